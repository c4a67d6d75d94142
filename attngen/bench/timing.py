"""How a number is taken.

A GPU at its power cap slows down under load and recovers in idle gaps, so whatever follows a gap gains clock. Hence:
the slots of a cell (one a kernel) run in random order, each warmed by its own kernel right before it is timed, several
rounds, median over the rounds. A matrix product of 8192^3 is one more slot of every round: the ceiling of this run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

#: A slot launches its kernel for about this long, warm-up not counted.
SLOT_MS, WARM_MS = 30.0, 15.0
_MAX_LAUNCHES = 400


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one launch: median of the rounds, fastest and slowest round."""

    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int


class Slot:
    """One kernel, and how often to launch it for a slot of `SLOT_MS`, or of another length with warming in scale."""

    def __init__(self, name: str, call: Callable[[], Any], slot_ms: float = SLOT_MS) -> None:
        self.name, self.call = name, call
        self.times: list[float] = []
        run_once(call, 2)
        once = max(run_once(call, 3), 1e-3)
        self.launches = max(3, min(_MAX_LAUNCHES, round(slot_ms / once)))
        self.warm = max(2, min(_MAX_LAUNCHES, round(WARM_MS * slot_ms / SLOT_MS / once)))

    def round(self) -> None:
        """Warm, then time one slot."""
        for _ in range(self.warm):
            self.call()
        self.times.append(run_once(self.call, self.launches))

    def timing(self) -> Timing:
        """Over the rounds so far."""
        return Timing(statistics.median(self.times), min(self.times), max(self.times), len(self.times))


def run_once(call: Callable[[], Any], launches: int) -> float:
    """Milliseconds a launch: by CUDA events around `launches` launches, by the clock where there is no GPU."""
    import time

    import torch

    if not torch.cuda.is_available():
        begun = time.perf_counter()
        for _ in range(launches):
            call()
        return (time.perf_counter() - begun) * 1e3 / launches
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / launches


def interleave(slots: Iterable[Slot], rounds: int, seed: int) -> None:
    """Run all slots `rounds` times, in a new random order each round."""
    order, shuffle = list(slots), random.Random(seed)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for slot in order:
            slot.round()


def matmul_slot(device: str = "cuda", size: int = 8192) -> tuple[Slot, float]:
    """The ceiling: a bf16 matrix product, and its floating-point operations."""
    import torch

    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return Slot("matmul", lambda: torch.matmul(a, b, out=out)), 2.0 * size**3


def host_us(call: Callable[[], Any], calls: int = 300) -> float:
    """Microseconds that a call keeps the host busy (no waiting for the GPU); median of 5 runs."""
    import time

    import torch

    wait: Callable[[], Any] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    found = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
        wait()
    return statistics.median(found)
