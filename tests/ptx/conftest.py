"""Puts `tests/` on the path, so that `ptxcheck` can be imported; compiled code is kept in pytest's cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_configure(config: pytest.Config) -> None:
    from ptxcheck import compile as compiling

    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    compiling.cache = cache.mkdir("ptxcheck") if cache is not None else None
