"""Tuning: which plans to measure, and of those measured which to record. Nothing here touches a GPU.

Two rough rounds, each one set of kernels: every tile as the planner would schedule it, then for the winners what the
planner decides by rule: order of tiles, ping-pong, stages, where O lies, CTAs in pairs, maxima (of a backward nothing
more: its steps are all there is). What comes near the best, and what the planner would have taken, is measured once
more, carefully and side by side; only that is recorded.

What a plan does not vary is no choice here either: the register split follows from the warpgroups, the rescale policy
from the scores, P stays in registers, and loops are unrolled and exponentials made as the templates say.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from attngen import search, search_backward
from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.ir.plan import KernelPlan, Maxima, PlanSet, plan_at
from attngen.ir.spec import AttentionSpec
from attngen.ir.tuned import Choice, Direction, Rate, Tuned
from attngen.passes import choose
from attngen.passes.backward import choose as choose_backward
from attngen.passes.cost import launch_cycles
from attngen.passes.launch import unpaired
from attngen.passes.mask_form import mask_form
from attngen.tuned import pack_of, spec_class

log = logging.getLogger("attngen.tune")
Plan = KernelPlan | BackwardPlan
#: TFLOP/s of plans (outer) at the lengths (inner); 0 for a plan that did not run.
Rates = list[tuple[float, ...]]
#: Tiles of the first round, best by the planner's ranking first; winners that go on to the second.
CANDIDATES, FINALISTS = 14, 3
#: Plans within this share of the best at some length are measured carefully, at most so many beside the planner's.
NEAR, CAREFUL = 0.06, 8


@dataclass(frozen=True)
class Ask:
    """Plans to be measured, of one kernel file each; `rough`: to tell which are worth a careful measurement."""

    planned: PlanSet | BackwardPlanSet
    plans: tuple[Plan, ...]
    rough: bool

    def alone(self, p: Plan) -> PlanSet | BackwardPlanSet:
        """A file of one of them."""
        one: dict[str, object] = {"plans": (p,), "limits": (), "rejected": (), "others": ()}
        if isinstance(self.planned, PlanSet):
            return self.planned.replace(**one, small=None)
        return self.planned.replace(**one)


Measure = Callable[[Ask], Rates]


@dataclass(frozen=True)
class Outcome:
    """A tuning run: the record, and the rates of the planner's own choice and of the fastest plan at each length."""

    record: Tuned
    static: tuple[Choice, ...]
    static_rates: tuple[float, ...]
    best_rates: tuple[float, ...]
    #: Plans that were measured, roughly or not.
    tried: int

    @property
    def chosen_rates(self) -> tuple[float, ...]:
        """Rates of the recorded plans at each length."""
        r, rates = self.record, {x.choice: x.tflops for x in self.record.rates}
        return tuple(rates[r.plans[plan_at(r.limits, n)]][j] for j, n in enumerate(r.lengths))

    @property
    def behind(self) -> tuple[float, ...]:
        """How far the planner's own choice was behind at each length (0.03: 3 %)."""
        return tuple(_over(b, s) - 1.0 for b, s in zip(self.best_rates, self.static_rates, strict=True))


def tune(
    spec: AttentionSpec,
    target: str,
    chip: str,
    lengths: Sequence[int],
    measure: Measure,
    candidates: int = CANDIDATES,
    direction: Direction = "forward",
) -> Outcome:
    """Measure, choose, compare with the planner's choice. `measure` times plans at `lengths`, ascending.

    Raises: AttnError E04xx where no plan serves the spec.
    """
    run = steps(spec, target, chip, lengths, candidates, direction=direction)
    ask = next(run)
    while True:
        try:
            ask = run.send(measure(ask))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def steps(
    spec: AttentionSpec,
    target: str,
    chip: str,
    lengths: Sequence[int],
    candidates: int = CANDIDATES,
    finalists: int = FINALISTS,
    title: str = "",
    direction: Direction = "forward",
    known: Tuned | None = None,
    usual: Callable[[PlanSet | BackwardPlanSet], Sequence[int]] | None = None,
) -> Generator[Ask, Rates, Outcome]:
    """`tune` as a coroutine: asks for measurements, is sent rates, so that whoever measures may serve several.

    `known`: the record of an earlier run, whose plans compete again. `usual`: which of the planner's plans a call
    takes at each length, where that is not by length alone.
    """
    planned = search.plan(spec, target) if direction == "forward" else search_backward.plan_backward(spec, target)
    earlier = _again(planned, known)
    tiles = [p for p in _ranked(planned, lengths) if p not in earlier]
    plans = [*planned.plans, *earlier, *tiles[: max(candidates - len(planned.plans) - len(earlier), 0)]]
    rates = yield Ask(planned, tuple(plans), rough=True)
    winners = _winners(plans, rates, finalists)
    more = _distinct([v for p in winners for v in variations(planned.spec, p)], known=plans)
    if more:
        rates += yield Ask(planned, tuple(more), rough=True)
        plans += more
    what = f"{title or spec.name} {spec.head_dim_qk}/{spec.head_dim_v} {direction}"
    _tell(f"{what}, roughly", plans, rates)
    taken = usual(planned) if usual is not None else [planned.index(n, n) for n in lengths]
    static: list[Plan] = [planned.plans[i] for i in taken]
    careful = list(dict.fromkeys([*static, *_near(plans, rates)]))
    tried, rates = len(plans), (yield Ask(planned, tuple(careful), rough=False))
    _tell(f"{what}, carefully", careful, rates)
    chosen, limits = pick(careful, rates, tuple(lengths))
    record = Tuned(
        chip=chip,
        spec=title or spec.name,
        head_dims=(spec.head_dim_qk, spec.head_dim_v),
        pack=pack_of(spec),
        direction=direction,
        spec_class=spec_class(spec, direction),
        lengths=tuple(lengths),
        plans=tuple(choice_of(careful[i]) for i in chosen),
        limits=limits,
        rates=tuple(Rate(choice=choice_of(p), tflops=r) for p, r in zip(careful, rates, strict=True)),
    )
    return Outcome(
        record,
        tuple(choice_of(p) for p in planned.plans),
        tuple(rates[careful.index(p)][j] for j, p in enumerate(static)),
        tuple(max(column) for column in zip(*rates, strict=True)),
        tried,
    )


def _tell(what: str, plans: Sequence[Plan], rates: Rates) -> None:
    """Every plan's rates, for who looks for what the planner misses."""
    for p, found in zip(plans, rates, strict=True):
        log.info("%s: %s: %s TFLOP/s", what, choice_of(p).text, " ".join(f"{r:.0f}" for r in found))


def choice_of(p: Plan) -> Choice:
    """What names a plan of either direction."""
    return search.choice_of(p) if isinstance(p, KernelPlan) else search_backward.choice_of(p)


def _skeleton(p: Plan) -> tuple[object, ...]:
    return choose.skeleton(p) if isinstance(p, KernelPlan) else choose_backward.skeleton(p)


def _ranked(planned: PlanSet | BackwardPlanSet, lengths: Sequence[int]) -> Sequence[Plan]:
    """The tiles that were not chosen: the best of each length in turn, the longest first, of each height the best
    before any second (one warpgroup's have a file of their own); where O lies comes later.
    """
    if isinstance(planned, BackwardPlanSet):
        return planned.others
    orders = [sorted(planned.others, key=partial(_cycles, n)) for n in reversed(lengths)]
    ranked = list(dict.fromkeys(chain.from_iterable(zip(*orders, strict=True))))
    first = {p.name: p for p in reversed([*planned.plans, *ranked])}
    tiles = [p for p in ranked if first[p.name] is p]
    heights = {p.compute.tile_m: p for p in reversed(tiles) if p.compute.warpgroups > 1}
    return sorted(tiles, key=lambda p: heights.get(p.compute.tile_m) is not p)


def _again(planned: PlanSet | BackwardPlanSet, known: Tuned | None) -> list[Plan]:
    """The plans of a record that can be built and are not the planner's own."""
    wanted = [c for c in (known.plans if known else ()) if c not in map(choice_of, planned.plans)]
    if isinstance(planned, BackwardPlanSet):
        return [p for p in planned.others if choice_of(p) in wanted]
    form = mask_form(planned.spec)
    found = [search.plan_choice(planned.spec, form, c) for c in wanted]
    return [p for p in found if isinstance(p, KernelPlan)]


def _cycles(seqlen: int, p: KernelPlan) -> float:
    return launch_cycles(p, seqlen)


def _over(a: float, b: float) -> float:
    """a / b, of a plan that did not run infinitely much."""
    return a / b if b else math.inf


def _near(plans: Sequence[Plan], rates: Rates) -> list[Plan]:
    """Plans that come near the best at some length, at most CAREFUL: the best of each length in turn."""
    found: dict[int, None] = {}
    columns = [
        sorted(range(len(plans)), key=lambda i: (-rates[i][j], -math.prod(rates[i]))) for j in range(len(rates[0]))
    ]
    for place in zip(*columns, strict=True):
        for j, i in enumerate(place):
            if _over(rates[columns[j][0]][j], rates[i][j]) < 1 + NEAR:
                found.setdefault(i)
    return [plans[i] for i in list(found)[:CAREFUL]]


def variations(spec: AttentionSpec, p: Plan) -> list[KernelPlan]:
    """The same tile with the other order, with and without ping-pong, with O in the other place, with a stage more and
    less, with CTAs in pairs and apart, with the other kind of maxima, where that fits; none of a backward.
    """
    if isinstance(p, BackwardPlan):
        return []
    form, own = mask_form(spec), search.choice_of(p)
    changes: tuple[dict[str, object], ...] = (
        {"order": "linear" if own.order == "lpt" else "lpt"},
        {"pingpong": not own.pingpong},
        {"o_in_q": not own.o_in_q},
        {"stages": own.stages + 1},
        {"stages": own.stages - 1},
        {"pairs": not own.pairs and not unpaired(spec)},
        {"maxima": Maxima.FLOATS if own.maxima is Maxima.INTS else Maxima.INTS},
    )
    found = (search.plan_choice(spec, form, own.replace(**c)) for c in changes if c.get("stages") != 0)
    return [v for v in found if isinstance(v, KernelPlan)]


def pick(plans: Sequence[Plan], rates: Rates, lengths: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which plans one file should hold, and the lengths up to which each serves: as the search splits, by measurement.

    All plans of a file share a skeleton, and a file holds a tile once, in one of its variations; of what that leaves,
    the split is taken that loses least, and a further plan only where it saves more than noise.
    """
    best = [max(r[j] for r in rates) for j in range(len(lengths))]
    slower = [[_over(b, t) for b, t in zip(best, r, strict=True)] for r in rates]
    options = []
    for skeleton in dict.fromkeys(_skeleton(p) for p in plans):
        tiles: dict[str, list[int]] = {}
        for i, p in enumerate(plans):
            if _skeleton(p) == skeleton:
                tiles.setdefault(p.name, []).append(i)
        for one_each in product(*tiles.values()):
            options += choose.splits({i: slower[i] for i in one_each}, lengths)
    return min(
        ((loss + len(chosen) * choose.WORTH * len(lengths), chosen, limits) for loss, chosen, limits in options),
    )[1:]


def _distinct(plans: Iterable[KernelPlan], known: Sequence[Plan]) -> list[KernelPlan]:
    seen = {choice_of(p) for p in known}
    return [p for p in {search.choice_of(p): p for p in plans}.values() if search.choice_of(p) not in seen]


def _winners(plans: Sequence[Plan], rates: Rates, count: int) -> list[Plan]:
    """The best plan at each length, then the best on the whole, at most `count`."""
    lengths = range(len(rates[0]))
    by_length = [max(range(len(plans)), key=lambda i: rates[i][j]) for j in lengths]
    overall = sorted(range(len(plans)), key=lambda i: -math.prod(rates[i]))
    return [plans[i] for i in list(dict.fromkeys([*by_length, *overall]))[:count]]
