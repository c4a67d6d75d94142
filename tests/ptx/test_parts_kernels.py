"""Specs of several kernels through the kernels of their parts: O, LSE and all gradients of the whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from backward_calls import call, close, kernels, run
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call

from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.jit.merge import softmax_weights, weighted_sum
from attngen.passes.parts import parts
from attngen.ref import dense
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
Tensor = torch.Tensor
#: Row 0 keeps no key at all, row 1 none of the segment's.
CACHE = load_spec(
    "attn 1\nattention cache {\n  head_dim = 64\n  mask = kv_idx <= q_pos and q_idx > 0\n"
    "  segment past {\n    mask = q_idx > 1 and q_idx + kv_idx < 90\n  }\n}\n"
)
DIFF = load_spec(
    "attn 1\nattention diff {\n  head_dim = 64\n  mask = kv_idx <= q_pos\n  branch one {\n  }\n"
    "  branch two {\n    weight = -0.5\n    mask = q_pos - kv_idx < 20\n  }\n}\n"
)


class Parted(torch.autograd.Function):
    """O and LSE of one part by its forward kernel, gradients by its backward kernel, in the checker."""

    @staticmethod
    def forward(ctx: Any, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        module, _ = compile_spec(spec)
        o, lse, report = attngen_call(module, 0, q, k, v)
        assert not report.faults
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        c = call(ctx.spec, Shape(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1]))
        c = replace(c, q=q, k=k, v=v, o=o, lse=lse, do=do.contiguous(), dlse=dlse.contiguous())
        found, _ = run(kernels(ctx.spec), c)
        return None, found["dq"], found["dk"], found["dv"]


@pytest.mark.parametrize("spec", [CACHE, DIFF], ids=["segments", "branches"])
def test_the_whole_by_its_parts(spec: AttentionSpec) -> None:
    """A part's gradients are those of its share: dO_i and dLSE_i come out of what puts the parts together."""
    shape = Shape(1, 2, 1, 70, 90)
    q, k, v = samples.qkv(spec, shape)
    segments = samples.segments(spec, shape) if spec.segments else {}
    given = [*(q if spec.branches else (q,)), *(k if spec.branches else (k,)), v, *segments.get("past", ())]
    leaves = [x.clone().requires_grad_() for x in given]
    one = parts(spec)
    if spec.branches:
        q1, q2, k1, k2, v = leaves
        results = [Parted.apply(one[0].spec, q1, k1, v), Parted.apply(one[1].spec, q2, k2, v)]
        lse = torch.stack([x[1] for x in results])
        weights: Any = [1.0, -0.5]
    else:
        q, k, v, k2, v2 = leaves
        results = [Parted.apply(one[0].spec, q, k, v), Parted.apply(one[1].spec, q, k2, v2)]
        weights, lse = softmax_weights([x[1] for x in results])
    o = weighted_sum([x[0] for x in results], weights, False).to(torch.bfloat16)
    detached = [x.detach() for x in leaves]
    assert_close(o.detach(), spec, *_arguments(spec, detached)[:3], lse=lse.detach(), **_segments(spec, detached))
    g = torch.Generator().manual_seed(7)
    do, dlse = torch.randn(o.shape, generator=g).to(o.dtype), torch.randn(lse.shape, generator=g)
    found = torch.autograd.grad(_loss(o, lse, do, dlse), leaves)
    exact, plain = (_autograd(spec, detached, meaning, kind, do, dlse) for meaning, kind in _MEANINGS)
    for n, (got, e, p) in enumerate(zip(found, exact, plain, strict=True)):
        ulp = float(torch.finfo(got.dtype).eps * e.abs().max())
        close(f"gradient {n}", got, e, 2 * float((p.double() - e).abs().max()) + 2 * ulp)


_MEANINGS = ((dense.attention, torch.float64), (dense.same_dtype, torch.bfloat16))


def _arguments(spec: AttentionSpec, x: list[Tensor]) -> tuple[Any, Any, Any]:
    return (tuple(x[:2]), tuple(x[2:4]), x[4]) if spec.branches else (x[0], x[1], x[2])


def _segments(spec: AttentionSpec, x: list[Tensor]) -> dict[str, Any]:
    return {} if spec.branches else {"segments": {"past": (x[3], x[4])}}


def _loss(o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Tensor:
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    return (o * do.to(o.dtype)).sum() + (finite * dlse.to(finite.dtype)).sum()


def _autograd(
    spec: AttentionSpec, given: list[Tensor], meaning: Any, kind: torch.dtype, do: Tensor, dlse: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.to(kind).requires_grad_() for x in given]
    out = meaning(spec, *_arguments(spec, leaves), **_segments(spec, leaves))
    return torch.autograd.grad(_loss(out.o, out.lse, do, dlse), leaves)
