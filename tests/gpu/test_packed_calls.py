"""Calls whose query heads share row tiles, on a GPU: found by the callable, right, and with LSE where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngen import api
from attngen.passes.few import Sibling
from attngen.ref.compare import assert_close

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize(("group", "rows", "keys"), [(8, 1, 700), (8, 300, 300), (4, 17, 900), (2, 5, 333)])
def test_groups(group: int, rows: int, keys: int) -> None:
    attn = api.build(str(EXAMPLES / "causal.attn"))
    g = torch.Generator("cuda").manual_seed(rows)
    q = torch.randn(40, rows, 4 * group, 128, device="cuda", generator=g).bfloat16()
    k, v = (torch.randn(40, keys, 4, 128, device="cuda", generator=g).bfloat16() for _ in range(2))
    o, lse = attn(q, k, v, return_lse=True)
    assert list(attn.relatives.siblings) == [Sibling(group)], "as many row tiles as this gain by it"
    for b in (0, 39):
        one = slice(b, b + 1)
        assert_close(o[one], attn.spec, q[one], k[one], v[one], lse=lse[one])


def test_a_gradient_goes_through_a_packed_forward() -> None:
    attn = api.build(str(EXAMPLES / "causal.attn"))
    q = torch.randn(8, 200, 32, 128, device="cuda").bfloat16().requires_grad_()
    k, v = (torch.randn(8, 200, 4, 128, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    attn(q, k, v).float().square().sum().backward()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in wide]
    o = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    o.square().sum().backward()
    for x, y in zip((q, k, v), wide, strict=True):
        assert x.grad is not None and y.grad is not None and Sibling(8) in attn.relatives.siblings
        assert float((x.grad.float() - y.grad).norm()) < 0.02 * float(y.grad.norm())
