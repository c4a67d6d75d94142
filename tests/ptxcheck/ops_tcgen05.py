"""tcgen05 instructions (PTX ISA, "TensorCore 5th Generation Family Instructions").

Order. What a warp issues with `mma` and `cp` executes in issue order and completes in that order, for accumulators of
any shape (the manual promises it for one accumulator and shape; kernels rely on more, and hardware does it); `commit`
signals its mbarrier after all of that. `ld` and `st` take effect at once and end at `wait::ld` and `wait::st`: before,
destination registers are out of bounds and the cells belong to the access. Every access has an event in the launch's
history (hb.py): a cell touched without having waited, or without telling the others, is a race in any schedule.

`tcgen05.fence::*` is accepted and never required: the waits and barriers that it belongs to are checked themselves.
Not modelled: `.ws`, `.sp`, block scaling, `.ashift`, `ld.red`, `shift`, `cp` with a change of format or of `.4x256b`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxcheck import tcgen05 as tc
from ptxcheck.formats import BYTES
from ptxcheck.hb import ASYNC, Actor
from ptxcheck.machine import CONVERGE, FULL, Block, Poison, Signal, Warp
from ptxcheck.memory import OFFSET_MASK, RANK_SHIFT
from ptxcheck.ptx import Addr, Inst, Vec
from ptxcheck.sched import AsyncOp
from ptxcheck.table import Array, Build, Step, op
from ptxcheck.tmem import LEAST, Tmem, tmem_of

if TYPE_CHECKING:
    from ptxcheck.machine import Cta

_REFUSED = ("ws", "sp", "ashift", "block_scale")


# ----------------------------------------------------------------------------------------------- what is in flight
class Unit:
    """The tcgen05 work of one warp: a pipeline of mma, cp and commit, and its loads and stores of tensor memory."""

    def __init__(self, warp: Warp) -> None:
        self.warp, self.history = warp, warp.machine.history
        who = f"cta {warp.cta.ctaid} warp {warp.id}"
        self.channel = warp.cta.channel(f"{who} (tcgen05)")
        self.loads = warp.cta.channel(f"{who} (tcgen05.ld)")
        self.stores = warp.cta.channel(f"{who} (tcgen05.st)")
        self.loading: list[int] = []  # registers that loads will write, and copies of them
        self.waited = 0  # the epoch of the loads up to which they have been waited for
        self.queue: deque[tuple[Inst, Callable[[], None]]] = deque()

    def fork(self, inst: Inst, channel: Any) -> Actor:
        """An operation issued now, which comes after all that the channel holds if that is the pipeline."""
        before = channel.epoch
        actor = self.history.fork(
            self.warp.clock, inst, channel, f"{inst.mods[0]}.{inst.mods[1]} of warp {self.warp.id}"
        )
        if channel is self.channel:
            actor.seen[channel.chain] = before
        return actor

    def push(self, inst: Inst, run: Callable[[], None]) -> None:
        """Append to the pipeline; only its head waits at the scheduler."""
        self.queue.append((inst, run))
        if len(self.queue) == 1:
            self._submit()

    def wait_loads(self, epoch: int) -> None:
        """Loads up to this one are complete for the warp."""
        left = []
        for k in self.loading:
            held = self.warp.regs[k]
            if held.__class__ is Loading:
                if held.epoch <= epoch:
                    self.warp.regs[k] = held.value
                else:
                    left.append(k)
        self.loading, self.waited = left, epoch
        self.history.join(self.warp.clock, self.loads, epoch)

    def _submit(self) -> None:
        inst = self.queue[0][0]
        self.warp.machine.async_.submit(AsyncOp(inst, self.warp, self._advance))

    def _advance(self) -> None:
        """Execute the head, and now and then some of what follows."""
        rng = self.warp.machine.rng
        while True:
            self.queue[0][1]()
            self.queue.popleft()
            if not self.queue:
                return
            if rng.random() < 0.3:
                self._submit()
                return


class Loading(Poison):
    """A register that `tcgen05.ld` may still write."""

    __slots__ = ("epoch",)

    def __init__(self, op: Inst, value: Array, epoch: int) -> None:
        super().__init__("tcgen05.ld may still write it: tcgen05.wait::ld comes first", op, value)
        self.epoch = epoch

    def settle(self, warp: Warp, pc: int) -> bool:
        unit = unit_of(warp)
        if self.epoch > unit.waited and "tcgen05.wait::ld" not in warp.machine.relaxed:
            return False
        unit.wait_loads(max(self.epoch, unit.waited))
        for k in warp.program.sources(pc):
            if warp.regs[k] is self:
                warp.regs[k] = self.value
        return True

    def moved(self, warp: Warp, value: Array, to: int | None = None) -> Poison:
        if to is not None:
            unit_of(warp).loading.append(to)
        return Loading(self.op, value, self.epoch)


def unit_of(warp: Warp) -> Unit:
    found: Unit | None = getattr(warp, "tcgen05", None)
    if found is None:
        found = warp.tcgen05 = Unit(warp)  # type: ignore[attr-defined]
    return found


def _whole(w: Warp, m: Array) -> bool:
    """Whether all lanes of the warp are here (`.sync.aligned`)."""
    return m is FULL or bool((m == w.alive).all())


def _group(b: Build) -> int:
    return 2 if b.inst.has("cta_group::2") else 1


def _ctas(w: Warp, b: Build) -> list[Cta]:
    """The CTAs of the group, the one with the even rank first."""
    cta = w.cta
    if _group(b) == 1:
        return [cta]
    ctas = cta.cluster.ctas
    if len(ctas) % 2:
        w.fault("bad-operand", f"cta_group::2 in a cluster of {len(ctas)} CTA(s)")
    first = cta.rank & ~1
    return [ctas[first], ctas[first + 1]]


# ------------------------------------------------------------------------------------------------------ allocation
@op("tcgen05.alloc")
def alloc(b: Build, i: Inst) -> Step:
    address, columns = b.address(i.ops[0], "shared"), b.uniform(i.ops[1], "u32")

    def step(w: Warp, m: Array) -> Signal:
        if not _whole(w, m):
            return CONVERGE
        n, at, tmem = columns(w, m), int(address(w)[int(m.argmax())]) & OFFSET_MASK, tmem_of(w.cta)
        tmems = [tmem_of(c) for c in _ctas(w, b)]
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
    address, columns, group = b.uniform(i.ops[0], "u32"), b.uniform(i.ops[1], "u32"), _group(b)

    def step(w: Warp, m: Array) -> Signal:
        if not _whole(w, m):
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
        if not _whole(w, m):
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
        if not _whole(w, m):
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
        if not _whole(w, m):
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
        if not _whole(w, m):
            return CONVERGE
        unit = unit_of(w)
        unit.wait_loads(unit.loads.epoch)
        return None

    return step


@op("tcgen05.wait::st")
def wait_st(b: Build, i: Inst) -> Step:
    def step(w: Warp, m: Array) -> Signal:
        if not _whole(w, m):
            return CONVERGE
        unit = unit_of(w)
        unit.history.join(w.clock, unit.stores)
        return None

    return step


@op("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(b: Build, i: Inst) -> Step:
    return lambda w, m: None


# ------------------------------------------------------------------------------------------------------ the tensor core
class _Mma:
    """One issued `tcgen05.mma`: where its operands lie."""

    def __init__(
        self, i: tc.Instruction, group: int, a: int, a_in_tmem: bool, b: int, d: int, keep: bool, scale: int
    ) -> None:
        self.i, self.group, self.a, self.a_in_tmem, self.b, self.d = i, group, a, a_in_tmem, b, d
        self.keep, self.scale = keep, scale
        self.disabled: Array | None = None  # lanes of each CTA that are not written, bool (CTAs, 128)
        # Decoded now, so that a bad descriptor is noticed at issue.
        self.b_units = tc.operand_units(b, i.n // group, BYTES[i.b], i.b_mn_major)
        self.a_units = None if a_in_tmem else tc.operand_units(a, i.m // group, BYTES[i.a], i.a_mn_major)
        lane = d >> 16
        half = lane // tc.GROUP_LANES
        if lane not in ((0, 16) if i.m == 64 else (0,)):
            raise tc.BadDescriptor(f"D at lane {lane} with M = {i.m}")
        if a_in_tmem and a >> 16 != lane:
            raise tc.BadDescriptor(f"A at lane {a >> 16} and D at lane {lane}")
        self.blocks = tc.d_blocks(i.m, i.n, group, half)

    def run(self, actor: Actor, ctas: list[Cta]) -> None:
        """Read the operands of all CTAs, then write D in each."""
        i = self.i
        parts = [tc.operand(_fetch(c, actor, self.b_units), i.b, i.b_mn_major) for c in ctas]
        b = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for rank, (cta, blocks) in enumerate(zip(ctas, self.blocks, strict=True)):
            tmem = tmem_of(cta)
            a = None
            if self.a_units is not None:
                a = tc.operand(_fetch(cta, actor, self.a_units), i.a, i.a_mn_major)
            for block in blocks:
                first = self.a & 0xFFFF
                rows = (
                    a
                    if a is not None
                    else tc.a_from_cells(tmem.read(actor, block.groups, slice(first, first + tc.K_BYTES // 4)), i.a)
                )
                self._update(actor, tmem, block, rows, b[block.columns], rank)

    def _update(self, actor: Actor, tmem: Tmem, block: tc.Block, a: Array, b: Array, rank: int) -> None:
        i, first = self.i, self.d & 0xFFFF
        columns = slice(first, first + b.shape[0])
        d = None
        if self.keep:
            d = tc.d_values(tmem.read(actor, block.groups, columns), i.d)
            if self.scale:
                d = d * np.float32(2.0**-self.scale)
        cells = tc.d_cells(tc.product(i, a, b, d), i.d)
        if self.disabled is not None:
            off = self.disabled[rank].reshape(tc.GROUPS, -1)[block.groups].reshape(-1, 1)
            cells = np.where(off, tmem.peek(block.groups, columns), cells)
        tmem.write(actor, block.groups, columns, cells)


def _fetch(cta: Cta, actor: Actor, units: Array) -> Array:
    return cta.shared.load(actor, (units * 16).ravel(), 16, ASYNC).reshape(*units.shape, 16)


@op("tcgen05.mma")
def mma(b: Build, i: Inst) -> Step:
    if refused := [m for m in i.mods if m.split("::")[0] in _REFUSED]:
        raise b.error(f".{refused[0]} is not modelled")
    kind = next(m for m in i.mods if m.startswith("kind::"))[6:]
    if kind not in ("f16", "tf32", "f8f6f4", "i8"):
        raise b.error(f"kind::{kind} is not modelled")
    group = _group(b)
    in_tmem = isinstance(i.ops[1], Addr)
    d = b.address(i.ops[0], "tmem")
    a = b.address(i.ops[1], "tmem") if in_tmem else b.read(i.ops[1], "u64")
    b_desc, i_desc = b.read(i.ops[2], "u64"), b.read(i.ops[3], "u32")
    rest = list(i.ops[4:])
    lanes_off = [b.read(x, "u32") for x in b.vector(rest.pop(0))] if rest and isinstance(rest[0], Vec) else []
    keep = b.read(rest[0], "pred")
    scale = int(rest[1].text, 0) if len(rest) > 1 else 0  # type: ignore[union-attr]

    def step(w: Warp, m: Array) -> Signal:
        unit, ctas = unit_of(w), _ctas(w, b)
        ds, as_, bs, ids, keeps = d(w), a(w), b_desc(w), i_desc(w), keep(w)
        for lane in np.flatnonzero(m):  # each thread issues its own
            try:
                what = tc.instruction(int(ids[lane]), kind, group)
                one = _Mma(what, group, int(as_[lane]), in_tmem, int(bs[lane]), int(ds[lane]), bool(keeps[lane]), scale)
            except tc.BadDescriptor as e:
                w.fault("bad-operand", str(e))
            if lanes_off:
                words = np.array([x(w)[lane] for x in lanes_off], "<u4")
                one.disabled = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool).reshape(group, 128)
            actor = unit.fork(i, unit.channel)
            unit.push(i, lambda one=one, actor=actor: one.run(actor, ctas))  # type: ignore[misc]
            if w.machine.counters is not None:
                w.machine.counters.mma[f"tcgen05 cta_group::{group} {what}"] += 1
        return None

    return step


@op("tcgen05.commit")
def commit(b: Build, i: Inst) -> Step:
    address = b.address(i.ops[0], "shared")
    mask = b.read(i.ops[1], "u16") if len(i.ops) > 1 else None

    def step(w: Warp, m: Array) -> Signal:
        unit, ctas = unit_of(w), w.cta.cluster.ctas
        at = address(w)
        for lane in np.flatnonzero(m):
            offset, rank = int(at[lane]) & OFFSET_MASK, int(at[lane]) >> RANK_SHIFT
            ranks = [rank]
            if mask is not None:
                bits = int(mask(w)[lane])
                ranks = [r for r in range(16) if bits >> r & 1]
            if any(r >= len(ctas) for r in ranks):
                w.fault("bad-operand", f"CTA ranks {ranks} in a cluster of {len(ctas)}")
            actor = unit.fork(i, unit.channel)
            unit.history.carry(actor, w.clock)
            targets = [ctas[r] for r in ranks]

            def run(targets: list[Cta] = targets, offset: int = offset, actor: Actor = actor) -> None:
                for t in targets:
                    t.barriers.arrive(offset, 1, actor)

            unit.push(i, run)
        return None

    return step


#: shape -> (rows of the source, 16-byte units of a row)
_COPIES = {"128x256b": (128, 2), "128x128b": (128, 1), "64x128b": (64, 1), "32x128b": (32, 1)}
#: multicast -> for each of the four quarters of the lanes, which 32 rows of the source it gets
_QUARTERS = {"warpx2::02_13": (0, 1, 0, 1), "warpx2::01_23": (0, 0, 1, 1), "warpx4": (0, 0, 0, 0)}


@op("tcgen05.cp")
def cp(b: Build, i: Inst) -> Step:
    shape = next((m for m in i.mods if m in _COPIES), None)
    if shape is None or any(m.startswith(("b8x16", "b6x16", "b4x16")) for m in i.mods):
        raise b.error("this shape or change of format is not modelled")
    rows, units = _COPIES[shape]
    quarters = next((q for m, q in _QUARTERS.items() if i.has(m)), (0, 1, 2, 3))
    source = np.concatenate([np.arange(32 * q, 32 * q + 32) for q in quarters])
    to, desc = b.address(i.ops[0], "tmem"), b.read(i.ops[1], "u64")

    def step(w: Warp, m: Array) -> Signal:
        unit, ctas = unit_of(w), _ctas(w, b)
        for lane in np.flatnonzero(m):
            at, word = int(to(w)[lane]), int(desc(w)[lane])
            try:
                where = tc.operand_units(word, rows, 2, False, units)
            except tc.BadDescriptor as e:
                w.fault("bad-operand", str(e))
            if at >> 16:
                w.fault("bad-operand", f"tcgen05.cp to lane {at >> 16}")
            actor = unit.fork(i, unit.channel)

            def run(actor: Actor = actor, where: Array = where, at: int = at) -> None:
                for c in ctas:
                    cells = _fetch(c, actor, where).reshape(rows, -1).view(np.uint32)[source]
                    tmem_of(c).write(actor, slice(0, tc.GROUPS), slice(at, at + math.prod(cells.shape[1:])), cells)

            unit.push(i, run)
        return None

    return step
