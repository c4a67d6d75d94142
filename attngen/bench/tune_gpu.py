"""Plans as kernels: compiled beside one another, checked against one another, timed together on the current GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from attngen.bench.cells import Work
from attngen.bench.tune import Rates
from attngen.diag.diagnostic import AttnError
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.plan import PlanSet
from attngen.ir.tuned import Direction
from attngen.ir.types import Layout

if TYPE_CHECKING:
    from attngen.source import KernelSource

#: A rough measurement: milliseconds of a slot, rounds.
ROUGH_MS, ROUGH_ROUNDS = 12.0, 1
#: Largest relative difference between O, or a gradient, of two plans: one that is further off is wrong, however fast.
AGREE = 0.03

Kernel = Callable[..., Any]


class Gpu:
    """Compiles at most `jobs` kernels at once, in processes that see no GPU, while this one may be timing others."""

    def __init__(
        self, target: str, *, rounds: int, jobs: int, seed: int = 0, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self.target, self.rounds, self.jobs, self.seed, self.say = target, rounds, jobs, seed, say
        self._pool: ThreadPoolExecutor | None = None
        self._forwards: dict[str, KernelSource] = {}

    def compile(self, file: PlanSet | BackwardPlanSet) -> Future[Kernel]:
        """The callable of a file of one plan, once it is compiled; of a backward with the planner's own forward.

        Threads only wait: their compilers are processes.
        """
        import torch

        from attngen import generate
        from attngen.jit.cache import KernelCache
        from attngen.jit.kernel import Attention
        from attngen.settings import settings

        self._pool = self._pool or ThreadPoolExecutor(max(1, self.jobs))
        cache = KernelCache(settings().cache_dir, persistent=settings().use_cache)
        device = torch.cuda.current_device()  # a thread's own is the first
        if isinstance(file, PlanSet):
            return self._pool.submit(Attention(file.spec, generate.emit(file), self.target, cache).compile, device)
        key = file.spec.model_dump_json()
        if key not in self._forwards:
            self._forwards[key] = generate.emit(generate.plan(file.spec, self.target))
        source = generate.emit_backward(file)
        made = Attention(file.spec, self._forwards[key], self.target, cache, backward=lambda captured: source)
        return self._pool.submit(partial(made.compile, device, backward=("q", "k", "v")))

    def close(self) -> None:
        """Let go of what still waits to be compiled."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def rates(
        self, work: Sequence[Work], kernels: Sequence[Future[Kernel]], rough: bool, direction: Direction
    ) -> Rates:
        """TFLOP/s of kernels (outer) at cells (inner), each cell's timed together; 0 for one that did not run."""
        import torch

        columns = []
        for w in work:
            columns.append(self._column(w, kernels, rough, direction == "backward"))
            torch.cuda.empty_cache()
        return [tuple(row) for row in zip(*columns, strict=True)]

    def _column(self, work: Work, kernels: Sequence[Future[Kernel]], rough: bool, backward: bool) -> list[float]:
        import torch

        from attngen.bench import runner, timing
        from attngen.bench.backward import backward_of, leaves

        cell = work.cell
        q, k, v, named, pairs = runner.arguments(cell, work.params, self.seed, work.captured)
        if cell.spec.layout is Layout.BHSD:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        if backward:
            q, k, v = leaves(q, k, v)
        slots, first, do = dict[int, timing.Slot](), None, None
        for i, kernel in enumerate(kernels):
            try:
                call = partial(kernel.result(), q, k, v, **named)
                if backward:
                    do = torch.randn_like(call().detach()) if do is None else do
                    call = partial(backward_of(call, (q, k, v), do))
                found = call() if backward else (call(),)
                if first is not None and not all(_gap(x, y) < AGREE for x, y in zip(found, first, strict=True)):
                    raise ValueError("it computes something else than the plans before it")
            except (AttnError, RuntimeError, ValueError) as fault:  # one plan's failure must not cost the others
                self.say(f"  {cell.label}: plan {i} is out, {str(fault).splitlines()[0][:120]}")
                continue
            first = found if first is None else first
            slots[i] = timing.Slot(str(i), call, ROUGH_MS if rough else timing.SLOT_MS)
        timing.interleave(slots.values(), ROUGH_ROUNDS if rough else self.rounds, self.seed)
        times = {i: s.timing().median_ms for i, s in slots.items()}
        flops = cell.flops(pairs, backward=backward)
        return [flops / times[i] / 1e9 if i in times else 0.0 for i in range(len(kernels))]


def _gap(x: Any, y: Any) -> float:
    """Relative difference; NaN where one has a NaN, which is no agreement."""
    return float((x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-9))
