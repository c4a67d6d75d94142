"""fp32, fp64 and packed fp32 arithmetic (PTX ISA, "Floating-Point Instructions").

Additions, products and fused multiply-adds are exact in all rounding modes. NaN results of arithmetic carry whatever
payload NumPy gives; min and max give the manual's 0x7fffffff. The `.approx` functions are computed by NumPy, closer to
the true value than the bounds the manual gives and not bit-equal to the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import isfinite, isqrt

import numpy as np

from ptxcheck.alu import alu
from ptxcheck.machine import FULL, Signal, Warp
from ptxcheck.ptx import Inst
from ptxcheck.rounding import (
    F32,
    F64,
    NAN32,
    TINY32,
    any_byte,
    exact64,
    flush,
    fma32,
    round64,
    sum_to_odd,
    to_f32,
    zero_sign,
)
from ptxcheck.table import DTYPES, Array, Build, Step, op

Function = Callable[..., Array]
U32 = np.uint32


def mode_of(i: Inst, default: str = "rn") -> str:
    return next((m for m in i.mods if m in ("rn", "rz", "rm", "rp")), default)


def saturate(x: Array) -> Array:
    """To [0, 1]; NaN gives +0."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def around(fn: Function, i: Inst) -> Function:
    """`fn` on fp32 with `.ftz` at both ends and `.sat`."""
    ftz, sat = i.has("ftz"), i.has("sat")
    if not ftz and not sat:
        return fn

    def wrapped(*args: Array) -> Array:
        r = fn(*map(flush, args)) if ftz else fn(*args)
        if ftz:
            r = flush(r)
        return saturate(r) if sat else r

    return wrapped


def add32(mode: str) -> Function:
    if mode == "rn":
        return np.add

    def fn(x: Array, y: Array) -> Array:
        return zero_sign(to_f32(sum_to_odd(x.astype(F64), y.astype(F64)), mode), x, y, mode)

    return fn


def mul32(mode: str) -> Function:
    return np.multiply if mode == "rn" else lambda x, y: to_f32(x.astype(F64) * y, mode)


def fused32(mode: str) -> Function:
    if mode == "rn":
        return fma32

    def fn(x: Array, y: Array, z: Array) -> Array:
        p = x.astype(F64) * y
        return zero_sign(to_f32(sum_to_odd(p, z.astype(F64)), mode), p, z, mode)

    return fn


def arithmetic32(name: str, mode: str) -> Function:
    """add, sub, mul or fma of fp32 arrays of any length."""
    if name == "sub":
        add = add32(mode)
        return np.subtract if mode == "rn" else lambda x, y: add(x, -y)
    return {"add": add32, "mul": mul32, "fma": fused32, "mad": fused32}[name](mode)


@op("add", "sub", "mul", "fma", "mad", types="f32")
def basic32(b: Build, i: Inst) -> Step:
    fn = around(arithmetic32(i.mods[0], mode_of(i)), i)
    return alu(b, fn, i.ops[0], "f32", *((o, "f32") for o in i.ops[1:]))


@op("add", "sub", "mul", "fma", types="f32x2")
def packed32(b: Build, i: Inst) -> Step:
    """Two fp32 in a 64-bit register, the first in the low half."""
    fn = around(arithmetic32(i.mods[0], mode_of(i)), i)

    def packed(*args: Array) -> Array:
        return fn(*(a.view(F32) for a in args)).view(np.uint64)

    return alu(b, packed, i.ops[0], "b64", *((o, "b64") for o in i.ops[1:]))


def lanes(fn: Callable[..., float], dtype: np.dtype) -> Function:  # type: ignore[type-arg]
    """A function of Python floats, lane by lane."""

    def run(*args: Array) -> Array:
        return np.array([fn(*row) for row in zip(*(a.tolist() for a in args), strict=True)], dtype)

    return run


@op("add", "sub", "mul", "fma", "mad", types="f64")
def basic64(b: Build, i: Inst) -> Step:
    name, mode = i.mods[0], mode_of(i)
    plain: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    exact: dict[str, Callable[..., float]] = {
        "add": lambda x, y: exact64(x, 1.0, y, mode),
        "sub": lambda x, y: exact64(x, 1.0, -y, mode),
        "mul": lambda x, y: exact64(x, y, -0.0 if np.signbit(x) != np.signbit(y) else 0.0, mode),
        "fma": lambda x, y, z: exact64(x, y, z, mode),
        "mad": lambda x, y, z: exact64(x, y, z, mode),
    }
    fn = plain[name] if mode == "rn" and name in plain else lanes(exact[name], F64)
    return alu(b, fn, i.ops[0], "f64", *((o, "f64") for o in i.ops[1:]))


# ---------------------------------------------------------------------------------------------------- signs and order
@op("abs", "neg", types="f32 f64")
def sign(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    fn: Function = np.abs if i.mods[0] == "abs" else np.negative
    return alu(b, around(fn, i) if t == "f32" else fn, i.ops[0], t, (i.ops[1], t))


@op("copysign")
def copysign(b: Build, i: Inst) -> Step:
    """The sign of a on the magnitude of b."""
    t = i.mods[-1]
    return alu(b, lambda x, y: np.copysign(y, x), i.ops[0], t, (i.ops[1], t), (i.ops[2], t))


@op("testp")
def testp(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    least = np.finfo(DTYPES[t]).smallest_normal
    kinds: dict[str, Function] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: x == x,
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & (np.abs(x) >= least),
        "subnormal": lambda x: (np.abs(x) < least) & (x != 0),
    }
    fn = kinds[i.mods[1]]
    return alu(b, fn, i.ops[0], "pred", (i.ops[1], t))


def extreme(largest: bool, keep_nan: bool, nan: np.generic) -> Function:
    """min or max of two: -0 < +0; a NaN loses unless `keep_nan`; a NaN result is the canonical one."""
    pick: Function = (np.maximum if largest else np.minimum) if keep_nan else (np.fmax if largest else np.fmin)
    u = np.dtype(f"u{nan.dtype.itemsize}")
    # Two zeros: the sign bits combine. Equal numbers that are not zero have equal bits, so this holds for them too.
    combine = np.bitwise_and if largest else np.bitwise_or
    zero = b"\0" * (u.itemsize - 1)

    def fn(x: Array, y: Array) -> Array:
        r = pick(x, y)
        if zero in r.tobytes():
            r = np.where(x == y, combine(x.view(u), y.view(u)).view(r.dtype), r)
        missing = r != r
        return np.where(missing, nan, r) if any_byte(missing) else r

    return fn


def ordered(i: Inst, nan: np.generic) -> Function:
    """min and max with .NaN, .xorsign.abs and a third operand."""
    two = extreme(i.mods[0] == "max", i.has("NaN"), nan)
    if i.has("xorsign"):
        u = np.dtype(f"u{nan.dtype.itemsize}")
        top = u.type(1 << (8 * u.itemsize - 1))

        def signed(x: Array, y: Array) -> Array:
            r = two(np.abs(x), np.abs(y))
            s = (x.view(u) ^ y.view(u)) & top
            return np.where(r != r, r, (r.view(u) | s).view(r.dtype))

        return signed
    if len(i.ops) == 4:
        if i.has("abs"):
            return lambda x, y, z: two(two(np.abs(x), np.abs(y)), np.abs(z))
        return lambda x, y, z: two(two(x, y), z)
    return two


@op("min", "max", types="f32")
def minmax32(b: Build, i: Inst) -> Step:
    return alu(b, around(ordered(i, NAN32), i), i.ops[0], "f32", *((o, "f32") for o in i.ops[1:]))


@op("min", "max", types="f64")
def minmax64(b: Build, i: Inst) -> Step:
    nan = np.uint64(0x7FFFFFFFFFFFFFFF).view(np.float64)
    return alu(b, ordered(i, nan), i.ops[0], "f64", *((o, "f64") for o in i.ops[1:]))


# ---------------------------------------------------------------------------------------------------------- functions
def _rsqrt(x: Array) -> Array:
    return (1.0 / np.sqrt(x.astype(F64))).astype(F32)


def _via64(fn: Function) -> Function:
    return lambda x: fn(x.astype(F64)).astype(F32)


APPROX32: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": _via64(np.sin),
    "cos": _via64(np.cos),
    "tanh": _via64(np.tanh),
    "rcp": lambda x: F32.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": _rsqrt,
}


def _ex2_ftz(x: Array) -> Array:
    # A flushed input gives 1, as the unflushed one does; only results need a look, and zeros, of masked scores, none.
    r: Array = np.exp2(x)
    if any_byte(r < TINY32) and any_byte(r.view(U32) - U32(1) < U32(0x7FFFFF)):
        return flush(r)
    return r


@op("ex2", "lg2", "sin", "cos", "tanh", types="f32")
def approx32(b: Build, i: Inst) -> Step:
    if i.mods[0] != "ex2":
        return alu(b, around(APPROX32[i.mods[0]], i), i.ops[0], "f32", (i.ops[1], "f32"))
    return counted(alu(b, _ex2_ftz if i.has("ftz") else np.exp2, i.ops[0], "f32", (i.ops[1], "f32")))


def counted(step: Step, values: int = 1) -> Step:
    """Exponentials are the scarce resource of attention: report how many lanes computed."""

    def run(w: Warp, m: Array) -> Signal:
        counters = w.machine.counters
        if counters is not None:
            counters.exponentials += values * (32 if m is FULL else int(np.count_nonzero(m)))
        return step(w, m)

    return run


@op("rcp", "sqrt", "rsqrt", types="f32")
def root32(b: Build, i: Inst) -> Step:
    """With a rounding mode: exact. Quotients and roots in fp64 are close enough to round to nearest; the directed modes
    compare the square or product, exact in fp64, with the operand."""
    mode = mode_of(i, "approx")
    if mode in ("approx", "rn") or i.has("approx"):
        fn: Function = APPROX32[i.mods[0]]
    elif i.mods[0] == "rcp":
        fn = divide32(mode)
        return alu(b, around(lambda x: fn(np.ones_like(x), x), i), i.ops[0], "f32", (i.ops[1], "f32"))
    else:

        def fn(x: Array) -> Array:
            r = np.sqrt(x)
            return _adjust(r, r.astype(F64) * r - x, mode)

    return alu(b, around(fn, i), i.ops[0], "f32", (i.ops[1], "f32"))


def _adjust(r: Array, excess: Array, mode: str) -> Array:
    """Nearest to directed rounding; `excess` has the sign of r minus the true value."""
    down = (excess > 0) & ((mode == "rm") | ((mode == "rz") & (r > 0)))
    up = (excess < 0) & ((mode == "rp") | ((mode == "rz") & (r < 0)))
    r = np.where(down, np.nextafter(r, F32.type(-np.inf)), r)
    return np.where(up, np.nextafter(r, F32.type(np.inf)), r)


def divide32(mode: str) -> Function:
    """fp32 quotients, exact in every mode; the remainder r * y - x is exact in fp64."""
    if mode == "rn":
        return np.divide

    def fn(x: Array, y: Array) -> Array:
        r = x / y
        finite = np.isfinite(x) & np.isfinite(y) & (y != 0)
        # Past the range r is infinite or zero and says nothing of the remainder: take the sign from the quotient.
        over = np.isinf(r) & finite
        excess = r.astype(F64) * y - x
        excess = np.where(y < 0, -excess, excess)
        excess = np.where(over, np.where(r > 0, 1.0, -1.0), np.where(finite, excess, 0.0))
        return _adjust(r, excess, mode)

    return fn


@op("div", types="f32")
def div32(b: Build, i: Inst) -> Step:
    """.approx and .full are computed as exact quotients; .approx gives 0 for divisors past 2^126 as the manual says."""

    def approx(x: Array, y: Array) -> Array:
        r = x / y
        big = (np.abs(y) > F32.type(2.0**126)) & np.isfinite(y)
        if not any_byte(big):
            return r
        return np.where(big, np.where(np.isinf(x), NAN32, np.copysign(F32.type(0), r)), r)

    fn = approx if i.has("approx") else divide32(mode_of(i))
    return alu(b, around(fn, i), i.ops[0], "f32", (i.ops[1], "f32"), (i.ops[2], "f32"))


def _divide64(x: float, y: float, mode: str) -> float:
    if not (isfinite(x) and isfinite(y)) or x == 0 or y == 0:
        return float(np.divide(F64.type(x), F64.type(y)))
    return round64(Fraction(x) / Fraction(y), mode)


def _sqrt64(x: float, mode: str) -> float:
    r = float(np.sqrt(F64.type(x)))
    if mode == "rn" or not isfinite(x) or x <= 0:
        return r
    f = Fraction(x) * (1 << 2400)  # scaled to an integer: 2400 is even and past the smallest exponent twice
    floor = isqrt(f.numerator // f.denominator)
    root = Fraction(floor, 1 << 1200)
    if root * root == Fraction(x):
        return float(root)
    return round64(Fraction(2 * floor + 1, 1 << 1201), mode)  # strictly between floor and the next integer


@op("div", "rcp", "sqrt", "rsqrt", types="f64")
def functions64(b: Build, i: Inst) -> Step:
    name, mode = i.mods[0], mode_of(i)
    if name == "div":
        fn = np.divide if mode == "rn" else lanes(lambda x, y: _divide64(x, y, mode), F64)
    elif name == "rcp":
        fn = lanes(lambda x: _divide64(1.0, x, mode), F64)
    elif name == "sqrt":
        fn = lanes(lambda x: _sqrt64(x, mode), F64)
    else:

        def fn(x: Array) -> Array:
            return 1.0 / np.sqrt(x)

    return alu(b, fn, i.ops[0], "f64", *((o, "f64") for o in i.ops[1:]))
