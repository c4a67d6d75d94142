"""Calls whose wide row tiles leave SMs idle, on a GPU: they find small tiles, and those are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngen import api
from attngen.passes.few import Sibling
from attngen.ref.compare import assert_close

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CALLS = [(1, 8, 8, 512, 512), (2, 3, 3, 100, 333), (1, 1, 1, 1, 700), (4, 32, 4, 3, 900)]


@pytest.mark.parametrize(("batch", "heads_q", "heads_kv", "rows", "keys"), CALLS)
@pytest.mark.parametrize("name", ["causal", "full"])
def test_small_tiles(name: str, batch: int, heads_q: int, heads_kv: int, rows: int, keys: int) -> None:
    attn = api.build(str(EXAMPLES / f"{name}.attn"))
    g = torch.Generator("cuda").manual_seed(rows)
    q = torch.randn(batch, rows, heads_q, 128, device="cuda", generator=g).bfloat16()
    k, v = (torch.randn(batch, keys, heads_kv, 128, device="cuda", generator=g).bfloat16() for _ in range(2))
    out, lse = torch.full_like(q, float("nan")), torch.full((batch, heads_q, rows), float("nan"), device="cuda")
    attn(q, k, v, out=out, lse=lse)
    small, group = Sibling(1, (64, 128)), heads_q // heads_kv
    assert small in attn.relatives.siblings or (group > 1 and Sibling(group) in attn.relatives.siblings)
    assert_close(out, attn.spec, q, k, v, lse=lse)
    again = attn(q, k, v)
    assert torch.equal(again, out), "the same kernel from then on"


def test_a_gradient_goes_through_small_tiles() -> None:
    attn = api.build(str(EXAMPLES / "causal.attn"))
    q, k, v = (torch.randn(1, 300, 4, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    attn(q, k, v).float().square().sum().backward()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in wide), is_causal=True)
    o.square().sum().backward()
    for x, y in zip((q, k, v), wide, strict=True):
        assert x.grad is not None and y.grad is not None and Sibling(1, (64, 128)) in attn.relatives.siblings
        assert float((x.grad.float() - y.grad).norm()) < 0.02 * float(y.grad.norm())
