"""search: from a spec to a PlanSet.

Candidates run through the passes; a Reject ends one; measurements, or a static cost, rank the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.diag.diagnostic import AttnError, Diagnostic, Label
from attngen.ir.forms import MaskForm
from attngen.ir.plan import KernelPlan, PlanSet, Rejected
from attngen.ir.spec import AttentionSpec
from attngen.passes.base import Reject
from attngen.passes.compute import Candidate, padded, plan_compute
from attngen.passes.cost import launch_cycles, tile_cost
from attngen.passes.launch import plan_launch
from attngen.passes.mask_form import mask_form
from attngen.passes.mask_plan import plan_mask
from attngen.passes.memory import plan_memory
from attngen.passes.schedule import plan_schedule
from attngen.passes.serves import why_not
from attngen.targets import measured, sm90
from attngen.verify.plan import verify

#: Lengths at which plans are compared; between two that prefer different plans lies a limit of the PlanSet.
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MAX_PLANS = 3
#: A second plan must save this share of the time at some length to be worth its compile time.
WORTH = 0.005
#: The cost model flatters narrow KV tiles; without a measurement none below this width is chosen.
MIN_TILE_N = 64
TARGETS = (sm90.NAME,)


def candidates(spec: AttentionSpec) -> Iterator[Candidate]:
    """Tiles in order of preference: more warpgroups first (they hide each other's softmax), then wider KV tiles."""
    hints = spec.schedule
    for warpgroups in (3, 2, 4, 1):
        for tile_n in range(256, 16, -16):
            tile_m = 64 * warpgroups
            if (hints.tile_m or tile_m) == tile_m and (hints.tile_n or tile_n) == tile_n:
                yield Candidate(warpgroups=warpgroups, tile_n=tile_n)


def plan_candidate(spec: AttentionSpec, form: MaskForm, candidate: Candidate, o_in_q: bool) -> KernelPlan | Reject:
    """Run one candidate through the passes."""
    compute = plan_compute(spec, candidate)
    if isinstance(compute, Reject):
        return compute
    memory = plan_memory(compute, spec.schedule.stages, o_in_q)
    if isinstance(memory, Reject):
        return memory
    mask = plan_mask(form, compute)
    pingpong = spec.schedule.pingpong is not False
    schedule = plan_schedule(compute, mask, memory, spec.schedule.order, pingpong)
    return KernelPlan(
        name=candidate.name,
        compute=compute,
        mask=mask,
        schedule=schedule,
        memory=memory,
        launch=plan_launch(compute),
        cost=tile_cost(spec, compute),
    )


def plan(spec: AttentionSpec, target: str = sm90.NAME) -> PlanSet:
    """Choose at most three tile plans for `spec` on `target`.

    Raises:
        AttnError: E0401 the target is unknown; E0402 the spec uses what no kernel here serves yet; E0403 no candidate
            fits.
    """
    reasons = why_not(spec, target)
    if reasons:
        raise AttnError(*reasons)
    form = mask_form(spec)
    served: list[KernelPlan] = []
    rejected: list[Rejected] = []
    # O in its own buffer lets the next tile's Q load during the epilogue; where no tile fits well, O takes Q's.
    for o_in_q in (False, True):
        for candidate in candidates(spec):
            outcome = plan_candidate(spec, form, candidate, o_in_q)
            if isinstance(outcome, Reject):
                where = " (O in Q)" if o_in_q else ""
                rejected.append(Rejected(candidate=candidate.name + where, by=outcome.by, why=outcome.why))
            else:
                served.append(outcome)
    if not served:
        raise _nothing_fits(spec, target, rejected)
    for p in served:
        verify(p)
    chosen, limits = choose(served)
    others = tuple(p for p in served if p not in chosen)
    return PlanSet(spec=spec, target=target, plans=chosen, limits=limits, rejected=tuple(rejected), others=others)


def choose(served: list[KernelPlan]) -> tuple[tuple[KernelPlan, ...], tuple[int, ...]]:
    """At most MAX_PLANS plans and the lengths up to which each serves.

    All share the place of O and ping-pong: one skeleton. Times are relative to the best candidate at each length, so
    that no length dominates; another plan joins only when it saves at least WORTH on average.
    """
    lengths, served, times = _times(served)
    best = [min(column) for column in zip(*times, strict=True)]
    relative = [[t / b for t, b in zip(row, best, strict=True)] for row in times]
    anchor = min(range(len(served)), key=lambda i: sum(relative[i]))
    alike = [
        i for i, p in enumerate(served)
        if p.memory.o_in_q == served[anchor].memory.o_in_q and p.schedule.pingpong == served[anchor].schedule.pingpong
    ]  # fmt: skip
    splits = _splits({i: relative[i] for i in alike}, lengths)
    chosen = splits[0]
    for split in splits[1:]:
        if split[0] < chosen[0] - WORTH * len(lengths):
            chosen = split
    plans, limits = chosen[1], chosen[2]
    return tuple(served[i] for i in plans), limits


def _times(served: list[KernelPlan]) -> tuple[tuple[int, ...], list[KernelPlan], list[list[float]]]:
    """Lengths, candidates, and a time of each at each length: measured where the head dims were, else modelled.

    Measured and modelled times do not mix: where some candidates were measured, only those compete.
    """
    measured_plans: list[KernelPlan] = []
    rows: list[list[float]] = []
    for p in served:
        mask = "causal" if p.schedule.order == "lpt" else "full"
        found = measured.seconds_per_flop(p.compute.head_dim_qk, p.compute.head_dim_v, mask, p.name)
        if found is not None:
            measured_plans.append(p)
            rows.append(list(found))
    if measured_plans:
        return measured.lengths(), measured_plans, rows
    wide = [p for p in served if p.compute.tile_n >= MIN_TILE_N] or served
    return LENGTHS, wide, [[launch_cycles(p, n) for n in LENGTHS] for p in wide]


def _splits(
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


def _nothing_fits(spec: AttentionSpec, target: str, rejected: list[Rejected]) -> AttnError:
    nearest = sorted(rejected, key=lambda r: (r.by == "compute", len(r.why)))[:3]
    d = padded(spec.head_dim_qk), padded(spec.head_dim_v)
    return AttnError(
        Diagnostic(
            "E0403",
            f"no plan fits {target} for head dims {d[0]} and {d[1]}",
            Label(spec.schedule.span, "with this schedule") if spec.schedule.span else None,
            notes=tuple(f"{r.candidate} was rejected by {r.by}: {r.why}" for r in nearest),
            helps=("leave `tile` and `stages` to the planner, or take a smaller tile",),
        )
    )
