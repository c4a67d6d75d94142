"""Counting every hoisted load left no tile at head dims over 144, and valid specs were refused (E0403)."""

from __future__ import annotations

import pytest

from attngen.search import MIN_TILE_N, plan
from attngen.syntax import load_spec

TEXT = """attn 1
attention a {{
  head_dim = {d}
  tensor bias: f32[batch, heads_q, seqlen_q, seqlen_kv]
  tensor table: f32[32, heads_q]
  tensor flag: bool[seqlen_q, seqlen_kv]
  score = s + bias[b, h, q_idx, kv_idx] + table[min(max(kv_idx - q_idx, 0), 31), h]
  mask = flag[q_idx, kv_idx] if kv_idx < 100 else kv_idx <= q_pos
}}
"""


@pytest.mark.parametrize("d", [8, 64, 128, 160, 240, 256])
def test_a_spec_full_of_loads_plans_at_every_head_dim(d: int) -> None:
    plans = plan(load_spec(TEXT.format(d=d))).plans
    # the widest heads leave registers for half of that, beside a bias and a table that are loaded ahead
    assert plans and all(p.compute.tile_n >= (MIN_TILE_N if d < 240 else 32) for p in plans)
