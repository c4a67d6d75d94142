"""Names of captured tensors, which may have up to 64 characters, made lines longer than 120: E9901, no kernel.

In ragged layouts a name of ten was too long where a tensor has two axes of a sequence; in a tile map an index of two
clamps was, whatever the name.
"""

from __future__ import annotations

import pytest

import attngen

NAMES = ("position_bias", "the_positions_of_documents_in_a_sequence", "the_positions_of_documents_x" * 2)
#: Clauses over a tensor called NAME, in layouts where it has an axis of all sequences, or not.
SPECS = {
    "two axes": ("f32[heads_q, seqlen_q, seqlen_kv] grad", "score = s + NAME[h, q_idx, kv_idx]", ("varlen", "padded")),
    "sums": ("f32[heads_q, seqlen_kv] grad", "score = s + NAME[h, kv_idx]", ("varlen",)),
    "sums of rows": ("f32[heads_q, seqlen_q] grad", "sink = NAME[h, q_idx]", ("varlen",)),
    "outputs": ("f32[seqlen_q, heads_q, head_dim_v] grad", "epilogue = o * NAME[q_idx, h, d]", ("varlen", "bshd")),
    "outputs of rows": ("f32[heads_q, seqlen_q] grad", "epilogue = o * NAME[h, q_idx]", ("varlen",)),
    "sums of pairs": ("f32[heads_q, 64] grad", "score = s + NAME[h, abs(q_idx - kv_idx) % 64]", ("varlen", "bshd")),
    "tables": ("i32[seqlen_kv] sorted", "mask = NAME[max(q_pos, 0)] == NAME[kv_idx]", ("varlen", "bshd")),
    "extremes": ("i32[seqlen_q]", "mask = kv_idx < NAME[q_idx]", ("padded", "bshd")),
    "map": (
        "i32[seqlen_kv]",
        "mask = NAME[clamp(q_pos - 40, 0, seqlen_kv - 1)] == NAME[kv_idx]\n  block_sparse { q = 64, kv = 64 }",
        ("varlen", "bshd"),
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("clause", "layout"), [(c, layout) for c, x in SPECS.items() for layout in x[2]])
def test_lines(clause: str, layout: str, name: str) -> None:
    kind, body, _ = SPECS[clause]
    body = f"  head_dim = 64\n  layout = {layout}\n  tensor NAME: {kind}\n  {body}\n"
    text = f"attn 1\nattention a {{\n{body}}}\n".replace("NAME", name)
    lines = attngen.compile(text).text.splitlines()
    assert max(map(len, lines)) <= 120


def test_many_tensors() -> None:
    """The self-check of a ragged kernel says in a line which axes of each tensor hold all sequences."""
    names = [f"x{i}" for i in range(40)]
    declared = "".join(f"  tensor {n}: f32[heads_q]\n" for n in names)
    score = " + ".join(f"{n}[h]" for n in names)
    text = f"attn 1\nattention many {{\n  head_dim = 64\n  layout = varlen\n{declared}  score = s + {score}\n}}\n"
    lines = attngen.compile(text, only="forward").text.splitlines()
    assert max(map(len, lines)) <= 120


def test_segment_over_documents() -> None:
    """The kernel over a segment reads the call's own keys where their sequence begins: an index as long as a line."""
    text = """attn 1
attention cache {
  head_dim = 64
  layout = varlen
  tensor doc: i32[seqlen_kv] sorted
  segment past {
    mask = doc[kv_idx] == doc[max(q_pos, 0)]
  }
  block_sparse { q = 64, kv = 64 }
}
"""
    attn = attngen.build(text)
    assert max(len(line) for part in attn.kernels for line in part.source.text.splitlines()) <= 120  # type: ignore[union-attr]
