"""Scores of every shape, executed by the checker: what is hoisted out of the elements, what stays, gathers, signs; and
masks by bits."""

from __future__ import annotations

from typing import Any

import backward_calls
import pytest
import torch
from ptxcheck.compile import compile_spec
from test_gallery import verify

from attngen.ir.functions import FUNCTIONS
from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
CAUSAL = "mask = kv_idx <= q_pos"
#: Clauses, and params to call with.
SCORES: dict[str, tuple[str, dict[str, Any]]] = {
    "slope": (f"tensor m: f32[heads_q]\n  score = s - m[h] * (q_pos - kv_idx)\n  {CAUSAL}", {}),
    "constant slope": (f"score = s - 0.05 * (q_pos - kv_idx)\n  {CAUSAL}", {}),
    "steep slope": ("param m: float = 0.1\n  score = s + m * (kv_idx - q_pos)", {"m": -6.0}),
    "distance": ("param m: float = 0.1\n  score = s - m * abs(q_pos - kv_idx)", {"m": 0.3}),
    "negative cap": (f"param cap: float = 2.0\n  score = cap * tanh(s / cap)\n  {CAUSAL}", {"cap": -1.5}),
    "negative factor": ("param f: float = 2.0\n  score = f * sigmoid(s)", {"f": -3.0}),
    "negative temperature": ("param f: float = 2.0\n  score = f * s", {"f": -0.7}),
    "temperatures": (
        "tensor t: f32[batch, seqlen_q]\n  tensor r: f32[batch, heads_q, seqlen_q]\n"
        f"  score = s * t[b, q_idx] + r[b, h, q_idx] * 40.0\n  {CAUSAL}", {},
    ),
    "keys and rows": (
        "tensor f: f32[batch, heads_q, seqlen_kv]\n  tensor g: f32[heads_q]\n"
        f"  score = (s + f[b, h, q_pos] - f[b, h, kv_idx]) * g[h] + 0.01 * kv_idx\n  {CAUSAL}", {},
    ),
    "offsets": (
        "param q_start: int = 0\n  param kv_start: int = 0\n  param m: float = 0.02\n"
        "  score = s - m * float((q_start + q_idx) - (kv_start + kv_idx))\n"
        "  mask = kv_start + kv_idx <= q_start + q_idx",
        {"q_start": 100, "kv_start": 40},
    ),
    "sigmoid": (
        "normalizer = sigmoid\n  tensor m: f32[heads_q]\n  param cap: float = 3.0\n"
        f"  score = cap * tanh(s / cap) - m[h] * (q_pos - kv_idx) - 1.0\n  {CAUSAL}", {"cap": -2.0},
    ),
    "bits": (
        "tensor words: i32[batch, seqlen_q, per_row]\n"
        "  mask = kv_idx < 20 or bit(words[b, q_idx, kv_idx // 32], kv_idx)", {},
    ),
    "streams": (
        "tensor x: f32[heads_q, seqlen_q, seqlen_kv]\n  tensor y: fp16[batch, seqlen_kv]\n"
        "  tensor z: i32[shifted]\n"
        "  score = s + x[h, q_idx, kv_idx] - y[b, kv_idx] * 0.5 + 0.1 * z[kv_idx - q_idx + 9]\n"
        "  mask = kv_idx <= q_idx + 50 and q_idx - kv_idx < 9", {},
    ),
    "distances": (
        "tensor x: bf16[heads_q, 64]\n  param m: float = 0.1\n"
        "  score = s * 0.5 + m * x[h, clamp(q_pos - kv_idx + 20, 0, 63)] + log2(1.0 + abs(q_idx - kv_idx))\n"
        "    - m * kv_idx\n"
        f"  {CAUSAL}", {},
    ),
    "buckets of weights": (
        "normalizer = relu\n  tensor x: f32[heads_q, 16]\n"
        f"  score = s + x[h, min(int(log2(1.0 + abs(q_pos - kv_idx))), 15)]\n  {CAUSAL}", {},
    ),
    "as good as nothing before": ("score = s if kv_idx < 20 else -3.4e38", {}),
    "below any reference before": ("score = s if kv_idx < 20 else -1e30", {}),
    "nothing before": ("score = s + log(1.0 if kv_idx < 20 else 0.0)", {}),
    "no product": ("tensor r: f32[seqlen_q]\n  score = r[q_idx]", {}),
    "capped bias": (
        "tensor bias: bf16[batch, heads_q, seqlen_q, seqlen_kv]\n  param cap: float = 4.0\n"
        f"  score = cap * tanh((s + bias[b, h, q_idx, kv_idx] - 0.01 * (q_pos - kv_idx)) / cap)\n  {CAUSAL}", {},
    ),
}  # fmt: skip


def written(name: str) -> AttentionSpec:
    return load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {SCORES[name][0]}\n}}\n")


@pytest.mark.parametrize("name", sorted(SCORES))
def test_forward(name: str) -> None:
    spec = written(name)
    module, _ = compile_spec(spec)
    # an even number of keys, so that pairs of a row are aligned, and an odd one
    for seed, keys in enumerate((150, 67) if "bias" in name or "streams" in name else (150,)):
        softmax = "normalizer" not in SCORES[name][0]
        verify(spec, module, 0, Shape(1, 2, 1, 70, keys), seed, given=SCORES[name][1], lse=softmax)


def test_a_bit_is_what_its_word_says() -> None:
    """All of them, the sign among them, whatever multiple of 32 is added to the number."""
    word, i = torch.tensor([-(2**31) + 5, -1, 0, 2**30])[:, None], torch.arange(-32, 64)
    found = FUNCTIONS["bit"].dense(word, i)
    assert found[0].nonzero().flatten().tolist() == [0, 2, 31, 32, 34, 63, 64, 66, 95]
    assert found[1].all() and not found[2].any() and found[3].sum() == 3


OUTSIDE = "tensor x: f32[heads_q, 9] grad\n  tensor y: bf16[seqlen_kv]\n  score = s + x[h, {}] + y[{}]"


def test_an_index_outside_reads_the_end_and_adds_there() -> None:
    """Without `check=True` nothing is read or added past a tensor: the checker knows every array's bounds."""
    text = "attn 1\nattention a {{\n  head_dim = 64\n  {}\n}}\n"
    loose = load_spec(text.format(OUTSIDE.format("q_idx - kv_idx", "kv_idx + 40")))
    held = load_spec(text.format(OUTSIDE.format("clamp(q_idx - kv_idx, 0, 8)", "clamp(kv_idx + 40, 0, seqlen_kv - 1)")))
    module, _ = compile_spec(loose)
    verify(held, module, 0, Shape(1, 2, 1, 70, 70), 0)
    made = backward_calls.kernels(loose, captured=("x",))
    backward_calls.verify(made, backward_calls.call(held, Shape(1, 2, 1, 70, 70)))
