"""search: from a spec to a BackwardPlanSet. Candidates run through the passes; a static cost ranks what is left."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from attngen.diag.diagnostic import AttnError, Diagnostic, Label
from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.ir.forms import MaskForm
from attngen.ir.gradient import GradientForm
from attngen.ir.plan import LaunchPlan, Rejected
from attngen.ir.spec import AttentionSpec
from attngen.ir.tuned import Choice, Tuned
from attngen.passes.backward.choose import choose, skeleton
from attngen.passes.backward.compute import FEW_REGISTERS, Candidate, plan_compute
from attngen.passes.backward.cost import step_cost
from attngen.passes.backward.memory import plan_memory
from attngen.passes.backward.order import plan_order
from attngen.passes.backward.schedule import plan_schedule
from attngen.passes.backward.serves import why_not
from attngen.passes.base import Reject
from attngen.passes.epilogue import whole_form
from attngen.passes.mask_form import mask_form
from attngen.passes.mask_plan import plan_mask
from attngen.passes.parts import is_composed, kernel_spec, several
from attngen.passes.serves import why_not as forward_why_not
from attngen.passes.tile_test import tile_map
from attngen.stages import staged
from attngen.targets import sm90
from attngen.verify.backward import verify, verify_set

log = logging.getLogger("attngen.plan")
#: Query rows of a step that are tried.
TILES_M = (128, 112, 96, 80, 64, 48, 32)


def candidates() -> Iterator[Candidate]:
    """Tall steps first: every step costs its barriers and its latency once."""
    for tile_m in TILES_M:
        yield Candidate(tile_m=tile_m)
    yield Candidate(tile_m=64, splits_operands=True)


def _tries(served: list[BackwardPlan]) -> Iterator[Candidate]:
    """Candidates in order; `served` is read as it grows. Where none is left, again with few registers for expressions,
    then with none: a tall tile whose fragments take all of them spills hundreds of bytes.
    """
    for registers in (None, FEW_REGISTERS, 0):
        if not served:
            for candidate in candidates():
                yield candidate.replace(for_expressions=registers)


def plan_candidate(
    spec: AttentionSpec, form: MaskForm, gradient: GradientForm, candidate: Candidate, deterministic: bool
) -> BackwardPlan | Reject:
    """Run one candidate through the passes."""
    compute = plan_compute(spec, form, gradient, candidate)
    if isinstance(compute, Reject):
        return compute
    memory = plan_memory(compute, bool(gradient.in_kernel))
    if isinstance(memory, Reject):
        return memory
    n = compute.warpgroups
    return BackwardPlan(
        name=candidate.name,
        compute=compute,
        mask=plan_mask(form, 1, tile_map(spec) if spec.block_sparse is not None else None),
        schedule=plan_schedule(
            compute,
            memory,
            deterministic,
            plan_order(spec, form, compute, deterministic),
            spec.layout.is_ragged,
            bool(gradient.in_kernel),
        ),
        memory=memory,
        launch=LaunchPlan(
            threads=128 * (n + 1), cluster=(compute.cluster, 1, 1), launch_registers=sm90.LAUNCH_REGISTERS[n]
        ),
        cost=step_cost(compute, gradient),
    )


@staged("plan backward")
def plan_backward(
    spec: AttentionSpec, target: str = sm90.NAME, *, captured: Sequence[str] = (), tuned: Tuned | None = None
) -> BackwardPlanSet:
    """Choose at most three tile plans of the backward of `spec` on `target`; the set's spec is the kernel's
    (`passes.parts`).

    `captured`: tensors declared `grad` whose gradient is asked for, beside those of q, k and v. `tuned`: the record
    whose plans it takes, where they still fit.

    Raises:
        AttnError: E0401 the target is unknown; E0402 the spec uses what no backward kernel serves yet; E0403 no
            candidate fits; E0404 the spec takes several kernels: plan each of its parts.
    """
    if is_composed(spec):
        refused = forward_why_not(spec, target)
        raise AttnError(*refused) if refused else several(spec)
    gradient = whole_form(spec)
    gradient = gradient.replace(contributions=tuple(c for c in gradient.contributions if c.tensor in captured))
    deterministic = spec.backward.deterministic
    reasons = why_not(spec, gradient, target, captured, deterministic)
    if reasons:
        raise AttnError(*reasons)
    spec = kernel_spec(spec)
    form = mask_form(spec)
    served: list[BackwardPlan] = []
    rejected: dict[Rejected, float] = {}
    for candidate in _tries(served):
        outcome = plan_candidate(spec, form, gradient, candidate, deterministic)
        if isinstance(outcome, Reject):
            rejected[Rejected(candidate=candidate.name, by=outcome.by, why=outcome.why)] = outcome.excess
            log.debug("%s was rejected by %s: %s", candidate.name, outcome.by, outcome.why)
        else:
            verify(outcome)
            served.append(outcome)
    if not served:
        raise _nothing_fits(spec, target, sorted(rejected, key=lambda r: (r.by == "compute", rejected[r])))
    chosen, limits = choose(spec, form, served, deterministic)
    if tuned is not None and (measured_best := _tuned_plans(spec, served, tuned)):
        chosen, limits = measured_best, tuned.limits
    found = BackwardPlanSet(
        spec=spec,
        target=target,
        gradient=gradient,
        deterministic=deterministic,
        plans=chosen,
        limits=limits,
        rejected=tuple(rejected),
        others=tuple(p for p in served if p not in chosen),
    )
    verify_set(found)
    return found


def choice_of(p: BackwardPlan) -> Choice:
    """What names a plan among all of its spec."""
    c = p.compute
    return Choice(
        tile_m=c.tile_m,
        tile_n=c.tile_n,
        stages=p.memory.q_stages,
        order="linear",
        pingpong=False,
        o_in_q=False,
        pairs=c.splits_operands,
    )


def _tuned_plans(spec: AttentionSpec, served: Sequence[BackwardPlan], tuned: Tuned) -> tuple[BackwardPlan, ...]:
    """The plans of a record; none where this attngen does not plan one of them any more."""
    known = {choice_of(p): p for p in served}
    found = tuple(known[c] for c in tuned.plans if c in known)
    if len(found) < len(tuned.plans) or len({skeleton(p) for p in found}) != 1:
        lost = "; ".join(c.text for c in tuned.plans)
        log.warning(
            "tuned plans of the backward of `%s` no longer fit and are not used: %s; tune again", spec.name, lost
        )
        return ()
    return found


#: Reasons that differ from candidate to candidate by a number alone.
_MEASURED = ("registers", "smem")


def _nothing_fits(spec: AttentionSpec, target: str, nearest: Sequence[Rejected]) -> AttnError:
    """E0403 with the three candidates that came nearest, and the other reasons there are."""
    nearest = list({r.candidate: r for r in reversed(nearest)}.values())[::-1]  # the best try of each
    shown = {r.why for r in nearest[:3]}
    others = [w for w in dict.fromkeys(r.why for r in nearest) if w not in shown and not w.startswith(_MEASURED)]
    more = (f"{len(nearest)} candidates were tried and rejected" + "".join(f"; {w}" for w in others),)
    return AttnError(
        Diagnostic(
            "E0403",
            f"no backward plan fits {target} for head dims {spec.head_dim_qk} and {spec.head_dim_v}",
            Label(spec.span, "needs gradients") if spec.span else None,
            notes=(*(f"{r.candidate} was rejected by {r.by}: {r.why}" for r in nearest[:3]), *more),
            helps=("gradients of this spec are computed on CPU tensors",),
        )
    )
