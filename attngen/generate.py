"""From a resolved spec to the text of a kernel file: plan, emit, and leave a copy where one is asked for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec
from attngen.settings import settings
from attngen.source import KernelSource
from attngen.stages import staged

if TYPE_CHECKING:
    from attngen.ir.backward import BackwardPlanSet
    from attngen.ir.plan import PlanSet
    from attngen.ir.tuned import Tuned

log = logging.getLogger("attngen")


def plan(spec: AttentionSpec, target: str, tuned: Tuned | None = None) -> PlanSet:
    """The plans of a forward; `tuned`: what was measured on this chip."""
    from attngen import search

    return search.plan(spec, target, tuned)


@staged("emit")
def emit(plan_set: PlanSet) -> KernelSource:
    """The file of a forward."""
    from attngen.emit import module

    return module.emit(plan_set)


@staged("emit")
def emit_backward(plan_set: BackwardPlanSet) -> KernelSource:
    """The file of a backward."""
    from attngen.emit import backward

    return backward.emit_backward(plan_set)


def part_of(spec: AttentionSpec, name: str | None, target: str) -> AttentionSpec:
    """The spec of the kernel of that name, or of the only one."""
    from attngen.passes.parts import is_composed, several
    from attngen.passes.serves import served_parts

    if name is None and not is_composed(spec):
        return spec
    found = served_parts(spec, target, name)
    if len(found) > 1:
        raise several(spec)
    return found[0].spec


def generate(spec: AttentionSpec, target: str, only: str | None) -> KernelSource:
    """The file of one direction, or of both."""
    if only == "forward":
        return emit(plan(spec, target))
    from attngen.directions import plan_gradients
    from attngen.emit.both import emit_both, emit_without_backward

    plans = plan(spec, target) if only is None else None
    gradients = plan_gradients(spec, target)
    if plans is None:
        if gradients.plans is None or gradients.refused:
            raise AttnError(*gradients.refused)
        return emit_backward(gradients.plans)
    if gradients.plans is None:
        return emit_without_backward(plans, gradients.notes)
    return emit_both(plans, gradients.plans, gradients.notes)


def dumped(source: KernelSource) -> KernelSource:
    """Leave a copy in ATTNGEN_DUMP_DIR, if it is set."""
    folder = settings().dump_dir
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            source.write(folder / f"{source.kernel_id}.py", force=True)
        except (OSError, AttnError) as failure:
            log.warning("cannot dump the kernel into %s: %s", folder, failure)
    return source
