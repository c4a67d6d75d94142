"""Conversions and half-precision arithmetic against torch, struct and exact rationals."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch
from lanes import apply, as_f32, f32, f64, run, signed, value
from test_alu_float import SINGLE, Binary

HALF, BFLOAT, TF32 = Binary(5, 10), Binary(8, 7), Binary(8, 10)
FORMATS = {"f16": HALF, "bf16": BFLOAT, "f32": SINGLE, "f64": Binary(11, 52)}
INF, NAN = math.inf, math.nan


def singles(seed: int, low: int = -30, high: int = 20) -> list[int]:
    """fp32 patterns: ties and near-ties of bf16 and f16, ends of ranges, any."""
    rng = random.Random(seed)
    edges = [
        0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3F801000, 0x3F803000, 0x3F801001, 0x7F7F8000, 0x7F7F7FFF,
        0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x38801000, 0x00000001, 0x00008000, 0x00018000, 0x807F8000,
    ]  # fmt: skip
    out = [rng.choice(edges) ^ rng.getrandbits(1) << 31 for _ in range(12)]
    return out + [f32(rng.uniform(-2, 2) * 2.0 ** rng.randrange(low, high)) for _ in range(20)]


def rounded(fmt: Binary, source: Binary, code: int, mode: str) -> int:
    x = source.exact(code)
    return fmt.round(x, mode) if x else (fmt.sign if code & source.sign else 0)


@pytest.mark.parametrize(
    ("to", "mode"), [("f16", "rn"), ("f16", "rz"), ("f16", "rm"), ("f16", "rp"), ("bf16", "rn"), ("bf16", "rz")]
)
def test_single_to_half(to: str, mode: str) -> None:
    for seed in range(8):
        xs = singles(seed)
        want = [rounded(FORMATS[to], SINGLE, x, mode) for x in xs]
        assert apply(f"cvt.{mode}.{to}.f32", "b16", ("b32", xs)) == want
        if mode not in ("rn", "rz"):
            continue
        got = apply(f"cvt.{mode}.{to}x2.f32", "b32", ("b32", xs), ("b32", xs[::-1]))
        assert got == [a << 16 | b for a, b in zip(want, want[::-1], strict=True)]


def test_single_to_half_special() -> None:
    inf, ninf, nan, big = f32(INF), f32(-INF), 0x7FC00001, 0x7F7FFFFF
    xs = ("b32", [inf, ninf, nan, big, f32(-1.0), 0x80000000])
    assert apply("cvt.rn.bf16.f32", "b16", xs) == [0x7F80, 0xFF80, 0x7FFF, 0x7F80, 0xBF80, 0x8000]
    assert apply("cvt.rn.f16.f32", "b16", xs) == [0x7C00, 0xFC00, 0x7FFF, 0x7C00, 0xBC00, 0x8000]
    assert apply("cvt.rn.relu.f16.f32", "b16", xs) == [0x7C00, 0, 0x7FFF, 0x7C00, 0, 0]
    assert apply("cvt.rn.satfinite.bf16.f32", "b16", xs) == [0x7F7F, 0xFF7F, 0x7FFF, 0x7F7F, 0xBF80, 0x8000]
    assert apply("cvt.rz.f16.f32", "b16", xs)[3] == 0x7BFF
    zeros = ("b32", [0] * 6)
    assert apply("cvt.rn.relu.bf16x2.f32", "b32", xs, zeros) == [x << 16 for x in (0x7F80, 0, 0x7FFF, 0x7F80, 0, 0)]
    assert apply("cvt.rn.bf16x2.f32", "b32", xs, zeros) == [
        x << 16 for x in (0x7F80, 0xFF80, 0x7FFF, 0x7F80, 0xBF80, 0x8000)
    ]
    assert apply("cvt.rn.satfinite.f16x2.f32", "b32", zeros, xs) == [0x7BFF, 0xFBFF, 0x7FFF, 0x7BFF, 0xBC00, 0x8000]


@pytest.mark.parametrize("mode", ["rn", "rz", "rna"])
def test_tf32(mode: str) -> None:
    for seed in range(4):
        xs = [x ^ (0x1000 if k % 3 == 0 else 0) for k, x in enumerate(singles(seed))]
        want = [rounded(TF32, SINGLE, x, mode) << 13 for x in xs]
        assert apply(f"cvt.{mode}.tf32.f32", "b32", ("b32", xs)) == want
    assert apply("cvt.rn.relu.tf32.f32", "b32", ("b32", [f32(-3.0), f32(3.0)])) == [0, f32(3.0)]
    assert apply("cvt.rna.satfinite.tf32.f32", "b32", ("b32", [0x7F7FFFFF, f32(-INF)])) == [0x7F7FE000, 0xFF7FE000]


def test_widening() -> None:
    """All half patterns, against torch."""
    codes = torch.arange(0, 1 << 16, dtype=torch.int32)
    for t, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        exact = codes.to(torch.int16).view(dtype).float()
        for start in range(0, 1 << 16, 1031):
            part = slice(start, start + 32)
            got = apply(f"cvt.f32.{t}", "b32", ("b16", codes[part].tolist()))
            want = exact[part].tolist()
            assert [as_f32(g) for g in got if not math.isnan(as_f32(g))] == [x for x in want if not math.isnan(x)]
            assert [math.isnan(as_f32(g)) for g in got] == [math.isnan(x) for x in want]
    assert apply("cvt.f64.f32", "b64", ("b32", [f32(0.1)])) == [f64(as_f32(f32(0.1)))]
    assert apply("cvt.ftz.f32.f32", "b32", ("b32", [1, f32(1.5)])) == [0, f32(1.5)]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_double_to_single(mode: str) -> None:
    rng = random.Random(1)
    double = FORMATS["f64"]
    xs = [f64(rng.uniform(-2, 2) * 2.0 ** rng.randrange(-155, 130)) for _ in range(30)]
    xs += [f64(1 + 2.0**-24), f64(1 + 3 * 2.0**-24)]
    want = [rounded(SINGLE, double, x, mode) for x in xs]
    assert apply(f"cvt.{mode}.f32.f64", "b32", ("b64", xs)) == want
    if mode == "rn":
        assert apply("cvt.rn.f16.f64", "b16", ("b64", xs)) == [rounded(HALF, double, x, "rn") for x in xs]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_fp8(name: str) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    top, nan = {"e4m3": (0x7E, 0x7F), "e5m2": (0x7B, 0x7F)}[name]
    limit = torch.tensor(top, dtype=torch.uint8).view(dtype).float().item()
    for seed in range(6):
        xs = singles(seed, -16, 9)
        values = [as_f32(x) for x in xs]
        clipped = torch.tensor([max(-limit, min(limit, v)) for v in values])
        want = clipped.to(dtype).view(torch.uint8).tolist()
        got = apply(f"cvt.rn.satfinite.{name}x2.f32", "b16", ("b32", xs), ("b32", xs[::-1]))
        assert got == [a << 8 | b for a, b in zip(want, want[::-1], strict=True)]
    special = ("b32", [f32(INF), f32(-INF), 0x7FC00000, f32(1e9)])
    zero = ("b32", [0] * 4)
    assert apply(f"cvt.rn.satfinite.{name}x2.f32", "b16", zero, special) == [top, top | 128, nan, top]
    got = apply(f"cvt.rn.satfinite.relu.{name}x2.f32", "b16", zero, ("b32", [f32(-1.0), f32(1.0)]))
    assert got[0] == 0 and got[1] == torch.tensor(1.0).to(dtype).view(torch.uint8).item()
    # Every code back, through f16x2: exact in both directions.
    for start in range(0, 256, 32):
        codes = list(range(start, start + 32))
        back = torch.tensor(codes, dtype=torch.uint8).view(dtype).to(torch.float16)
        got = apply(f"cvt.rn.f16x2.{name}x2", "b32", ("b16", [c << 8 | 0x38 for c in codes]))
        low = torch.tensor(0x38, dtype=torch.uint8).view(dtype).to(torch.float16).view(torch.int16).item()
        for c, g, b in zip(codes, got, back, strict=True):
            assert g & 0xFFFF == low
            if math.isnan(b):
                assert g >> 16 & 0x7FFF > 0x7C00, c
            else:
                assert g >> 16 == b.view(torch.int16).item() & 0xFFFF, c
        finite = [c for c, b in zip(codes, back, strict=True) if math.isfinite(b)]
        pairs = [b.view(torch.int16).item() & 0xFFFF for b in back if math.isfinite(b)]
        got = apply(f"cvt.rn.satfinite.{name}x2.f16x2", "b16", ("b32", [p << 16 | 0x3C00 for p in pairs]))
        one = torch.tensor(1.0).to(dtype).view(torch.uint8).item()
        assert got == [c << 8 | one for c in finite]


SMALL = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6], "e2m3": [], "e3m2": []}
SMALL["e2m3"] = [n / 8 for n in range(16)] + [n / 4 for n in range(8, 16)] + [n / 2 for n in range(8, 16)]
SMALL["e3m2"] = [n / 16 for n in range(4)] + [(4 + n) / 16 * 2.0**e for e in range(7) for n in range(4)]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_fp6_and_fp4(name: str) -> None:
    """Nearest by search over the written-out values; ties to the even code; past the end, and NaN: the largest."""
    values = SMALL[name]
    sign = len(values)
    width = 4 if name == "e2m1" else 8

    def nearest(x: float) -> int:
        if math.isnan(x):
            return sign - 1
        code = min(range(sign), key=lambda k: (abs(Fraction(values[k]) - min(Fraction(abs(x)), 10**9)), k & 1))
        return code | (sign if math.copysign(1, x) < 0 else 0)

    points = [v + d for v in values for d in (0, 1e-3, 2.0**-3, 2.0**-4, 0.25)] + [7.0, 1e6, NAN, -0.0]
    points += [-p for p in points[:40]]
    points = [as_f32(f32(p)) for p in points]
    for start in range(0, len(points), 32):
        xs = points[start : start + 32]
        dst = "b8" if name == "e2m1" else "b16"
        regs = {"%d": dst, "%a": "b32", "%b": "b32"}
        given = {"%a": [f32(x) for x in xs], "%b": [f32(1.0)] * 32}
        w = run(f"cvt.rn.satfinite.{name}x2.f32 %d, %a, %b;", regs, given)
        assert value(w, "%d")[: len(xs)] == [nearest(x) << width | nearest(1.0) for x in xs]
    codes = list(range(2 * sign))
    for start in range(0, 2 * sign, 32):
        part = codes[start : start + 32]
        w = run(f"cvt.rn.f16x2.{name}x2 %d, %a;", {"%d": "b32", "%a": dst}, {"%a": [c << width | 1 for c in part]})
        high = torch.tensor([value_of(values, sign, c) for c in part]).half().view(torch.int16).tolist()
        low = torch.tensor(float(values[1])).half().view(torch.int16).item()
        assert value(w, "%d")[: len(part)] == [(h & 0xFFFF) << 16 | low for h in high]


def value_of(values: list[float], sign: int, code: int) -> float:
    return -float(values[code - sign]) if code >= sign else values[code]


def test_scale_factors() -> None:
    xs = [1.0, 2.0, 1.5, 3.0, 2.0**-127, 2.0**-130, 0.0, 2.0**127, 1.9 * 2.0**127]
    up = [127, 128, 128, 129, 0, 0, 0, 254, 254]
    down = [127, 128, 127, 128, 0, 0, 0, 254, 254]
    zero = ("b32", [f32(1.0)] * len(xs))
    for mode, want in (("rp", up), ("rz", down)):
        got = apply(f"cvt.{mode}.satfinite.ue8m0x2.f32", "b16", ("b32", [f32(x) for x in xs]), zero)
        assert got == [w << 8 | 127 for w in want], mode
    assert apply("cvt.rp.ue8m0x2.f32", "b16", ("b32", [f32(INF), 0x7FC00000]), zero)[:2] == [0xFF7F] * 2
    assert apply("cvt.rn.bf16x2.ue8m0x2", "b32", ("b16", [0x807F])) == [0x40003F80]


# ----------------------------------------------------------------------------------------------------------- integers
def test_integer_widths() -> None:
    xs = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678]
    mask = {8: 0xFF, 16: 0xFFFF, 32: 0xFFFFFFFF, 64: (1 << 64) - 1}
    for (a, n), (c, m) in itertools.product(
        itertools.product("us", (8, 16, 32)), itertools.product("us", (16, 32, 64))
    ):
        given = [x & mask[max(n, 16)] for x in xs]
        exact = [signed(x & mask[n], n) if a == "s" else x & mask[n] for x in given]
        got = apply(f"cvt.{c}{m}.{a}{n}", f"b{m}", (f"b{max(n, 16)}", given))
        assert got == [x & mask[m] for x in exact], (a, n, c, m)
        low, high = (-(1 << (m - 1)), (1 << (m - 1)) - 1) if c == "s" else (0, mask[m])
        got = apply(f"cvt.sat.{c}{m}.{a}{n}", f"b{m}", (f"b{max(n, 16)}", given))
        assert got == [max(low, min(high, x)) & mask[m] for x in exact], (a, n, c, m)
    # Destinations narrower than their register are extended by their own sign.
    assert apply("cvt.s8.s32", "b16", ("b32", [0x180, 0x7F])) == [0xFF80, 0x7F]
    assert apply("cvt.u8.u32", "b32", ("b32", [0x180])) == [0x80]
    assert apply("cvt.sat.s8.s32", "b32", ("b32", [1000, 0x80000000])) == [127, 0xFFFFFF80]
    assert apply("cvt.u16.u64", "b16", ("b64", [0xABCD1234ABCD5678])) == [0x5678]


@pytest.mark.parametrize("source", ["s16", "u16", "s32", "u32", "s64", "u64"])
def test_integer_to_float(source: str) -> None:
    bits = int(source[1:])
    rng = random.Random(bits)
    xs = [0, 1, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1]
    xs += [rng.getrandbits(rng.randrange(1, bits + 1)) for _ in range(20)]
    if bits > 24:
        xs += [(1 << 24) + 1, (1 << 24) + 3, 0x7FFFFFBF, 0x7FFFFFC0]
    if bits == 64:
        xs += [(1 << 62) + (1 << 38), (1 << 62) + (1 << 38) + 1, (1 << 53) + 1]
    exact = [signed(x, bits) if source[0] == "s" else x for x in xs]
    for to, mode in itertools.product(("f32", "f64", "f16", "bf16"), ("rn", "rz", "rm", "rp")):
        fmt = FORMATS[to]
        width = f"b{16 if to == 'bf16' else to[1:]}"
        want = [fmt.round(Fraction(x), mode) if x else 0 for x in exact]
        assert apply(f"cvt.{mode}.{to}.{source}", width, (f"b{bits}", xs)) == want, (to, mode)


@pytest.mark.parametrize("to", ["s16", "u16", "s32", "u32", "s64", "u64", "u8", "s8"])
@pytest.mark.parametrize("source", ["f32", "f64", "f16"])
def test_float_to_integer(source: str, to: str) -> None:
    bits = int(to[1:])
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    rng = random.Random(7)
    points = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9, 1e20, -1e20, INF, -INF]
    points += [127.5, 32767.5, float(high), float(low)] + [rng.uniform(-300, 300) for _ in range(10)]
    dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16}[source]
    as_int = {"f32": torch.int32, "f64": torch.int64, "f16": torch.int16}[source]
    tensor = torch.tensor(points, dtype=torch.float64).to(dtype)
    width = int(source[1:])
    codes = [c & ((1 << width) - 1) for c in tensor.view(as_int).tolist()]
    register = max(bits, 16)
    for mode, fn in (("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil)):
        want = [
            (high if v > 0 else low) if math.isinf(v) else max(low, min(high, fn(v))) for v in tensor.double().tolist()
        ]
        got = apply(f"cvt.{mode}.{to}.{source}", f"b{register}", (f"b{width}", codes))
        assert got == [w & ((1 << register) - 1) for w in want], mode
    nan = {"f32": 0x7FC00000, "f64": 0x7FF8 << 48, "f16": 0x7E00}[source]
    want_nan = 1 << (bits - 1) if source == "f64" or bits == 64 else 0
    assert apply(f"cvt.rzi.{to}.{source}", f"b{register}", (f"b{width}", [nan]))[0] & ((1 << bits) - 1) == want_nan


def test_rounding_to_whole_floats() -> None:
    xs = [0.5, 1.5, -0.5, -1.2, 2.7, 1e30]
    for mode, want in (
        ("rni", [0.0, 2.0, -0.0, -1.0, 3.0, 1e30]),
        ("rzi", [0.0, 1.0, -0.0, -1.0, 2.0, 1e30]),
        ("rmi", [0.0, 1.0, -1.0, -2.0, 2.0, 1e30]),
        ("rpi", [1.0, 2.0, -0.0, -1.0, 3.0, 1e30]),
    ):
        got = apply(f"cvt.{mode}.f32.f32", "b32", ("b32", [f32(x) for x in xs]))
        assert got == [f32(x) for x in want], mode
    assert apply("cvt.sat.f32.f32", "b32", ("b32", [f32(2.0), f32(-1.0), 0x7FC00000])) == [f32(1.0), 0, 0]


def test_pack() -> None:
    a, b = ("b32", [70000, 0xFFFFFFFF, 5]), ("b32", [0x80000000, 7, 300])
    assert apply("cvt.pack.sat.s16.s32", "b32", a, b) == [0x7FFF8000, 0xFFFF0007, 0x0005012C]
    assert apply("cvt.pack.sat.u16.s32", "b32", a, b) == [0xFFFF0000, 0x00000007, 0x0005012C]
    c = ("b32", [0xABCD1234] * 3)
    assert apply("cvt.pack.sat.u8.s32.b32", "b32", a, b, c) == [0x1234FF00, 0x12340007, 0x123405FF]
    assert apply("cvt.pack.sat.s8.s32.b32", "b32", a, b, c) == [0x12347F80, 0x1234FF07, 0x1234057F]


# --------------------------------------------------------------------------------------------------- half arithmetic
def half_rows(t: str, count: int, seed: int) -> list[list[int]]:
    fmt = FORMATS[t]
    rng = random.Random(seed)
    edges = [0, 1, fmt.sign, fmt.infinity - 1, 1 << fmt.mantissa, (1 << fmt.mantissa) - 1, fmt.round(Fraction(1))]
    rows = []
    for _ in range(32):
        row = []
        for _ in range(count):
            k = rng.random()
            code = rng.choice(edges) if k < 0.3 else rng.randrange(fmt.infinity)
            if k > 0.7:
                code = rng.randrange(fmt.bias - 2, fmt.bias + 3) << fmt.mantissa | rng.getrandbits(fmt.mantissa)
            row.append(code | rng.getrandbits(1) * fmt.sign)
        rows.append(row)
    return rows


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_half_arithmetic(name: str, t: str) -> None:
    from test_alu_float import reference

    fmt = FORMATS[t]
    for seed in range(6):
        rows = half_rows(t, 3 if name == "fma" else 2, seed)
        want = [reference(fmt, name, "rn", r) for r in rows]
        columns = [list(c) for c in zip(*rows, strict=True)]
        assert apply(f"{name}.rn.{t}", "b16", *(("b16", c) for c in columns)) == want
        packed = [[h << 16 | x for x, h in zip(c, c[1:] + c[:1], strict=True)] for c in columns]
        got = apply(f"{name}.rn.{t}x2", "b32", *(("b32", c) for c in packed))
        assert got == [h << 16 | x for x, h in zip(want, want[1:] + want[:1], strict=True)]


def test_half_modifiers() -> None:
    one, two, neg = 0x3C00, 0x4000, 0xC000
    assert apply("add.sat.f16", "b16", ("b16", [one, neg]), ("b16", [two, 0])) == [one, 0]
    assert apply("add.ftz.f16", "b16", ("b16", [1, 0x8001]), ("b16", [0, 0x8000])) == [0, 0x8000]
    assert apply("fma.rn.relu.f16", "b16", ("b16", [neg, one]), ("b16", [one, one]), ("b16", [0, one])) == [0, two]
    assert apply("fma.rn.relu.bf16", "b16", ("b16", [0xC000]), ("b16", [0x3F80]), ("b16", [0])) == [0]
    assert apply("add.f16", "b16", ("b16", [0x7C00]), ("b16", [0xFC00])) == [0x7FFF]
    assert apply("fma.rn.oob.f16", "b16", ("b16", [0xFFFF, one]), ("b16", [one, one]), ("b16", [one, one])) == [0, two]
    assert apply("neg.f16x2", "b32", ("b32", [0x3C00BC00])) == [0xBC003C00]
    assert apply("abs.bf16", "b16", ("b16", [0xBF80])) == [0x3F80]
    assert apply("neg.ftz.f16", "b16", ("b16", [1])) == [0x8000]


def test_half_min_max() -> None:
    a, b = [0x0000, 0x3C00, 0x7E00, 0x7E01, 0xBC00], [0x8000, 0x4000, 0x3C00, 0x7E05, 0x3C00]
    assert apply("max.f16", "b16", ("b16", a), ("b16", b)) == [0, 0x4000, 0x3C00, 0x7FFF, 0x3C00]
    assert apply("min.NaN.f16", "b16", ("b16", a), ("b16", b)) == [0x8000, 0x3C00, 0x7FFF, 0x7FFF, 0xBC00]
    got = apply("max.bf16x2", "b32", ("b32", [0x3F80BF80]), ("b32", [0x40000000]))
    assert got == [0x40000000]
    assert apply("min.xorsign.abs.f16", "b16", ("b16", [0x3C00]), ("b16", [0xC000])) == [0xBC00]


def test_half_functions() -> None:
    for t, dtype in (("f16", torch.float16), ("bf16", torch.bfloat16)):
        x = torch.tensor([-3.0, -0.25, 0.0, 0.5, 2.0]).to(dtype)
        codes = [c & 0xFFFF for c in x.view(torch.int16).tolist()]
        for opcode, fn in (("ex2.approx", torch.exp2), ("tanh.approx", torch.tanh)):
            full = f"{opcode}.{'ftz.' if (opcode, t) == ('ex2.approx', 'bf16') else ''}{t}"
            got = apply(full, "b16", ("b16", codes))
            want = fn(x.double()).to(dtype).view(torch.int16).tolist()
            assert all(abs(signed(g, 16) - w) <= 1 for g, w in zip(got, want, strict=True)), full


def test_mixed_precision() -> None:
    """fp32 sums with narrow operands are exact up to their one rounding."""
    a, b = [0x3F81, 0x4049], [0x3F81, 0xC049]  # bf16
    c = [f32(1.0), f32(0.1)]
    exact = [BFLOAT.exact(x) * BFLOAT.exact(y) + SINGLE.exact(z) for x, y, z in zip(a, b, c, strict=True)]
    assert apply("fma.rn.f32.bf16", "b32", ("b16", a), ("b16", b), ("b32", c)) == [SINGLE.round(x) for x in exact]
    got = apply("fma.rz.f32.bf16", "b32", ("b16", a), ("b16", b), ("b32", c))
    assert got == [SINGLE.round(x, "rz") for x in exact]
    h = [0x3C01, 0xBC01]
    sums = [HALF.exact(x) + SINGLE.exact(z) for x, z in zip(h, c, strict=True)]
    assert apply("add.f32.f16", "b32", ("b16", h), ("b32", c)) == [SINGLE.round(x) for x in sums]
    differences = [HALF.exact(x) - SINGLE.exact(z) for x, z in zip(h, c, strict=True)]
    assert apply("sub.rm.f32.f16", "b32", ("b16", h), ("b32", c)) == [SINGLE.round(x, "rm") for x in differences]
