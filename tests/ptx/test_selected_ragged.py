"""Lists of keys in ragged layouts by their kernels: O, LSE and all gradients of the call, NaN around its sequences."""

from __future__ import annotations

import math

import pytest
import torch
from checked_calls import in_checker

import attngen
from attngen.jit.selected import SelectedAttention
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

pytestmark = [pytest.mark.dsl, pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")]
#: Rows and keys; two sequences have none of one, and one of neither.
LENGTHS = [(3, 90), (0, 7), (5, 40), (4, 0), (0, 0), (2, 9)]
LISTS = "  block_sparse { q = Q, kv = KV, lists = given }\n  backward { deterministic = true }\n"
SEEN = "  tensor seen: bool[batch, heads_kv, blocks_q, blocks_kv]\n"
TEXT = """attn 1
attention listed {
  head_dim = 64
  layout = LAYOUT
  tensor bias: f32[KEYS] grad
  tensor sinks: f32[batch, heads_q] grad
MORE  score = s + bias[AT]
  sink  = sinks[b, h]
  mask  = kv_idx <= q_pos and q_pos - kv_idx < 60 + b SEEN
}
"""


def text(layout: str, q: int, kv: int, *, mapped: bool) -> str:
    keys, at = ("seqlen_kv", "kv_idx") if layout == "varlen" else ("batch, seqlen_kv", "b, kv_idx")
    read = f" and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]" if mapped else ""
    more = SEEN if mapped else LISTS.replace("Q", str(q)).replace("KV", str(kv))
    found = TEXT.replace("LAYOUT", layout).replace("MORE", more).replace("SEEN", read)
    return found.replace("f32[KEYS]", f"f32[{keys}]").replace("[AT]", f"[{at}]")


@pytest.mark.parametrize(("layout", "q", "kv"), [("varlen", 1, 8), ("varlen", 4, 1), ("padded", 4, 1)])
def test_lists(layout: str, q: int, kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a row, and token lists of four rows of a sequence; query heads fill the tile."""
    g = torch.Generator().manual_seed(3)
    packed, batch = layout == "varlen", len(LENGTHS)
    rows, keys = (torch.tensor([n[i] for n in LENGTHS]) for i in range(2))
    shape = (int(rows.sum()) + 2, int(keys.sum()) + 3) if packed else (6, 92)
    lead = () if packed else (batch,)
    qkv = [
        torch.randn(*lead, n, h, 64, generator=g).bfloat16() for n, h in ((shape[0], 3), (shape[1], 1), (shape[1], 1))
    ]
    starts = [torch.cat((n.new_zeros(1), n.cumsum(0))).int() for n in (rows, keys)]
    names = ("cu_seqlens_q", "cu_seqlens_kv") if packed else ("seqused_q", "seqused_kv")
    lengths = dict(zip(names, starts if packed else (rows.int(), keys.int()), strict=True))
    there = [torch.arange(m) < (n.sum() if packed else n.view(-1, 1)) for m, n in zip(shape, (rows, keys), strict=True)]
    for x, which in zip(qkv, (0, 1, 1), strict=True):
        x[~there[which]] = math.nan
    learned = [torch.randn(*lead, shape[1], generator=g), torch.randn(batch, 3, generator=g)]
    count = -(-(92 if not packed else 90) // kv)
    lists = torch.randint(-1, count, (batch, 1, -(-(5 if packed else 6) // q), 60 // kv), generator=g)
    places = torch.where(lists < 0, count, lists)
    seen = torch.zeros(*lists.shape[:3], count + 1, dtype=torch.bool).scatter_(-1, places, True)[..., :count]

    attn = attngen.build(text(layout, q, kv, mapped=False))
    assert isinstance(attn, SelectedAttention)
    in_checker(attn.inner, monkeypatch)
    leaves = [x.requires_grad_() for x in (*qkv, *learned)]
    given = {"bias": leaves[3], "sinks": leaves[4]}
    o, lse = attn(*leaves[:3], blocks=lists.int(), **lengths, **given, return_lse=True)
    do, dlse = torch.randn(o.shape, generator=g), torch.randn(lse.shape, generator=g)

    def by_meaning(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        wide = [x.detach().to(kind if n < 3 else torch.promote_types(kind, torch.float32)).requires_grad_()
                for n, x in enumerate(leaves)]  # fmt: skip
        how = dense.attention if kind is torch.float64 else dense.same_dtype
        tensors = {"bias": wide[3], "sinks": wide[4], "seen": seen}
        spec = load_spec(text(layout, q, kv, mapped=True))
        out, found = ragged.attention(spec, *wide[:3], lengths, {}, tensors, how=how)
        finite = found.isfinite()
        loss = (out * do.to(out.dtype)).sum() + (found[finite] * dlse[finite].to(found.dtype)).sum()
        return out.detach(), found.detach(), torch.autograd.grad(loss, wide)

    want, want_lse, exact = by_meaning(torch.float64)
    plain, _, same = by_meaning(torch.bfloat16)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    finite = lse.isfinite()
    assert (lse - want_lse)[finite].abs().max() < 2e-3
    close("o", o, want, plain)
    loss = (o * do.to(o.dtype)).sum() + (lse[finite] * dlse[finite]).sum()
    for name, got, e, p in zip(("q", "k", "v", *given), torch.autograd.grad(loss, leaves), exact, same, strict=True):
        close(name, got, e, p)
        if name in "qkv":
            assert (got[~there[name != "q"]] == 0).all()


def close(name: str, got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> None:
    """Twice torch's error in the same dtype, and two ulps."""
    assert got.isfinite().all(), name
    allowed = 2 * (plain.double() - exact).abs().max() + 2 * 2**-8 * exact.abs().max()
    error = (got.double() - exact).abs().max()
    assert error <= allowed, f"{name} is off by {error:.3e}, allowed {allowed:.3e}"
