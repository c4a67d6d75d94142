"""Compile everything of a grid beforehand, cells side by side in processes of their own.

Most of a grid's wall time is compilation, one kernel at a time on one core, while the GPU waits. Here every cell's
kernels, ours and the peers', are called once in other processes, so that the measuring process finds them in the caches
on disk: ours, inductor's and Triton's. A rehearsal that fails is told and costs nothing: the cell is measured all the
same, and compiles then.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from attngen.bench.cells import Cell

#: What `runner.rehearse` takes beside the cell.
Arguments = tuple[Any, ...]
Work = TypeVar("Work")
#: Set to 1, FlashAttention-4 keeps what it compiles.
_FA4_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
#: Seconds after which the measurements start, whatever is still compiling.
TIMEOUT_S = 120.0


def kept_by(peers: Sequence[str]) -> tuple[str, ...]:
    """Of the peers, those whose compiled code another process finds: calling the others beforehand gains nothing."""
    return tuple(p for p in peers if p == "flex" or (p == "fa4" and os.environ.get(_FA4_KEEPS) == "1"))


def distinct(work: Sequence[Work], cell: Callable[[Work], Cell], peers: Sequence[str]) -> list[Work]:
    """Of work that compiles the same, the first: our kernels serve all shapes, those of peers one."""
    if kept_by(peers):
        return list(work)
    found: list[Work] = []
    for w in work:
        if all(cell(w).spec != cell(f).spec for f in found):
            found.append(w)
    return found


def rehearse_all(
    work: Sequence[tuple[Cell, Arguments]],
    jobs: int,
    say: Callable[[str], None],
    *,
    rehearse: Callable[..., dict[str, str]] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Rehearse the cells in `jobs` processes, telling each end; returns when all are done or `timeout_s` is over.

    Processes that are still at work then are ended, so that nothing runs beside the measurements.
    """
    from attngen.bench import runner

    one = rehearse or runner.rehearse
    begun = time.perf_counter()
    # Spawned: a CUDA context does not survive a fork.
    pool = ProcessPoolExecutor(max_workers=min(jobs, len(work)), mp_context=multiprocessing.get_context("spawn"))
    futures: dict[Future[dict[str, str]], Cell] = {pool.submit(one, cell, *args): cell for cell, args in work}
    try:
        for done in as_completed(futures, timeout=timeout_s):
            fault = done.exception()
            absent = {"": f"{type(fault).__name__}: {str(fault)[:120]}"} if fault else done.result()
            failed = "".join(f"; {name} {why}".rstrip() for name, why in absent.items() if "fail" in why or fault)
            say(f"  compiled {futures[done].label} at {time.perf_counter() - begun:.1f} s{failed}")
    except TimeoutError:
        left = sum(not f.done() for f in futures)
        say(f"  {left} cells are still compiling after {timeout_s:.0f} s: they are left to the measurement")
    finally:
        at_work = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in at_work:
            process.terminate()
        for process in at_work:
            process.join(10)
