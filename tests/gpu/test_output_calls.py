"""Sigmoid and relu weights, epilogues with gradients, output dtypes and largest scores on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.ref import dense
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import make_spec

CAUSAL = "kv_idx <= q_pos"
GATE = {"gate": {"dtype": "bf16", "dims": ("batch", "seqlen_q", "heads_q", "head_dim_v"), "grad": True}}
GATED = "o * sigmoid(gate[b, q_idx, h, d])"
SPECS = {
    s.name: s
    for s in (
        make_spec("sig", head_dim=128, mask=CAUSAL, score="s - log(float(seqlen_kv))", normalizer="sigmoid"),
        make_spec("sig_wide", head_dim=256, mask=CAUSAL, normalizer="sigmoid"),
        make_spec("rectified", head_dim=64, mask=f"{CAUSAL} and q_pos - kv_idx < 100", normalizer="relu"),
        make_spec("gated", head_dim=128, mask=CAUSAL, tensors=GATE, epilogue=GATED),
        make_spec("gated_256", head_dim=256, mask=CAUSAL, tensors=GATE, epilogue=GATED, deterministic=True),
        make_spec(
            "headwise", head_dim=64, head_dim_v=40, mask=CAUSAL, layout="bhsd", sink="sinks[h]",
            epilogue="o * softplus(gate[b, h, q_idx]) + tanh(o) * w[d]",
            tensors={
                "gate": {"dims": ("batch", "heads_q", "seqlen_q"), "grad": True},
                "w": {"dims": ("head_dim_v",), "grad": True},
                "sinks": {"dims": ("heads_q",), "grad": True},
            },
        ),
        make_spec("wide_out", head_dim=128, mask=CAUSAL, out_dtype="f32", max_logit=True),
        make_spec("sig_out", head_dim=64, mask=CAUSAL, normalizer="sigmoid", out_dtype="f32", max_logit=True),
    )
}  # fmt: skip
SHAPES = [Shape(2, 4, 2, 333, 517), Shape(1, 2, 1, 700, 700), Shape(1, 2, 2, 200, 77)]


def on_gpu(spec: AttentionSpec, shape: Shape, seed: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs in the spec's layout, and captured tensors; all that may require gradients does."""
    swap = spec.layout is Layout.BHSD
    qkv = [(x.transpose(1, 2).contiguous() if swap else x).cuda() for x in samples.qkv(spec, shape, seed=seed)]
    learned = {t.name for t in spec.tensors if t.grad}
    tensors = {n: x.cuda().requires_grad_(n in learned) for n, x in samples.tensors(spec, shape, seed=seed).items()}
    return [x.requires_grad_() for x in qkv], tensors


def exact(spec: AttentionSpec, qkv: Any, tensors: Any, do: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor]:
    """Gradients by float64 autograd of the dense meaning."""
    leaves = [x.detach().double().requires_grad_() for x in (*qkv, *tensors.values())]
    swap = spec.layout is Layout.BHSD
    q, k, v = (x.transpose(1, 2) if swap else x for x in leaves[:3])
    out = dense.attention(spec, q, k, v, None, dict(zip(tensors, leaves[3:], strict=True)))
    o = out.o.transpose(1, 2) if swap else out.o
    lse = out.lse.masked_fill(out.lse.isinf(), 0.0)
    return list(torch.autograd.grad((o * do.double()).sum() + (lse * dlse.double()).sum(), leaves, allow_unused=True))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", SPECS)
def test_everything(name: str, traced: bool) -> None:
    """O and LSE by the error rule, the largest scores, and gradients through O and LSE."""
    spec = SPECS[name]
    attn = attngen.build(spec)

    def layer(q: Any, k: Any, v: Any, t: Any) -> Any:
        if spec.max_logit:
            return attn(q, k, v, **t, return_lse=True, return_max_logit=True)
        return attn(q, k, v, **t, return_lse=True)

    call = torch.compile(layer, fullgraph=True) if traced else layer
    for seed, shape in enumerate(SHAPES[:1] if traced else SHAPES):
        qkv, tensors = on_gpu(spec, shape, seed)
        o, lse, *top = call(*qkv, tensors)
        swap = spec.layout is Layout.BHSD
        plain = [(x.transpose(1, 2) if swap else x).detach() for x in (o, *qkv)]
        given = {n: x.detach() for n, x in tensors.items()}
        assert_close(plain[0], spec, *plain[1:], lse=lse.detach(), tensors=given)
        if top:
            want = dense.attention(spec, *plain[1:], None, given).max_logit
            torch.testing.assert_close(top[0].double(), want, rtol=1e-3, atol=1e-3)
            assert not top[0].requires_grad
        g = torch.Generator(device="cuda").manual_seed(seed)
        do = torch.randn(o.shape, generator=g, device="cuda").to(o.dtype)
        dlse = torch.randn(lse.shape, generator=g, device="cuda").masked_fill(lse.isinf(), 0.0)
        inputs = [*qkv, *tensors.values()]
        found = torch.autograd.grad((o, lse), inputs, (do, dlse))
        for got, x, want in zip(found, inputs, exact(spec, qkv, tensors, do, dlse), strict=True):
            assert got.shape == x.shape and got.dtype is x.dtype and got.isfinite().all()
            assert (got - want).abs().max() <= 2e-2 * want.abs().max() + 1e-6


@pytest.mark.parametrize("name", ["sig", "gated", "wide_out"])
def test_no_gradient_is_the_same(name: str) -> None:
    """What a call saves for a backward changes nothing of O; `out` is written in place."""
    spec = SPECS[name]
    attn = attngen.build(spec)
    qkv, tensors = on_gpu(spec, SHAPES[0], 0)
    o = attn(*qkv, **tensors)
    with torch.no_grad():
        out = torch.full_like(o, torch.nan)
        assert torch.equal(attn(*qkv, **tensors), o)
        assert attn(*qkv, **tensors, out=out) is out and torch.equal(out, o)


def test_a_captured_graph_replays() -> None:
    spec = SPECS["gated"]
    attn = attngen.build(spec)
    qkv, tensors = on_gpu(spec, SHAPES[1], 0)
    attn.compile(backward=True)

    def step() -> Any:
        return torch.autograd.grad(attn(*qkv, **tensors), [*qkv, *tensors.values()], torch.ones_like(qkv[0]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        want = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for a, b in zip(found[1:], want[1:], strict=True):  # the sums of dQ follow the order of CTAs
        assert torch.equal(a, b)
