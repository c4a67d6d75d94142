"""`compile(group=)`: what is no count of heads is refused, not ignored; lists of keys pass on their kernel's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attngen import AttnError, build

CAUSAL = Path(__file__).resolve().parents[2] / "examples" / "causal.attn"
LISTED = "attn 1\nattention listed {{\n  head_dim = 64\n  block_sparse {{ q = {}, kv = 1, lists = given }}\n}}\n"


@pytest.mark.parametrize("group", [0, -3, 2.5, "a", True])
def test_what_is_no_count(group: Any) -> None:
    with pytest.raises(AttnError, match="`group` does not take") as failure:
        build(str(CAUSAL)).compile(group=group)
    assert failure.value.diagnostics[0].code == "E0503"


@pytest.mark.parametrize(("q", "inner"), [(4, 1), (128, 6)])
def test_heads_that_are_rows_are_no_group(q: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attn: Any = build(LISTED.format(q))
    seen: list[Any] = []
    monkeypatch.setattr(attn.inner, "compile", lambda device, *, backward, group: seen.append(group))
    attn.compile(group=6)
    attn.compile()
    assert seen == [inner, None]
