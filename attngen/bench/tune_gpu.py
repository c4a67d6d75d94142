"""Plans as kernels: compiled beside one another, checked against one another, timed together on the current GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from attngen.bench.cells import Work
from attngen.bench.tune import Rates
from attngen.diag.diagnostic import AttnError
from attngen.ir.plan import PlanSet
from attngen.ir.types import Layout

if TYPE_CHECKING:
    from attngen.jit.kernel import Attention

#: A rough measurement: milliseconds of a slot, rounds.
ROUGH_MS, ROUGH_ROUNDS = 12.0, 1
#: Largest relative difference between the O of two plans: one that is further off is wrong, however fast.
AGREE = 0.03

Kernel = Callable[..., Any]


class Gpu:
    """Compiles at most `jobs` kernels at once, in processes that see no GPU, while this one may be timing others."""

    def __init__(
        self, target: str, *, rounds: int, jobs: int, seed: int = 0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.target, self.rounds, self.jobs, self.seed, self.say = target, rounds, jobs, seed, say
        self._pool: ThreadPoolExecutor | None = None

    def compile(self, file: PlanSet) -> Future[Kernel]:
        """The callable of a file of one plan, once it is compiled. Threads only wait: their compilers are processes."""
        import torch

        from attngen.emit.module import emit
        from attngen.jit.cache import KernelCache
        from attngen.jit.kernel import Attention
        from attngen.settings import settings

        self._pool = self._pool or ThreadPoolExecutor(max(1, self.jobs))
        cache = KernelCache(settings().cache_dir, persistent=settings().use_cache)
        made: Attention = Attention(file.spec, emit(file), self.target, cache)
        return self._pool.submit(made.compile, torch.cuda.current_device())  # a thread's own is the first

    def rates(self, work: Sequence[Work], kernels: Sequence[Future[Kernel]], rough: bool) -> Rates:
        """TFLOP/s of kernels (outer) at cells (inner), each cell's timed together; 0 for one that did not run."""
        import torch

        columns = []
        for w in work:
            columns.append(self._column(w, kernels, rough))
            torch.cuda.empty_cache()
        return [tuple(row) for row in zip(*columns, strict=True)]

    def _column(self, work: Work, kernels: Sequence[Future[Kernel]], rough: bool) -> list[float]:
        from attngen.bench import runner, timing

        cell = work.cell
        q, k, v, named, pairs = runner.arguments(cell, work.params, self.seed, work.captured)
        if cell.spec.layout is Layout.BHSD:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        slots, first = dict[int, timing.Slot](), None
        for i, kernel in enumerate(kernels):
            try:
                call = partial(kernel.result(), q, k, v, **named)
                o = call()
                if first is not None and not float((o - first).float().norm() / first.float().norm()) < AGREE:
                    raise ValueError("its O is another than that of the plans before it")
            except (AttnError, RuntimeError, ValueError) as fault:  # one plan's failure must not cost the others
                self.say(f"  {cell.label}: plan {i} is out, {str(fault).splitlines()[0][:120]}")
                continue
            first = o if first is None else first
            slots[i] = timing.Slot(str(i), call, ROUGH_MS if rough else timing.SLOT_MS)
        timing.interleave(slots.values(), ROUGH_ROUNDS if rough else self.rounds, self.seed)
        times = {i: s.timing().median_ms for i, s in slots.items()}
        return [cell.flops(pairs) / times[i] / 1e9 if i in times else 0.0 for i in range(len(kernels))]
