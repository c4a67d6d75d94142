"""Every plan of the backward search executed tile by tile, against float64 autograd of the dense meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from backward_plans import alone, check, make_plans
from builders import CAUSAL, B, H, K, P, Q, S, f, load, positions, spec
from cases import ALL_MASKS, SCORES, SINKS, qkv, tensors_for
from test_three_way import VALUES, make

from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.gradient import GradientKind
from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import DType
from attngen.passes.mask_form import mask_form
from attngen.ref import dense, interp_backward, walk_backward
from attngen.ref.evaluate import evaluate
from attngen.search_backward import plan_backward
from attngen.syntax import load_all, load_spec

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))
SPECS = [s for path in EXAMPLES for s in load_all(path)]
SIZES = [(300, 300), (70, 333), (333, 70), (1, 200)]


def served(s: AttentionSpec) -> bool:
    try:
        plan_backward(s)
    except AttnError as fault:
        assert fault.code in ("E0402", "E0403")
        return False
    return True


SERVED = [s for s in SPECS if served(s)]
FEW = [s for s in SERVED if s.name in ("causal", "longformer", "gpt_oss_local")]
INTERVALS = [s for s in SERVED if (form := mask_form(s)).is_exact and len(form.clauses) == 1]


def narrow(plans: BackwardPlanSet) -> BackwardPlanSet:
    """The same tiles and walk with small head dims."""
    return plans.replace(spec=plans.spec.replace(head_dim_qk=12, head_dim_v=8))


def run_example(plans: BackwardPlanSet, size: tuple[int, int], b: int = 2) -> interp_backward.Result | None:
    s = plans.spec
    shape = samples.Shape(batch=b, heads_q=2, heads_kv=1, seqlen_q=size[0], seqlen_kv=size[1])
    q, k, v = (t.double() for t in samples.qkv(s, shape))
    try:
        return check(plans, q, k, v, samples.params(s), samples.tensors(s, shape))
    except AttnError as fault:  # a document of a query position before the first key: the spec needs Sq <= Skv
        assert fault.code == "E0650" and size[0] > size[1]
        return None


def test_most_examples_are_served() -> None:
    assert len(SERVED) >= len(SPECS) - 2


@pytest.mark.parametrize("s", SERVED, ids=[s.name for s in SERVED])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_example(s: AttentionSpec, size: tuple[int, int]) -> None:
    """The chosen plan; the second of two runs counts turns."""
    plans = plan_backward(s)
    for deterministic in (False, True):
        run_example(narrow(plans).replace(deterministic=deterministic), size, b=1)


@pytest.mark.parametrize(
    "s", [s for s in SERVED if s.name in ("causal", "longformer", "gpt_oss_local")], ids=lambda s: s.name
)
def test_other_plans_of_an_example(s: AttentionSpec) -> None:
    plans = plan_backward(s)
    assert plans.others
    for p in plans.others:
        run_example(narrow(alone(plans, p.name)), (200, 260), b=1)


def test_the_plan_of_a_length() -> None:
    """Of several plans the one that serves the longer length runs."""
    plans = narrow(plan_backward(load_spec(EXAMPLES[0].parent / "causal.attn")))
    both = plans.replace(plans=(plans.others[0], plans.long_plan), limits=(150,))
    names = [p.compute.tile_m for p in both.plans]
    assert names[0] != names[1]
    for size, wanted in (((150, 40), names[0]), ((40, 151), names[1])):
        got = run_example(both, size, b=1)
        assert got is not None and got.trace.tile_m == wanted


@pytest.mark.parametrize("mask", ALL_MASKS)
def test_masks(mask: str) -> None:
    """Odd sizes around small tiles; element tests and row limits; turns."""
    for n, (sq, skv, heads) in enumerate([(33, 50, (4, 2)), (50, 21, (2, 1)), (16, 16, (2, 2)), (1, 40, (3, 1))]):
        s = make(mask, list(SCORES)[n], "per_head" if n % 2 else "none")
        q, k, v = qkv(s, 2, sq, skv, *heads)
        plans = make_plans(
            s, (8, 16, 12, 32)[n], (16, 8)[n % 2], deterministic=n in (1, 2), test="elements" if n == 3 else None
        )
        check(plans, q, k, v, VALUES, tensors_for(s, 2, sq, skv, heads[0]))


def test_more_than_32_query_tiles() -> None:
    """A kernel finds its walk 32 query tiles at a time."""
    s = spec(CAUSAL & (Q - K < 5))
    q, k, v = qkv(s, 1, 150, 150, 2, 1)
    got = check(make_plans(s, 2, 8, deterministic=True), q, k, v, {}, {})
    assert max(t.m_block for t in got.trace.steps) == 74


def captured(name: str, dims: tuple[str | int, ...], *indices: object, score: object = None, **more: object):
    """s + X[indices] with X declared `grad`."""
    decl = TensorDecl(name=name, dtype=DType.F32, dims=dims, grad=True)
    read = load(name, *indices, dtype=DType.F32)
    return spec(score=S + read * 0.5 if score is None else score, mask=CAUSAL, **more).replace(tensors=(decl,))


@pytest.mark.parametrize(
    ("dims", "indices", "kind"),
    [
        (("heads_q",), (H,), GradientKind.COLUMN),
        (("batch", "seqlen_kv"), (B, K), GradientKind.COLUMN),
        (("heads_q", "seqlen_q"), (H, Q), GradientKind.ROW),
        ((7,), (f("min", f("abs", Q - K), 6),), GradientKind.ELEMENT),
    ],
    ids=["head", "column", "row", "distance"],
)
def test_captured_gradients(dims: tuple[str | int, ...], indices: tuple[object, ...], kind: GradientKind) -> None:
    s = captured("c", dims, *indices)
    plans = make_plans(s, 16, 8)
    assert [c.kind for c in plans.gradient.contributions] == [kind]
    extents = {"heads_q": 4, "batch": 2, "seqlen_q": 30, "seqlen_kv": 41}
    q, k, v = qkv(s, 2, 30, 41, 4, 2)
    c = torch.randn([extents.get(d, d) for d in dims], generator=torch.Generator().manual_seed(1))
    check(plans, q, k, v, {}, {"c": c})


@pytest.mark.parametrize("sink", [n for n in SINKS if SINKS[n] is not None])
def test_sinks(sink: str) -> None:
    s = make("window", "softcap", sink)
    q, k, v = qkv(s, 2, 30, 41, 4, 2)
    plans = make_plans(s, 16, 8)
    assert len(plans.gradient.contributions) == (sink == "per_head")
    check(plans, q, k, v, VALUES, tensors_for(s, 2, 30, 41, 4))


# ---- what must be seen -----------------------------------------------------------------------------------------------


def bounded(plans: BackwardPlanSet, **changes: str) -> BackwardPlanSet:
    """Bounds of every clause replaced by other bounds of it."""
    (p,) = plans.plans
    form = p.mask.form
    bounds = tuple(t.replace(**{n: getattr(t, other) for n, other in changes.items()}) for t in form.bounds)
    mask = p.mask.replace(form=form.replace(bounds=bounds))
    return plans.replace(plans=(p.replace(mask=mask),))


@pytest.mark.parametrize(
    "changes",
    [{"upper_min": "upper_max"}, {"upper_max": "upper_min"}, {"lower_max": "lower_min"}, {"lower_min": "lower_max"}],
    ids=["diagonal unmasked", "diagonal lost", "left edge unmasked", "left edge lost"],
)
def test_a_wrong_bound_is_seen(changes: dict[str, str]) -> None:
    s = spec(ALL_MASKS["window"])
    q, k, v = qkv(s, 1, 40, 40, 1, 1)
    plans = make_plans(s, 8, 4)
    check(plans, q, k, v, VALUES, {})
    with pytest.raises(AssertionError):
        check(bounded(plans, **changes), q, k, v, VALUES, {})


@pytest.mark.parametrize("kv_order", ["ascending", "descending"])
def test_another_order_of_launch_is_out_of_turn(kv_order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = spec(CAUSAL)
    q, k, v = qkv(s, 1, 40, 40, 1, 1)
    wrong = range(4, -1, -1) if kv_order == "ascending" else range(5)
    monkeypatch.setattr(walk_backward, "launch_order", lambda *_: ((0, 0, n) for n in wrong))
    check(make_plans(s, 8, 8), q, k, v, {}, {})
    with pytest.raises(interp_backward.TurnError, match=r"has turn \d, 0 are done"):
        check(make_plans(s, 8, 8, deterministic=True, kv_order=kv_order), q, k, v, {}, {})


def test_no_rows_or_no_keys_is_no_launch() -> None:
    s = spec()
    for sq, skv in ((0, 4), (4, 0)):
        q, k, v = qkv(s, 1, sq, skv, 1, 1)
        with pytest.raises(ValueError, match="launches nothing"):
            interp_backward.run(make_plans(s, 8, 8), q, k, v, q, q[..., 0].transpose(1, 2), q)


@pytest.mark.parametrize(
    "s", [s for s in SERVED if (m := mask_form(s)).is_exact and len(m.clauses) == 1], ids=lambda s: s.name
)
def test_skips_pay(s: AttentionSpec) -> None:
    """Steps keep something, but for one a KV tile that nobody sees; those kept whole run unmasked."""
    n = 1024
    plans = narrow(plan_backward(s))
    shape = samples.Shape(batch=1, heads_q=1, heads_kv=1, seqlen_q=n, seqlen_kv=n)
    q, k, v = (t.double() for t in samples.qkv(plans.spec, shape))
    params, tensors = samples.params(s), samples.tensors(plans.spec, shape)
    out = dense.attention(plans.spec, q, k, v, params, tensors)
    trace = interp_backward.run(plans, q, k, v, out.o, out.lse, out.o, None, params, tensors).trace
    env = {**positions(n, n), **{name: torch.tensor(value) for name, value in params.items()}}
    keep = torch.broadcast_to(evaluate(s.mask, env, tensors), (1, 1, n, n))[0, 0]
    has_score = plans.plans[0].compute.has_score
    m, n_ = trace.tile_m, trace.tile_n
    unseen = 0
    for step in trace.steps:
        here = keep[step.m_block * m : (step.m_block + 1) * m, step.n_block * n_ : (step.n_block + 1) * n_]
        whole = bool(here.all()) and (step.n_block + 1) * n_ <= n and (not has_score or (step.m_block + 1) * m <= n)
        assert step.masked != whole
        unseen += not here.any()
    assert unseen <= -(-n // n_)


def test_masks_that_read_a_param() -> None:
    """Bounds by run-time values."""
    s = spec(CAUSAL | (K < P))
    q, k, v = qkv(s, 1, 70, 70, 2, 2)
    for prefix in (0, 1, 33, 70, 99):
        check(make_plans(s, 16, 16), q, k, v, {"prefix": prefix}, {})
