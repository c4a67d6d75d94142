"""Softmax of bounded scores on the GPU: scores at either end of what is possible, rows without keys, sinks, fp16."""

from __future__ import annotations

import pytest
from harness import inputs, verify

from attngen.ir.plan import Rescale
from attngen.search import plan
from attngen.syntax import load_spec

CAUSAL = "mask = kv_idx <= q_pos"
CLAUSES = {
    "constant": f"score = 30.0 * tanh(s / 30.0)\n  {CAUSAL}",
    "declared": f"param cap: float in 1.0..50.0 = 50.0\n  score = cap * tanh(s / cap)\n  {CAUSAL}",
    "halves": "dtype = fp16\n  score = 9.0 * tanh(s / 9.0)",
    "window": "score = clamp(s, -20.0, 20.0)\n  mask = kv_idx <= q_pos and q_pos - kv_idx < 40",
    "sunk": f"tensor sinks: f32[heads_q]\n  score = 30.0 * tanh(s / 30.0)\n  sink = sinks[h]\n  {CAUSAL}",
}


@pytest.mark.parametrize("spread", [0.1, 1.0, 12.0])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", sorted(CLAUSES))
def test_bounded_scores_are_right(name: str, d: int, spread: float) -> None:
    spec = load_spec(f"attn 1\nattention a {{\n  head_dim = {d}\n  {CLAUSES[name]}\n}}\n")
    assert plan(spec).plans[0].compute.rescale is Rescale.BOUNDED
    q, k, v = inputs(spec, 2, 333, 200, 4, 2, seed=d)  # more rows than keys: the first ones keep none
    verify(spec, q * spread, k * spread, v)
