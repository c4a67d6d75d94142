"""Sigmoid and relu weights: plans execute what the dense meaning says, forward and backward; LSE comes from a twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backward_plans import check

import attngen
from attngen import samples
from attngen.ir.plan import Rescale
from attngen.ir.spec import AttentionSpec
from attngen.jit.unnormalized import Unnormalized, twin_of
from attngen.ref import blockwise, dense, interp
from attngen.samples import Shape
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import make_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
CAUSAL = "kv_idx <= q_pos"
BIAS = {"bias": {"dims": ("heads_q", "seqlen_kv"), "grad": True}}
SPECS = {
    s.name: s
    for s in (
        make_spec("sig", head_dim=16, mask=CAUSAL, normalizer="sigmoid"),
        make_spec(
            "local", head_dim=16, score="s - log(float(seqlen_kv))", mask=f"{CAUSAL} and q_pos - kv_idx < 40",
            normalizer="sigmoid",
        ),
        make_spec(
            "rectified", head_dim=16, head_dim_v=8, score="tanh(s) + bias[h, kv_idx]", mask=f"{CAUSAL} or kv_idx < 9",
            tensors=BIAS, normalizer="relu",
        ),
        # a kept score of -inf: weight 0, and no gradient
        make_spec("dropping", head_dim=16, score="s + log(float(kv_idx % 3))", normalizer="sigmoid"),
    )
}  # fmt: skip
SIZES = [(70, 70), (33, 150), (150, 33), (1, 200)]


def inputs(spec: AttentionSpec, sq: int, skv: int) -> Any:
    shape = Shape(batch=2, heads_q=2, heads_kv=1, seqlen_q=sq, seqlen_kv=skv)
    qkv = [x.double() for x in samples.qkv(spec, shape)]
    return qkv, samples.params(spec), samples.tensors(spec, shape)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, size: tuple[int, int]) -> None:
    spec = SPECS[name]
    plans = plan(spec)
    assert {p.compute.rescale for p in plans.plans} == {Rescale.NEVER}
    qkv, params, tensors = inputs(spec, *size)
    want = dense.attention(spec, *qkv, params, tensors)
    for p in plans.plans:
        o, lse, _ = interp.run(p, spec, *qkv, params, tensors)
        torch.testing.assert_close(o, want.o, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(lse, want.lse, rtol=1e-9, atol=1e-9)
    o, lse = blockwise.attention(spec, *qkv, params, tensors)
    torch.testing.assert_close(o, want.o, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", SIZES[:3], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_backward(name: str, size: tuple[int, int], deterministic: bool) -> None:
    spec = SPECS[name]
    plans = plan_backward(spec, captured=[t.name for t in spec.tensors if t.grad])
    qkv, params, tensors = inputs(spec, *size)
    check(plans.replace(deterministic=deterministic), *qkv, params, tensors)


def test_identical_keys() -> None:
    """(b) of closed forms: S identical keys give S sigmoid(s + b) v."""
    spec = make_spec(
        "same", head_dim=16, score="s + b0", params={"b0": {"type": "float", "default": -3.0}}, normalizer="sigmoid"
    )
    (q, k, v), params, _ = inputs(spec, 5, 90)
    k, v = (x[:, :1].expand(x.shape) for x in (k, v))
    o, _, _ = interp.run(plan(spec), spec, q, k, v, params)
    s = torch.einsum("bqhd,bxd->bqh", q, k[:, :1, 0]) / 4
    torch.testing.assert_close(o, 90 * torch.sigmoid(s - 3.0)[..., None] * v[:, :1], rtol=1e-12, atol=1e-12)


def test_the_twin_has_the_lse_and_its_gradient() -> None:
    spec = SPECS["rectified"].replace(head_dim_qk=64)
    attn = attngen.build(spec)
    assert isinstance(attn, Unnormalized) and attn.twin.spec == twin_of(spec)
    assert type(attngen.build(twin_of(spec))) is not Unnormalized
    (q, k, v), _, tensors = inputs(spec, 30, 40)
    leaves = [x.bfloat16().requires_grad_() for x in (q, k)] + [tensors["bias"].requires_grad_()]
    q, k, bias = leaves
    _, lse = attn(q, k, v.bfloat16(), bias=bias, return_lse=True)
    again = attn.lse_of(q, k, None, None, {"bias": bias})
    torch.testing.assert_close(again, lse, rtol=1e-6, atol=1e-6)
    weight = torch.randn(lse.shape, generator=torch.Generator().manual_seed(0))
    for a, b in zip(*(torch.autograd.grad((x * weight).sum(), leaves) for x in (lse, again)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


def test_shapes_of_traced_calls() -> None:
    """One operator without LSE, two with."""
    attn = attngen.build(SPECS["sig"].replace(head_dim_qk=64, head_dim_v=64))
    q, k, v = (torch.empty(2, 9, h, 64, dtype=torch.bfloat16, device="meta") for h in (4, 2, 2))
    o = attn(q, k, v)
    again, lse = attn(q, k, v, return_lse=True)
    assert o.shape == again.shape == (2, 9, 4, 64) and o.dtype is torch.bfloat16
    assert lse.shape == (2, 4, 9) and lse.dtype is torch.float32
