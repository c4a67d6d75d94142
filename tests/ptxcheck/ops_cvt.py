"""Conversions (PTX ISA, "cvt", "cvt.pack").

Values go through fp64, which holds every source but 64-bit integers exactly, and are rounded once to the destination.
The hot forms (fp32 to bf16x2, widening, integers) have their own code. Stochastic rounding (.rs) is not modelled: its
bits depend on the hardware's use of the random operand. Scale factors (ue8m0) take the magnitude of negative values.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from ptxcheck.alu import alu
from ptxcheck.ops_float import mode_of, saturate
from ptxcheck.ops_half import decode, encode
from ptxcheck.ptx import Inst, Operand
from ptxcheck.rounding import F32, F64, FORMATS, NAN32, any_byte, bf16_values, flush, round64, to_f32
from ptxcheck.table import DTYPES, Array, Build, Step, op

Function = Callable[..., Array]
FLOATS = ("f16", "bf16", "f32", "f64")
PAIRS = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2", "ue8m0x2")
U16, U32, U64 = np.uint16, np.uint32, np.uint64
ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@op("cvt")
def cvt(b: Build, i: Inst) -> Step:
    to, source = i.mods[-2], i.mods[-1]
    if i.mods[1] == "pack":
        return _pack(b, i)
    if i.has("rs"):
        raise b.error("stochastic rounding is not modelled")
    if to in PAIRS or source in PAIRS:
        return _pairs(b, i, to, source)
    if to == "tf32":
        mode = "rna" if i.has("rna") else mode_of(i)
        return alu(b, lambda x: _tf32(x, mode, i.has("satfinite"), i.has("relu")), i.ops[0], "b32", (i.ops[1], "f32"))
    if to not in DTYPES or source not in DTYPES:
        raise b.error(f"conversion from .{source} to .{to}")
    if to in FLOATS:
        if source in FLOATS:
            return _plain(b, i, _float_to_float(i, to, source), to, source)
        return _plain(b, i, _int_to_float(i, to, source), to, source)
    if source in FLOATS:
        return _plain(b, i, _float_to_int(i, to, source), to, source)
    return _plain(b, i, _int_to_int(i, to), to, source)


def _plain(b: Build, i: Inst, fn: Function, to: str, source: str) -> Step:
    return alu(b, fn, i.ops[0], to, (i.ops[1], source))


# ----------------------------------------------------------------------------------------------------------- integers
def _bounds(t: str) -> tuple[int, int]:
    n = int(t[1:])
    return (-(1 << (n - 1)), (1 << (n - 1)) - 1) if t[0] == "s" else (0, (1 << n) - 1)


def _int_to_int(i: Inst, to: str) -> Function:
    """Truncation, or extension by the sign of the source; .sat limits to the destination's range."""
    dtype = DTYPES[to]
    if not i.has("sat"):
        return lambda x: x.astype(dtype)
    low, high = _bounds(to)

    def fn(x: Array) -> Array:
        ends = _bounds(f"{'s' if x.dtype.kind == 'i' else 'u'}{8 * x.dtype.itemsize}")
        return np.clip(x, max(low, ends[0]), min(high, ends[1])).astype(dtype)

    return fn


def _float_to_int(i: Inst, to: str, source: str) -> Function:
    """Always limited to the range. NaN gives 0, or the integer with only its top bit set if either type has 64 bits."""
    rounding = next((m for m in i.mods if m in ROUND), None)
    fn = ROUND[rounding or "rzi"]
    low, high = _bounds(to)
    dtype = DTYPES[to]
    wide = source == "f64" or to.endswith("64")
    nan = dtype.type(
        (1 << (8 * dtype.itemsize - 1)) - (1 << (8 * dtype.itemsize) if to[0] == "s" else 0) if wide else 0
    )
    top = float(high) if high < 1 << 53 else float(high + 1)

    def run(x: Array) -> Array:
        v = (bf16_values(x) if source == "bf16" else x).astype(F64)
        if i.has("ftz"):
            v = flush(x).astype(F64)
        missing = v != v
        v = fn(np.where(missing, 0.0, v))
        over = v >= top
        out = np.where(over | (v < low), 0, v).astype(dtype)
        out = np.where(over, dtype.type(high), np.where(v < low, dtype.type(low), out))
        return np.where(missing, nan, out)

    return run


def _int_to_float(i: Inst, to: str, source: str) -> Function:
    mode = mode_of(i)
    dtype = DTYPES[to]
    sat = i.has("sat")

    def exact(x: Array) -> Array:
        """fp64, rounded to odd where 64 bits do not fit."""
        v = x.astype(F64)
        if x.dtype.itemsize == 8:
            v = np.array([_odd64(n) for n in x.tolist()], F64)
        return v

    def run(x: Array) -> Array:
        if to == "f64":
            if mode == "rn" or x.dtype.itemsize < 8:
                r = x.astype(F64)
            else:
                r = np.array([round64(Fraction(n), mode) if n else 0.0 for n in x.tolist()], F64)
        elif to == "f32":
            r = to_f32(exact(x), mode)
        else:
            r = FORMATS[to].encode(exact(x), mode).astype(U16).view(dtype)
        return saturate(r) if sat and to != "bf16" else r

    if to == "f32" and mode == "rn" and not sat and not source.endswith("64"):
        return lambda x: x.astype(F32)
    return run


def _odd64(n: int) -> float:
    """An integer to fp64, rounded to odd."""
    r = float(n)
    if int(r) == n:
        return r
    toward = round64(Fraction(n), "rz")
    return float((np.float64(toward).view(U64) | U64(1)).view(F64))


# ------------------------------------------------------------------------------------------------------------- floats
def _float_to_float(i: Inst, to: str, source: str) -> Function:
    whole = next((m for m in i.mods if m in ROUND), None)
    mode = "rna" if i.has("rna") else mode_of(i)
    satfinite, relu, sat = i.has("satfinite"), i.has("relu"), i.has("sat")
    if source == "bf16" and to == "f32" and not (whole or sat or relu or i.has("ftz")):
        return bf16_values

    def run(x: Array) -> Array:
        v = decode(x.view(U16), source).astype(F64) if source in ("f16", "bf16") else x.astype(F64)
        if whole:
            v = ROUND[whole](v)
        if sat:
            v = saturate(v)
        if relu and to == "f32":
            v = np.where(v < 0, 0.0, np.where(v == 0, 0.0, v))
        if to == "f64":
            return v
        if to == "f32":
            r = to_f32(v, mode)
            return np.where(r != r, NAN32, r)
        return narrow(v, to, mode, satfinite, relu).view(DTYPES[to])

    if to == "f32" or source == "f32":
        ftz = i.has("ftz")
        return lambda x: _flushed(run, x, ftz)
    return run


def _flushed(fn: Function, x: Array, ftz: bool) -> Array:
    if not ftz:
        return fn(x)
    r = fn(flush(x) if x.dtype == F32 else x)
    return flush(r) if r.dtype == F32 else r


def narrow(v: Array, to: str, mode: str, satfinite: bool, relu: bool) -> Array:
    """fp64 to f16 or bf16 patterns, uint16."""
    if mode == "rn" and not satfinite and not relu:
        return encode(v, to)
    return FORMATS[to].encode(v, mode, satfinite, relu).astype(U16)


def _tf32(x: Array, mode: str, satfinite: bool, relu: bool) -> Array:
    return FORMATS["tf32"].encode(x.astype(F64), mode, satfinite, relu).astype(U32) << U32(13)


def _bf16_pairs() -> Callable[[Array, Array], Array]:
    """Two fp32 arrays to packed bf16, to nearest. Every tile of probabilities goes through it: both are rounded at once
    in scratch arrays, with constants as arrays, which NumPy handles much faster than scalars."""
    x = np.empty(64, F32)
    u = x.view(U32)
    low_in, high_in = x[:32], x[32:]
    t = np.empty(64, U32)
    low, high = t[:32], t[32:]
    sixteen, one, half = (np.full(64, c, U32) for c in (16, 1, 0x7FFF))
    upper = np.full(32, 0xFFFF0000, U32)
    differs = np.empty(64, np.bool_)

    def fn(a: Array, b: Array) -> Array:
        np.copyto(high_in, a)
        np.copyto(low_in, b)
        np.right_shift(u, sixteen, t)
        np.bitwise_and(t, one, t)
        np.add(t, half, t)
        np.add(t, u, t)
        np.not_equal(x, x, differs)
        if any_byte(differs):
            t[differs] = 0x7FFF0000
        np.right_shift(low, sixteen[:32], low)
        np.bitwise_and(high, upper, high)
        return high | low

    return fn


bf16_pair = _bf16_pairs()


def _pairs(b: Build, i: Inst, to: str, source: str) -> Step:
    """Packed conversions: two fp32 (the first goes to the upper half), or a packed pair, to a packed pair."""
    mode = next((m for m in i.mods if m in ("rn", "rz", "rna", "rp", "rm")), "rn")
    satfinite, relu = i.has("satfinite"), i.has("relu")
    if source == "f32":
        plain = to == "bf16x2" and mode == "rn" and not (satfinite or relu)
        combine = bf16_pair if plain else _joined(to, mode, satfinite, relu)
        return _packed(b, combine, i.ops[0], to, (i.ops[1], "f32"), (i.ops[2], "f32"))
    decoder = _values(source)
    joined = _joined(to, mode, satfinite, relu)
    if i.has("scaled"):
        raise b.error("scaled conversions are not modelled")

    def run(x: Array) -> Array:
        low, high = decoder(x)
        return joined(high, low)

    return _packed(b, run, i.ops[0], to, (i.ops[1], _container(source)))


def _container(pair: str) -> str:
    """The type of a register that holds a packed pair."""
    return {"f16x2": "b32", "bf16x2": "b32", "e2m1x2": "b8"}.get(pair, "b16")


def _packed(b: Build, fn: Function, dst: Operand, to: str, *sources: tuple[Operand, str]) -> Step:
    return alu(b, fn, dst, _container(to), *sources)


def _joined(to: str, mode: str, satfinite: bool, relu: bool) -> Callable[[Array, Array], Array]:
    name = to.removesuffix("x2")
    if name == "ue8m0":

        def one(x: Array) -> Array:
            return _scale(x.astype(F64), mode, satfinite)
    elif name in ("f16", "bf16"):

        def one(x: Array) -> Array:
            return narrow(x.astype(F64), name, mode, satfinite, relu)
    else:
        fmt = FORMATS[name]

        def one(x: Array) -> Array:
            return fmt.encode(x.astype(F64), mode, satfinite, relu)

    width = 16 if name in ("f16", "bf16") else 4 if name == "e2m1" else 8
    dtype = DTYPES[_container(to)]
    return lambda high, low: ((one(high).astype(U32) << U32(width)) | one(low).astype(U32)).astype(dtype)


def _values(pair: str) -> Callable[[Array], tuple[Array, Array]]:
    """Packed pair to its low and high values, exact."""
    name = pair.removesuffix("x2")
    if name in ("f16", "bf16"):
        return lambda x: (decode(x.astype(U16), name), decode((x >> U32(16)).astype(U16), name))
    if name == "ue8m0":
        table = np.where(np.arange(256) == 255, np.nan, np.ldexp(1.0, np.arange(256) - 127))
        width = 8
    else:
        table = FORMATS[name].values()
        width = 4 if name == "e2m1" else 8
    mask = len(table) - 1
    return lambda x: (table[x & mask], table[x.astype(np.int64) >> width & mask])


def _scale(x: Array, mode: str, satfinite: bool) -> Array:
    """Power-of-two scale, 2^(code - 127); 255 is NaN."""
    a = np.abs(x)
    fraction, e = np.frexp(np.where(np.isfinite(a) & (a > 0), a, 1.0))
    e = e - 1 + ((fraction > 0.5) if mode == "rp" else 0)
    code = np.where(a == 0, 0, np.maximum(e + 127, 0))
    over = (code > 254) | np.isinf(a)
    return np.where(x != x, 255, np.where(over, 254 if satfinite else 255, code))


def _pack(b: Build, i: Inst) -> Step:
    """cvt.pack.sat: b, then a, limited to the narrow type, from bit 0 up; the third operand above them."""
    to, source = i.mods[3], i.mods[4]
    low, high = _bounds(to)
    width = int(to[1:])
    mask = np.int64((1 << width) - 1)

    def fn(x: Array, y: Array, *z: Array) -> Array:
        parts = [np.clip(v.astype(np.int64), low, high) & mask for v in (x, y)]
        out = parts[0] << np.int64(width) | parts[1]
        if z:
            out |= z[0].astype(np.int64) << np.int64(2 * width)
        return out.astype(U32)

    return alu(b, fn, i.ops[0], "b32", *((o, source) for o in i.ops[1:3]), *((o, "b32") for o in i.ops[3:]))
