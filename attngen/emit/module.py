"""emit: a PlanSet becomes the text of one standalone kernel file."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from attngen.emit.env import environment, tidy
from attngen.emit.spell_forward import kernel_view
from attngen.ir.expr import Const
from attngen.ir.plan import KernelPlan, PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import Extreme, Table, axes_of
from attngen.ir.tile_map import TileMap
from attngen.ir.types import Layout
from attngen.passes.epilogue import further_names
from attngen.passes.few import pace_of, paces
from attngen.source import KernelSource, body_sha256
from attngen.verify.source import parsed, verify_source

#: Moves only when generated text moves in a way that may change meaning or speed.
CODEGEN = 1
UNHASHED = "0" * 64


def emit(plan_set: PlanSet) -> KernelSource:
    """Render `plan_set`. Same input, same bytes: no clock, no path, no order that a hash decides.

    Raises: verify.source.SourceError where the text breaks its own plan (a bug in a template).
    """
    kernel_id = kernel_id_of(plan_set)
    meta = meta_of(plan_set, kernel_id)
    view = kernel_view(plan_set, kernel_id, meta)
    text = tidy(environment().get_template("kernel/fwd_sm90.py.jinja").render(view=view))
    tree = parsed(text, plan_set)  # once: the hash that goes in moves no line
    text = sealed(text, tree)
    verify_source(text, plan_set, tree)
    return KernelSource(text=text, kernel_id=kernel_id, sha256=hashlib.sha256(text.encode()).hexdigest())


def sealed(text: str, tree: ast.Module) -> str:
    """The text with the hash of its body in its ATTN_META, by its key: a doc string holds no double quote."""
    return text.replace(f'"body_sha256": "{UNHASHED}"', f'"body_sha256": "{body_sha256(text, tree)}"', 1)


def kernel_id_of(plan_set: PlanSet) -> str:
    """Stable name: spec, target, and a hash of everything that the text depends on."""
    facts = [
        plan_set.spec.model_dump(mode="json"),
        [p.model_dump(mode="json") for p in plan_set.plans],
        plan_set.limits,
        CODEGEN,
        *([] if plan_set.score is None else [plan_set.score.model_dump(mode="json")]),
        *([] if plan_set.small is None else [pace_of(plan_set.small)]),
    ]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    return f"{plan_set.spec.name}_fwd_{plan_set.target.removesuffix('a')}_{digest}"


def spec_meta(
    spec: AttentionSpec, kernel_id: str, direction: str, target: str, tables: Sequence[Table | Extreme] = ()
) -> dict[str, Any]:
    """The entries of ATTN_META that follow from the spec and from the tables of its mask."""
    described = spec.replace(doc=None).model_dump_json()
    further = further_names(spec) if direction == "forward" else ()
    return {
        "kernel_id": kernel_id,
        "name": spec.name,
        "direction": direction,
        "target": target,
        "codegen": CODEGEN,
        "spec_sha256": hashlib.sha256(described.encode()).hexdigest(),
        "body_sha256": UNHASHED,
        "layout": spec.layout.value,
        "dtype": spec.dtype.value,
        **({"further": list(further)} if further else {}),
        "out_dtype": (spec.out_dtype or spec.dtype).value,
        "head_dim_qk": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        "scale": spec.scale.value if isinstance(spec.scale, Const) else None,
        "has_sink": spec.sink is not None,
        "params": [
            {"name": p.name, "type": p.type.value, "default": p.default, "minimum": p.minimum, "maximum": p.maximum}
            for p in spec.params
        ],
        "tensors": [{"name": t.name, "dtype": t.dtype.value, "dims": list(t.dims)} for t in spec.inputs],
        **({"tables": [{"name": t.name, "dims": axes_of(t)} for t in tables]} if tables else {}),
    }


def meta_of(plan_set: PlanSet, kernel_id: str) -> dict[str, Any]:
    """ATTN_META: what tools and the callable need to know, plain literals only."""
    return {
        **spec_meta(plan_set.spec, kernel_id, "forward", plan_set.target, plan_set.plans[0].mask.form.tables),
        "plans": [_plan_meta(p) for p in plan_set.plans],
        "limits": list(plan_set.limits),
        **({"paces": [p.stated for p in found]} if (found := paces(plan_set)) else {}),
        **({"small": pace_of(plan_set.small).stated} if plan_set.small is not None else {}),
        **({"pack": pack} if (pack := plan_set.plans[0].schedule.pack) > 1 else {}),
        **map_meta(plan_set.plans[0].mask.map, plan_set.spec),
    }


def map_meta(tile_map: TileMap | None, spec: AttentionSpec, **more: bool) -> dict[str, Any]:
    """What says how many words the tile map of a call takes (`ir.tile_map.map_words`); nothing where there is none."""
    if tile_map is None:
        return {}
    packed = {"packed": True} if spec.layout is Layout.VARLEN else {}
    return {"map": {"per_batch": tile_map.per_batch, "per_head": tile_map.per_head, **packed, **more}}


def _plan_meta(p: KernelPlan) -> dict[str, Any]:
    return {
        "name": p.name,
        "tile_m": p.compute.tile_m,
        "tile_n": p.compute.tile_n,
        "kv_stages": p.memory.kv_stages,
        "threads": p.launch.threads,
        "smem_bytes": p.memory.smem_bytes,
    }
