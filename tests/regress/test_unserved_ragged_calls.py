"""Specs of ragged layouts that no kernel serves: their callable took no lengths. And starts that no batch has."""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.kernel.AttngenNotice")
LENGTHS = [3, 0, 7, 1]


def text(more: str, layout: str = "varlen") -> str:
    return f"attn 1\nattention a {{\n  head_dim = 64\n  layout = {layout}\n  mask = kv_idx <= q_pos\n  {more}\n}}\n"


def operands(*shape: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, h, 64, generator=g).bfloat16().requires_grad_() for h in (4, 2, 2)]


@pytest.mark.parametrize("more", ["block_sparse { q = 64, kv = 64 }", "v = k[0:32]"])
@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_values_and_gradients(layout: str, more: str) -> None:
    spec = load_spec(text(more, layout))
    qkv = operands(12) if layout == "varlen" else operands(4, 8)
    counts = torch.tensor(LENGTHS).int()
    if layout == "varlen":
        lengths = {"cu_seqlens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int()}
    else:
        lengths = {"seqused_q": counts, "seqused_kv": counts}
    if "k[" in more:
        qkv = qkv[:2]
    o, lse = build(spec)(*qkv, return_lse=True, check=True, **lengths)
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    q, k = leaves[:2]
    v = k[..., :32] if "k[" in more else leaves[2]
    want, rows = ragged.attention(spec.replace(v_view_start=None), q, k, v, lengths, how=dense.attention)
    assert (o - want).abs().max() < 2e-2 and torch.allclose(lse.double(), rows, atol=2e-3)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(o, qkv, do.to(o.dtype))
    for got, exact in zip(found, torch.autograd.grad(want, leaves, do.double()), strict=True):
        assert (got - exact).abs().max() < 3e-2 * exact.abs().max()


@pytest.mark.parametrize("starts", [[], [0, 10], [0]])
def test_starts_of_another_batch(starts: list[int]) -> None:
    attn, (q, k, v) = build(text("")), operands(10)
    given = torch.tensor(starts).int()
    named = {"cu_seqlens_q": torch.tensor([0, 3, 10]).int(), "cu_seqlens_kv": given}
    for call in (named, {"cu_seqlens_q": given} if not starts else named):
        with pytest.raises(AttnError) as caught:
            attn(q, k, v, **call)
        assert caught.value.diagnostics[0].code == "E0607" and "1 to broadcast" not in str(caught.value)


def test_the_rank_is_said_before_the_lengths() -> None:
    with pytest.raises(AttnError, match="`q` has 3 axes"):
        build(text("", "padded"))(*operands(10))


def test_a_reason_is_said_once() -> None:
    two = "branch one {\n  weight = 1.0\n  }\n  branch two {\n  weight = -0.5\n  }"
    with pytest.warns(UserWarning, match="head_dim = 320"):
        attn = build(text(two).replace("head_dim = 64", "head_dim = 320"))
    assert len(attn.reasons) == 1
