"""Logic, shifts and bit fields (PTX ISA, "Logic and Shift Instructions", and bfe, bfi, bfind, bmsk, brev, clz, fns,
popc, prmt, szext of the integer chapter)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptxcheck.alu import alu
from ptxcheck.ptx import Imm, Inst, Operand, Pair, Sink
from ptxcheck.table import DTYPES, Array, Build, Step, immediate, op

U32 = np.uint32
BITS = "pred b16 b32 b64"


@op("and", "or", "xor", types=BITS)
def logic(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    fn = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[i.mods[0]]
    return alu(b, fn, i.ops[0], t, (i.ops[1], t), (i.ops[2], t))


@op("not", types=BITS)
def not_(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    return alu(b, np.invert, i.ops[0], t, (i.ops[1], t))


@op("cnot", types="b16 b32 b64")
def cnot(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    return alu(b, lambda x: (x == 0).astype(DTYPES[t]), i.ops[0], t, (i.ops[1], t))


@op("shl", "shr", types="b16 b32 b64 u16 u32 u64 s16 s32 s64")
def shift(b: Build, i: Inst) -> Step:
    """Counts are unsigned and clamped: from the width on, shl and unsigned shr give 0, signed shr the sign."""
    t = i.mods[-1]
    dtype, width = DTYPES[t], int(t[1:])
    base = np.left_shift if i.mods[0] == "shl" else np.right_shift
    # NumPy's shifts are clamped likewise when count and value have one type.
    if isinstance(i.ops[2], Imm):
        count = np.full(32, min(int(immediate(i.ops[2].text, "u32")), width), dtype)
        return alu(b, lambda x: base(x, count), i.ops[0], t, (i.ops[1], t))
    if width == 32:
        return alu(b, base, i.ops[0], t, (i.ops[1], t), (i.ops[2], "s32" if t[0] == "s" else "u32"))
    limit = U32(width)
    return alu(
        b, lambda x, n: base(x, np.minimum(n, limit).astype(dtype)), i.ops[0], t, (i.ops[1], t), (i.ops[2], "u32")
    )


@op("shf")
def funnel(b: Build, i: Inst) -> Step:
    """The 64-bit value b:a shifted left (upper half taken) or right (lower half taken)."""
    left, wrap = i.mods[1] == "l", i.has("wrap")
    s = np.uint64(32)

    def fn(x: Array, y: Array, n: Array) -> Array:
        n = n & U32(31) if wrap else np.minimum(n, U32(32))
        v = y.astype(np.uint64) << s | x
        n = n.astype(np.uint64)
        return ((v << n >> s) if left else (v >> n)).astype(U32)

    return alu(b, fn, i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "b32"), (i.ops[3], "u32"))


@op("lop3")
def lop3(b: Build, i: Inst) -> Step:
    """Bit k of the table, k = 4a + 2b + c, is the result. `lop3.or` and `lop3.and` also give (d != 0) op q."""
    table = i.ops[4]
    if not isinstance(table, Imm):
        raise b.error("immLut is not a literal")
    lut = int(table.text, 0) & 255
    flip = bin(lut).count("1") > 4
    terms = [k for k in range(8) if (lut >> k & 1) != flip]

    def fn(x: Array, y: Array, z: Array) -> Array:
        out = np.zeros(32, U32)
        for k in terms:
            out |= (x if k & 4 else ~x) & (y if k & 2 else ~y) & (z if k & 1 else ~z)
        return ~out if flip else out

    sources = [(o, "b32") for o in i.ops[1:4]]
    dst: Operand = i.ops[0]
    if not isinstance(dst, Pair):
        return alu(b, fn, dst, "b32", *sources)
    both: Callable[[Array, Array], Array] = np.logical_or if i.mods[1] == "or" else np.logical_and
    first = Sink() if isinstance(dst.first, Sink) else dst.first
    # The predicate is computed first: the destination may be one of the sources.
    flag = alu(b, lambda x, y, z, q: both(fn(x, y, z) != 0, q), dst.second, "pred", *sources, (i.ops[5], "pred"))
    value = alu(b, fn, first, "b32", *sources)

    def run(w, m):  # type: ignore[no-untyped-def]
        flag(w, m)
        value(w, m)

    return run


def _ones(n: Array, width: int) -> Array:
    """The n lowest bits set; all of them from the width on."""
    t = np.dtype(f"u{width // 8}").type
    n = np.minimum(n, width).astype(t)
    return np.where(n >= width, ~t(0), (t(1) << np.minimum(n, t(width - 1))) - t(1))


@op("bfe", types="u32 s32 u64 s64")
def bfe(b: Build, i: Inst) -> Step:
    """Field of c bits from bit b (both taken modulo 256). Signed: filled with the field's top bit, which is the value's
    top bit if the field goes past it."""
    t = i.mods[-1]
    u = "u" + t[1:]
    width, dtype = int(t[1:]), DTYPES["u" + t[1:]]

    def fn(x: Array, pos: Array, length: Array) -> Array:
        pos, length = pos & U32(255), length & U32(255)
        p = np.minimum(pos, U32(width)).astype(dtype)
        keep = _ones(length, width) & (~dtype.type(0) >> p)
        out = (x >> p) & keep
        if t[0] == "u":
            return out
        top = np.minimum(pos.astype(np.int64) + length - 1, width - 1).clip(0).astype(dtype)
        sign = ((x >> top & dtype.type(1)) != 0) & (length != 0)
        return np.where(sign, out | ~keep, out)

    return alu(b, fn, i.ops[0], u, (i.ops[1], u), (i.ops[2], "u32"), (i.ops[3], "u32"))


@op("bfi", types="b32 b64")
def bfi(b: Build, i: Inst) -> Step:
    """The d lowest bits of a placed into b from bit c."""
    t = i.mods[-1]
    width, dtype = int(t[1:]), DTYPES[t]

    def fn(x: Array, y: Array, pos: Array, length: Array) -> Array:
        p = np.minimum(pos & U32(255), U32(width)).astype(dtype)
        mask = _ones(length & U32(255), width) << p
        return (y & ~mask) | (x << p & mask)

    return alu(b, fn, i.ops[0], t, (i.ops[1], t), (i.ops[2], t), (i.ops[3], "u32"), (i.ops[4], "u32"))


def _count_leading(x: Array) -> Array:
    """Zeros above the top set bit."""
    width = 8 * x.dtype.itemsize
    out = np.zeros(32, U32)
    v = x.copy()
    step = width // 2
    while step:
        high = v >> v.dtype.type(width - step) == 0
        out += np.where(high, U32(step), U32(0))
        v = np.where(high, v << v.dtype.type(step), v)
        step //= 2
    return np.where(x == 0, U32(width), out)


@op("clz", types="b32 b64")
def clz(b: Build, i: Inst) -> Step:
    return alu(b, _count_leading, i.ops[0], "u32", (i.ops[1], i.mods[-1]))


@op("popc", types="b32 b64")
def popc(b: Build, i: Inst) -> Step:
    return alu(b, lambda x: np.bitwise_count(x).astype(U32), i.ops[0], "u32", (i.ops[1], i.mods[-1]))


@op("bfind", types="u32 s32 u64 s64")
def bfind(b: Build, i: Inst) -> Step:
    """Position of the top bit that differs from the sign (`.shiftamt`: how far to shift it to the top); all ones if
    there is none."""
    t = i.mods[-1]
    width = int(t[1:])

    def fn(x: Array) -> Array:
        if t[0] == "s":
            x = np.where(x < 0, ~x, x).view(DTYPES["u" + t[1:]])
        n = _count_leading(x)
        return np.where(n == width, ~U32(0), n if i.has("shiftamt") else U32(width - 1) - n)

    return alu(b, fn, i.ops[0], "u32", (i.ops[1], t))


@op("brev", types="b32 b64")
def brev(b: Build, i: Inst) -> Step:
    t = i.mods[-1]
    n = DTYPES[t].itemsize

    def fn(x: Array) -> Array:
        bits = np.unpackbits(x.view(np.uint8).reshape(32, n), axis=1, bitorder="little")
        return np.packbits(bits[:, ::-1], axis=1, bitorder="little").reshape(-1).view(DTYPES[t])

    return alu(b, fn, i.ops[0], t, (i.ops[1], t))


@op("bmsk")
def bmsk(b: Build, i: Inst) -> Step:
    """b ones from bit a; .clamp limits both to 32, .wrap takes them modulo 32."""
    wrap = i.has("wrap")

    def fn(x: Array, y: Array) -> Array:
        x, y = (x & U32(31), y & U32(31)) if wrap else (np.minimum(x, U32(32)), np.minimum(y, U32(32)))
        return _ones(y, 32) << x

    return alu(b, fn, i.ops[0], "b32", (i.ops[1], "u32"), (i.ops[2], "u32"))


@op("szext")
def szext(b: Build, i: Inst) -> Step:
    """Sign- or zero-extend the low b bits; from 32 on (.clamp) the value itself."""
    t, wrap = i.mods[-1], i.has("wrap")

    def fn(x: Array, n: Array) -> Array:
        n = n & U32(31) if wrap else np.minimum(n, U32(32))
        keep = _ones(n, 32)
        if t == "u32":
            return x & keep
        sign = (n != 0) & ((x >> (np.maximum(n, U32(1)) - U32(1)) & U32(1)) != 0)
        return np.where(sign, x | ~keep, x & keep)

    return alu(b, fn, i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "u32"))


@op("fns")
def fns(b: Build, i: Inst) -> Step:
    """The offset-th set bit of a mask from `base` upward (offset > 0), downward (< 0), or bit `base` itself (0)."""

    def one(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        order = range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [k for k in order if mask >> k & 1]
        return found[abs(offset) - 1] if abs(offset) <= len(found) else 0xFFFFFFFF

    def fn(mask: Array, base: Array, offset: Array) -> Array:
        rows = zip(mask.tolist(), (base & U32(31)).tolist(), offset.tolist(), strict=True)
        return np.array([one(*row) for row in rows], U32)

    return alu(b, fn, i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "b32"), (i.ops[3], "s32"))


# Byte selectors of the prmt modes, indexed by the two low bits of c (PTX ISA, "prmt").
_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


@op("prmt")
def prmt(b: Build, i: Inst) -> Step:
    """Four bytes chosen from the eight of b:a. In the default mode each nibble of c selects one; its top bit asks for
    the byte's sign, replicated."""
    mode = _MODES.get(i.mods[-1])

    def fn(x: Array, y: Array, c: Array) -> Array:
        pool = np.concatenate([x.view(np.uint8).reshape(32, 4), y.view(np.uint8).reshape(32, 4)], axis=1)
        if mode is not None:
            pick = np.array(mode)[c & U32(3)]
            return np.take_along_axis(pool, pick, 1).reshape(-1).view(U32)
        nibbles = c[:, None] >> np.array([0, 4, 8, 12], U32) & U32(15)
        out = np.take_along_axis(pool, (nibbles & U32(7)).astype(np.int64), 1)
        sign = np.where(out & 0x80, np.uint8(255), np.uint8(0))
        return np.where(nibbles & U32(8), sign, out).reshape(-1).view(U32)

    return alu(b, fn, i.ops[0], "b32", (i.ops[1], "b32"), (i.ops[2], "b32"), (i.ops[3], "b32"))
