"""wgmma.mma_async, fence, commit_group and wait_group: reading the instructions; warpgroup.py does the work.

PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group". Not modelled, and refused: sparse
and single-bit forms.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxcheck import wgmma
from ptxcheck.machine import CONVERGE, FULL, Block, Signal, Warp
from ptxcheck.ptx import Imm, Inst, Operand, Vec
from ptxcheck.table import Array, Build, Step, op
from ptxcheck.warpgroup import Mma, warpgroup


def _constant(b: Build, o: Operand) -> int:
    if not isinstance(o, Imm):
        raise b.error(f"{o} is no constant")
    return int(o.text, 0)


def _whole(warp_step: Callable[[Warp], Signal]) -> Step:
    """`.sync.aligned`: all lanes of the warp together."""

    def step(w: Warp, mask: Array) -> Signal:
        if mask is not FULL:
            return CONVERGE
        return warp_step(w)

    return step


@op("wgmma.mma_async.sync.aligned")
def mma_async(b: Build, i: Inst) -> Step:
    """`d, a, b, scale-d` and, for floating-point types, the signs and majors of A and B."""
    shape = wgmma.shape_of(i.mods)
    if shape is None:
        raise b.error("a form of wgmma that the manual does not have, or that is not modelled")
    d, a, b_desc, scale, *rest = i.ops
    accumulators = tuple(b.number(r) for r in b.vector(d))
    if len(accumulators) != shape.registers:
        raise b.error(f"{len(accumulators)} accumulator registers, {shape.registers} expected")
    a_registers = tuple(b.number(r) for r in a.items) if isinstance(a, Vec) else ()
    if isinstance(a, Vec) and len(a_registers) != 4:
        raise b.error(f"{len(a_registers)} registers for A, 4 expected")
    numbers = [_constant(b, o) for o in rest]
    signs, majors = numbers[:2], numbers[2:]
    wide = shape.a in ("bf16", "f16")
    expected = (0 if shape.d == "s32" else 2) + ((1 if a_registers else 2) if wide else 0)
    if len(numbers) != expected or any(s not in (1, -1) for s in signs) or any(m not in (0, 1) for m in majors):
        raise b.error(f"immediate operands {numbers}")
    a_major, b_major = [0, 0, *majors][-2:]
    sign = signs[0] * signs[1] if signs else 1
    mma = Mma(i, shape, accumulators, a_registers, bool(a_major), bool(b_major), sign, "satfinite" in i.mods)
    read_a = None if a_registers else b.uniform(a, "u64")
    read_b, read_scale = b.uniform(b_desc, "u64"), b.uniform(scale, "pred")

    def step(w: Warp) -> Signal:
        if len(w.cta.warps) < 4 * (w.id // 4) + 4:
            w.fault("wgmma-order", f"warp {w.id} belongs to no whole warpgroup: the CTA has {len(w.cta.warps)} warps")
        a_word = 0 if read_a is None else read_a(w, FULL)
        b_word = read_b(w, FULL)
        for word in (a_word, b_word):
            if wgmma.Descriptor.reserved(word):
                w.fault("bad-operand", f"matrix descriptor {word:#018x} has bits set that the format does not have")
        warpgroup(w).issue(w, mma, a_word, b_word, bool(read_scale(w, FULL)))
        return None

    return _whole(step)


@op("wgmma.fence.sync.aligned")
def fence(b: Build, i: Inst) -> Step:
    """Orders the warp's register accesses before the wgmmas that follow."""

    def step(w: Warp) -> Signal:
        warpgroup(w).sides[w.id % 4].fence()
        return None

    return _whole(step)


@op("wgmma.commit_group.sync.aligned")
def commit(b: Build, i: Inst) -> Step:
    """The warp's wgmmas since its last commit become a group."""

    def step(w: Warp) -> Signal:
        side = warpgroup(w).sides[w.id % 4]
        side.committed.append(side.issued)
        return None

    return _whole(step)


@op("wgmma.wait_group.sync.aligned")
def wait(b: Build, i: Inst) -> Step:
    """Until all but the last N groups are complete; their registers and shared memory may be used again."""
    keep = _constant(b, i.ops[0])

    def step(w: Warp) -> Signal:
        ready, then = warpgroup(w).wait(w, keep)
        if ready():
            then()
            return None
        return Block(ready, f"waits for all wgmma groups but {keep}", then)

    return _whole(step)
