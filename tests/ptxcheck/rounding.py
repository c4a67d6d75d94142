"""Exact rounding: sums rounded to odd, and values rounded to any format in any mode.

Double rounding is avoided by Boldo and Melquiond's round-to-odd: a sum of doubles whose last bit is set when it is not
exact can be rounded again, to a format at least two bits narrower, in any mode, with the result of one rounding.
Modes as PTX spells them: rn (nearest, ties to even), rna (nearest, ties away), rz, rm (down), rp (up).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import inf, isfinite, nextafter
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
U32 = np.uint32
NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)
TINY32 = np.float32(2.0**-126)
#: Of an fp64 significand the bits that fp32 has no room for, and what they are half way between two of its numbers.
U64 = np.uint64
_BELOW32, _HALF32 = U64((1 << 29) - 1), U64(1 << 28)


def any_byte(x: Array) -> bool:
    """Whether any bit is set; several times faster than `any` on arrays of this size."""
    b = x.tobytes()
    return b.count(0) != len(b)


def sum_to_odd(x: Array, y: Array) -> Array:
    """x + y in fp64, rounded to odd. Knuth's two-sum gives the error, exactly."""
    s = x + y
    part = s - x
    error = (x - (s - part)) + (y - part)
    if not any_byte(error):
        return s
    even = s.view(np.uint64) & np.uint64(1) == 0
    up, down = even & (error > 0), even & (error < 0)
    if any_byte(up | down):  # infinite sums have an error that is no number
        s = np.where(up, np.nextafter(s, np.inf), np.where(down, np.nextafter(s, -np.inf), s))
    return s


def fma32(x: Array, y: Array, z: Array) -> Array:
    """fp32 x * y + z, rounded once to nearest. The product is exact in fp64. Its sum with z, rounded to fp64, rounds
    wrongly to fp32 only if it looks like a midpoint of fp32 numbers: only then is the exact sum taken."""
    p = x.astype(F64) * y.astype(F64)
    z = z.astype(F64)
    s = p + z
    if b"\0\0\0" in s.tobytes() and may_be_midpoint(s):
        s = sum_to_odd(p, z)
    return s.astype(F32)


def may_be_midpoint(s: Array) -> bool:
    """Whether one of the fp64 values lies half way between neighbouring fp32 numbers, or, near zero, might."""
    if any_byte(s.view(U64) & _BELOW32 == _HALF32):
        return True
    small = np.abs(s) < TINY32  # subnormal in fp32: the midpoints are those of a fixed grid
    return any_byte(small) and any_byte(small & (s != 0))


def to_f32(s: Array, mode: str) -> Array:
    """fp64 (exact, or rounded to odd) to fp32."""
    r = s.astype(F32)
    if mode == "rn":
        return r
    if mode == "rz":
        return np.where(np.abs(r) > np.abs(s), np.nextafter(r, F32.type(0)), r)
    if mode == "rm":
        return np.where(r > s, np.nextafter(r, F32.type(-inf)), r)
    if mode == "rp":
        return np.where(r < s, np.nextafter(r, F32.type(inf)), r)
    if mode == "odd":
        t = to_f32(s, "rz")
        return np.where((t != s) & (s == s), (t.view(U32) | U32(1)).view(F32), t)
    raise ValueError(f"rounding mode {mode}")


def zero_sign(r: Array, x: Array, y: Array, mode: str) -> Array:
    """A sum that is exactly zero with operands of unlike sign is -0 when rounding down (IEEE 754, 6.3)."""
    if mode != "rm":
        return r
    return np.where((r == 0) & (np.signbit(x) != np.signbit(y)), r.dtype.type(-0.0), r)


def exact64(x: float, y: float, z: float, mode: str) -> float:
    """x * y + z in fp64, rounded once."""
    plain = x * y + z
    if not (isfinite(x) and isfinite(y) and isfinite(z)):
        return plain
    true = Fraction(x) * Fraction(y) + Fraction(z)
    if true == 0:
        like = (np.signbit(x) != np.signbit(y)) == np.signbit(z)
        return (-0.0 if np.signbit(z) else 0.0) if like else (-0.0 if mode == "rm" else 0.0)
    return round64(true, mode)


def round64(true: Fraction, mode: str) -> float:
    """A non-zero rational to fp64."""
    try:
        r = true.numerator / true.denominator
    except OverflowError:
        r = inf if true > 0 else -inf
    if r == 0:
        r = 0.0 if true > 0 else -0.0
    over = r == inf or (r != -inf and Fraction(r) > true)
    under = r == -inf or (r != inf and Fraction(r) < true)
    if over and (mode == "rm" or (mode == "rz" and true > 0)):
        return nextafter(r, -inf)
    if under and (mode == "rp" or (mode == "rz" and true < 0)):
        return nextafter(r, inf)
    return r


# ---------------------------------------------------------------------------------------------------------- formats
@dataclass(frozen=True)
class Format:
    """A binary format with sign. `top`: code of the largest finite magnitude; `infinity`: its code, or None; `nan`:
    the code conversions give, or None where NaN becomes the largest value (fp6 and fp4 have neither)."""

    exponent: int
    mantissa: int
    top: int
    infinity: int | None
    nan: int | None

    @property
    def least(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent - 1))

    def encode(self, x: Array, mode: str, satfinite: bool = False, relu: bool = False) -> Array:
        """Codes of fp64 values (exact or rounded to odd)."""
        nan = np.isnan(x)
        negative = np.signbit(x) & ~nan
        a = np.where(nan | np.isinf(x), 0.0, np.abs(x))
        e = np.where(a == 0, self.least, np.maximum(np.frexp(a)[1] - 1, self.least))
        n = np.ldexp(a, self.mantissa - e)
        away = {"rp": ~negative, "rm": negative}.get(mode)
        if mode == "rn":
            n = np.rint(n)
        elif mode == "rna":
            n = np.floor(n + 0.5)
        elif away is not None:
            n = np.where(away, np.ceil(n), np.floor(n))
        elif mode == "rz":
            n = np.floor(n)
        else:
            raise ValueError(f"rounding mode {mode}")
        code = ((e - self.least).astype(np.int64) << self.mantissa) + n.astype(np.int64)
        past = code > self.top
        beyond = self.infinity if self.infinity is not None else self.nan
        if satfinite or beyond is None:
            code = np.where(past | np.isinf(x), self.top, code)
        else:
            stays = np.zeros_like(nan) if mode in ("rn", "rna") else ~away if away is not None else ~nan
            code = np.where(past, np.where(stays, self.top, beyond), code)
            code = np.where(np.isinf(x), beyond, code)
        code = np.where(nan, self.top if self.nan is None else self.nan, code)
        sign = 1 << (self.exponent + self.mantissa)
        if relu:
            return np.where(negative, 0, code)
        return np.where(negative & ~((code == self.nan) if self.nan is not None else nan), code | sign, code)

    def values(self) -> Array:
        """The values of all codes, fp64."""
        width = 1 + self.exponent + self.mantissa
        code = np.arange(1 << width)
        magnitude = code & ((1 << (width - 1)) - 1)
        e, n = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        normal = e > 0
        v = np.ldexp(
            np.where(normal, n + (1 << self.mantissa), n), np.where(normal, e - 1, 0) + self.least - self.mantissa
        )
        v = np.where(magnitude > self.top, np.nan, v)
        if self.infinity is not None:
            v = np.where(magnitude == self.infinity, np.inf, v)
        return np.where(code >> (width - 1), -v, v)


FORMATS = {
    "f16": Format(5, 10, 0x7BFF, 0x7C00, 0x7FFF),
    "bf16": Format(8, 7, 0x7F7F, 0x7F80, 0x7FFF),
    # tf32 is fp32 without its low 13 bits; `encode` gives 19 bits.
    "tf32": Format(8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF),
    "e4m3": Format(4, 3, 0x7E, None, 0x7F),
    "e5m2": Format(5, 2, 0x7B, 0x7C, 0x7F),
    "e2m3": Format(2, 3, 0x1F, None, None),
    "e3m2": Format(3, 2, 0x1F, None, None),
    "e2m1": Format(2, 1, 0x7, None, None),
}


def bf16_values(code: Array) -> Array:
    """fp32 values of bf16 patterns in uint16."""
    return (code.astype(U32) << U32(16)).view(F32)


def bf16_codes(x: Array) -> Array:
    """bf16 patterns, uint16, of fp32 values; to nearest, NaN becomes 0x7fff."""
    u = x.view(U32)
    r = u + (U32(0x7FFF) + (u >> U32(16) & U32(1))) >> U32(16)
    nan = x != x
    if any_byte(nan):
        r = np.where(nan, U32(0x7FFF), r)
    return r.astype(np.uint16)


def flush(x: Array) -> Array:
    """fp32 with subnormal numbers replaced by zero of the same sign (.ftz)."""
    small = np.abs(x) < TINY32
    if any_byte(small):
        return np.where(small, np.copysign(F32.type(0), x), x)
    return x
