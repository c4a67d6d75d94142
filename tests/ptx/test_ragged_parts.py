"""Ragged kernels of parts and over views, executed by the checker: V in K's memory; segments under one softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ptxcheck.compile import compile_spec
from ragged_calls import Call, Gradients

from attngen.jit.merge import softmax_weights, weighted_sum
from attngen.passes.parts import kernel_spec, parts
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
LENGTHS = [(5, 9), (0, 7), (130, 40), (33, 0), (0, 0), (1, 200)]
VIEW = "attn 1\nattention latent {{\n  head_dim = 96\n  layout = {}\n  v = k[16:80]\n  mask = kv_idx <= q_pos\n}}\n"
CACHE = """attn 1
attention cache {{
  head_dim = 64
  layout = {}
  tensor sinks: f32[batch, heads_q]
  mask = kv_idx <= q_pos
  sink = sinks[b, h]
  segment past {{
    mask = q_pos - kv_idx < 30 + 9 * b
  }}
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
def test_segments_under_one_softmax(layout: str) -> None:
    """The same rows over two sets of keys, each with lengths of its own; rows of no sequence weigh nothing."""
    spec = load_spec(CACHE.format(layout))
    one, two = parts(spec)
    own = Call(one.spec, LENGTHS, tail=3, extent=(131, 201))
    past = Call(two.spec, [(m, n) for (m, _), n in zip(LENGTHS, (3, 0, 70, 12, 9, 0), strict=True)], tail=3,
                extent=(131, 90), seed=1)  # fmt: skip
    past.qkv[0] = own.qkv[0]
    results: list[Any] = [c.verify(compile_spec(p.spec)[0]) for c, p in ((own, one), (past, two))]
    weights, lse = softmax_weights([x[1] for x in results])
    o = weighted_sum([x[0] for x in results], weights, False)
    wide = [x.double() for x in own.qkv]
    segment = (*(x.double() for x in past.qkv[1:]), [*past.lengths.values()][1])
    exact, rows = ragged.attention(
        spec, *wide, own.lengths, {}, own.tensors, how=dense.attention, segments={"past": segment}
    )
    assert torch.equal(lse.isinf(), rows.isinf()) and (o - exact).abs().max() < 2e-2
    assert torch.where(lse.isfinite(), lse - rows, 0.0).abs().max() < 2e-3
