"""Texts of ragged kernels: what a plan says stands there, for every shape that a backward takes."""

from __future__ import annotations

import pytest

from attngen.emit.backward import emit_backward
from attngen.emit.module import emit
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

SPEC = """attn 1
attention ragged {{
  head_dim = {head_dim}
  layout = {layout}
  tensor bias: f32[heads_q, seqlen_kv]
  score = s + bias[h, kv_idx]
  mask = {mask}
  backward {{ deterministic = {deterministic} }}
}}
"""


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("mask", ["kv_idx <= q_pos", "kv_idx <= q_pos or kv_idx < 3"])
def test_backward(layout: str, deterministic: str, head_dim: int, mask: str) -> None:
    spec = load_spec(SPEC.format(head_dim=head_dim, layout=layout, mask=mask, deterministic=deterministic))
    text = emit_backward(plan_backward(spec, captured=())).text
    assert "def tile_coords(self, place, p, head, b)" in text and "p.first_row_tile" in text
    assert ("def sequence_of" in text) == (layout == "varlen")
    head = text.split('"""')[1]
    assert ("(batch, heads_q, seqlen_q)" in head) == (layout == "padded"), "packed rows have no batch axis"


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_forward(layout: str) -> None:
    spec = load_spec(SPEC.format(head_dim=64, layout=layout, mask="kv_idx <= q_pos", deterministic="false"))
    source = emit(plan(spec))
    names = [t["name"] for t in source.meta["tensors"]]
    assert names == [*(t.name for t in spec.lengths), "bias"] and source.meta["layout"] == layout
    assert "def order_sequences" in source.text
    assert "own.bias = self.of_sequence(p.bias, (1, own.start_kv" in source.text
