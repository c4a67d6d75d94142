"""Which of the plans that fit serve which lengths: at most three, ranked by measurements or a static cost."""

from __future__ import annotations

from attngen.ir.plan import MAX_PLANS, KernelPlan, Maxima
from attngen.passes.cost import launch_cycles
from attngen.targets import measured

#: Lengths at which plans are compared; between two that prefer different plans lies a limit of the PlanSet.
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
#: A second plan must save this share of the time at some length to be worth its compile time.
WORTH = 0.005
#: The cost model flatters narrow KV tiles; without a measurement none below this width is chosen.
MIN_TILE_N = 64


def choose(served: list[KernelPlan]) -> tuple[tuple[KernelPlan, ...], tuple[int, ...]]:
    """At most MAX_PLANS plans and the lengths up to which each serves.

    All share one kernel class (`skeleton`). Times are relative to the best candidate at each length, so
    that no length dominates; another plan joins only when it saves at least WORTH on average.
    """
    lengths, served, times = _times(served)
    best = [min(column) for column in zip(*times, strict=True)]
    relative = [[t / b for t, b in zip(row, best, strict=True)] for row in times]
    anchor = min(range(len(served)), key=lambda i: sum(relative[i]))
    alike = [i for i, p in enumerate(served) if skeleton(p) == skeleton(served[anchor])]
    plans, limits = fewest({i: relative[i] for i in alike}, lengths, WORTH)
    return tuple(served[i] for i in plans), limits


def fewest(
    relative: dict[int, list[float]], lengths: tuple[int, ...], worth: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The plans worth their compile time and their limits. `relative`: of each plan, its time over the best's at each
    of the lengths, which ascend; `worth`: the share of the time, on average, that another plan saves at least.
    """
    by_count = splits(relative, lengths)
    chosen = by_count[0]
    for split in by_count[1:]:
        if split[0] < chosen[0] - worth * len(lengths):
            chosen = split
    return chosen[1], chosen[2]


def skeleton(p: KernelPlan) -> tuple[bool, bool, bool, bool, Maxima]:
    """What a kernel's text fixes for all its plans: the place of O, turns, whose rows bound a warpgroup's tiles,
    whether CTAs go in pairs, and how maxima are taken.
    """
    turns, pairs = p.schedule.pingpong, p.launch.pairs_ctas
    return p.memory.o_in_q, turns, p.mask.ranges_per_warpgroup, pairs, p.compute.maxima


def _times(served: list[KernelPlan]) -> tuple[tuple[int, ...], list[KernelPlan], list[list[float]]]:
    """Lengths, candidates, and a time of each at each length: measured where the head dims were, else modelled.

    Measured and modelled times do not mix: where some candidates were measured, only those compete.
    """
    measured_plans: list[KernelPlan] = []
    rows: list[list[float]] = []
    lengths: tuple[int, ...] = ()
    for p in served:
        group = p.compute.head_dim_qk, p.compute.head_dim_v, "causal" if p.schedule.order == "lpt" else "full"
        lengths, found = measured.lengths(*group), measured.seconds_per_flop(*group, p.name)
        if found is not None:
            measured_plans.append(p)
            rows.append(list(found))
    if measured_plans:
        return lengths, measured_plans, rows
    wide = [p for p in served if p.compute.tile_n >= MIN_TILE_N] or served
    return LENGTHS, wide, [[launch_cycles(p, n) for n in LENGTHS] for p in wide]


def splits(
    relative: dict[int, list[float]], lengths: tuple[int, ...]
) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """Best (summed time, plans, limits) with 1, 2, … MAX_PLANS plans over ascending lengths."""
    n = len(lengths)

    def best_run(start: int, end: int) -> tuple[float, int]:
        return min((sum(row[start:end]), i) for i, row in relative.items())

    table: list[dict[int, tuple[float, tuple[int, ...], tuple[int, ...]]]] = [
        {end: (best_run(0, end)[0], (best_run(0, end)[1],), ()) for end in range(1, n + 1)}
    ]
    for _ in range(1, MAX_PLANS):
        row: dict[int, tuple[float, tuple[int, ...], tuple[int, ...]]] = {}
        for end in range(1, n + 1):
            options = [
                (time + best_run(cut, end)[0], (*plans, best_run(cut, end)[1]), (*limits, lengths[cut - 1]))
                for cut, (time, plans, limits) in table[-1].items()
                if cut < end and best_run(cut, end)[1] not in plans
            ]
            if options:
                row[end] = min(options)
        table.append(row)
    return [row[n] for row in table if n in row]
