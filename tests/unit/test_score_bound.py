"""How far scores may lie from 0, as far as a spec says, and which plans therefore take no maxima."""

from __future__ import annotations

import math

import pytest
import torch

from attngen.ir.plan import ComputePlan, Rescale
from attngen.ir.spec import AttentionSpec
from attngen.passes.score_bound import interval, score_bound
from attngen.plan_text import describe
from attngen.ref.evaluate import evaluate
from attngen.search import plan
from attngen.syntax import load_spec

#: A score's clauses and its bound.
BOUNDED = {
    "a declared cap": ("param cap: float in 1.0..50.0 = 30.0\n  score = cap * tanh(s / cap)", 50.0),
    "a constant cap": ("score = 20.0 * tanh(s / 20.0)", 20.0),
    "sigmoid": ("param cap: float in -3.0..2.0 = 2.0\n  score = cap * sigmoid(s)", 3.0),
    "clamp": ("score = clamp(s, -8.0, 5.0)", 8.0),
    "a clamp by a param": ("param cap: float in 0.5..40.0 = 5.0\n  score = max(min(s, cap), -cap)", 40.0),
    "a sum": ("score = 4.0 * (tanh(s) - 0.5 * tanh(0.1 * s)) - abs(sigmoid(s))", 7.0),
    "a quotient": ("score = clamp(s, -9.0, 60.0 / 2.0)", 30.0),
    "of a distance": ("score = 4.0 * tanh(s + 0.1 * (q_pos - kv_idx)) if kv_idx < q_pos else -2.0", 4.0),
}
UNBOUNDED = {
    "s": "score = 2.0 * s",
    "a bias beside": "tensor x: f32[heads_q]\n  score = 20.0 * tanh(s / 20.0) + x[h]",
    "one side": "score = max(s, -5.0)",
    "an open cap": "param cap: float >= 0.5 = 5.0\n  score = cap * tanh(s / cap)",
    "a divisor that may be 0": "param part: float in -1.0..1.0 = 0.5\n  score = tanh(s) / part",
    "what no rule knows": "score = exp(s) - exp(s)",
}
#: Bounded, and with maxima all the same.
FOLLOWED = {
    "out of reach": "score = 60.0 * tanh(s / 60.0)",
    "the largest score is asked for": "output {\n    max_logit = true\n  }\n  score = 20.0 * tanh(s / 20.0)",
}


def written(clauses: str, dtype: str = "bf16") -> AttentionSpec:
    return load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  dtype = {dtype}\n  {clauses}\n}}\n")


def computes(spec: AttentionSpec) -> list[ComputePlan]:
    return [p.compute for p in plan(spec).with_small]


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_bounded(name: str) -> None:
    clauses, bound = BOUNDED[name]
    spec = written(clauses)
    assert score_bound(spec) == pytest.approx(bound)
    reference = max(bound * math.log2(math.e) - 48.0, 0.0)
    for c in computes(spec):
        assert c.rescale is Rescale.BOUNDED and c.reference == pytest.approx(reference)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("end", ["minimum", "maximum"])
def test_no_score_passes_its_bound(name: str, end: str) -> None:
    """Scores from everywhere, as the score is written, with params at either end of what is declared."""
    spec = written(BOUNDED[name][0])
    draw = torch.Generator().manual_seed(1)
    values = {p.name: torch.tensor(getattr(p, end), dtype=torch.float64) for p in spec.params}
    s = torch.randn(4000, generator=draw, dtype=torch.float64) * 10 ** torch.linspace(-3, 4, 4000, dtype=torch.float64)
    places = {n: torch.randint(0, 500, (4000,), generator=draw) for n in ("q_pos", "kv_idx")}
    scores = evaluate(spec.score, {**values, **places, "s": s})
    low, high = interval(spec.score, spec)
    assert float(scores.min()) >= low - 1e-12 and float(scores.max()) <= high + 1e-12
    assert max(-low, high) == score_bound(spec)


@pytest.mark.parametrize("name", [*UNBOUNDED, *FOLLOWED])
def test_what_takes_maxima(name: str) -> None:
    spec = written({**UNBOUNDED, **FOLLOWED}[name])
    assert (score_bound(spec) == math.inf) == (name in UNBOUNDED)
    assert all(c.rescale is Rescale.ON_GROWTH and c.growth > 0 for c in computes(spec))


def test_weights_without_a_reference_have_no_bounded_one() -> None:
    spec = written("normalizer = sigmoid\n  score = 20.0 * tanh(s / 20.0)")
    assert all(c.rescale is Rescale.NEVER for c in computes(spec))


def test_halves_reach_less_far() -> None:
    """P in fp16 is precise between 2**-14 and 2**15."""
    for bound, rescale in ((9.7, Rescale.BOUNDED), (9.8, Rescale.ON_GROWTH)):
        (halves, *_) = computes(written(f"score = {bound} * tanh(s)", "fp16"))
        assert halves.rescale is rescale and halves.reference == 0.0


def test_explain_says_that_no_maximum_is_taken() -> None:
    assert "rescale bounded: one reference, 2^0, for all rows" in describe(plan(written(BOUNDED["clamp"][0])))
