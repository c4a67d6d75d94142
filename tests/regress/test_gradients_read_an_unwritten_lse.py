"""Gradients of captured tensors under sigmoid and relu, by the reference: they read the LSE that no kernel of these
writes, so that whatever was in its memory (NaN, a huge number) reached them.
"""

from __future__ import annotations

import math

import pytest
import torch

from attngen import samples
from attngen.ref import dense
from attngen.ref.backward import attention_backward
from attngen.syntax import load_spec

TEXT = """attn 1
attention a {
  head_dim = 64
  tensor bias: f32[heads_q, seqlen_q, seqlen_kv] grad
  normalizer = NORMALIZER
  mask  = kv_idx <= q_pos
  score = s + bias[h, q_idx, kv_idx]
}
"""


@pytest.mark.parametrize("normalizer", ["sigmoid", "relu"])
@pytest.mark.parametrize("there", [math.nan, -1e30, 1e30, math.inf])
def test_whatever_its_memory_held(normalizer: str, there: float) -> None:
    spec = load_spec(TEXT.replace("NORMALIZER", normalizer))
    shape = samples.Shape(1, 2, 1, 9, 13)
    leaves = [x.double().requires_grad_() for x in samples.qkv(spec, shape)]
    bias = samples.tensors(spec, shape)["bias"].double().requires_grad_()
    o = dense.attention(spec, *leaves, None, {"bias": bias}).o
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0)).double()
    exact = torch.autograd.grad(o, (*leaves, bias), do)
    lse = torch.full((1, 2, 9), there)
    q, k, v, learned = (x.detach() for x in (*leaves, bias))
    found = attention_backward(spec, q, k, v, o.detach(), lse, do, None, None, {"bias": learned})
    for got, want in zip((found.dq, found.dk, found.dv, found.captured["bias"]), exact, strict=True):
        assert got is not None and torch.allclose(got.double(), want, atol=1e-9)
