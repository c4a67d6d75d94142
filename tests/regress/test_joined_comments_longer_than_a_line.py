"""Head dims whose padded width differs by direction, 200 say: a name of the backward got a prefix, and a comment that
holds it was longer than a line, so that `attngen compile` ended in E9901.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import attngen

CAUSAL = Path(__file__).resolve().parents[2] / "examples" / "causal.attn"


@pytest.mark.parametrize("head_dim", [200, 208])
def test_both_directions_in_one_file(head_dim: int) -> None:
    text = attngen.compile(str(CAUSAL), head_dim=head_dim).text
    assert "BACKWARD_HEAD_DIM_QK" in text and max(map(len, text.splitlines())) <= 120
