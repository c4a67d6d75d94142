"""Ragged kernels of parts and over views, executed by the checker: V in K's memory; segments under one softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checked_calls import in_checker
from ptxcheck.compile import compile_spec
from ragged_calls import Call, Gradients

import attngen
from attngen.passes.parts import kernel_spec, parts
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

pytestmark = [pytest.mark.dsl, pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")]
LENGTHS = [(5, 9), (0, 7), (130, 40), (33, 0), (0, 0), (1, 200)]
VIEW = "attn 1\nattention latent {{\n  head_dim = 96\n  layout = {}\n  v = k[16:80]\n  mask = kv_idx <= q_pos\n}}\n"
#: Keys of the segment, of each sequence; where a sequence has fewer of its own, none of them is read.
PAST = (3, 0, 30, 12, 9, 0)
CACHE = """attn 1
attention cache {{
  head_dim = 64
  layout = {layout}
  tensor sinks: f32[batch, heads_q] grad
  tensor gain: f32[{keys}] grad
  mask  = kv_idx <= q_pos
  sink  = sinks[b, h]
  score = s + gain[{at}]
  segment past {{
    mask  = q_pos - kv_idx < 30 + 9 * b and b < 3
    score = s * 0.5 + gain[{at}]
  }}
  backward {{ deterministic = true }}
}}
"""


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_a_view_of_k(layout: str) -> None:
    """Steps from row to row, and to a padded batch entry, are K's; dV has memory of its own."""
    spec = kernel_spec(load_spec(VIEW.format(layout)))
    c = Call(spec, LENGTHS, tail=3, extent=(131, 201))
    c.qkv[2] = c.qkv[1][..., 16:80]
    c.verify(compile_spec(spec)[0])
    Gradients(spec).verify(c, workers=3)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_segments_under_one_softmax(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows over two sets of keys, each with lengths of its own; rows of no sequence weigh nothing.

    Gradients of all operands, and of a tensor over the call's own keys that both parts read.
    """
    spec = load_spec(CACHE.format(layout=layout, keys="seqlen_kv" if layout == "varlen" else "batch, seqlen_kv",
                                  at="kv_idx" if layout == "varlen" else "b, kv_idx"))  # fmt: skip
    attn: Any = attngen.build(spec)
    for part in attn.kernels:
        in_checker(part, monkeypatch)
    one, two = (p.spec for p in parts(spec))
    own = Call(one, LENGTHS, tail=3, extent=(131, 201))
    past = Call(two, [(m, n) for (m, _), n in zip(LENGTHS, PAST, strict=True)], tail=3, extent=(131, 90), seed=1)
    leaves = [*own.qkv, *past.qkv[1:], own.tensors["gain"], own.tensors["sinks"]]
    leaves = [x.detach().requires_grad_() for x in leaves]
    q, k, v, k2, v2, gain, sinks = leaves
    lengths = [*past.lengths.values()][1]
    o, lse = attn(q, k, v, segments={"past": (k2, v2, lengths)}, gain=gain, sinks=sinks, **own.lengths, return_lse=True)
    g = torch.Generator().manual_seed(7)
    do, dlse = torch.randn(o.shape, generator=g).to(o.dtype), torch.randn(lse.shape, generator=g)

    def loss(o: Any, lse: Any) -> Any:
        there = lse.isfinite()
        return (o * do.to(o.dtype)).sum() + (lse[there] * dlse[there].to(lse.dtype)).sum()

    def by_meaning(how: Any, kind: torch.dtype) -> list[Any]:
        wide = torch.promote_types(kind, torch.float32)
        x = [y.detach().to(kind if n < 5 else wide).requires_grad_() for n, y in enumerate(leaves)]
        found = ragged.attention(
            spec, *x[:3], own.lengths, {}, {"gain": x[5], "sinks": x[6]}, how=how,
            segments={"past": (x[3], x[4], lengths)},
        )  # fmt: skip
        return [*(y.detach() for y in found), *torch.autograd.grad(loss(*found), x)]

    exact = by_meaning(dense.attention, torch.float64)
    plain = by_meaning(dense.same_dtype, torch.bfloat16)
    assert torch.equal(lse.isinf(), exact[1].isinf())
    assert torch.where(lse.isfinite(), lse - exact[1], 0.0).abs().max() < 2e-3
    names = ("o", "dq", "dk", "dv", "dk of the segment", "dv of the segment", "gain", "sinks")
    found = [o, *torch.autograd.grad(loss(o, lse), leaves)]
    for name, got, want, other in zip(names, found, exact[:1] + exact[2:], plain[:1] + plain[2:], strict=True):
        assert got.isfinite().all(), f"{name} is not finite, or was not written"
        allowed = 2 * float((other.double() - want).abs().max()) + 2 * 2**-8 * float(want.abs().max())
        error = float((got.detach().double() - want).abs().max())
        assert error <= allowed, f"{name} is off by {error:.3e}, allowed {allowed:.3e}"
    assert all((x.grad is None and (got[x.isnan()] == 0).all()) for x, got in zip(leaves, found[1:], strict=True))
