"""Score forms mean what the score means: put together again, along either axis, at every pair of a tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_exprs import PARAMS, TENSORS, exprs

from attngen.ir.expr import Expr, Load, atoms_of, const, params_of, substitute
from attngen.ir.functions import apply
from attngen.ir.score import COLUMN, KV_0, Q_0, RAW, SCALE, ScoreForm
from attngen.ir.types import Type
from attngen.passes.score_form import LOAD, ONE, score_form
from attngen.ref.evaluate import evaluate
from attngen.syntax import load_spec

SPEC = load_spec("attn 1\nattention a {\n  head_dim = 64\n  param cap: float >= 0.5 = 2.0\n  score = cap * s\n}\n")
ROWS, KEYS, FIRST = 5, 7, 3


def env() -> dict[str, torch.Tensor]:
    """Five queries, seven keys; q_pos is two past q_idx."""
    q, k = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :]
    fixed = {"b": 0, "h": 1, "h_kv": 0, "seqlen_q": ROWS, "seqlen_kv": KEYS, "heads_q": 2, "heads_kv": 1, "batch": 1}
    out = {n: torch.tensor(x) for n, x in fixed.items()}
    s = torch.randn(ROWS, KEYS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    out |= {"q_idx": q, "kv_idx": k, "q_pos": q + KEYS - ROWS, "s": s}
    return out | {n: torch.tensor(v, dtype=torch.float64 if t is Type.FLOAT else None) for n, (t, v) in PARAMS.items()}


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(2)
    size = {"b": 1, "h": 2, "q_idx": ROWS, "kv_idx": KEYS}
    made = {}
    for name, (dtype, axes) in TENSORS.items():
        x = torch.randn([size[a] for a in axes], dtype=torch.float64, generator=g)
        made[name] = x if dtype.type is Type.FLOAT else (x > 0 if dtype.type is Type.BOOL else (4 * x).long())
    return made


def score_of(form: ScoreForm) -> Expr:
    """The score that a form says, over `raw * softmax_scale` and the column."""
    loads: dict[str, Expr] = {
        LOAD.format(k): Load(
            type=s.dtype.type, tensor=s.tensor, dtype=s.dtype, indices=(*s.indices, apply("add", s.start, COLUMN))
        )
        for k, s in enumerate(form.streams)
    }
    terms = [(t.factor, substitute(t.value, loads)) for t in form.terms]
    total: Expr = const(0.0)
    for factor, value in (
        (form.scale, apply("mul", RAW, SCALE)),
        (form.slope, apply("float", COLUMN)),
        (None if form.distance is None else ONE, form.distance or ONE),
        *terms,
    ):
        if factor is not None:
            total = apply("add", total, apply("mul", factor, value))
    if form.factor is not None:
        total = apply("mul", form.factor, total)
    return total if form.shift is None else apply("add", total, form.shift)


def check(score: Expr) -> None:
    given, loads = env(), tensors()
    exact = evaluate(score, given, loads)
    for axis, index, first in (("kv", "kv_idx", KV_0), ("q", "q_idx", Q_0)):
        form = score_form(score, axis, SPEC)
        moving = {index, "s"} | ({"q_pos"} if axis == "q" else set())
        for e in (form.scale, form.slope, form.shift, form.factor, *(t.factor for t in form.terms)):
            assert e is None or not (atoms_of(e) & moving or params_of(e) & {COLUMN.name, RAW.name}), e
        assert not any("s" in atoms_of(t.value) for t in form.terms)
        scale = torch.tensor(0.25, dtype=torch.float64)
        around = given | {
            first.name: torch.tensor(FIRST), COLUMN.name: given[index] - FIRST, SCALE.name: scale,
            RAW.name: given["s"] / scale,
        }  # fmt: skip
        found = evaluate(score_of(form), around, loads)
        a, b = torch.broadcast_tensors(exact, found)
        both = a.isfinite() & b.isfinite()
        assert torch.equal(a.isfinite(), b.isfinite()) or not a.isfinite().all()
        torch.testing.assert_close(b[both].double(), a[both].double(), rtol=1e-9, atol=1e-7)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(exprs(Type.FLOAT))
def test_random_scores(score: Expr) -> None:
    check(score)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(exprs(Type.FLOAT, depth=2), min_size=2, max_size=3))
def test_random_sums(terms: list[Expr]) -> None:
    total = apply("mul", terms[0], const(0.5))
    for t in terms[1:]:
        total = apply("sub", total, t)
    check(total)


def form_of(text: str, clauses: str = "", axis: str = "kv"):
    spec = load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {clauses}\n  score = {text}\n}}\n")
    return score_form(spec.score, axis, spec)


def test_alibi_is_one_slope_and_one_shift() -> None:
    """Two multiply-adds an element; the distance to the tile's first key is an int."""
    for axis in ("kv", "q"):
        form = form_of("s - m[h] * (q_pos - kv_idx)", "tensor m: f32[heads_q]", axis)
        assert form.scale == ONE and form.terms == () and form.slope is not None and form.factor is None
        assert not atoms_of(form.slope) & {"q_idx", "q_pos", "kv_idx"}


def test_a_softcap_leaves_one_product_and_one_tanh() -> None:
    form = form_of("cap * tanh(s / cap)", "param cap: float = 50.0")
    assert form.factor is not None and len(form.terms) == 1 and form.shift is form.slope is form.scale is None
    assert form.terms[0].value.fn == "tanh" and form.terms[0].value.args[0].args[0] == RAW


@pytest.mark.parametrize("text", ["cap * sigmoid(s)", "cap * exp(s / 8.0)"])
def test_a_factor_of_unknown_sign_stays(text: str) -> None:
    """A maximum is taken before the factor multiplies: only a positive one may be taken out."""
    assert form_of(text, "param cap: float = 50.0").factor is None
    assert form_of(text, "param cap: float >= 1.0 = 50.0").factor is not None


def test_nothing_is_regrouped_below_a_step() -> None:
    """41 * (1 / 41) is below 1, and `int` of it is 0."""
    form = form_of("s + float(int(s / 41.0))")
    (term,) = form.terms
    inside = term.value.args[0].args[0]
    assert inside.fn == "div" and inside.args[0].fn == "mul"


def test_rows_of_temperatures_cost_an_element_one_product() -> None:
    form = form_of("s * t[b, q_idx] + r[b, q_idx]", "tensor t: f32[batch, seqlen_q]\n  tensor r: f32[batch, seqlen_q]")
    assert form.scale is not None and form.shift is not None and form.terms == () and form.slope is None


def test_an_index_keeps_the_key() -> None:
    """The key's number stays an atom where no sum of floats holds it."""
    form = form_of("s + t[abs(2 * q_pos - kv_idx)]", "tensor t: f32[seqlen_kv]")
    assert "kv_idx" in atoms_of(form.terms[0].value)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("t[min(abs(q_pos - kv_idx), 7)]", True),
        ("m[h] * t[(3 if kv_idx > q_idx else 0) + (q_idx - kv_idx) % 3]", True),
        ("t[kv_idx - seqlen_kv + seqlen_q - q_idx]", True),
        ("t[q_pos + kv_idx]", False),
        ("t[kv_idx // 2 - q_idx // 2]", False),
        ("t[q_idx] * t[abs(q_pos - kv_idx)]", False),
        ("t[abs(q_pos - kv_idx)] * s", False),
        ("float(abs(q_pos - kv_idx))", False),
    ],
)
def test_what_key_minus_query_decides(text: str, is_one: bool) -> None:
    """Cheap values are evaluated in place; a factor by row is none of the distance's."""
    tensors = "tensor t: f32[seqlen_kv]\n  tensor m: f32[heads_q]"
    assert (form_of(f"s + {text}", tensors).distance is not None) is is_one
