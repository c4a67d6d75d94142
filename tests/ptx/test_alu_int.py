"""Integer arithmetic, logic, shifts and bit fields against Python's integers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from lanes import apply, run, signed, value

EDGES = {
    16: [0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
    32: [0, 1, 2, 31, 32, 33, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF],
    64: [0, 1, 63, 64, 0xFFFFFFFF, 0x100000000, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1],
}


def operands(bits: int, count: int) -> list[list[int]]:
    """Rows of operands: random draws of edges and of any value; 32 rows."""
    rng = random.Random(bits * 10 + count)
    return [
        [rng.choice(EDGES[bits]) if rng.random() < 0.6 else rng.getrandbits(bits) for _ in range(count)]
        for _ in range(32)
    ]


def check(opcode: str, bits: int, count: int, expect: Callable[..., int], out: int | None = None) -> None:
    """`expect` of unsigned patterns, taken modulo 2^out."""
    rows = operands(bits, count)
    for _ in range(3):
        columns = [(f"b{bits}", [r[k] for r in rows]) for k in range(count)]
        got = apply(opcode, f"b{out or bits}", *columns)
        want = [expect(*r) & ((1 << (out or bits)) - 1) for r in rows]
        assert got == want, [(r, hex(g), hex(e)) for r, g, e in zip(rows, got, want, strict=True) if g != e]
        random.Random(1).shuffle(rows)
        rows = [[*r[1:], r[0]] for r in rows]


def quotient(x: int, y: int) -> int:
    """Toward zero; by zero all ones."""
    return -1 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["u", "s"])
def test_arithmetic(bits: int, sign: str) -> None:
    t = f"{sign}{bits}"

    def v(x: int) -> int:
        return signed(x, bits) if sign == "s" else x

    check(f"add.{t}", bits, 2, lambda x, y: x + y)
    check(f"sub.{t}", bits, 2, lambda x, y: x - y)
    check(f"mul.lo.{t}", bits, 2, lambda x, y: x * y)
    check(f"mul.hi.{t}", bits, 2, lambda x, y: v(x) * v(y) >> bits)
    check(f"mad.lo.{t}", bits, 3, lambda x, y, z: x * y + z)
    check(f"mad.hi.{t}", bits, 3, lambda x, y, z: (v(x) * v(y) >> bits) + z)
    check(f"div.{t}", bits, 2, lambda x, y: quotient(v(x), v(y)))
    check(f"rem.{t}", bits, 2, lambda x, y: v(x) if y == 0 else v(x) - quotient(v(x), v(y)) * v(y))
    check(f"min.{t}", bits, 2, lambda x, y: min(v(x), v(y)))
    check(f"max.{t}", bits, 2, lambda x, y: max(v(x), v(y)))
    check(f"sad.{t}", bits, 3, lambda x, y, z: abs(v(x) - v(y)) + z)
    if bits < 64:
        check(f"mul.wide.{t}", bits, 2, lambda x, y: v(x) * v(y), 2 * bits)
    if sign == "s":
        check(f"abs.{t}", bits, 1, lambda x: abs(v(x)))
        check(f"neg.{t}", bits, 1, lambda x: -v(x))


def test_mad_wide() -> None:
    got = apply(
        "mad.wide.s32", "b64", ("b32", [0x80000000, 7]), ("b32", [0x80000000, 0xFFFFFFFF]), ("b64", [5, (1 << 64) - 1])
    )
    assert got == [(1 << 62) + 5, (1 << 64) - 8]


def clamp(x: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, x))


def test_saturation() -> None:
    s = lambda x: signed(x, 32)  # noqa: E731
    check("add.sat.s32", 32, 2, lambda x, y: clamp(s(x) + s(y)))
    check("sub.sat.s32", 32, 2, lambda x, y: clamp(s(x) - s(y)))
    check("mad.hi.sat.s32", 32, 3, lambda x, y, z: clamp((s(x) * s(y) >> 32) + s(z)))
    check("min.relu.s32", 32, 2, lambda x, y: max(0, min(s(x), s(y))))
    check("max.relu.s32", 32, 2, lambda x, y: max(0, s(x), s(y)))


def test_24_bits() -> None:
    low = lambda x: x & 0xFFFFFF  # noqa: E731
    slow = lambda x: signed(x & 0xFFFFFF, 24)  # noqa: E731
    check("mul24.lo.u32", 32, 2, lambda x, y: low(x) * low(y))
    check("mul24.hi.u32", 32, 2, lambda x, y: low(x) * low(y) >> 16)
    check("mul24.lo.s32", 32, 2, lambda x, y: slow(x) * slow(y))
    check("mul24.hi.s32", 32, 2, lambda x, y: slow(x) * slow(y) >> 16)
    check("mad24.lo.u32", 32, 3, lambda x, y, z: low(x) * low(y) + z)
    check("mad24.hi.sat.s32", 32, 3, lambda x, y, z: clamp((slow(x) * slow(y) >> 16) + signed(z, 32)))


def test_carry_chains() -> None:
    """128-bit sums and differences in four words, and a 64 x 64 product as compilers write it."""
    rng = random.Random(4)
    xs, ys = ([rng.choice([0, 1, (1 << 128) - 1, 1 << 127, rng.getrandbits(128)]) for _ in range(32)] for _ in "ab")
    regs = {f"%{n}{k}": "b32" for n in "abd" for k in range(4)}
    words = {f"%{n}{k}": [v >> (32 * k) & 0xFFFFFFFF for v in vs] for n, vs in (("a", xs), ("b", ys)) for k in range(4)}
    for name, result in (("add", lambda x, y: x + y), ("sub", lambda x, y: x - y)):
        body = f"{name}.cc.u32 %d0, %a0, %b0;\n" + "\n".join(
            f"{name}c{'.cc' if k < 3 else ''}.u32 %d{k}, %a{k}, %b{k};" for k in (1, 2, 3)
        )
        w = run(body, regs, words)
        got = [
            sum(p << (32 * k) for k, p in enumerate(row))
            for row in zip(*(value(w, f"%d{k}") for k in range(4)), strict=True)
        ]
        assert got == [result(x, y) % (1 << 128) for x, y in zip(xs, ys, strict=True)]
    body = """
        mul.lo.u32 %d0, %a0, %b0;
        mul.hi.u32 %d1, %a0, %b0;
        mad.lo.cc.u32 %d1, %a0, %b1, %d1;
        madc.hi.u32 %d2, %a0, %b1, 0;
        mad.lo.cc.u32 %d1, %a1, %b0, %d1;
        madc.hi.cc.u32 %d2, %a1, %b0, %d2;
        addc.u32 %d3, 0, 0;
        mad.lo.cc.u32 %d2, %a1, %b1, %d2;
        madc.hi.u32 %d3, %a1, %b1, %d3;
    """
    w = run(body, regs, words)
    got = [
        sum(p << (32 * k) for k, p in enumerate(row))
        for row in zip(*(value(w, f"%d{k}") for k in range(4)), strict=True)
    ]
    low = (1 << 64) - 1
    assert got == [(x & low) * (y & low) for x, y in zip(xs, ys, strict=True)]


def test_packed() -> None:
    def each(fn: Callable[[int, int], int]) -> Callable[[int, int], int]:
        return lambda x, y: (fn(x & 0xFFFF, y & 0xFFFF) & 0xFFFF) | (fn(x >> 16, y >> 16) & 0xFFFF) << 16

    s = lambda x: signed(x, 16)  # noqa: E731
    check("add.u16x2", 32, 2, each(lambda x, y: x + y))
    check("min.u16x2", 32, 2, each(min))
    check("max.s16x2", 32, 2, each(lambda x, y: max(s(x), s(y))))
    check("max.relu.s16x2", 32, 2, each(lambda x, y: max(s(x), s(y), 0)))


@pytest.mark.parametrize("ta", ["u32", "s32"])
@pytest.mark.parametrize("tb", ["u32", "s32"])
def test_dot(ta: str, tb: str) -> None:
    def parts(x: int, n: int, t: str) -> list[int]:
        items = [x >> (n * k) & ((1 << n) - 1) for k in range(32 // n)]
        return [signed(p, n) for p in items] if t == "s32" else items

    def four(x: int, y: int, z: int) -> int:
        return sum(p * q for p, q in zip(parts(x, 8, ta), parts(y, 8, tb), strict=True)) + z

    check(f"dp4a.{ta}.{tb}", 32, 3, four)
    for half, at in (("lo", 0), ("hi", 2)):
        check(
            f"dp2a.{half}.{ta}.{tb}",
            32,
            3,
            lambda x, y, z, at=at: (
                sum(p * q for p, q in zip(parts(x, 16, ta), parts(y, 8, tb)[at : at + 2], strict=True)) + z
            ),
        )


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic(bits: int) -> None:
    check(f"and.b{bits}", bits, 2, lambda x, y: x & y)
    check(f"or.b{bits}", bits, 2, lambda x, y: x | y)
    check(f"xor.b{bits}", bits, 2, lambda x, y: x ^ y)
    check(f"not.b{bits}", bits, 1, lambda x: ~x)
    check(f"cnot.b{bits}", bits, 1, lambda x: int(x == 0))


def test_predicates() -> None:
    p, q = [False, False, True, True], [False, True, False, True]
    for name, want in (("and", [0, 0, 0, 1]), ("or", [0, 1, 1, 1]), ("xor", [0, 1, 1, 0])):
        assert apply(f"{name}.pred", "pred", ("pred", p), ("pred", q)) == [bool(x) for x in want]
    assert apply("not.pred", "pred", ("pred", p)) == [True, True, False, False]
    assert apply("mov.pred", "pred", ("pred", p)) == p


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts(bits: int) -> None:
    counts = [0, 1, bits - 1, bits, bits + 1, 63, 64, 65, 255, 256, 0x80000000, 0xFFFFFFFF]
    top = 1 << (bits - 1)
    for x in (1, top, top | 1, (1 << bits) - 1, 0x5A5A5A5A5A5A5A5A & ((1 << bits) - 1)):
        left = [(x << n) % (1 << bits) if n < bits else 0 for n in counts]
        right = [x >> n if n < bits else 0 for n in counts]
        arithmetic = [(signed(x, bits) >> min(n, bits)) % (1 << bits) for n in counts]
        xs = (f"b{bits}", [x] * len(counts))
        for opcode, want in ((f"shl.b{bits}", left), (f"shr.u{bits}", right), (f"shr.s{bits}", arithmetic)):
            assert apply(opcode, f"b{bits}", xs, ("b32", counts)) == want, opcode
            for n, expected in zip(counts, want, strict=True):
                assert apply(opcode, f"b{bits}", (f"b{bits}", [x]), str(n)) == [expected], (opcode, n)


def test_funnel_shifts() -> None:
    def fn(side: str, wrap: bool) -> Callable[[int, int, int], int]:
        def one(x: int, y: int, n: int) -> int:
            n = n & 31 if wrap else min(n, 32)
            v = y << 32 | x
            return v << n >> 32 if side == "l" else v >> n

        return one

    for side in "lr":
        for mode in ("wrap", "clamp"):
            check(f"shf.{side}.{mode}.b32", 32, 3, fn(side, mode == "wrap"))


def test_lop3_all_tables() -> None:
    a, b, c = 0xF0F0AA55, 0xCCCC1234, 0xAAAA8001
    for lut in range(256):
        want = sum((lut >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | c >> k & 1) & 1) << k for k in range(32))
        assert apply("lop3.b32", "b32", ("b32", [a]), ("b32", [b]), ("b32", [c]), hex(lut)) == [want], lut


def test_lop3_predicate() -> None:
    regs = {"%d": "b32", "%p": "pred", "%q": "pred", "%a": "b32"}
    given = {"%a": [0, 3, 0, 3], "%q": [False, False, True, True]}
    for name, want in (("or", [False, True, True, True]), ("and", [False, False, False, True])):
        w = run(f"lop3.{name}.b32 %a|%p, %a, %a, %a, 0x80, %q;", regs, given)
        assert value(w, "%p")[:4] == want
        assert value(w, "%a")[:4] == [0, 3, 0, 3]


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields(bits: int) -> None:
    positions = [0, 1, bits // 2, bits - 1, bits, bits + 8, 255, 256 + 4]
    lengths = [0, 1, 7, bits - 1, bits, bits + 1, 255, 256 + 3]
    full = (1 << bits) - 1
    for x in (0x8123456789ABCDEF & full, full, 1 << (bits - 1)):
        for pos in positions:
            p, n = [pos] * len(lengths), lengths

            def extract(k: int, sign: bool, x: int = x, at: int = pos & 255) -> int:
                k &= 255
                out = sum((x >> (at + j) & 1) << j for j in range(min(k, bits)) if at + j < bits)
                last = min(at + k - 1, bits - 1)
                if sign and k and x >> last & 1:
                    out |= sum(1 << j for j in range(bits) if j >= k or at + j >= bits)
                return out

            args = [(f"b{bits}", [x] * len(n)), ("b32", p), ("b32", n)]
            assert apply(f"bfe.u{bits}", f"b{bits}", *args) == [extract(k, False) for k in n], (x, pos)
            assert apply(f"bfe.s{bits}", f"b{bits}", *args) == [extract(k, True) for k in n], (x, pos)
            base = 0x0F0F0F0F0F0F0F0F & full

            def insert(k: int, x: int = x, base: int = base, at: int = pos & 255) -> int:
                for j in range(k & 255):
                    if at + j < bits:
                        base = base & ~(1 << (at + j)) | (x >> j & 1) << (at + j)
                return base

            got = apply(f"bfi.b{bits}", f"b{bits}", args[0], (f"b{bits}", [base] * len(n)), *args[1:])
            assert got == [insert(k) for k in n], (x, pos)


@pytest.mark.parametrize("bits", [32, 64])
def test_counting(bits: int) -> None:
    xs = [*EDGES[bits], 0x00F0, 1 << (bits - 2)]
    args = (f"b{bits}", xs)
    assert apply(f"popc.b{bits}", "b32", args) == [x.bit_count() for x in xs]
    assert apply(f"clz.b{bits}", "b32", args) == [bits - x.bit_length() for x in xs]
    assert apply(f"brev.b{bits}", f"b{bits}", args) == [int(f"{x:0{bits}b}"[::-1], 2) for x in xs]
    none = 0xFFFFFFFF
    top = [x.bit_length() - 1 if x else none for x in xs]
    assert apply(f"bfind.u{bits}", "b32", args) == top
    assert apply(f"bfind.shiftamt.u{bits}", "b32", args) == [none if k == none else bits - 1 - k for k in top]
    full = (1 << bits) - 1
    folded = [x ^ full if x >> (bits - 1) else x for x in xs]
    assert apply(f"bfind.s{bits}", "b32", args) == [x.bit_length() - 1 if x else none for x in folded]


def test_masks_and_extension() -> None:
    for mode in ("clamp", "wrap"):

        def limit(n: int, mode: str = mode) -> int:
            return min(n, 32) if mode == "clamp" else n & 31

        check(f"bmsk.{mode}.b32", 32, 2, lambda x, y, f=limit: ((1 << f(y)) - 1) << f(x))

        def extend(x: int, n: int, sign: bool, f: Callable[[int], int] = limit) -> int:
            k = f(n)
            low = x & ((1 << k) - 1)
            return signed(low, k) if sign and k else low

        check(f"szext.{mode}.u32", 32, 2, lambda x, n, f=extend: f(x, n, False))
        check(f"szext.{mode}.s32", 32, 2, lambda x, n, f=extend: f(x, n, True))


def test_fns() -> None:
    #            mask          base offset   expected
    rows = [
        (0b1011_0000, 0, 1, 4),
        (0b1011_0000, 0, 3, 7),
        (0b1011_0000, 0, 4, 0xFFFFFFFF),
        (0b1011_0000, 5, 1, 5),
        (0b1011_0000, 6, -1, 5),
        (0b1011_0000, 6, -2, 4),
        (0b1011_0000, 6, -3, 0xFFFFFFFF),
        (0b1011_0000, 7, 0, 7),
        (0b1011_0000, 6, 0, 0xFFFFFFFF),
    ]
    mask, base, offset, want = zip(*rows, strict=True)
    assert apply("fns.b32", "b32", ("b32", mask), ("b32", base), ("b32", [o & 0xFFFFFFFF for o in offset])) == list(
        want
    )


def test_prmt() -> None:
    a, b = 0x33_22_91_00, 0x77_66_55_84
    pool = [0x00, 0x91, 0x22, 0x33, 0x84, 0x55, 0x66, 0x77]
    rng = random.Random(2)
    selectors = [0x3210, 0x7654, 0x0000, 0x89AB, 0xCDEF, *(rng.getrandbits(16) for _ in range(27))]

    def default(c: int) -> int:
        out = 0
        for k in range(4):
            n = c >> (4 * k) & 15
            byte = pool[n & 7]
            out |= (byte if n < 8 else 255 * (byte >> 7)) << (8 * k)
        return out

    args = [("b32", [a] * 32), ("b32", [b] * 32)]
    assert apply("prmt.b32", "b32", *args, ("b32", selectors)) == [default(c) for c in selectors]
    # Rows of the manual's table, most significant byte first.
    table = {
        "f4e": ["3210", "4321", "5432", "6543"],
        "b4e": ["5670", "6701", "7012", "0123"],
        "rc8": ["0000", "1111", "2222", "3333"],
        "ecl": ["3210", "3211", "3222", "3333"],
        "ecr": ["0000", "1110", "2210", "3210"],
        "rc16": ["1010", "3232", "1010", "3232"],
    }
    for mode, rows in table.items():
        want = [int.from_bytes([pool[int(n)] for n in row]) for row in rows]
        got = apply(f"prmt.b32.{mode}", "b32", *args, ("b32", [0, 1, 2, 3]))
        assert got[:4] == want, mode
