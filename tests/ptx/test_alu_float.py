"""fp32, fp64 and packed fp32 arithmetic against exact rationals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from lanes import apply, as_f32, as_f64, f32, f64, run, value

INF, NAN = math.inf, math.nan
NAN32, NAN64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF
# Zeros, ends of the subnormal and normal ranges, neighbours of 1, ties, large and small.
EDGES32 = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F7FFFFF, 0x3F800000,
    0x3F800001, 0xBF800000, 0x33800000, 0x33000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x4B000000, 0x4B800001, 0x1A000000,
]  # fmt: skip
EDGES64 = [
    0, 1 << 63, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FEFFFFFFFFFFFFF, 0x3FF0000000000000, 0x3FF0000000000001,
    0xBFF0000000000000, 0x3CA0000000000000, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF, 0x1A00000000000000,
]  # fmt: skip


class Binary:
    """Round a rational to a binary format, by definition: no floating-point arithmetic."""

    def __init__(self, exponent: int, mantissa: int) -> None:
        self.exponent, self.mantissa = exponent, mantissa
        self.bias = (1 << (exponent - 1)) - 1
        self.infinity = ((1 << exponent) - 1) << mantissa
        self.sign = 1 << (exponent + mantissa)

    def exact(self, code: int) -> Fraction:
        e, n = (code & ~self.sign) >> self.mantissa, code & ((1 << self.mantissa) - 1)
        n, e = (n, 1) if e == 0 else (n + (1 << self.mantissa), e)
        v = Fraction(n) * Fraction(2) ** (e - self.bias - self.mantissa)
        return -v if code & self.sign else v

    def round(self, x: Fraction, mode: str = "rn") -> int:
        """Code of a non-zero rational."""
        negative, a = x < 0, abs(x)
        e = a.numerator.bit_length() - a.denominator.bit_length()
        e = max(e if a >= Fraction(2) ** e else e - 1, 1 - self.bias)
        quantum = Fraction(2) ** (e - self.mantissa)
        n, rest = divmod(a, quantum)
        n = int(n)
        half = rest * 2 - quantum
        up = {
            "rn": half > 0 or (half == 0 and n & 1),
            "rna": half >= 0,
            "rz": False,
            "rm": bool(rest) and negative,
            "rp": bool(rest) and not negative,
        }[mode]
        n += int(up)
        code = ((e - (1 - self.bias)) << self.mantissa) + n
        if code >= self.infinity:
            stays = mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative)
            code = self.infinity - 1 if stays else self.infinity
        return code | (self.sign if negative else 0)


SINGLE, DOUBLE = Binary(8, 23), Binary(11, 52)


def draws(edges: list[int], fmt: Binary, count: int, seed: int) -> list[list[int]]:
    """32 rows of finite patterns: edges, any, and numbers close to each other, whose sums cancel."""
    rng = random.Random(seed)

    def one() -> int:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(edges)
        if kind < 0.7:
            e = rng.randrange(fmt.bias - 3, fmt.bias + 3)
            return rng.getrandbits(1) * fmt.sign | e << fmt.mantissa | rng.getrandbits(fmt.mantissa)
        return rng.getrandbits(1) * fmt.sign | rng.randrange(fmt.infinity)

    rows = [[one() for _ in range(count)] for _ in range(32)]
    for r in rows[:6]:
        r[-1] = r[0] ^ fmt.sign ^ rng.randrange(2)
    return rows


def reference(fmt: Binary, name: str, mode: str, row: list[int]) -> int:
    x, y, z = (*map(fmt.exact, row), Fraction(0))[:3]
    signs = [bool(c & fmt.sign) for c in row]
    if name == "sub":
        y, signs[1] = -y, not signs[1]
    if name == "mul":
        true, parts = x * y, [signs[0] ^ signs[1]] * 2
    elif name == "fma":
        true, parts = x * y + z, [signs[0] ^ signs[1], signs[2]]
    else:
        true, parts = x + y, signs
    if true == 0:  # IEEE 754, 6.3
        same = parts[0] == parts[1]
        return fmt.sign if (parts[0] if same else mode == "rm") else 0
    return fmt.round(true, mode)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize(("t", "fmt", "edges"), [("f32", SINGLE, EDGES32), ("f64", DOUBLE, EDGES64)])
def test_rounding(t: str, fmt: Binary, edges: list[int], name: str, mode: str) -> None:
    for seed in range(12):
        rows = draws(edges, fmt, 3 if name == "fma" else 2, seed)
        got = apply(f"{name}.{mode}.{t}", f"b{t[1:]}", *((f"b{t[1:]}", c) for c in map(list, zip(*rows, strict=True))))
        want = [reference(fmt, name, mode, r) for r in rows]
        assert got == want, [
            ([hex(x) for x in r], hex(g), hex(e)) for r, g, e in zip(rows, got, want, strict=True) if g != e
        ]


def test_fma_ties() -> None:
    """Sums that fp64 rounds onto a midpoint of fp32: rounding twice would go the wrong way."""
    cases = []
    for far in (-80, -60, -54, -40):
        for low in (1, -1):
            # 1 + 2^-24 is a midpoint; the product's far bit decides.
            cases.append((f32(2.0**far), f32(float(low)), SINGLE.round(Fraction(1))))
            cases.append((f32(1.0 + 2.0**-23), f32(1.0 + low * 2.0**far if far > -24 else 1.0), f32(2.0**-24)))
    cases += [(0x3F800001, 0x33800001, 0x3F800000), (0x3F800001, 0xB3800001, 0x3F800000), (0x1A000001, 0x1A000001, 1)]
    for name in ("fma.rn.f32",):
        got = apply(name, "b32", *(("b32", list(c)) for c in zip(*cases, strict=True)))
        assert got == [reference(SINGLE, "fma", "rn", list(c)) for c in cases]
    # p = 2^-24 + 2^-60: fp64 keeps it, so the tie must break upward; without the far bit it goes to even.
    x, y = f32(2.0**-12 * (1 + 2.0**-18)), f32(2.0**-12 * (1 + 2.0**-18))
    assert apply("fma.rn.f32", "b32", ("b32", [x]), ("b32", [y]), ("b32", [f32(1.0)])) == [0x3F800001]
    x = f32(2.0**-12)
    assert apply("fma.rn.f32", "b32", ("b32", [x]), ("b32", [x]), ("b32", [f32(1.0)])) == [0x3F800000]


def test_fma_ties_of_subnormal_numbers() -> None:
    """Products just above half of the smallest number, beside numbers so large that fp64 drops the difference."""
    pairs = [(a, -(-(1 << 47) // a)) for a in range(1 << 23, 1 << 24, 5003)]
    pairs = [(a, b) for a, b in pairs if 0 < a * b - (1 << 47) < 1 << 17][:8]
    assert len(pairs) == 8
    cases = [
        (f32(a * 2.0**-98), f32(sign * b * 2.0**-99), f32(z))
        for a, b in pairs for sign in (1, -1) for z in (2.0**-127, 3 * 2.0**-128)
    ]  # fmt: skip
    got = apply("fma.rn.f32", "b32", *(("b32", list(c)) for c in zip(*cases, strict=True)))
    assert got == [reference(SINGLE, "fma", "rn", list(c)) for c in cases]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize(("t", "fmt", "edges"), [("f32", SINGLE, EDGES32), ("f64", DOUBLE, EDGES64)])
def test_division_and_roots(t: str, fmt: Binary, edges: list[int], mode: str) -> None:
    for seed in range(8):
        rows = [[x or 1, (y if y & ~fmt.sign else 1)] for x, y in draws(edges, fmt, 2, seed)]
        rows = [[x if x & ~fmt.sign else fmt.infinity // 2, y] for x, y in rows]
        xs, ys = map(list, zip(*rows, strict=True))
        width = f"b{t[1:]}"
        got = apply(f"div.{mode}.{t}", width, (width, xs), (width, ys))
        assert got == [fmt.round(fmt.exact(x) / fmt.exact(y), mode) for x, y in rows]
        assert apply(f"rcp.{mode}.{t}", width, (width, ys)) == [fmt.round(1 / fmt.exact(y), mode) for y in ys]
        positive = [x & ~fmt.sign for x in xs]
        got = apply(f"sqrt.{mode}.{t}", width, (width, positive))
        for x, g in zip(positive, got, strict=True):
            # A root is right if no neighbour is: compare squares of it and of what lies half a step away.
            r, v = fmt.exact(g), fmt.exact(x)
            below, above = fmt.exact(g - 1), fmt.exact(g + 1)
            if mode == "rn":
                assert ((below + r) / 2) ** 2 <= v <= ((above + r) / 2) ** 2, hex(x)
            elif mode == "rp":
                assert below**2 < v <= r**2, hex(x)
            else:
                assert r**2 <= v < above**2, hex(x)


def test_special_values() -> None:
    inf, ninf, one, zero, nzero = f32(INF), f32(-INF), f32(1.0), 0, 0x80000000

    def nan(code: int) -> bool:
        return math.isnan(as_f32(code))

    assert nan(apply("add.f32", "b32", ("b32", [inf]), ("b32", [ninf]))[0])
    assert nan(apply("mul.f32", "b32", ("b32", [inf]), ("b32", [zero]))[0])
    assert nan(apply("fma.rn.f32", "b32", ("b32", [inf]), ("b32", [zero]), ("b32", [one]))[0])
    assert nan(apply("fma.rn.f32", "b32", ("b32", [inf]), ("b32", [one]), ("b32", [ninf]))[0])
    for mode in ("rz", "rm", "rp"):
        assert apply(f"add.{mode}.f32", "b32", ("b32", [inf, ninf]), ("b32", [one, one])) == [inf, ninf]
        assert apply(f"fma.{mode}.f32", "b32", ("b32", [one]), ("b32", [one]), ("b32", [inf])) == [inf]
        assert apply(f"div.{mode}.f32", "b32", ("b32", [one, one, zero]), ("b32", [zero, nzero, inf])) == [inf, ninf, 0]
        assert apply(f"div.{mode}.f64", "b64", ("b64", [f64(1.0)]), ("b64", [f64(-0.0)])) == [f64(-INF)]
        assert apply(f"sqrt.{mode}.f32", "b32", ("b32", [zero, nzero, inf])) == [zero, nzero, inf]
        assert nan(apply(f"sqrt.{mode}.f32", "b32", ("b32", [f32(-1.0)]))[0])
        assert apply(f"sqrt.{mode}.f64", "b64", ("b64", [f64(INF), 1 << 63])) == [f64(INF), 1 << 63]


def test_flush_and_saturate() -> None:
    sub, nsub, least = 0x007FFFFF, 0x807FFFFF, 0x00800000
    assert apply("add.ftz.f32", "b32", ("b32", [sub, nsub]), ("b32", [0, 0x80000000])) == [0, 0x80000000]
    assert apply("add.f32", "b32", ("b32", [sub]), ("b32", [1])) == [least]
    assert apply("add.ftz.f32", "b32", ("b32", [sub]), ("b32", [least])) == [least]
    # A subnormal result of normal operands is flushed too.
    half = f32(0.5)
    assert apply("mul.ftz.f32", "b32", ("b32", [least, least | 0x80000000]), ("b32", [half, half])) == [0, 0x80000000]
    assert apply("mul.f32", "b32", ("b32", [least]), ("b32", [half])) == [0x00400000]
    assert apply("fma.rn.ftz.f32", "b32", ("b32", [least]), ("b32", [half]), ("b32", [0])) == [0]
    two, neg = f32(2.0), f32(-2.0)
    zero = ("b32", [0] * 4)
    assert apply("add.sat.f32", "b32", ("b32", [two, neg, half, NAN32]), zero) == [f32(1.0), 0, half, 0]
    assert apply("add.sat.f32", "b32", ("b32", [0x80000000]), ("b32", [0x80000000])) == [0]
    assert apply("abs.ftz.f32", "b32", ("b32", [nsub, neg])) == [0, two]
    assert apply("neg.ftz.f32", "b32", ("b32", [sub, two])) == [0x80000000, neg]
    assert apply("abs.f32", "b32", ("b32", [0x80000001, f32(-INF)])) == [1, f32(INF)]
    assert apply("neg.f64", "b64", ("b64", [0, f64(3.0)])) == [1 << 63, f64(-3.0)]
    assert apply("abs.f64", "b64", ("b64", [f64(-3.0)])) == [f64(3.0)]


@pytest.mark.parametrize(("t", "n", "code"), [("f32", NAN32, f32), ("f64", NAN64, f64)])
def test_min_max(t: str, n: int, code: Callable[[float], int]) -> None:
    w = f"b{t[1:]}"
    zero, nzero, one, two = code(0.0), code(-0.0), code(1.0), code(2.0)
    payload = n - 5
    a = [zero, nzero, one, n, one, payload, nzero, zero, code(-INF)]
    b = [nzero, zero, two, one, payload, n, nzero, zero, code(INF)]
    assert apply(f"max.{t}", w, (w, a), (w, b)) == [zero, zero, two, one, one, n, nzero, zero, code(INF)]
    assert apply(f"min.{t}", w, (w, a), (w, b)) == [nzero, nzero, one, one, one, n, nzero, zero, code(-INF)]
    if t == "f32":
        assert apply("max.NaN.f32", w, (w, a), (w, b)) == [zero, zero, two, n, n, n, nzero, zero, code(INF)]
        assert apply("min.NaN.f32", w, (w, a), (w, b)) == [nzero, nzero, one, n, n, n, nzero, zero, code(-INF)]


def test_min_max_forms() -> None:
    def c(*xs: float) -> tuple[str, list[int]]:
        return "b32", [f32(x) for x in xs]

    assert apply("max.f32", "b32", c(1, -5, NAN), c(2, -6, NAN), c(-3, -4, 7)) == [f32(2), f32(-4), f32(7)]
    assert apply("min.NaN.f32", "b32", c(1, 2), c(2, 1), c(NAN, 3)) == [NAN32, f32(1)]
    assert apply("max.abs.f32", "b32", c(1), c(-9), c(3)) == [f32(9)]
    assert apply("max.xorsign.abs.f32", "b32", c(1, -1, -1), c(-2, -2, 0.5)) == [f32(-2), f32(2), f32(-1)]
    assert apply("min.xorsign.abs.f32", "b32", c(1, -1), c(-2, -2)) == [f32(-1), f32(1)]
    assert apply("min.ftz.f32", "b32", ("b32", [1]), ("b32", [f32(1.0)])) == [0]


def test_classes_and_signs() -> None:
    xs = ("b32", [0, 1, 0x00800000, f32(-1.0), f32(INF), NAN32])
    want = {
        "finite": [1, 1, 1, 1, 0, 0],
        "infinite": [0, 0, 0, 0, 1, 0],
        "number": [1, 1, 1, 1, 1, 0],
        "notanumber": [0, 0, 0, 0, 0, 1],
        "normal": [0, 0, 1, 1, 0, 0],
        "subnormal": [0, 1, 0, 0, 0, 0],
    }
    for name, bools in want.items():
        assert apply(f"testp.{name}.f32", "pred", xs) == [bool(x) for x in bools], name
    assert apply("copysign.f32", "b32", ("b32", [f32(-1.0), 0]), ("b32", [f32(3.0), f32(-4.0)])) == [
        f32(-3.0),
        f32(4.0),
    ]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_packed_pairs_equal_singles(name: str, mode: str) -> None:
    rows = draws(EDGES32, SINGLE, 3 if name == "fma" else 2, 5)
    low, high = rows[:16], rows[16:]
    pairs = [[h << 32 | x for x, h in zip(a, b, strict=True)] for a, b in zip(low, high, strict=True)]
    got = apply(f"{name}.{mode}.f32x2", "b64", *(("b64", list(c)) for c in zip(*pairs, strict=True)))
    want = [
        reference(SINGLE, name, mode, b) << 32 | reference(SINGLE, name, mode, a)
        for a, b in zip(low, high, strict=True)
    ]
    assert got == want


#         opcode                       true function                       relative, absolute bounds of the manual
APPROX = [
    ("ex2.approx.f32", lambda x: 2.0**x, [-126.0, -10.5, -0.1, 0.0, 0.3, 1.0, 31.7, 127.9], 2**-22, 0),
    ("ex2.approx.ftz.f32", lambda x: 2.0**x, [-126.0, -10.5, 0.0, 0.3, 127.9], 2**-22, 0),
    ("lg2.approx.f32", math.log2, [1e-38, 0.1, 0.9, 1.0, 1.1, 2.0, 1e30], 2**-22, 2**-22),
    ("rcp.approx.ftz.f32", lambda x: 1 / x, [1e-37, -0.3, 1.0, 3.0, 1e37], 2**-23, 0),
    ("rsqrt.approx.ftz.f32", lambda x: x**-0.5, [1e-37, 0.3, 1.0, 2.0, 1e37], 2**-22, 0),
    ("sqrt.approx.f32", math.sqrt, [1e-37, 0.3, 1.0, 2.0, 1e37], 2**-22, 0),
    ("sin.approx.f32", math.sin, [-3.0, -0.5, 0.0, 0.7, 3.1], 0, 2**-20),
    ("cos.approx.f32", math.cos, [-3.0, -0.5, 0.0, 0.7, 3.1], 0, 2**-20),
    ("tanh.approx.f32", math.tanh, [-9.0, -0.5, 0.0, 0.001, 0.7, 3.1], 2**-11, 0),
]


@pytest.mark.parametrize(("opcode", "true", "points", "relative", "absolute"), APPROX)
def test_approximations(
    opcode: str, true: Callable[[float], float], points: list[float], relative: float, absolute: float
) -> None:
    points = [as_f32(f32(p)) for p in points]
    for p, code in zip(points, apply(opcode, "b32", ("b32", [f32(p) for p in points])), strict=True):
        assert abs(as_f32(code) - true(p)) <= relative * abs(true(p)) + absolute, p


def test_approximations_at_the_ends() -> None:
    inf, ninf = f32(INF), f32(-INF)
    sub = 0x00000400
    table = {
        "ex2.approx.f32": [(ninf, 0), (inf, inf), (sub, f32(1.0)), (f32(-149.0), 1)],
        "ex2.approx.ftz.f32": [(ninf, 0), (inf, inf), (sub, f32(1.0)), (f32(-149.0), 0), (f32(-127.0), 0)],
        "lg2.approx.f32": [(0, ninf), (inf, inf), (1, f32(-149.0)), (f32(8.0), f32(3.0))],
        "lg2.approx.ftz.f32": [(sub, ninf), (sub | 1 << 31, ninf)],
        "rcp.approx.ftz.f32": [(0, inf), (1 << 31, ninf), (sub, inf), (inf, 0), (ninf, 1 << 31), (0x7F000000, 0)],
        "rcp.approx.f32": [(0x7F000000, 0x00400000), (f32(4.0), f32(0.25))],
        "rsqrt.approx.f32": [(0, inf), (inf, 0), (f32(4.0), f32(0.5))],
        "sqrt.approx.ftz.f32": [(sub, 0), (inf, inf)],
        "tanh.approx.f32": [(inf, f32(1.0)), (ninf, f32(-1.0)), (1 << 31, 1 << 31)],
    }
    for opcode, rows in table.items():
        assert apply(opcode, "b32", ("b32", [x for x, _ in rows])) == [y for _, y in rows], opcode
    for opcode in ("lg2.approx.f32", "rsqrt.approx.f32", "sqrt.approx.f32"):
        assert math.isnan(as_f32(apply(opcode, "b32", ("b32", [f32(-1.0)]))[0]))


def test_approximate_division() -> None:
    big = f32(2.0**127)
    x = ("b32", [f32(1.0), f32(6.0), f32(INF), f32(5.0)])
    y = ("b32", [big, f32(3.0), big, 0])
    got = apply("div.approx.f32", "b32", x, y)
    assert got[:2] == [0, f32(2.0)] and math.isnan(as_f32(got[2])) and got[3] == f32(INF)
    assert apply("div.full.f32", "b32", x, y)[:2] == [f32(2.0**-127), f32(2.0)]
    assert as_f64(apply("rsqrt.approx.f64", "b64", ("b64", [f64(4.0)]))[0]) == 0.5


def test_literals() -> None:
    """0f and 0d hexadecimal, decimal floats, octal, binary, negative integers."""
    regs = {f"%d{k}": "b32" for k in range(7)} | {"%e": "b64", "%g": "b64"}
    w = run(
        """mov.f32 %d0, 0f3FC00000; mov.f32 %d1, 0fFF800000; mov.b32 %d2, -1; mov.u32 %d3, 0x1F; mov.u32 %d4, 017;
           mov.u32 %d5, 0b101; add.f32 %d6, 0f3F800000, 0f3F800000; mov.f64 %e, 0d3FF8000000000000;
           mov.u64 %g, 0xFFFFFFFFFFFFFFFFU;""",
        regs,
        {},
    )
    assert [value(w, f"%d{k}")[0] for k in range(7)] == [f32(1.5), f32(-INF), 0xFFFFFFFF, 31, 15, 5, f32(2.0)]
    assert value(w, "%e")[3] == f64(1.5) and value(w, "%g")[31] == (1 << 64) - 1


def test_half_precision_reference_agrees_with_numpy() -> None:
    """The reference of these tests, itself: random rationals to fp16 as NumPy rounds them."""
    rng = random.Random(3)
    for _ in range(300):
        x = rng.uniform(-1, 1) * 2.0 ** rng.randrange(-26, 17)
        with np.errstate(over="ignore"):
            assert Binary(5, 10).round(Fraction(x)) == int(np.float64(x).astype(np.float16).view(np.uint16))
