"""In a sequence without rows nothing is read: an index made of no row's atom, `seqlen_q - 1`, was outside (E0650)."""

from __future__ import annotations

import pytest
import torch

from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec
from attngen.jit.checks import check_call
from attngen.ref import blockwise, dense, ragged
from attngen.syntax import load_spec

TEXT = """attn 1
attention last {
  head_dim = 16
  layout   = varlen
  tensor until: i32[seqlen_q]
  tensor ends: f32[seqlen_q]
  mask     = kv_idx <= until[seqlen_q - 1]
  score    = s + ends[seqlen_q - 1]
  sink     = ends[seqlen_q - 1]
  epilogue = o * ends[seqlen_q - 1]
}
"""


def spec() -> AttentionSpec:
    return load_spec(TEXT)


def call(counts: tuple[int, ...]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]:
    rows = sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    keys = torch.tensor([0, *(7 for _ in counts)]).cumsum(0).int()
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, 16, generator=g) for n in (rows, 7 * len(counts), 7 * len(counts)))
    tensors = {"until": torch.randint(0, 7, (rows,), generator=g).int(), "ends": torch.rand(rows, generator=g)}
    return {"cu_seqlens_q": starts, "cu_seqlens_kv": keys}, tensors, [q, k, v]


@pytest.mark.parametrize("how", [dense.attention, blockwise.attention])
def test_the_references_read_nothing_there(how) -> None:
    lengths, tensors, qkv = call((3, 0, 5))
    o, lse = ragged.attention(spec(), *qkv, lengths, {}, tensors, how=how)
    assert o.shape == (8, 2, 16) and o.isfinite().all() and lse.isfinite().all()


def test_a_checked_call_reads_nothing_there() -> None:
    lengths, tensors, qkv = call((0, 4))
    check_call(spec(), *qkv, {}, {**tensors, **lengths})


def test_without_keys_a_sink_reads_nothing_outside() -> None:
    """Rows without keys have their sink all the same: what it reads is still checked."""
    one = "attn 1\nattention a {\n  head_dim = 16\n  tensor t: f32[n]\n  sink = t[seqlen_kv - 1]\n}\n"
    q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 0, 1, 16)
    with pytest.raises(AttnError, match="E0650"):
        dense.attention(load_spec(one), q, k, k, {}, {"t": torch.zeros(3)})
