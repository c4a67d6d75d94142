"""tcgen05 instructions of the tensor core: mma, cp, commit (PTX ISA, "TensorCore 5th Generation Family Instructions").

`tcgen05.fence::*` is accepted and never required: the waits and barriers that it belongs to are checked themselves.
Not modelled: `.ws`, `.sp`, block scaling, `.ashift`, `shift`, `cp` with a change of format or of `.4x256b`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ptxcheck import tcgen05 as tc
from ptxcheck.formats import BYTES
from ptxcheck.hb import ASYNC, Actor
from ptxcheck.machine import Signal, Warp
from ptxcheck.memory import OFFSET_MASK, RANK_SHIFT
from ptxcheck.ptx import Addr, Inst, Vec
from ptxcheck.table import Array, Build, Step, op
from ptxcheck.tensorcore import ctas_of, group_of, unit_of
from ptxcheck.tmem import Tmem, tmem_of

if TYPE_CHECKING:
    from ptxcheck.machine import Cta

_REFUSED = ("ws", "sp", "ashift", "block_scale")


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
    group = group_of(b)
    in_tmem = isinstance(i.ops[1], Addr)
    d = b.address(i.ops[0], "tmem")
    a = b.address(i.ops[1], "tmem") if in_tmem else b.read(i.ops[1], "u64")
    b_desc, i_desc = b.read(i.ops[2], "u64"), b.read(i.ops[3], "u32")
    rest = list(i.ops[4:])
    lanes_off = [b.read(x, "u32") for x in b.vector(rest.pop(0))] if rest and isinstance(rest[0], Vec) else []
    keep = b.read(rest[0], "pred")
    scale = int(rest[1].text, 0) if len(rest) > 1 else 0  # type: ignore[union-attr]

    def step(w: Warp, m: Array) -> Signal:
        unit, ctas = unit_of(w), ctas_of(w, b)
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
        unit, ctas = unit_of(w), ctas_of(w, b)
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
