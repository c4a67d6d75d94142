"""The callable around real kernels, in the checker: gradients through buffers, saved tensors and permutations."""

from __future__ import annotations

import pytest
import torch
from checked_calls import in_checker
from test_epilogues import SPECS

import attngen
from attngen import samples
from attngen.ir.types import Layout
from attngen.ref import dense
from attngen.samples import Shape

pytestmark = [pytest.mark.dsl, pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")]


@pytest.mark.parametrize("name", ["gated", "headwise", "weighed"])
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shape = SPECS[name], Shape(1, 2, 1, 37, 50)
    attn = in_checker(attngen.build(spec), monkeypatch)
    swap = spec.layout is Layout.BHSD
    qkv = [(x.transpose(1, 2).contiguous() if swap else x).requires_grad_() for x in samples.qkv(spec, shape)]
    tensors = {n: x.requires_grad_() for n, x in samples.tensors(spec, shape).items()}
    with torch.no_grad():
        alone = attn(*qkv, **tensors)
    o = attn(*qkv, **tensors)
    assert torch.equal(o, alone) and o.dtype is (torch.float32 if spec.out_dtype else torch.bfloat16)
    leaves = [x.detach().double().requires_grad_() for x in (*qkv, *tensors.values())]
    q, k, v = (x.transpose(1, 2) if swap else x for x in leaves[:3])
    want = dense.attention(spec, q, k, v, None, dict(zip(tensors, leaves[3:], strict=True))).o
    want = want.transpose(1, 2) if swap else want
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(o, (*qkv, *tensors.values()), do.to(o.dtype))
    exact = torch.autograd.grad(want, leaves, do.double())
    for got, x, e in zip(found, (*qkv, *tensors.values()), exact, strict=True):
        assert got.shape == x.shape and got.dtype is x.dtype
        assert (got - e).abs().max() <= 2e-2 * e.abs().max()
