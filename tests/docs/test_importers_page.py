"""docs/importers.md: its program runs, and prints the text that the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attngen
from attngen.syntax import load_spec

TEXT = (Path(__file__).resolve().parents[2] / "attngen" / "docs" / "importers.md").read_text()


def test_the_program_runs_and_prints_the_text() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (text,) = re.findall(r"```\n(attn 1.*?)```", TEXT, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["found"].text == text
    assert load_spec(text) == scope["spec"] and scope["o"].shape == scope["q"].shape


def test_every_importer_is_named() -> None:
    for name in (n for n in attngen.__all__ if n.startswith("from_")):
        assert f"attngen.{name}" in TEXT, name
