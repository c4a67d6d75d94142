"""Specs of ragged layouts that no kernel serves: their callable took no lengths. And starts that no batch has."""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build
from attngen.jit.lists import lists_of
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
LENGTHS = [3, 0, 7, 1]


def text(more: str, layout: str = "varlen") -> str:
    return f"attn 1\nattention a {{\n  head_dim = 64\n  layout = {layout}\n  mask = kv_idx <= q_pos\n  {more}\n}}\n"


def operands(*shape: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, h, 64, generator=g).bfloat16().requires_grad_() for h in (4, 2, 2)]


@pytest.mark.parametrize("more", ["block_sparse { q = 1, kv = 4, lists = given }", "v = k[0:32]"])
@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_values_and_gradients(layout: str, more: str) -> None:
    spec = load_spec(text(more, layout))
    qkv = operands(12) if layout == "varlen" else operands(4, 8)
    counts = torch.tensor(LENGTHS).int()
    if layout == "varlen":
        lengths = {"cu_seqlens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int()}
    else:
        lengths = {"seqused_q": counts, "seqused_kv": counts}
    tensors, given = {}, {}
    if "k[" in more:
        qkv = qkv[:2]
    else:  # a list of blocks of each row, of those that the sequence has
        kept = torch.rand(4, 1, 8, 3 if layout == "varlen" else 2, generator=torch.Generator().manual_seed(3)) < 0.6
        kept &= torch.arange(kept.shape[-1]) * 4 < counts.view(-1, 1, 1, 1)
        tensors, given = {"blocks": kept}, {"blocks": lists_of(kept)}
    o, lse = build(spec)(*qkv, return_lse=True, check=True, **lengths, **given)
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    q, k = leaves[:2]
    v = k[..., :32] if "k[" in more else leaves[2]
    want, rows = ragged.attention(spec.replace(v_view_start=None), q, k, v, lengths, None, tensors, how=dense.attention)
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


@pytest.mark.parametrize("layout", ["bshd", "varlen"])
def test_largest_scores_of_a_spec_without_a_kernel(layout: str) -> None:
    """`output { max_logit = true }` was declared, and the callable said to declare it."""
    spec = load_spec(text("block_sparse { q = 1, kv = 4, lists = given }\n  output { max_logit = true }", layout))
    q, k, v = operands(*((12,) if layout == "varlen" else (1, 12)))
    lengths = {"cu_seqlens_q": torch.tensor([0, 12]).int()} if layout == "varlen" else {}
    blocks = torch.arange(3, dtype=torch.int32).expand(1, 1, 12, 3)
    _, lse, top = build(spec)(q, k, v, return_lse=True, return_max_logit=True, blocks=blocks, **lengths)
    rows, keys = (x if layout == "varlen" else x[0] for x in (q, k))
    scores = torch.einsum("ihd,jhd->hij", rows.double(), keys.double().repeat_interleave(2, 1)) / 8
    want = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).amax(-1)
    assert top.shape == lse.shape and (top.reshape(4, 12) - want).abs().max() < 1e-4 and not top.requires_grad
    with pytest.raises(AttnError, match="declare"):
        build(text("block_sparse { q = 1, kv = 4, lists = given }", "varlen"))(
            *operands(12), return_max_logit=True, cu_seqlens_q=torch.tensor([0, 12]).int(), blocks=blocks
        )
