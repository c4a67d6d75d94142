"""Where no tile left what a score's expressions hold, the tallest was taken whose fragments fit. With nothing left for
the score it spilled up to 672 bytes a thread, or its WGMMAs were serialised. A tile that leaves a few goes first.
"""

from __future__ import annotations

import pytest

from attngen.ir.backward import BackwardPlan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

FUNCTIONS = "sigmoid(s) + softplus(s) + sqrt(abs(s)) + log2(1.0 + s * s) + floor(s) + clamp(s, -1.0, 1.0)"
BIAS = "30.0 * tanh((s + bias[b, h, q_idx, kv_idx] - slopes[h] * (q_pos - kv_idx)) / 30.0)"


def planned(d: int, dv: int, score: str, captured: tuple[str, ...] = ()) -> BackwardPlan:
    text = (
        f"attn 1\nattention a {{\n  head_dim = {d}, v = {dv}\n  tensor slopes: f32[heads_q] grad\n"
        "  tensor bias: bf16[batch, heads_q, seqlen_q, seqlen_kv]\n"
        f"  score = {score}\n  mask = kv_idx <= q_pos\n}}\n"
    )
    return plan_backward(load_spec(text), captured=captured).plans[0]


@pytest.mark.parametrize(
    ("d", "dv", "score", "name"),
    [(32, 256, BIAS, "64x2x64"), (64, 256, BIAS, "32x128"), (256, 64, FUNCTIONS, "32x128")],
    ids=["672 bytes", "268 bytes", "serialised"],
)
def test_a_tile_that_leaves_registers(d: int, dv: int, score: str, name: str) -> None:
    assert planned(d, dv, score).name == name


def test_a_tile_that_spills_nothing_is_kept() -> None:
    """Two CTAs that share the score's work, since dK's warpgroup computes S again: no register is short there."""
    assert planned(128, 128, "s * slopes[h]", ("slopes",)).name == "64x2x64"


def test_a_tile_without_room_is_better_than_none() -> None:
    assert (
        planned(256, 64, "s * slopes[h]", ("slopes",)).compute.expression_registers
        < planned(64, 64, "s * slopes[h]", ("slopes",)).compute.expression_registers
    )
