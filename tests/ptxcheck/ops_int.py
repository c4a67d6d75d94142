"""Integer arithmetic (PTX ISA, "Integer Arithmetic Instructions" and "Extended-Precision Integer Arithmetic").

Arithmetic wraps. Division by zero is unspecified by the manual; here, as GPUs do, a quotient of all ones and a
remainder equal to the dividend. The condition code CC.CF is one bool a lane in `warp.carry`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxcheck.alu import alu
from ptxcheck.machine import Signal, Warp
from ptxcheck.ptx import Inst
from ptxcheck.table import DTYPES, Array, Build, Step, op

INTEGERS = "u16 s16 u32 s32 u64 s64"
PACKED = "u16x2 s16x2"


def unsigned(type_: str) -> str:
    return "u" + type_[1:]


def wider(type_: str) -> str:
    return f"{type_[0]}{2 * int(type_[1:])}"


def halves(fn: Callable[..., Array], type_: str) -> Callable[..., Array]:
    """Apply `fn` to both 16-bit parts of packed 32-bit values."""
    dtype = DTYPES[type_[:3]]

    def packed(*args: Array) -> Array:
        return fn(*(a.view(dtype) for a in args)).view(np.uint32)

    return packed


@op("add", "sub", types=INTEGERS)
def add(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    if i.has("cc"):
        return _with_carry(b, i)
    if i.has("sat"):  # .s32 only
        wide: Callable[..., Array] = np.add if i.mods[0] == "add" else np.subtract
        return alu(b, lambda x, y: _saturate(wide(x, y, dtype=np.int64)), i.ops[0], t, (i.ops[1], t), (i.ops[2], t))
    fn = np.add if i.mods[0] == "add" else np.subtract
    u = unsigned(t)
    return alu(b, fn, i.ops[0], u, (i.ops[1], u), (i.ops[2], u))


def _saturate(v: Array) -> Array:
    return np.clip(v, -(1 << 31), (1 << 31) - 1).astype(np.int32)


@op("add", types=PACKED)
def add_packed(b: Build, i: Inst) -> Step:
    return alu(b, halves(np.add, "u16x2"), i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "b32"))


@op("addc", "subc", "madc")
def _with_carry(b: Build, i: Inst) -> Step:
    """add.cc, addc, sub.cc, subc, mad.cc, madc: `.cc` writes CC.CF (carry or borrow), the `c` forms read it."""
    t = unsigned(i.mods[-1])
    base = i.mods[0].removesuffix("c") if i.mods[0] in ("addc", "subc", "madc") else i.mods[0]
    takes, gives = i.mods[0] != base, i.has("cc")
    readers = [b.read(o, t) for o in i.ops[1:]]
    product = _product(i.mods[1], i.mods[-1]) if base == "mad" else None
    write = b.write(i.ops[0], t)

    def run(w: Warp, m: Array) -> Signal:
        v = [r(w) for r in readers]
        x, y = v if product is None else (product(*(a.view(DTYPES[i.mods[-1]]) for a in v[:2])).view(v[0].dtype), v[2])
        one = w.carry.astype(x.dtype) if takes else np.zeros_like(x)
        if base == "sub":
            s = x - y
            out = s - one
            flag = (x < y) | (s < one)
        else:
            s = x + y
            out = s + one
            flag = (s < x) | (out < s)
        write(w, m, out)
        if gives:
            w.carry = np.where(m, flag, w.carry)
        return None

    return run


def _high64(x: Array, y: Array) -> Array:
    """Upper 64 bits of an unsigned product, from 32-bit parts."""
    low = np.uint64(0xFFFFFFFF)
    s = np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> s, y & low, y >> s
    middle = (x0 * y0 >> s) + (x1 * y0 & low) + (x0 * y1 & low)
    return x1 * y1 + (x1 * y0 >> s) + (x0 * y1 >> s) + (middle >> s)


def _signed_high64(x: Array, y: Array) -> Array:
    a, c = x.view(np.uint64), y.view(np.uint64)
    zero = np.uint64(0)
    return (_high64(a, c) - np.where(x < 0, c, zero) - np.where(y < 0, a, zero)).view(np.int64)


def _product(part: str, t: str) -> Callable[[Array, Array], Array]:
    """mul.lo, mul.hi or mul.wide of operands of type t."""
    if part == "lo":
        return np.multiply
    if t.endswith("64") and part == "hi":
        return _signed_high64 if t[0] == "s" else _high64
    narrow, wide = DTYPES[t], DTYPES[wider(t)]
    if part == "wide":
        return lambda x, y: np.multiply(x.astype(wide), y.astype(wide))
    shift = wide.type(int(t[1:]))
    return lambda x, y: (np.multiply(x.astype(wide), y.astype(wide)) >> shift).astype(narrow)


@op("mul", types=INTEGERS)
def mul(b: Build, i: Inst) -> Step:
    t, part = i.mods[-1], i.mods[1]
    if part not in ("lo", "hi", "wide"):
        raise b.error("mul needs .lo, .hi or .wide")
    return alu(b, _product(part, t), i.ops[0], wider(t) if part == "wide" else t, (i.ops[1], t), (i.ops[2], t))


@op("mad", types=INTEGERS)
def mad(b: Build, i: Inst) -> Step:
    t, part = i.mods[-1], i.mods[1]
    if i.has("cc"):
        return _with_carry(b, i)
    product = _product(part, t)
    out = wider(t) if part == "wide" else t
    if i.has("sat"):  # mad.hi.sat.s32

        def fn(x: Array, y: Array, z: Array) -> Array:
            return _saturate(product(x, y).astype(np.int64) + z)

        return alu(b, fn, i.ops[0], t, (i.ops[1], t), (i.ops[2], t), (i.ops[3], t))
    return alu(b, lambda x, y, z: product(x, y) + z, i.ops[0], out, (i.ops[1], t), (i.ops[2], t), (i.ops[3], out))


@op("mul24", "mad24")
def mul24(b: Build, i: Inst) -> Step:
    """Products of the low 24 bits: .lo are bits 0..31 of the 48, .hi bits 16..47."""
    t = i.mods[-1]
    shift, left = np.int64(16 if i.has("hi") else 0), np.int64(40)

    def fn(x: Array, y: Array, *z: Array) -> Array:
        if t == "s32":
            x, y = (v.astype(np.int64) << left >> left for v in (x, y))
        else:
            x, y = (v.astype(np.int64) & np.int64(0xFFFFFF) for v in (x, y))
        p = x * y >> shift
        if z and i.has("sat"):
            return _saturate((p << np.int64(32) >> np.int64(32)) + z[0])
        return (p + (z[0] if z else 0)).astype(DTYPES[t])

    return alu(b, fn, i.ops[0], t, *((o, t) for o in i.ops[1:]))


def divide(x: Array, y: Array) -> Array:
    """Quotient rounded toward zero."""
    zero = y == 0
    d = np.where(zero, 1, y)
    if x.dtype.kind == "u":
        q = x // d
    else:
        u = np.dtype(f"u{x.dtype.itemsize}")
        q = (np.abs(x).view(u) // np.abs(d).view(u)).view(x.dtype)
        q = np.where((x < 0) != (d < 0), -q, q)
    return np.where(zero, x.dtype.type(-1) if x.dtype.kind == "i" else ~x.dtype.type(0), q)


def remainder(x: Array, y: Array) -> Array:
    """Has the sign of the dividend."""
    return np.where(y == 0, x, x - divide(x, y) * y)


@op("div", "rem", types=INTEGERS)
def div(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    return alu(b, divide if i.mods[0] == "div" else remainder, i.ops[0], t, (i.ops[1], t), (i.ops[2], t))


@op("abs", types="s16 s32 s64")
def abs_(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    return alu(b, np.abs, i.ops[0], t, (i.ops[1], t))


@op("neg", types="s16 s32 s64")
def neg(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    return alu(b, np.negative, i.ops[0], t, (i.ops[1], t))


@op("min", "max", types=f"{INTEGERS} {PACKED}")
def min_(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    base: Callable[..., Array] = np.minimum if i.mods[0] == "min" else np.maximum
    fn = base
    if i.has("relu"):

        def fn(x: Array, y: Array) -> Array:
            return np.maximum(base(x, y), 0)

    if t.endswith("x2"):
        return alu(b, halves(fn, t), i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "b32"))
    return alu(b, fn, i.ops[0], t, (i.ops[1], t), (i.ops[2], t))


@op("sad", types=INTEGERS)
def sad(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    u = DTYPES[unsigned(t)]

    def fn(x: Array, y: Array, z: Array) -> Array:
        return (np.maximum(x, y).view(u) - np.minimum(x, y).view(u)) + z.view(u)

    return alu(b, fn, i.ops[0], t, (i.ops[1], t), (i.ops[2], t), (i.ops[3], t))


@op("dp4a", "dp2a")
def dot(b: Build, i: Inst) -> Step:
    """Dot product of bytes (dp4a), or of 16-bit parts of a with two bytes of b (dp2a.lo, dp2a.hi), added to c."""
    ta, tb = i.mods[-2], i.mods[-1]
    four = i.mods[0] == "dp4a"
    a_type = np.dtype(("i" if ta[0] == "s" else "u") + ("1" if four else "2"))
    b_type = np.dtype(("i" if tb[0] == "s" else "u") + "1")
    part = slice(0, 4) if four else slice(2, 4) if i.has("hi") else slice(0, 2)

    def fn(x: Array, y: Array, z: Array) -> Array:
        xs = x.view(a_type).reshape(32, -1).astype(np.int64)
        ys = y.view(b_type).reshape(32, 4)[:, part].astype(np.int64)
        return ((xs * ys).sum(1) + z.astype(np.int64)).astype(np.uint32)

    out = "s32" if "s32" in (ta, tb) else "u32"
    return alu(b, fn, i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "b32"), (i.ops[3], out))
