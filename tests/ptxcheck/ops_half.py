"""f16, bf16 and their packed pairs, and the mixed forms with an fp32 accumulator (PTX ISA, "Half Precision
Floating-Point Instructions", "Mixed Precision Floating-Point Instructions").

Sums and products are formed in fp64, rounded to odd, and rounded once to the destination.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxcheck.alu import alu
from ptxcheck.ops_float import APPROX32, arithmetic32, counted, mode_of, ordered, saturate
from ptxcheck.ptx import Inst
from ptxcheck.rounding import F32, F64, bf16_codes, bf16_values, sum_to_odd, to_f32
from ptxcheck.table import Array, Build, Step, op

Function = Callable[..., Array]
HALVES = "f16 bf16 f16x2 bf16x2"
U16 = np.uint16
NAN = U16(0x7FFF)
_LEAST = {"f16": 2.0**-14, "bf16": 2.0**-126}


def decode(raw: Array, t: str) -> Array:
    """uint16 patterns to fp32, exact."""
    return raw.view(np.float16).astype(F32) if t == "f16" else bf16_values(raw)


def encode(x: Array, t: str) -> Array:
    """fp64 (exact or rounded to odd) to uint16 patterns, to nearest; NaN is 0x7fff."""
    if t == "bf16":
        return bf16_codes(to_f32(x, "odd"))
    return np.where(x != x, NAN, x.astype(np.float16).view(U16))


def on_patterns(b: Build, i: Inst, fn: Function) -> Step:
    """A step from a function of uint16 arrays of any length, for plain and packed types."""
    t = i.mods[-1]
    if not t.endswith("x2"):
        return alu(b, fn, i.ops[0], "b16", *((o, "b16") for o in i.ops[1:]))

    def packed(*args: Array) -> Array:
        return fn(*(a.view(U16) for a in args)).view(np.uint32)

    return alu(b, packed, i.ops[0], "b32", *((o, "b32") for o in i.ops[1:]))


def _flush(raw: Array, t: str) -> Array:
    small = np.abs(decode(raw, t)) < _LEAST[t]
    return np.where(small, raw & U16(0x8000), raw)


def _sum(name: str) -> Callable[..., Array]:
    if name == "add":
        return lambda x, y: sum_to_odd(x, y)
    if name == "sub":
        return lambda x, y: sum_to_odd(x, -y)
    if name == "mul":
        return np.multiply
    return lambda x, y, z: sum_to_odd(x * y, z)


@op("add", "sub", "mul", "fma", types=HALVES)
def basic16(b: Build, i: Inst) -> Step:
    if i.mods[-2] == "f32":
        return _mixed(b, i)
    t = i.mods[-1].removesuffix("x2")
    exact = _sum(i.mods[0])
    ftz, oob = i.has("ftz"), i.has("oob")

    def fn(*raw: Array) -> Array:
        out_of_bounds = (raw[0] == U16(0xFFFF)) | (raw[1] == U16(0xFFFF)) if oob else None
        if ftz:
            raw = tuple(_flush(r, t) for r in raw)
        wide = exact(*(decode(r, t).astype(F64) for r in raw))
        if i.has("sat"):
            wide = saturate(wide)
        if i.has("relu"):
            wide = np.where(wide < 0, 0.0, np.where(wide == 0, 0.0, wide))
        r = encode(wide, t)
        if ftz:
            r = _flush(r, t)
        return r if out_of_bounds is None else np.where(out_of_bounds, U16(0), r)

    return on_patterns(b, i, fn)


def _mixed(b: Build, i: Inst) -> Step:
    """add, sub, fma `.f32.f16` / `.f32.bf16`: the narrow operands are widened, the last operand and the result fp32."""
    t = i.mods[-1]
    fn = arithmetic32(i.mods[0], mode_of(i))

    def run(*args: Array) -> Array:
        r = fn(*(decode(a, t) for a in args[:-1]), args[-1])
        return saturate(r) if i.has("sat") else r

    narrow = [(o, "b16") for o in i.ops[1:-1]]
    return alu(b, run, i.ops[0], "f32", *narrow, (i.ops[-1], "f32"))


@op("neg", "abs", types=HALVES)
def sign16(b: Build, i: Inst) -> Step:
    t = i.mods[-1].removesuffix("x2")
    top = U16(0x8000)

    def fn(raw: Array) -> Array:
        r = raw ^ top if i.mods[0] == "neg" else raw & ~top
        return _flush(r, t) if i.has("ftz") else r

    return on_patterns(b, i, fn)


@op("min", "max", types=HALVES)
def minmax16(b: Build, i: Inst) -> Step:
    """Done on fp32 values, which hold both formats exactly; their bits go back unrounded."""
    t = i.mods[-1].removesuffix("x2")
    fn = ordered(i, np.uint32(0x7FFFFFFF).view(np.float32))

    def run(*raw: Array) -> Array:
        if i.has("ftz"):
            raw = tuple(_flush(r, t) for r in raw)
        r = fn(*(decode(x, t) for x in raw))
        return np.where(r != r, NAN, encode(r.astype(F64), t))

    return on_patterns(b, i, run)


@op("ex2", "tanh", types=HALVES)
def approx16(b: Build, i: Inst) -> Step:
    t = i.mods[-1].removesuffix("x2")
    fn: Callable[[Array], Array] = APPROX32[i.mods[0]]

    def run(raw: Array) -> Array:
        if i.has("ftz"):
            raw = _flush(raw, t)
        r = encode(fn(decode(raw, t)).astype(F64), t)
        return _flush(r, t) if i.has("ftz") else r

    step = on_patterns(b, i, run)
    return counted(step, 2 if i.mods[-1].endswith("x2") else 1) if i.mods[0] == "ex2" else step
