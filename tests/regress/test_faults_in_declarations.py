"""A declaration that goes wrong says how one is written; some had no help, or that of another slip."""

from __future__ import annotations

import pytest

from attngen.diag.diagnostic import AttnError
from attngen.syntax import load_spec

#: A line, and what its help says.
LINES = {
    "param c: float > 0.0 = 0.1": "both ends included",
    "param c: float in (0.0, 1.0)": "`in 1..8`",
    "param c: float = 0.1 in 0.0..1.0": "`param window: int >= 1 = 128`",
    "param n = 3": "`param window: int >= 1 = 128`",
    "tensor x = f32[heads_q]": "`tensor bias: f32[heads_q, seqlen_q, seqlen_kv]`",
    "let x: int = 3": "a let has the type of its expression",
    "let x = s ** 2.0": "`x * x`",
    "mask = kv_idx in 3..5": "`low <= x < high`",
}


@pytest.mark.parametrize("line", LINES)
def test_help(line: str) -> None:
    with pytest.raises(AttnError) as failure:
        load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {line}\n}}\n")
    (found,) = failure.value.diagnostics
    assert LINES[line] in " ".join(found.helps)
