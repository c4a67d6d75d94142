"""Shared by all tests. Being here, it also puts `tests/` on the path, so that `builders` can be imported."""

from __future__ import annotations

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each worker: threads of theirs would only wait for each other
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "attngen", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("attngen")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "compile kernels with places in the source, which the PTX checker's reports then name"
    parser.addoption("--source-lines", action="store_true", help=text)


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through it for garbage again and again takes a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_configure(config: pytest.Config) -> None:
    """Compiled kernels are kept in pytest's cache, for the other processes of a session and for the next one."""
    from ptxcheck import compile as compiling

    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    compiling.cache = cache.mkdir("ptxcheck") if cache is not None else None
    compiling.source_lines = config.getoption("--source-lines")
