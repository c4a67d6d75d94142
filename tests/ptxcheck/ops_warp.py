"""Instructions between the lanes of a warp (PTX ISA, "shfl.sync", "vote.sync", "match.sync", "activemask",
"redux.sync", "elect.sync", "movmatrix").

The lanes that a member mask names must execute the instruction together: a fragment that lacks some waits at it
(CONVERGE) until they arrive. Lanes that have exited are not waited for. A lane that is not in its own mask, and one
that reads a lane outside the exchange, is a fault, where the manual says undefined behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ptxcheck.machine import CONVERGE, FULL, LANES, Signal, Warp, as_mask
from ptxcheck.ops_float import extreme
from ptxcheck.ptx import Imm, Inst, Operand
from ptxcheck.rounding import NAN32
from ptxcheck.table import Array, Build, Step, immediate, op

U32 = np.uint32
ALL = 0xFFFFFFFF


def bits(m: Array) -> int:
    """A lane mask as an integer."""
    return int.from_bytes(np.packbits(m, bitorder="little").tobytes(), "little")


def lanes_of(n: int) -> Array:
    """An integer as a lane mask."""
    return np.unpackbits(np.array([n & ALL], "<u4").view(np.uint8), bitorder="little").view(np.bool_)


Groups = Callable[[Warp, Array], "list[Array] | None"]


def groups(b: Build, operand: Operand) -> Groups:
    """The sets of lanes that exchange, one for each distinct member mask; None if lanes are missing."""
    inst = b.inst
    fixed = int(immediate(operand.text, "b32")) if isinstance(operand, Imm) else None
    read = b.read(operand, "b32")

    def get(w: Warp, m: Array) -> list[Array] | None:
        if fixed == ALL:
            if m is FULL:
                return [FULL]
            return [m] if m.tobytes() == w.alive.tobytes() else None
        values = read(w)
        here, alive = bits(m), bits(w.alive)
        out = []
        for value in sorted({int(v) for v in values[m]}):
            if value & alive & ~here:
                return None
            users = m & (values == U32(value))
            if bits(users) & ~value:
                w.fault("divergence", f"a lane executes {inst.op} with member mask {value:#x}, which does not name it")
            if bits(users) != value & alive:
                w.fault("divergence", f"the lanes of member mask {value:#x} give {inst.op} different masks")
            out.append(as_mask(users))
        return out

    return get


def each(got: list[Array]) -> Iterator[tuple[Array, list[int]]]:
    for g in got:
        yield g, np.flatnonzero(g).tolist()


@op("shfl.sync")
def shfl(b: Build, i: Inst) -> Step:
    """c = segment mask << 8 | clamp. A source past the clamp leaves the lane its own value and the predicate false."""
    mode = i.mods[2]
    first, second = b.pair(i.ops[0])
    value, write, write_p = b.read(i.ops[1], "b32"), b.write(first, "b32"), b.write(second, "pred")
    get_groups = groups(b, i.ops[4])
    lane = LANES.astype(np.int64)

    def sources(distance: Array, control: Array) -> tuple[Array, Array]:
        n, clamp, segment = distance.astype(np.int64) & 31, control.astype(np.int64) & 31, control >> U32(8) & U32(31)
        segment = segment.astype(np.int64)
        low = lane & segment
        limit = low | (clamp & ~segment)
        j = {"up": lane - n, "down": lane + n, "bfly": lane ^ n, "idx": low | (n & ~segment)}[mode]
        inside = j >= limit if mode == "up" else j <= limit
        return np.where(inside, j, lane), inside

    distance, control = b.read(i.ops[2], "b32"), b.read(i.ops[3], "b32")
    known = None
    if isinstance(i.ops[2], Imm) and isinstance(i.ops[3], Imm):
        fixed = [np.full(32, immediate(o.text, "b32"), U32) for o in i.ops[2:4] if isinstance(o, Imm)]
        known = sources(*fixed)

    def run(w: Warp, m: Array) -> Signal:
        got = get_groups(w, m)
        if got is None:
            return CONVERGE
        j, inside = known if known is not None else sources(distance(w), control(w))
        if got[0] is not FULL:
            member = np.zeros((32, 32), np.bool_)
            for g in got:
                member |= g[:, None] & g
            lost = m & ~member[lane, j]
            if lost.any():
                k = int(lost.argmax())
                w.fault("divergence", f"lane {k} reads lane {int(j[k])}, which does not take part in {i.op}")
        write(w, m, value(w)[j])
        write_p(w, m, inside)
        return None

    return run


@op("vote.sync")
def vote(b: Build, i: Inst) -> Step:
    kind = i.mods[2]
    read = b.read(i.ops[1], "pred")
    write = b.write(i.ops[0], "b32" if kind == "ballot" else "pred")
    get_groups = groups(b, i.ops[2])

    def run(w: Warp, m: Array) -> Signal:
        got = get_groups(w, m)
        if got is None:
            return CONVERGE
        p = read(w)
        for g in got:
            true = bits(p & g)
            if kind == "ballot":
                write(w, g, np.full(32, true, U32))
            else:
                every = true == bits(g)
                write(w, g, np.full(32, {"all": every, "any": true != 0, "uni": every or true == 0}[kind]))
        return None

    return run


@op("activemask")
def activemask(b: Build, i: Inst) -> Step:
    write = b.write(i.ops[0], "b32")
    return lambda w, m: write(w, m, np.full(32, bits(m), U32))


@op("match")
def match(b: Build, i: Inst) -> Step:
    """any: the lanes with this lane's value. all: the mask and true if every value is the same, else 0 and false."""
    any_ = i.mods[1] == "any"
    first, second = b.pair(i.ops[0])
    read = b.read(i.ops[1], i.mods[-1])
    write, write_p = b.write(first, "b32"), b.write(second, "pred")
    get_groups = groups(b, i.ops[2])

    def run(w: Warp, m: Array) -> Signal:
        got = get_groups(w, m)
        if got is None:
            return CONVERGE
        v = read(w)
        for g, lanes in each(got):
            same = (v[:, None] == v) & g
            if any_:
                masks = np.packbits(same, axis=1, bitorder="little").view("<u4").reshape(32)
                write(w, g, masks.astype(U32))
            else:
                equal = bool(same[lanes[0]][lanes].all())
                write(w, g, np.full(32, bits(g) if equal else 0, U32))
                write_p(w, g, np.full(32, equal))
        return None

    return run


@op("redux.sync")
def redux(b: Build, i: Inst) -> Step:
    name, t = i.mods[2], i.mods[-1]
    read, write = b.read(i.ops[1], t), b.write(i.ops[0], t)
    get_groups = groups(b, i.ops[2])
    if t == "f32":
        two = extreme(name == "max", i.has("NaN"), NAN32)
    else:
        two = {
            "add": np.add,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[name]

    def run(w: Warp, m: Array) -> Signal:
        got = get_groups(w, m)
        if got is None:
            return CONVERGE
        v = read(w)
        if i.has("abs"):
            v = np.abs(v)
        for g in got:
            rest = v[g]
            total = rest[:1]
            for k in range(1, len(rest)):
                total = two(total, rest[k : k + 1])
            write(w, g, np.full(32, total[0], v.dtype))
        return None

    return run


# By leader: its number for all lanes, and who it is.
ELECTED = [(np.full(32, k, U32), k == LANES) for k in range(32)]


@op("elect.sync")
def elect(b: Build, i: Inst) -> Step:
    """The lowest lane is elected: a legal choice, and the one GPUs are seen to make."""
    first, second = b.pair(i.ops[0])
    write, write_p = b.write(first, "b32"), b.write(second, "pred")
    get_groups = groups(b, i.ops[1])

    def run(w: Warp, m: Array) -> Signal:
        got = get_groups(w, m)
        if got is None:
            return CONVERGE
        for g in got:
            leader = int(g.argmax())
            write(w, g, np.full(32, leader, U32))
            write_p(w, g, leader == LANES)
        return None

    return run


@op("movmatrix")
def movmatrix(b: Build, i: Inst) -> Step:
    """Transpose an 8x8 matrix of 16-bit elements; lane l holds row l / 4, columns 2 (l % 4) and the next."""
    if not (i.has("m8n8") and i.has("trans")):
        raise b.error("only .m8n8.trans is defined")
    read, write = b.read(i.ops[1], "b32"), b.write(i.ops[0], "b32")

    def run(w: Warp, m: Array) -> Signal:
        if m is not FULL:
            return CONVERGE
        write(w, m, read(w).view(np.uint16).reshape(8, 8).T.copy().view(U32).reshape(32))
        return None

    return run
