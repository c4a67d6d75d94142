"""Softmax of bounded scores, executed by the checker: one reference for all rows, whatever a call gives; rows that keep
nothing, sinks, and scores that lie at either end of what is possible."""

from __future__ import annotations

import pytest
import torch
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call

from attngen import samples
from attngen.ir.plan import Rescale
from attngen.ir.spec import AttentionSpec
from attngen.ref import dense, interp
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.search import plan
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
TEXT = """
attn 1
attention {0} {{
  head_dim = 64
  dtype    = {1}
  {2}
  mask     = kv_idx <= q_pos
  schedule {{ tile = 128 x 64 }}
}}
"""
CAP = "param cap: float in {}..{} = 1.0\n  score = cap * tanh(s / cap)"
SPECS = {
    name: load_spec(TEXT.format(name, dtype, clauses))
    for name, dtype, clauses in (
        ("capped", "bf16", CAP.format(0.001, 50.0)),
        ("halves", "fp16", CAP.format(0.001, 9.5)),
        ("sunk", "bf16", f"{CAP.format(0.5, 9.0)}\n  param logit: float = 1.0\n  sink = logit"),
        ("clamped", "bf16", "score = clamp(s, -9.0, 60.0 / 2.0)"),
    )
}
#: Hardly different scores, usual ones, the largest that is declared; sinks that weigh nothing, and everything.
CALLS: list[tuple[str, dict[str, float]]] = [
    *[("capped", {"cap": c}) for c in (0.001, 20.0, 50.0)],
    *[("halves", {"cap": c}) for c in (0.001, 9.5)],
    *[("sunk", {"cap": 9.0, "logit": x}) for x in (1.0, -90.0, 90.0)],
    ("clamped", {}),
]


def operands(spec: AttentionSpec):  # type: ignore[no-untyped-def]
    """77 keys for 150 rows, so that some keep none; rows whose scores are all at one end, low or high."""
    q, k, v = samples.qkv(spec, Shape(1, 2, 1, 150, 77), seed=3)
    q[..., 0], k[..., 0] = 0.0, 60.0
    q[:, 90:120, :, 0], q[:, 120:, :, 0] = -60.0, 60.0
    return q, k, v


@pytest.mark.parametrize(("name", "params"), CALLS, ids=str)
def test_bounded_scores(name: str, params: dict[str, float]) -> None:
    spec = SPECS[name]
    module, _ = compile_spec(spec)
    q, k, v = operands(spec)
    o, lse, report = attngen_call(
        module, 0, q, k, v, params=tuple(params.values()), tensors=(), scale=0.5, layout="bshd"
    )
    assert not report.faults
    assert torch.isfinite(o.float()).all()
    assert_close(o, spec, q, k, v, lse=lse, params=params, scale=0.5)


@pytest.mark.parametrize(("name", "params"), CALLS, ids=str)
def test_plans_of_bounded_scores(name: str, params: dict[str, float]) -> None:
    """The same walk and the same reference in float64."""
    spec = SPECS[name]
    q, k, v = (x.double() for x in operands(spec))
    plans = plan(spec)
    assert plans.plans[0].compute.rescale is Rescale.BOUNDED
    want = dense.attention(spec, q, k, v, params, {}, scale=0.5)
    o, lse, _ = interp.run(plans, spec, q, k, v, params, {}, scale=0.5)
    assert torch.allclose(o, want.o, rtol=1e-10, atol=1e-10) and torch.allclose(lse, want.lse, rtol=1e-10, atol=1e-10)


def test_no_maximum_is_taken() -> None:
    """Neither maxima nor votes are left of the softmax."""
    ptx = compile_spec(SPECS["capped"])[1].ptx
    assert "ex2.approx" in ptx and "vote.sync" not in ptx and "max.f32" not in ptx
