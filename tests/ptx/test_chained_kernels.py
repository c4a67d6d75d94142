"""Kernels that add to what the one before gave, executed by the checker: O and LSE of calls without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checked_calls import in_checker
from ragged_calls import Call

import attngen
from attngen.passes.parts import parts
from attngen.ref import dense, ragged
from attngen.ref.compare import assert_close
from attngen.syntax import load_spec

pytestmark = [pytest.mark.dsl, pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")]
#: Row 0 keeps no key of its own, and in the first segment neither; of the second every row keeps some.
SEGMENTS = """attn 1
attention cascade {
  head_dim = 64
  tensor sinks: f32[heads_q]
  tensor gate: bf16[batch, seqlen_q, heads_q, head_dim_v]
  mask     = kv_idx <= q_pos and q_idx > 0
  sink     = sinks[h]
  epilogue = o * sigmoid(gate[b, q_idx, h, d])
  segment past {
    mask = q_idx > 1 and q_idx + kv_idx < 90
  }
  segment more { }
}
"""
BRANCHES = """attn 1
attention diff {
  head_dim = 64
  layout = bhsd
  param least: float = 0.5
  tensor lam: f32[heads_q]
  mask = kv_idx <= q_pos
  epilogue = o * 0.25
  branch one { }
  branch two {
    weight = -lam[h] - least
    mask   = q_pos - kv_idx < 20
  }
}
"""
#: Rows and own keys of each sequence, and its keys of the segment, which reads a tensor over the own ones.
LENGTHS, PAST = [(5, 9), (0, 7), (130, 40), (33, 0), (0, 0), (1, 200)], (3, 0, 30, 12, 9, 0)
PACKED = """attn 1
attention packed {
  head_dim = 64
  layout = varlen
  tensor gain: f32[seqlen_kv]
  mask  = kv_idx <= q_pos
  score = s + gain[kv_idx]
  segment past {
    mask  = q_pos - kv_idx < 30 + 9 * b and b < 3
    score = s * 0.5 + gain[kv_idx]
  }
}
"""


def built(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its parts are left alone: a launch of one fails."""
    attn: Any = attngen.build(text)
    for kernel in attn.chain.kernels:
        in_checker(kernel, monkeypatch)
    for part in attn.kernels:
        part.launcher.ready.clear()
        monkeypatch.setattr(part.launcher, "reference", None)
    return attn


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels, fp32 between them."""
    attn = built(SEGMENTS, monkeypatch)
    q, gate = random(1, 70, 2, 64, seed=0), random(1, 70, 2, 64, seed=1)
    k, v, k2, v2, k3, v3 = (random(1, n, 1, 64, seed=2 + i) for i, n in enumerate((90, 90, 130, 130, 33, 33)))
    segments, sinks = {"past": (k2, v2), "more": (k3, v3)}, torch.tensor([0.5, -torch.inf])
    named = {"sinks": sinks, "gate": gate}
    o, lse = attn(q, k, v, segments=segments, **named, return_lse=True)
    assert_close(o, attn.spec, q, k, v, lse=lse, tensors=named, segments=segments)
    assert torch.equal(attn(q, k, v, segments=segments, **named), o)


def test_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds its weighted O; LSE by branch, into memory that is given."""
    attn = built(BRANCHES, monkeypatch)
    q, k = ([random(1, h, n, 64, seed=s + i) for i in range(2)] for h, n, s in ((2, 70, 0), (1, 90, 2)))
    v, lam = random(1, 1, 90, 64, seed=5), torch.tensor([0.25, -2.0])
    rows = torch.full((2, 1, 2, 70), torch.nan)
    o, lse = attn(tuple(q), tuple(k), v, lam=lam, least=0.75, lse=rows, return_lse=True)
    assert lse is rows
    exact, plain = (
        how(
            attn.spec,
            *[[x.transpose(1, 2) for x in y] for y in (q, k)],
            v.transpose(1, 2),
            {"least": 0.75},
            {"lam": lam},
        )
        for how in (dense.attention, dense.same_dtype)
    )
    assert (lse - exact.lse).abs().max() < 2e-3
    error, other = ((x.double() - exact.o).abs().max() for x in (o.transpose(1, 2), plain.o))
    assert error <= 2 * other + 2**-9


def test_ragged_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences without rows, own keys or keys of the segment, and NaN around them."""
    attn = built(PACKED, monkeypatch)
    one, two = (p.spec for p in parts(load_spec(PACKED)))
    own = Call(one, LENGTHS, tail=3)
    past = Call(two, [(m, n) for (m, _), n in zip(LENGTHS, PAST, strict=True)], tail=3, seed=1)
    q, k, v, (_, k2, v2), gain = *own.qkv, past.qkv, own.tensors["gain"]
    lengths = past.lengths["cu_seqlens_kv"]
    o, lse = attn(q, k, v, segments={"past": (k2, v2, lengths)}, gain=gain, **own.lengths, return_lse=True)
    exact, plain = (
        ragged.attention(
            attn.spec, *(x.to(kind) for x in (q, k, v)), own.lengths, {}, {"gain": gain}, how=how,
            segments={"past": (k2.to(kind), v2.to(kind), lengths)},
        )
        for how, kind in ((dense.attention, torch.float64), (dense.same_dtype, torch.bfloat16))
    )  # fmt: skip
    assert torch.equal(lse.isinf(), exact[1].isinf()) and o.isfinite().all()
    assert torch.where(lse.isfinite(), lse - exact[1], 0.0).abs().max() < 2e-3
    error, other = ((x.double() - exact[0]).abs().max() for x in (o, plain[0]))
    assert error <= 2 * other + 2**-9
