"""mma.sync against float64 products, fragments as the manual draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptxcheck.table import UnknownInstruction
from ptxtext import Kernel
from test_wgmma import close, draw, loads, names, stores

Array = np.ndarray[Any, Any]


def rows_of(raw: Array, lane: int, count: int) -> list[int]:
    """A lane's registers of A, (16, bytes): rows l / 4 and + 8, four bytes at 4 * (l % 4) of each 16."""
    out = []
    for j in range(count):
        at = 16 * (j // 2) + 4 * (lane % 4)
        out.append(int(raw[lane // 4 + 8 * (j % 2), at : at + 4].copy().view(np.uint32)[0]))
    return out


def columns_of(raw: Array, lane: int, count: int) -> list[int]:
    """A lane's registers of B, given transposed, (8, bytes)."""
    return [
        int(raw[lane // 4, 16 * j + 4 * (lane % 4) : 16 * j + 4 * (lane % 4) + 4].copy().view(np.uint32)[0])
        for j in range(count)
    ]


def accumulators(matrix: Array, d: str) -> Array:
    """(16, 8) as (32 lanes, registers): elements (l / 4 + 8 * (i / 2), 2 * (l % 4) + i % 2)."""
    kind = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[d]
    flat = [[matrix[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] for i in range(4)] for lane in range(32)]
    return np.array(flat).astype(kind).view(np.uint32)


@pytest.mark.parametrize(
    ("k", "d", "a", "b"),
    [
        (8, "f32", "bf16", "bf16"), (16, "f32", "bf16", "bf16"), (8, "f32", "f16", "f16"), (16, "f32", "f16", "f16"),
        (16, "f16", "f16", "f16"), (8, "f16", "f16", "f16"), (4, "f32", "tf32", "tf32"), (8, "f32", "tf32", "tf32"),
        (32, "f32", "e4m3", "e5m2"), (16, "s32", "s8", "s8"), (32, "s32", "u8", "s8"),
    ],
)  # fmt: skip
def test_products(k: int, d: str, a: str, b: str) -> None:
    a_values, a_raw = draw(16, k, a, 1)
    b_values, b_raw = draw(8, k, b, 2)
    a_count, b_count, c_count = a_raw.shape[1] // 8, b_raw.shape[1] // 16, 2 if d == "f16" else 4
    g = np.random.default_rng(0)
    c = g.integers(-99, 99, (16, 8)) if d == "s32" else g.standard_normal((16, 8)).astype(np.float16)
    start = accumulators(c, d)
    rows = [[*start[lane], *rows_of(a_raw, lane, a_count), *columns_of(b_raw, lane, b_count)] for lane in range(32)]
    total = a_count + b_count + c_count
    op = f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{a}.{b}.{d}"
    operands = [names(c_count), names(a_count, 100 + c_count), names(b_count, 100 + c_count + a_count), names(c_count)]
    text = f"{loads(total)}\n    {op} {', '.join(f'{{{o}}}' for o in operands)};\n{stores(c_count)}\n    ret;\n"
    kernel = Kernel(text, out=4 * total, threads=32, initial=np.array(rows, np.uint32))
    got = kernel.run()[0].view(np.uint32)[:, :c_count].copy()
    want = a_values @ b_values.T + c.astype(np.float64)
    if d == "s32":
        assert np.array_equal(got, accumulators(want.astype(np.int64), d))
    else:
        kind = np.float16 if d == "f16" else np.float32
        close(got.view(kind), accumulators(want, d).view(kind), 2e-3 if d == "f16" else 1e-5)


def test_saturation() -> None:
    """Sums of int32 clamp with .satfinite and wrap without."""
    for mod, want in ((".satfinite", 2**31 - 1), ("", -(2**31) + 3)):
        op = f"mma.sync.aligned.m16n8k16.row.col{mod}.s32.s8.s8.s32"
        lines = "".join(f"    mov.b32 %r{100 + i}, 0x7fffffff;\n" for i in range(4))
        lines += "    mov.b32 %r110, 0x00000001;\n    mov.b32 %r111, 0x00000001;\n    mov.b32 %r112, 0x00000001;\n"
        text = f"{lines}    {op} {{{names(4)}}}, {{%r110, %r111}}, {{%r112}}, {{{names(4)}}};\n{stores(4)}\n    ret;\n"
        got = Kernel(text, out=16, threads=32).run()[0].view(np.int32)
        assert (got == want).all()


def test_unknown_forms_are_named() -> None:
    op = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    text = f"    {op} {{{names(2)}}}, {{%r9}}, {{%r10}}, {{{names(2)}}};\n    ret;"
    with pytest.raises(UnknownInstruction, match=r"m8n8k4\.row\.col\.f64"):
        Kernel(text, threads=32).run()
