"""W0401 on `bit` advised bounds on the key, or a `sorted` promise, which no set of bits can be written as."""

from __future__ import annotations

import pytest

from attngen.passes.advice import element_wise
from attngen.syntax import load_spec

BODY = "attn 1\nattention a {{\n  head_dim = 64\n  tensor word: i32[batch, {}]\n  mask = kv_idx <= q_pos and {}\n}}\n"


@pytest.mark.parametrize(
    ("axis", "term"),
    [("seqlen_q", "bit(word[b, q_idx], kv_idx)"), ("words", "bit(word[b, kv_idx // 32], kv_idx)"),
     ("seqlen_q", "not bit(word[b, q_idx], kv_idx - 3)")],
)  # fmt: skip
def test_bits(axis: str, term: str) -> None:
    (note,) = element_wise(load_spec(BODY.format(axis, term)))
    assert "the bits of `word[" in note.notes[0] and "block_sparse" in note.helps[0]
    assert "sorted" not in note.helps[0] and "write it as bounds" not in note.helps[0]
