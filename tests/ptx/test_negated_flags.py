"""`not marks[b, q_idx]` kept every row of a ragged call: a sequence's part of a bool tensor was read as bytes, and `~1`
is no zero. Masks that are tested by limits, scores and tile maps took it for true.
"""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_spec
from ragged_calls import Call, Gradients

from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
BODY = """head_dim = 64
  tensor lost: bool[batch, seqlen_q]
  tensor marks: bool[batch, seqlen_kv]
  score = s if not marks[b, kv_idx] else s - 2.0
  mask = kv_idx <= q_pos and not lost[b, q_idx]"""
LENGTHS = [(70, 90), (0, 3), (33, 33)]


@pytest.mark.parametrize(
    ("layout", "clause"),
    [("varlen", ""), ("padded", ""), ("varlen", "block_sparse { q = 64, kv = 64 }")],
    ids=["varlen", "padded", "tile map"],
)
def test_negated_flags_of_ragged_calls(layout: str, clause: str) -> None:
    body = BODY if layout == "padded" else BODY.replace("batch, ", "").replace("b, ", "")
    spec = load_spec(f"attn 1\nattention a {{\n  layout = {layout}\n  {body}\n  {clause}\n}}\n")
    call = Call(spec, LENGTHS, (2, 1), extent=(71, 90))
    call.tensors["lost"][..., ::3] = call.tensors["lost"][..., 64:] = call.tensors["marks"][..., ::2] = True
    call.verify(compile_spec(spec)[0])
    Gradients(spec).verify(call, workers=3)
