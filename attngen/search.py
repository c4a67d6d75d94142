"""search: from a spec to a PlanSet.

Candidates run through the passes; a Reject ends one; `passes.choose` ranks the rest.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from attngen.diag.diagnostic import AttnError, Diagnostic, Label
from attngen.ir.expr import Atom
from attngen.ir.forms import MaskForm
from attngen.ir.plan import KernelPlan, PlanSet, Rejected
from attngen.ir.spec import AttentionSpec, ScheduleHints
from attngen.ir.tuned import Choice, Tuned
from attngen.passes.base import Reject
from attngen.passes.choose import MIN_TILE_N, choose, skeleton
from attngen.passes.compute import Candidate, plan_compute
from attngen.passes.cost import tile_cost
from attngen.passes.few import small_plan
from attngen.passes.given_blocks import inside_blocks
from attngen.passes.launch import plan_launch
from attngen.passes.mask_form import mask_form
from attngen.passes.mask_plan import plan_mask
from attngen.passes.memory import plan_memory
from attngen.passes.parts import is_composed, kernel_spec, several
from attngen.passes.schedule import plan_schedule
from attngen.passes.score_form import score_form
from attngen.passes.serves import why_not
from attngen.passes.tile_test import tile_map
from attngen.stages import staged
from attngen.targets import sm90
from attngen.verify.plan import verify, verify_set

log = logging.getLogger("attngen.plan")
#: Rows of a tile that given blocks are matched with: two warpgroups take turns.
MIN_TILE_M = 128
#: Tiles that are tried: consumer warpgroups of 64 rows each, and keys.
WARPGROUPS = (3, 2, 4, 1)
TILES_N = tuple(range(256, 16, -16))


def candidates(spec: AttentionSpec) -> Iterator[Candidate]:
    """Tiles in order of preference: more warpgroups first (they hide each other's softmax), then wider KV tiles."""
    hints = spec.schedule
    for warpgroups in WARPGROUPS:
        for tile_n in TILES_N:
            tile_m = 64 * warpgroups
            if (hints.tile_m or tile_m) == tile_m and (hints.tile_n or tile_n) == tile_n:
                yield Candidate(warpgroups=warpgroups, tile_n=tile_n)


def plan_candidate(spec: AttentionSpec, form: MaskForm, candidate: Candidate, o_in_q: bool) -> KernelPlan | Reject:
    """Run one candidate through the passes."""
    inside = inside_blocks(spec, 64 * candidate.warpgroups, candidate.tile_n)
    form = form if inside is None else mask_form(spec, inside)
    compute = plan_compute(spec, form, candidate)
    if isinstance(compute, Reject):
        return compute
    by_distance = compute.has_score and score_form(spec.score, "kv", spec).distance is not None
    memory = plan_memory(compute, spec.schedule.stages, o_in_q, by_distance, spec.out_dtype in (None, spec.dtype))
    if isinstance(memory, Reject):
        return memory
    mask = plan_mask(form, compute.warpgroups, tile_map(spec) if spec.block_sparse is not None else None)
    hints = spec.schedule
    launch = plan_launch(compute, mask, hints.cluster)
    if isinstance(launch, Reject):
        return launch
    schedule = plan_schedule(compute, mask, memory, hints.order, hints.pingpong, hints.pack_gqa or 1, launch.cluster[0])
    if isinstance(schedule, Reject):
        return schedule
    return KernelPlan(
        name=candidate.name,
        compute=compute,
        mask=mask,
        schedule=schedule,
        memory=memory,
        launch=launch,
        cost=tile_cost(spec, compute),
    )


def _tries(spec: AttentionSpec, served: list[KernelPlan]) -> Iterator[tuple[Candidate, bool]]:
    """(candidate, O in Q) in order; `served` is read as it grows.

    O in its own buffer lets the next tile's Q load during the epilogue; where no tile fits well, O takes Q's. Where
    element-wise loads leave no tile of a useful width, narrow ones are tried again without counting hoisted loads.
    """
    for o_in_q in (False, True):
        for candidate in candidates(spec):
            yield candidate, o_in_q
    if not any(p.compute.tile_n >= MIN_TILE_N for p in served) and spec.schedule.tile_n is None:
        for o_in_q in (False, True):
            for candidate in candidates(spec):
                if candidate.tile_n <= MIN_TILE_N:
                    yield candidate.replace(hoisting=False), o_in_q


def choice_of(p: KernelPlan) -> Choice:
    """What names a plan among all of its spec."""
    return Choice(
        tile_m=p.compute.tile_m,
        tile_n=p.compute.tile_n,
        stages=p.memory.kv_stages,
        order=p.schedule.order,
        pingpong=p.schedule.pingpong,
        o_in_q=p.memory.o_in_q,
        pairs=p.launch.pairs_ctas,
        maxima=p.compute.maxima,
    )


def plan_choice(spec: AttentionSpec, form: MaskForm, choice: Choice) -> KernelPlan | Reject:
    """The plan of that name, or why a pass turns it down."""
    hints = ScheduleHints(
        stages=choice.stages,
        order=choice.order,
        pingpong=choice.pingpong,
        cluster=(2, 1) if choice.pairs else None,
        pack_gqa=spec.schedule.pack_gqa,
    )
    outcome: KernelPlan | Reject = Reject("compute", "no such tile", 1.0)
    for hoisting in (True, False):
        candidate = Candidate(
            warpgroups=choice.tile_m // 64, tile_n=choice.tile_n, hoisting=hoisting, maxima=choice.maxima
        )
        outcome = plan_candidate(spec.replace(schedule=hints), form, candidate, choice.o_in_q)
        if isinstance(outcome, KernelPlan):
            break
    return outcome


def _tuned_plans(spec: AttentionSpec, form: MaskForm, tuned: Tuned) -> tuple[KernelPlan, ...]:
    """The plans of a record; none where this attngen cannot build one of them any more."""
    plans = [plan_choice(spec, form, c) for c in tuned.plans]
    for choice, outcome in zip(tuned.plans, plans, strict=True):
        if isinstance(outcome, Reject):
            why = f"{outcome.by} rejects it: {outcome.why}"
            log.warning("the tuned plan %s of `%s` is not used, %s; tune again", choice.text, spec.name, why)
            return ()
    found = tuple(p for p in plans if isinstance(p, KernelPlan))
    if len({skeleton(p) for p in found}) != 1:
        log.warning("the tuned plans of `%s` no longer fit one file and are not used; tune again", spec.name)
        return ()
    return found


@staged("plan")
def plan(spec: AttentionSpec, target: str = sm90.NAME, tuned: Tuned | None = None) -> PlanSet:
    """Choose at most three tile plans for `spec` on `target`: those of `tuned`, where given.

    The set's spec is the kernel's (`passes.parts`).

    Raises:
        AttnError: E0401 the target is unknown; E0402 the spec uses what no kernel here serves yet; E0403 no candidate
            fits; E0404 the spec takes several kernels: plan each of its parts.
    """
    reasons = why_not(spec, target)
    if reasons:
        raise AttnError(*reasons)
    if is_composed(spec):
        raise several(spec)
    spec = kernel_spec(spec)
    form = mask_form(spec)
    served: list[KernelPlan] = []
    rejected: dict[Rejected, float] = {}
    for candidate, o_in_q in _tries(spec, served):
        outcome = plan_candidate(spec, form, candidate, o_in_q)
        if isinstance(outcome, Reject):
            # only memory cares where O lives: what the other passes say is the same both times
            where = " (O in Q)" if o_in_q and outcome.by == "memory" else ""
            rejected[Rejected(candidate=candidate.name + where, by=outcome.by, why=outcome.why)] = outcome.excess
        else:
            served.append(outcome)
    for r in rejected:
        log.debug("%s was rejected by %s: %s", r.candidate, r.by, r.why)
    if not served:
        # nearest: got past compute, then by how little was missing
        raise _nothing_fits(spec, target, sorted(rejected, key=lambda r: (r.by == "compute", rejected[r])))
    log.debug("%d candidates fit, %d do not", len(served), len(rejected))
    for p in served:
        verify(p)
    chosen, limits = choose(_whole_blocks(spec, served))
    if tuned is not None and (measured_best := _tuned_plans(spec, form, tuned)):
        for p in measured_best:
            verify(p)
        chosen, limits = measured_best, tuned.limits
    found = PlanSet(
        spec=spec,
        target=target,
        plans=chosen,
        score=None if isinstance(spec.score, Atom) else score_form(spec.score, "kv", spec),
        limits=limits,
        small=small_plan(spec, served, chosen),
        rejected=tuple(rejected),
        others=tuple(p for p in served if p not in chosen),
    )
    verify_set(found)
    log.debug("chosen: %s", ", ".join(p.name for p in chosen))
    return found


def _whole_blocks(spec: AttentionSpec, served: list[KernelPlan]) -> list[KernelPlan]:
    """Candidates whose tiles and the given blocks divide one another, if there are any: a tile that cuts a block is
    tested element by element.
    """
    blocks = spec.block_sparse
    if blocks is None or not blocks.given:
        return served

    def rows(tile: int) -> int:
        """A single warpgroup has nobody to hide its softmax; a tall tile sees what any of its blocks sees."""
        if tile >= MIN_TILE_M and blocks.q % tile == 0:
            return 0
        return 3 if tile < MIN_TILE_M or tile % blocks.q else 1 if tile == MIN_TILE_M else 2

    def keys(tile: int) -> int:
        return 0 if blocks.kv % tile == 0 else 1 if tile % blocks.kv == 0 else 2

    ranks = [rows(p.compute.tile_m) + keys(p.compute.tile_n) for p in served]
    return [p for p, rank in zip(served, ranks, strict=True) if rank == min(ranks)]


def _nothing_fits(spec: AttentionSpec, target: str, nearest: list[Rejected]) -> AttnError:
    """E0403 with the three candidates that came nearest, how many there were, and what fits without the schedule's
    wishes; or with the tiles there are.
    """
    hints = spec.schedule
    notes = tuple(f"{r.candidate} was rejected by {r.by}: {r.why}" for r in nearest[:3])
    if len(nearest) > 3:
        counts = Counter(r.by for r in nearest)
        by = ", ".join(f"{n} by {which}" for which, n in counts.most_common())
        notes += (f"{len(nearest)} candidates were tried and rejected, {by}; ATTNGEN_LOG=debug lists them",)
    if not nearest:
        rows = ", ".join(str(64 * n) for n in sorted(WARPGROUPS))
        notes = (f"tile_m is one of {rows}; tile_n a multiple of 16 from {min(TILES_N)} to {max(TILES_N)}",)
    notes += _without_wishes(spec)
    place = hints.span or next((span for name, span in hints.places if name in ("tile", "stages", "pingpong")), None)
    asked = " x ".join(str(n or "auto") for n in (hints.tile_m, hints.tile_n))
    what = f"head dims {spec.head_dim_qk} and {spec.head_dim_v}"
    return AttnError(
        Diagnostic(
            "E0403",
            f"no plan fits {target} for {what}" if nearest else f"{target} kernels have no tile {asked}",
            Label(place, "with this schedule") if place else None,
            notes=notes,
            helps=("leave `tile` and `stages` to the planner, or take a smaller tile",),
        )
    )


def _without_wishes(spec: AttentionSpec) -> tuple[str, ...]:
    """The tiles that fit once an entry of the schedule is left out, one entry alone where that is enough, else all;
    those next to the tile that was asked for come first.
    """
    hints = spec.schedule
    given = {"tile": ("tile_m", "tile_n"), "stages": ("stages",), "pingpong": ("pingpong",)}
    asked = [name for name, fields in given.items() if any(getattr(hints, f) is not None for f in fields)]
    for names in [*([n] for n in asked), *([asked] if len(asked) > 1 else [])]:
        bare = hints.replace(**dict.fromkeys(f for n in names for f in given[n]))
        fits = _fitting(spec.replace(schedule=bare))
        if fits:
            m, n = hints.tile_m or 128, hints.tile_n or 128
            fits.sort(key=lambda p: abs(p.compute.tile_m - m) + abs(p.compute.tile_n - n))
            tiles = dict.fromkeys(f"{p.name} with {p.memory.kv_stages} stages" for p in fits)
            words = " and ".join(f"`{n}`" for n in names)
            return (f"without {words} these fit: {', '.join(list(tiles)[:3])}",)
    return ()


def _fitting(spec: AttentionSpec) -> list[KernelPlan]:
    form, found = mask_form(spec), list[KernelPlan]()
    for candidate, o_in_q in _tries(spec, found):
        outcome = plan_candidate(spec, form, candidate, o_in_q)
        if isinstance(outcome, KernelPlan):
            found.append(outcome)
    return found
