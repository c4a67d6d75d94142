"""Control flow: bra, brx.idx, ret, exit, trap (PTX ISA, "Control Flow Instructions")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxcheck.machine import ALL_LANES, EXIT, FULL, NO_LANES, Scatter, Signal, Split, Warp
from ptxcheck.ptx import Inst, Label, Labels
from ptxcheck.table import Array, Build, Step, op


def fall_off(w: Warp, m: Array) -> Signal:
    """The end of the body acts as `ret`."""
    return EXIT


def guarded_lanes(k: int, negated: bool) -> Callable[[Warp, Array], Array]:
    """The lanes of a mask whose guard, register k, holds."""

    def get(w: Warp, m: Array) -> Array:
        p: Array = w.regs[k]
        if p.dtype.kind != "b":
            p = p.view(np.bool_)
        if negated:
            p = ~p
        return p if m is FULL else p & m

    return get


@op("ret", "exit")
def ret(b: Build, i: Inst) -> Step:
    """In an entry function both end the lanes that execute them; under a guard the others go on."""

    def run(w: Warp, m: Array) -> Signal:
        rest = w.running.mask & ~m
        if not rest.any():
            return EXIT
        w.alive = w.alive & ~m
        return Scatter([(w.pc + 1, rest)])

    return run


@op("trap")
def trap(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        w.fault("trap", f"{int(m.sum())} lanes reach trap")
        return EXIT

    return run


@op("bra")
def bra(b: Build, i: Inst) -> Step:
    """`.uni` asserts that all active lanes branch the same way: a split there is a fault."""
    label = i.ops[0]
    if not isinstance(label, Label):
        raise b.error(f"branch target {label}")
    target = label.index
    if i.guard is None:
        return lambda w, m: target
    taken, uniform = guarded_lanes(b.number(i.guard[0]), i.guard[1]), i.has("uni")

    def run(w: Warp, m: Array) -> Signal:
        p = taken(w, m)
        held = p.tobytes()
        if held == NO_LANES:
            return None
        if held == ALL_LANES or (m is not FULL and held == m.tobytes()):
            return target
        if uniform:
            w.fault("divergence", "bra.uni, and the active lanes disagree")
        return Split(target, p)

    return run


@op("brx.idx")
def brx(b: Build, i: Inst) -> Step:
    """A branch through a table of labels; an index past the end is undefined behaviour, hence a fault."""
    table = i.ops[1]
    if not isinstance(table, Labels):
        raise b.error(f"branch table {table}")
    if i.guard is not None:
        raise b.error("guarded brx.idx")
    targets = [t.index for t in table.targets]
    index = b.read(i.ops[0], "u32")

    def run(w: Warp, m: Array) -> Signal:
        v = np.broadcast_to(index(w), (32,))
        parts = [(t, m & (v == n)) for n, t in enumerate(targets)]
        parts = [(t, p) for t, p in parts if p.any()]
        if int((v[m] >= len(targets)).sum()):
            w.fault("bad-operand", f"brx.idx past its table of {len(targets)}")
        return parts[0][0] if len(parts) == 1 else Scatter(parts)

    return run
