"""The walk of the backward on random masks, scores and tiles: plan execution against autograd of the dense meaning."""

from __future__ import annotations

import torch
from backward_plans import check, make_plans
from builders import CAUSAL, PARAMS, spec
from cases import SCORES
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_exprs import PARAMS as VALUES
from random_exprs import TENSORS as LOADED
from random_exprs import F, exprs
from test_mask_properties import bools, params, tensors_for

from attngen.diag.diagnostic import AttnError
from attngen.ir.expr import Expr, const
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType

B, HEADS = 2, [(2, 2), (2, 1)]
NAMES = ("start", "doc", "first", "late", "flag", "row_flag", "slopes", "bias")
tiles = st.sampled_from([(2, 3), (3, 2), (4, 4), (1, 1), (5, 8), (16, 16)])
lengths = st.tuples(st.integers(1, 9), st.integers(1, 9))


def inputs(s: AttentionSpec, sq: int, skv: int, heads: tuple[int, int], seed: int) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hq, hkv = heads
    shapes = ((B, sq, hq, s.head_dim_qk), (B, skv, hkv, s.head_dim_qk), (B, skv, hkv, s.head_dim_v))
    return tuple(torch.randn(x, generator=g, dtype=torch.float64) for x in shapes)


@given(
    mask=bools,
    score=st.sampled_from(sorted(set(SCORES) - {"temperature", "log_bias"})),
    tile=tiles,
    size=lengths,
    heads=st.sampled_from(HEADS),
    values=params,
    deterministic=st.booleans(),
    kv_order=st.sampled_from(["ascending", "descending"]),
    grouped=st.booleans(),
    serpentine=st.booleans(),
    element_test=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_mask(  # type: ignore[no-untyped-def]
    mask, score, tile, size, heads, values, deterministic, kv_order, grouped, serpentine, element_test, seed
) -> None:
    """Every kept pair once; in deterministic plans turns in the order of launch, and no turn twice."""
    s = spec(mask, SCORES[score], tensors=NAMES, d=3, dv=2)
    plans = make_plans(
        s, *tile, deterministic=deterministic, test="elements" if element_test else None, kv_order=kv_order,
        grouped=grouped, serpentine=serpentine,
    )  # fmt: skip
    (sq, skv), (hq, _) = size, heads
    g = torch.Generator().manual_seed(seed)
    given_tensors = {
        **tensors_for(sq, skv, seed),
        "slopes": torch.rand(hq, generator=g) * 0.2,
        "bias": torch.randn(B, hq, sq, skv, generator=g),
    }
    arguments = {p.name: values.get(p.name, 3.0) for p in PARAMS}
    got = check(plans, *inputs(s, sq, skv, heads, seed), arguments, given_tensors, seed=seed)
    if deterministic:
        assert len(got.trace.turns) <= len(got.trace.steps)


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(score=exprs(F, depth=3), tile=tiles, size=lengths, seed=st.integers(0, 99))
def test_any_score(score: Expr, tile: tuple[int, int], size: tuple[int, int], seed: int) -> None:
    """Random scores with all their captured gradients, under a causal mask."""
    sq, skv = size
    g = torch.Generator().manual_seed(seed)
    dims = {"b": "batch", "h": "heads_q", "q_idx": "seqlen_q", "kv_idx": "seqlen_kv"}
    extents = {"batch": B, "heads_q": 2, "seqlen_q": sq, "seqlen_kv": skv}
    s = AttentionSpec(
        name="any", head_dim_qk=3, head_dim_v=2, mask=CAUSAL.e, score=score, epilogue=spec().epilogue,
        scale=const(0.5),
        params=tuple(ParamDecl(name=n, type=t, default=v) for n, (t, v) in VALUES.items()),
        tensors=tuple(
            TensorDecl(name=n, dtype=d, dims=tuple(dims[a] for a in axes), grad=d is DType.F32)
            for n, (d, axes) in LOADED.items()
        ),
    )  # fmt: skip
    made = {
        "doc": torch.randint(0, 3, (B, skv), generator=g, dtype=torch.int32),
        "slopes": torch.rand(2, generator=g) + 0.25,
        "bias": torch.randn(B, 2, sq, skv, generator=g),
        "flag": torch.rand(B, skv, generator=g) < 0.3,
    }
    assert {n: tuple(t.shape) for n, t in made.items()} == {
        n: tuple(extents[dims[a]] for a in axes) for n, (_, axes) in LOADED.items()
    }
    try:
        plans = make_plans(s, *tile)
    except AttnError as fault:
        assert fault.code == "E0402"
        assume(False)
    check(plans, *inputs(s, sq, skv, (2, 1), seed), {}, made, seed=seed)
