"""A sink, score or epilogue whose text fills a line made a self-check longer than one: E9901, no kernel."""

from __future__ import annotations

import pytest

import attngen

SINK = "level[b // 2 + batch // 3, min(q_idx, seqlen_q - 1), h]"
SPECS = {
    "sink": f"sink = {SINK}",
    "score": f"score = s + {SINK} * {SINK.replace('h]', '0]')}",
    "epilogue": f"epilogue = o * {SINK} + {SINK.replace('h]', '0]')}",
}


@pytest.mark.parametrize("layout", ["bshd", "varlen"])
@pytest.mark.parametrize("clause", SPECS)
@pytest.mark.parametrize("name", ["level", "level_of_the_row_by_head"])
def test_lines(clause: str, layout: str, name: str) -> None:
    body = f"  head_dim = 64\n  layout = {layout}\n  tensor {name}: f32[batch, seqlen_q, heads_q]\n"
    text = f"attn 1\nattention a {{\n{body}  {SPECS[clause].replace('level', name)}\n}}\n"
    assert max(map(len, attngen.compile(text, only="forward").text.splitlines())) <= 120
