"""Stages of the pipeline in the log: what ran and how long it took, for `-v` and ATTNGEN_LOG=info."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def staged(stage: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Log the wall time of a function's calls as `attngen.<stage>` at INFO, its end by a fault too."""
    log = logging.getLogger(f"attngen.{stage}")

    def wrap(f: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(f)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            started = time.perf_counter()
            end = "failed"
            try:
                result = f(*args, **kwargs)
                end = "done"
                return result
            finally:
                log.info("%s %s in %.1f ms", stage, end, 1e3 * (time.perf_counter() - started))

        return call

    return wrap
