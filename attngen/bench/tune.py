"""Tuning: measure the plans that the search could choose, and record those that are fastest on the GPU at hand.

Two rounds, each one set of kernels, compiled side by side and timed together as every benchmark here is (random order,
each warmed by itself, medians): first every tile as the planner would schedule it, then for the winners what the
planner decides by rule: order of tiles, ping-pong, stages, where O lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from attngen import search
from attngen.bench.cells import Cell
from attngen.ir.plan import KernelPlan, PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.tuned import Choice, Rate, Tuned
from attngen.ir.types import Layout
from attngen.passes import choose
from attngen.passes.cost import launch_cycles
from attngen.passes.launch import unpaired
from attngen.passes.mask_form import mask_form
from attngen.tuned import spec_class

if TYPE_CHECKING:
    from attngen.samples import Shape

#: TFLOP/s of plans (outer) at the lengths (inner).
Rates = list[tuple[float, ...]]
Measure = Callable[[Sequence[KernelPlan]], Rates]
#: Tiles of the first round, best by the planner's ranking first; winners that go on to the second.
CANDIDATES, FINALISTS = 14, 3


@dataclass(frozen=True)
class Outcome:
    """A tuning run: the record, and how far the planner's own choice was behind at each length (0.03: 3 %)."""

    record: Tuned
    static: tuple[Choice, ...]
    behind: tuple[float, ...]


def tune(
    spec: AttentionSpec,
    target: str,
    chip: str,
    lengths: Sequence[int],
    measure: Measure,
    candidates: int = CANDIDATES,
) -> Outcome:
    """Measure, choose, compare with the planner's choice. `measure` times plans at `lengths`, ascending.

    Raises: AttnError E04xx where no plan serves the spec.
    """
    planned = search.plan(spec, target)
    orders = [sorted(planned.others, key=partial(_cycles, n)) for n in reversed(lengths)]
    ranked = list(dict.fromkeys(chain.from_iterable(zip(*orders, strict=True))))  # the best of each length in turn
    tiles = {p.name: p for p in reversed([*planned.plans, *ranked])}  # of each tile the first; O's place comes later
    plans = [*planned.plans, *(p for p in ranked if tiles[p.name] is p)][: max(candidates, len(planned.plans))]
    rates = measure(plans)
    more = _distinct([v for p in _winners(plans, rates) for v in variations(spec, p)], known=plans)
    if more:
        rates += measure(more)
        plans += more
    chosen, limits = pick(plans, rates, tuple(lengths))
    record = Tuned(
        chip=chip,
        spec_class=spec_class(spec),
        lengths=tuple(lengths),
        plans=tuple(search.choice_of(plans[i]) for i in chosen),
        limits=limits,
        rates=tuple(Rate(choice=search.choice_of(p), tflops=r) for p, r in zip(plans, rates, strict=True)),
    )
    static = [plans.index(planned.plans[planned.index(n, n)]) for n in lengths]
    behind = tuple(max(r[j] for r in rates) / rates[i][j] - 1.0 for j, i in enumerate(static))
    return Outcome(record, tuple(search.choice_of(p) for p in planned.plans), behind)


def _cycles(seqlen: int, p: KernelPlan) -> float:
    return launch_cycles(p, seqlen)


def variations(spec: AttentionSpec, p: KernelPlan) -> list[KernelPlan]:
    """The same tile with the other order, with and without ping-pong, with O in the other place, with a stage more and
    less, with CTAs in pairs and apart, where that fits.
    """
    form, own = mask_form(spec), search.choice_of(p)
    changes: tuple[dict[str, object], ...] = (
        {"order": "linear" if own.order == "lpt" else "lpt"},
        {"pingpong": not own.pingpong},
        {"o_in_q": not own.o_in_q},
        {"stages": own.stages + 1},
        {"stages": own.stages - 1},
        {"pairs": not own.pairs and not unpaired(spec)},
    )
    found = (search.plan_choice(spec, form, own.replace(**c)) for c in changes if c.get("stages") != 0)
    return [v for v in found if isinstance(v, KernelPlan)]


def pick(
    plans: Sequence[KernelPlan], rates: Rates, lengths: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which plans one file should hold, and the lengths up to which each serves: as the search splits, by measurement.

    All plans of a file share a skeleton, and a file holds a tile once, in one of its variations; of what that leaves,
    the split is taken that loses least, and a further plan only where it saves more than noise.
    """
    best = [max(r[j] for r in rates) for j in range(len(lengths))]
    slower = [[b / t for b, t in zip(best, r, strict=True)] for r in rates]
    options = []
    for skeleton in dict.fromkeys(choose.skeleton(p) for p in plans):
        tiles: dict[str, list[int]] = {}
        for i, p in enumerate(plans):
            if choose.skeleton(p) == skeleton:
                tiles.setdefault(p.name, []).append(i)
        for one_each in product(*tiles.values()):
            options += choose.splits({i: slower[i] for i in one_each}, lengths)
    return min(
        ((loss + len(chosen) * choose.WORTH * len(lengths), chosen, limits) for loss, chosen, limits in options),
    )[1:]


def _distinct(plans: Iterable[KernelPlan], known: Sequence[KernelPlan] = ()) -> list[KernelPlan]:
    seen = {search.choice_of(p) for p in known}
    found = []
    for p in plans:
        if search.choice_of(p) not in seen:
            seen.add(search.choice_of(p))
            found.append(p)
    return found


def _winners(plans: Sequence[KernelPlan], rates: Rates) -> list[KernelPlan]:
    """The best plan at each length, then the best on the whole, at most FINALISTS."""
    lengths = range(len(rates[0]))
    by_length = [max(range(len(plans)), key=lambda i: rates[i][j]) for j in lengths]
    overall = sorted(range(len(plans)), key=lambda i: -math.prod(rates[i]))
    return [plans[i] for i in list(dict.fromkeys([*by_length, *overall]))[:FINALISTS]]


class OnGpu:
    """`Measure` on the current CUDA device: compiles `jobs` kernels at once, then times all of them cell by cell."""

    def __init__(
        self,
        cells: Sequence[Cell],
        params: Mapping[str, Any],
        target: str,
        *,
        rounds: int,
        jobs: int,
        seed: int = 0,
        captured: Callable[[Shape], dict[str, Any]] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.cells, self.params, self.target, self.captured = cells, params, target, captured
        self.rounds, self.jobs, self.seed, self.say = rounds, jobs, seed, say

    def __call__(self, plans: Sequence[KernelPlan]) -> Rates:
        import torch

        calls = self._compiled(plans)
        columns = []
        for cell in self.cells:
            columns.append(self._rates(cell, calls))
            self.say(f"  {cell.label}: best {max(columns[-1]):.0f} TFLOP/s of {len(calls)} plans")
            torch.cuda.empty_cache()
        return [tuple(row) for row in zip(*columns, strict=True)]

    def _rates(self, cell: Cell, calls: Sequence[Callable[..., Any]]) -> list[float]:
        from attngen.bench import runner, timing

        q, k, v, named, pairs = runner.arguments(cell, self.params, self.seed, self.captured)
        if cell.spec.layout is Layout.BHSD:
            q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        slots = [timing.Slot(str(i), partial(f, q, k, v, **named)) for i, f in enumerate(calls)]
        timing.interleave(slots, self.rounds, self.seed)
        return [cell.flops(pairs) / s.timing().median_ms / 1e9 for s in slots]

    def _compiled(self, plans: Sequence[KernelPlan]) -> list[Callable[..., Any]]:
        import torch

        from attngen.emit.module import emit
        from attngen.jit.cache import KernelCache
        from attngen.jit.kernel import Attention
        from attngen.settings import settings

        spec, cache = self.cells[0].spec, KernelCache(settings().cache_dir, persistent=settings().use_cache)
        made = [
            Attention(spec, emit(PlanSet(spec=spec, target=self.target, plans=(p,), limits=())), self.target, cache)
            for p in plans
        ]
        device = torch.cuda.current_device()  # a thread's own is the first
        with ThreadPoolExecutor(max(1, self.jobs)) as pool:
            for done, _ in enumerate(pool.map(lambda a: a.compile(device), made), 1):
                self.say(f"  compiled {done} of {len(made)}")
        return list(made)
