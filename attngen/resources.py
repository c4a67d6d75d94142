"""Finds the files that ship beside the package: grammar/ and templates/."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def root() -> Path:
    """The folder that holds `grammar` and `templates`: `_data` of an installed wheel, else the checkout."""
    package = Path(__file__).resolve().parent
    data = package / "_data"
    return data if data.is_dir() else package.parent


def read(relative: str) -> str:
    """Text of a shipped file, `read("grammar/attn.lark")`."""
    return (root() / relative).read_text(encoding="utf-8")
