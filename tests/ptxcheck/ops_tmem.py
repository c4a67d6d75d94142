"""tcgen05 instructions of tensor memory: allocation, loads and stores.

PTX ISA, "Tensor Memory Allocation and Management Instructions", "tcgen05.ld", "tcgen05.st", "tcgen05.wait".

`ld.red` is not modelled. `alloc` of a pair of CTAs is done by both together: each waits until the other asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxcheck import tcgen05 as tc
from ptxcheck.machine import CONVERGE, Block, Poison, Signal, Warp
from ptxcheck.memory import OFFSET_MASK
from ptxcheck.ptx import Addr, Inst
from ptxcheck.table import Array, Build, Step, op
from ptxcheck.tensorcore import Loading, ctas_of, group_of, unit_of, whole
from ptxcheck.tmem import LEAST, tmem_of


# ------------------------------------------------------------------------------------------------------ allocation
@op("tcgen05.alloc")
def alloc(b: Build, i: Inst) -> Step:
    address, columns = b.address(i.ops[0], "shared"), b.uniform(i.ops[1], "u32")

    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        n, at, tmem = columns(w, m), int(address(w)[int(m.argmax())]) & OFFSET_MASK, tmem_of(w.cta)
        tmems = [tmem_of(c) for c in ctas_of(w, b)]
        if not LEAST <= n <= tc.COLUMNS or n & (n - 1):
            w.fault("tmem-allocation", f"{n} columns: a power of two from {LEAST} to {tc.COLUMNS} is allowed")
        if not tmem.permit:
            w.fault("tmem-allocation", "allocation after tcgen05.relinquish_alloc_permit")
        w.clock.site = i
        tmem.asked.append(w.clock)
        turn = len(tmem.asked) - 1
        w.machine.wakes += 1

        def ready() -> bool:
            # The CTAs of a group allocate together, in the order of their requests.
            if tmem.given > turn:
                return True
            return (
                tmem.given == turn
                and all(len(t.asked) > turn and t.room(n) == tmem.room(n) for t in tmems)
                and (tmem.room(n) is not None)
            )

        def do() -> None:
            w.clock.site = i
            if tmem.given == turn:
                base = tmem.room(n)
                assert base is not None
                actors = [t.asked[turn] for t in tmems]
                for t, actor in zip(tmems, actors, strict=True):
                    t.allocate(base, n, actors, actor)
                    t.given, t.base = turn + 1, base
            w.cta.shared.store(w.clock, np.array([at]), np.array([[tmem.base]], np.uint32).view(np.uint8))

        if ready():
            do()
            return None
        return Block(ready, f"waits for {n} free columns of tensor memory, and for the peer to ask for them", do)

    return step


@op("tcgen05.dealloc")
def dealloc(b: Build, i: Inst) -> Step:
    address, columns, group = b.uniform(i.ops[0], "u32"), b.uniform(i.ops[1], "u32"), group_of(b)

    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        at, n = address(w, m), columns(w, m)
        w.clock.site = i
        wrong = tmem_of(w.cta).free(at & 0xFFFF, n, group, w.clock) if not at >> 16 else f"address {at:#x} has a lane"
        if wrong:
            w.fault("tmem-allocation", wrong)
        w.machine.progress += 1
        w.machine.wakes += 1
        return None

    return step


@op("tcgen05.relinquish_alloc_permit")
def relinquish(b: Build, i: Inst) -> Step:
    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        tmem_of(w.cta).permit = False
        return None

    return step


# ------------------------------------------------------------------------------------------------ loads and stores
class _Access:
    """What `ld` and `st` have in common: the fragment, the cells of a warp."""

    def __init__(self, b: Build, i: Inst, registers: int, address: Addr, split: int) -> None:
        self.shape = next(m for m in i.mods if m in tc.SHAPES)
        times = int(next(m for m in i.mods if m[0] == "x" and m[1:].isdigit())[1:])
        self.packed = i.has("pack::16b") or i.has("unpack::16b")
        lanes, _, count = tc.SHAPES[self.shape]
        if registers != times * count:
            raise b.error(f"{registers} registers, {times * count} are wanted")
        self.rows, self.columns = tc.fragment(self.shape, times, split)
        self.width = int(self.columns.max()) + 1
        self.cells = self.width * (2 if self.packed else 1)
        self.lanes = lanes
        self.taddr = b.uniform(address, "u32") if not isinstance(address, Addr) else _uniform_address(b, address)

    def place(self, w: Warp, m: Array) -> tuple[slice, slice]:
        """Groups of lanes and columns; a warp reaches the 32 lanes of its number modulo 4."""
        at = self.taddr(w, m)
        lane, column = at >> 16, at & 0xFFFF
        low = 32 * (w.id % 4)
        if lane != low and not (self.lanes == 16 and lane == low + 16):
            w.fault("bad-operand", f"tensor memory lane {lane}: warp {w.id} reaches lanes {low}-{low + 31}")
        first = lane // tc.GROUP_LANES
        return slice(first, first + self.lanes // tc.GROUP_LANES), slice(column, column + self.cells)


def _uniform_address(b: Build, operand: Addr) -> Callable[[Warp, Array], int]:
    read = b.address(operand, "tmem")

    def get(w: Warp, m: Array) -> int:
        v = read(w)[m]
        if (v != v[0]).any():
            w.fault("divergence", "lanes disagree on an address in tensor memory")
        return int(v[0]) & 0xFFFFFFFF

    return get


def _split(b: Build, operand: Any) -> int:
    return int(operand.text, 0)


@op("tcgen05.ld")
def ld(b: Build, i: Inst) -> Step:
    if i.has("red"):
        raise b.error("ld.red is not modelled")
    targets = [b.number(r) for r in b.vector(i.ops[0])]
    access = _Access(b, i, len(targets), i.ops[1], _split(b, i.ops[2]) if len(i.ops) > 2 else 0)  # type: ignore[arg-type]
    plain = access.shape == "32x32b"

    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        unit = unit_of(w)
        groups, columns = access.place(w, m)
        actor = unit.fork(i, unit.loads)
        cells = tmem_of(w.cta).read(actor, groups, columns)
        if access.packed:
            cells = tc.pack(cells)
        values = np.ascontiguousarray(cells.T) if plain else cells[access.rows, access.columns]
        for k, v in zip(targets, values, strict=True):
            held = w.regs[k]
            if isinstance(held, Poison) and not held.settle(w, w.pc):
                w.poisoned(k, "written")
            w.regs[k] = Loading(i, v, actor.epoch)
        unit.loading += targets
        return None

    return step


@op("tcgen05.st")
def st(b: Build, i: Inst) -> Step:
    sources = [b.read(r, "b32") for r in b.vector(i.ops[-1])]
    access = _Access(b, i, len(sources), i.ops[0], _split(b, i.ops[1]) if len(i.ops) > 2 else 0)  # type: ignore[arg-type]
    plain = access.shape == "32x32b"

    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        values = np.array([read(w) for read in sources])
        if plain:
            cells = values.T
        else:
            cells = np.zeros((access.lanes, access.width), np.uint32)
            cells[access.rows, access.columns] = values
        unit = unit_of(w)
        groups, columns = access.place(w, m)
        actor = unit.fork(i, unit.stores)
        tmem_of(w.cta).write(actor, groups, columns, tc.unpack(cells) if access.packed else cells)
        return None

    return step


@op("tcgen05.wait::ld")
def wait_ld(b: Build, i: Inst) -> Step:
    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        unit = unit_of(w)
        unit.wait_loads(unit.loads.epoch)
        return None

    return step


@op("tcgen05.wait::st")
def wait_st(b: Build, i: Inst) -> Step:
    def step(w: Warp, m: Array) -> Signal:
        if not whole(w, m):
            return CONVERGE
        unit = unit_of(w)
        unit.history.join(w.clock, unit.stores)
        return None

    return step
