"""Moves, packing, address conversion, selection and comparison (PTX ISA, "Data Movement and Conversion Instructions",
"Comparison and Selection Instructions").

A half-precision pair compares half by half. cvta adds the base of the state space's generic window and cvta.to takes it
away; global memory, constants and parameters have one address in both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxcheck.alu import alu
from ptxcheck.machine import Signal, Warp
from ptxcheck.ops_half import decode
from ptxcheck.ptx import Inst, Operand, Sink, Vec
from ptxcheck.rounding import F32, flush
from ptxcheck.table import DTYPES, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Array, Build, Step, op

Function = Callable[..., Array]


def _same(x: Array) -> Array:
    return x


@op("mov")
def mov(b: Build, i: Inst) -> Step:
    """Whole registers are shared between names, which is safe as arrays are never changed in place."""
    t = i.mods[-1]
    dst, src = i.ops
    if isinstance(dst, Vec):
        return _unpack(b, dst, src, t)
    if isinstance(src, Vec):
        return _pack(b, dst, src, t)
    if t == "b128":
        read, write = b.read(src, t), b.write(dst, t)

        def run(w: Warp, m: Array) -> Signal:
            v = read(w)
            write(w, m, v.view(v.dtype))  # the attribute is missing from what is not an array
            return None

        return run
    return alu(b, _same, dst, t, (src, t))


def _pack(b: Build, dst: Operand, src: Vec, t: str) -> Step:
    """The first item is the least significant."""
    n = len(src.items)
    part = f"b{int(t[1:]) // n}"
    dtype = DTYPES[part]
    if t == "b128":
        readers, write = [b.read(o, part) for o in src.items], b.write(dst, t)
        return lambda w, m: write(w, m, np.stack([r(w) for r in readers], axis=1))

    def fn(*parts: Array) -> Array:
        out = np.empty((32, n), dtype)
        for k, p in enumerate(parts):
            out[:, k] = p
        return out.view(DTYPES[t]).reshape(32)

    return alu(b, fn, dst, t, *((o, part) for o in src.items))


def _unpack(b: Build, dst: Vec, src: Operand, t: str) -> Step:
    n = len(dst.items)
    part = f"b{int(t[1:]) // n}"
    read = b.read(src, t)
    writers = [(k, b.write(o, part)) for k, o in enumerate(dst.items) if not isinstance(o, Sink)]
    dtype = DTYPES[part]

    def run(w: Warp, m: Array) -> Signal:
        v = read(w).view(dtype).reshape(32, n)
        for k, write in writers:
            write(w, m, v[:, k].copy())
        return None

    return run


def window(space: str) -> int:
    """Base of a state space in the generic address space."""
    return {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(space.split("::")[0], 0)


@op("cvta")
def cvta(b: Build, i: Inst) -> Step:
    to = i.mods[1] == "to"
    space, t = i.mods[2 if to else 1], i.mods[-1]
    if t != "u64":
        raise b.error("addresses have 64 bits")
    base = window(space)
    if not base:
        return alu(b, _same, i.ops[0], t, (i.ops[1], t))
    shift = np.full(32, (1 << 64) - base if to else base, np.uint64)
    return alu(b, lambda x: x + shift, i.ops[0], t, (i.ops[1], t))


@op("isspacep")
def isspacep(b: Build, i: Inst) -> Step:
    space = i.mods[1]
    spans = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW}
    size = np.uint64(1 << 32)

    def inside(x: Array, base: int) -> Array:
        return x - np.uint64(base) < size

    if space == "shared::cta":  # isspacep.shared means the CTA's own part
        space = "shared"
    if space == "shared":
        read, write = b.read(i.ops[1], "u64"), b.write(i.ops[0], "pred")

        def run(w: Warp, m: Array) -> Signal:
            x = read(w)
            own = np.uint64(SHARED_WINDOW + (w.cta.rank << 24))
            write(w, m, x - own < np.uint64(1 << 24))
            return None

        return run
    if space == "shared::cluster":
        return alu(b, lambda x: inside(x, SHARED_WINDOW), i.ops[0], "pred", (i.ops[1], "u64"))
    if space in ("global", "const"):
        return alu(b, lambda x: ~np.any([inside(x, s) for s in spans.values()], 0), i.ops[0], "pred", (i.ops[1], "u64"))
    base = spans[space.split("::")[0]]
    return alu(b, lambda x: inside(x, base), i.ops[0], "pred", (i.ops[1], "u64"))


# ------------------------------------------------------------------------------------------------------------ selection
def _select(p: Array, x: Array, y: Array) -> Array:
    return np.where(p, x, y)


@op("selp")
def selp(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    return alu(b, _select, i.ops[0], t, (i.ops[3], "pred"), (i.ops[1], t), (i.ops[2], t))


@op("slct")
def slct(b: Build, i: Inst) -> Step:
    """a where c >= 0, else b; -0 counts as 0 and NaN as negative."""
    t, by = i.mods[-2], i.mods[-1]
    zero = DTYPES[by].type(0)

    def fn(x: Array, y: Array, c: Array) -> Array:
        return np.where((flush(c) if i.has("ftz") else c) >= zero, x, y)

    return alu(b, fn, i.ops[0], t, (i.ops[1], t), (i.ops[2], t), (i.ops[3], by))


# ----------------------------------------------------------------------------------------------------------- comparison
def _either_nan(x: Array, y: Array) -> Array:
    return (x != x) | (y != y)


COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": lambda x, y: (x != y) & ~_either_nan(x, y),
    "equ": lambda x, y: (x == y) | _either_nan(x, y),
    "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~_either_nan(x, y),
    "nan": _either_nan,
}
# lo, ls, hi, hs are the unsigned orders.
UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
COMBINE: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def comparison(b: Build, i: Inst, t: str) -> tuple[Function, str]:
    """The comparison as a function of register arrays, and the type to read them as. On pairs it gives bool[32, 2]."""
    name = i.mods[1]
    if t.startswith(("u", "s", "b")) and not t.startswith("bf"):
        if name in UNSIGNED:
            return UNSIGNED[name], "u" + t[1:]
        if name == "ne":
            return np.not_equal, t
        if name not in ("eq", "lt", "le", "gt", "ge"):
            raise b.error(f"comparison .{name} of integers")
        return COMPARE[name], t
    fn = COMPARE.get(name)
    if fn is None:
        raise b.error(f"comparison .{name} of floats")
    ftz = i.has("ftz")
    if t in ("f32", "f64"):
        return (lambda x, y: fn(flush(x), flush(y))) if ftz else fn, t
    scalar = t.removesuffix("x2")
    least = np.float32(2.0**-14 if scalar == "f16" else 2.0**-126)

    def values(raw: Array) -> Array:
        v = decode(raw.view(np.uint16), scalar)
        return np.where(np.abs(v) < least, F32.type(0), v) if ftz else v

    if t.endswith("x2"):
        return (lambda x, y: fn(values(x), values(y)).reshape(32, 2)), "b32"
    return (lambda x, y: fn(values(x), values(y))), "b16"


@op("setp")
def setp(b: Build, i: Inst) -> Step:
    """p = (a cmp b) bool c, q = !(a cmp b) bool c; of pairs p takes the low and q the high halves."""
    t = i.mods[-1]
    fn, as_type = comparison(b, i, t)
    first, second = b.pair(i.ops[0])
    sources = [(i.ops[1], as_type), (i.ops[2], as_type)]
    join = next((COMBINE[m] for m in i.mods[2:] if m in COMBINE), None)
    if join is not None:
        sources.append((i.ops[3], "pred"))
    packed = t.endswith("x2")
    if isinstance(second, Sink) and not packed:
        if join is None:
            return alu(b, fn, first, "pred", *sources)
        return alu(b, lambda x, y, c: join(fn(x, y), c), first, "pred", *sources)
    readers = [b.read(o, k) for o, k in sources]
    write_p, write_q = b.write(first, "pred"), b.write(second, "pred")

    def run(w: Warp, m: Array) -> Signal:
        x, y, *rest = (r(w) for r in readers)
        v = fn(x, y)
        p, q = (v[:, 0].copy(), v[:, 1].copy()) if packed else (v, ~v)
        if join is not None:
            p, q = join(p, rest[0]), join(q, rest[0])
        write_p(w, m, p)
        write_q(w, m, q)
        return None

    return run


@op("set")
def set_(b: Build, i: Inst) -> Step:
    """All ones (integers) or 1.0 (floats) where the comparison holds, else 0."""
    to, t = i.mods[-2], i.mods[-1]
    fn, as_type = comparison(b, i, t)
    join = next((COMBINE[m] for m in i.mods[2:] if m in COMBINE), None)
    packed = t.endswith("x2")
    ones = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}
    size = 2 if packed else DTYPES[to].itemsize
    true = np.dtype(f"u{size}").type(ones.get(to, (1 << (8 * size)) - 1))

    def run(x: Array, y: Array, *c: Array) -> Array:
        v = fn(x, y)
        if join is not None:
            v = join(v, c[0][:, None] if packed else c[0])
        out = np.where(v, true, true.dtype.type(0))
        return out.view(np.uint32).reshape(32) if packed else out

    sources = [(i.ops[1], as_type), (i.ops[2], as_type)]
    if join is not None:
        sources.append((i.ops[3], "pred"))
    return alu(b, run, i.ops[0], "b32" if packed else to, *sources)
