"""emit: a BackwardPlanSet becomes the text of one standalone file with the backward's kernels."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from attngen.emit.env import environment, tidy
from attngen.emit.module import CODEGEN, map_meta, sealed, spec_meta
from attngen.emit.spell_backward import backward_view
from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.source import KernelSource
from attngen.verify.backward_source import verify_source
from attngen.verify.source import parsed


def emit_backward(plan_set: BackwardPlanSet) -> KernelSource:
    """Render `plan_set`. Same input, same bytes: no clock, no path, no order that a hash decides.

    Raises: verify.source.SourceError where the text breaks its own plan (a bug in a template).
    """
    kernel_id = kernel_id_of(plan_set)
    view = backward_view(plan_set, kernel_id, meta_of(plan_set, kernel_id))
    text = tidy(environment().get_template("kernel/bwd_sm90.py.jinja").render(view=view))
    tree = parsed(text, plan_set)
    text = sealed(text, tree)
    verify_source(text, plan_set, tree)
    return KernelSource(text=text, kernel_id=kernel_id, sha256=hashlib.sha256(text.encode()).hexdigest())


def kernel_id_of(plan_set: BackwardPlanSet) -> str:
    """Stable name: spec, target, and a hash of everything that the text depends on."""
    facts = [
        plan_set.spec.model_dump(mode="json"),
        plan_set.gradient.model_dump(mode="json"),
        [p.model_dump(mode="json") for p in plan_set.plans],
        plan_set.limits,
        plan_set.deterministic,
        CODEGEN,
    ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{plan_set.spec.name}_bwd_{plan_set.target.removesuffix('a')}_{digest}"


def meta_of(plan_set: BackwardPlanSet, kernel_id: str) -> dict[str, Any]:
    """ATTN_META: what tools and the callable need to know, plain literals only."""
    return {
        **spec_meta(plan_set.spec, kernel_id, "backward", plan_set.target, plan_set.plans[0].mask.form.tables),
        "plans": [_plan_meta(p) for p in plan_set.plans],
        "limits": list(plan_set.limits),
        "backward": {
            "deterministic": plan_set.deterministic,
            "plans": [_plan_meta(p) for p in plan_set.plans],
            "limits": list(plan_set.limits),
            **({"step_cycles": list(cycles)} if (cycles := plan_set.step_cycles) else {}),
            "gradients": [{"tensor": c.tensor, "kind": c.kind.value} for c in plan_set.gradient.contributions],
            **map_meta(plan_set.plans[0].mask.map, plan_set.spec, by_keys=True, turns=plan_set.deterministic),
        },
    }


def _plan_meta(p: BackwardPlan) -> dict[str, Any]:
    return {
        "name": p.name,
        "tile_m": p.compute.tile_m,
        "tile_n": p.compute.tile_n,
        "cluster": p.launch.cluster[0],
        "threads": p.launch.threads,
        "smem_bytes": p.memory.smem_bytes,
        "workspace_per_tile": p.memory.workspace_per_tile,
        **({"part_words": p.part_words} if p.part_words else {}),
    }
