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
#: By a tile map: a mask that is nothing but the flag, and keys that fill a tile.
MAPPED = """head_dim = 64
  tensor lost: bool[batch, seqlen_q]
  mask = not lost[b, q_idx]
  block_sparse { q = 64, kv = 64 }"""


@pytest.mark.parametrize(
    ("layout", "body", "lengths"),
    [
        ("varlen", BODY, [(70, 90), (0, 3), (33, 33)]),
        ("padded", BODY, [(70, 90), (0, 3), (33, 33)]),
        ("varlen", MAPPED, [(70, 270)]),
    ],
    ids=["varlen", "padded", "tile map"],
)
def test_negated_flags_of_ragged_calls(layout: str, body: str, lengths: list[tuple[int, int]]) -> None:
    body = body if layout == "padded" else body.replace("batch, ", "").replace("b, ", "")
    spec = load_spec(f"attn 1\nattention a {{\n  layout = {layout}\n  {body}\n}}\n")
    call = Call(spec, lengths, (2, 1), extent=(71, 90))
    call.tensors["lost"][..., ::3] = True
    if "marks" in call.tensors:
        call.tensors["marks"][..., ::2] = True
    call.verify(compile_spec(spec)[0])
    Gradients(spec).verify(call, workers=3)
