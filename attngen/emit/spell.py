"""Spell what both directions say alike for the templates: the fields of `view.CommonView`, and texts of arguments."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from attngen.emit.exprs import CutePrinter, dim_name, safe_name
from attngen.emit.header import clipped, spelled
from attngen.emit.selfcheck import check_view
from attngen.emit.spell_map import MAP_ARGUMENT
from attngen.emit.spell_mask import mask_view
from attngen.emit.straight import ARGS, fold, statement, straight_line
from attngen.emit.tables import table_fields
from attngen.emit.view import Argument, Dim, Formula, Uses
from attngen.emit.weights import weight
from attngen.ir.backward import BackwardCompute, BackwardPlanSet
from attngen.ir.expr import Expr
from attngen.ir.plan import ComputePlan, MaskPlan, PlanSet
from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import KNOWN_DIMS, DType, Layout, Normalizer, Type
from attngen.passes.facts import facts_of

_BSHD = ("(batch, seqlen, heads, head_dim)", "[1, 3, 2, 0]")
#: Axes of q, k, v and o, and those of (seqlen, head_dim, heads, batch) among them.
_AXES = {
    Layout.BSHD: _BSHD,
    Layout.BHSD: ("(batch, heads, seqlen, head_dim)", "[2, 3, 1, 0]"),
    Layout.PADDED: _BSHD,
    Layout.VARLEN: ("(seqlen, heads, head_dim)", "[0, 2, 1]"),
}
_ELEMENT = {DType.BF16: ("cutlass.BFloat16", "bf16x2"), DType.FP16: ("cutlass.Float16", "f16x2")}
TENSOR_TYPES = {
    DType.BF16: "cutlass.BFloat16",
    DType.FP16: "cutlass.Float16",
    DType.F32: "Float32",
    DType.I32: "Int32",
    DType.BOOL: "Boolean",
}
#: Axes of packed sequences.
TOTALS = {"seqlen_q": "total_q", "seqlen_kv": "total_kv"}
TORCH_TYPES = {DType.BF16: "torch.bfloat16", DType.FP16: "torch.float16", DType.F32: "torch.float32"}


def formula(printer: CutePrinter, e: Expr | None, args: str) -> Formula:
    """A clause of the spec as text; `args` names what stands as an argument. An empty one where there is none."""
    if e is None:
        return Formula("", "", ())
    lines, (value,) = straight_line(printer, [e], ARGS[args])
    return Formula(clipped(spelled(e)), value, lines)


def extents(spec: AttentionSpec, t: TensorDecl) -> list[str]:
    """The extents of a captured tensor as the file's host code names them; that of one element where it has no axes."""
    known = {"head_dim": str(spec.head_dim_qk), "head_dim_v": str(spec.head_dim_v)}
    if spec.layout is Layout.VARLEN:
        known |= TOTALS
    free = {d: d if d in KNOWN_DIMS else dim_name(d) for d in t.dims if isinstance(d, str)} | known
    return [str(d) if isinstance(d, int) else free[d] for d in t.dims] or ["1"]


def arguments(spec: AttentionSpec) -> tuple[tuple[Argument, ...], tuple[Dim, ...]]:
    """Kernel arguments after the fixed ones, params first, and every symbolic extent in order of first use."""
    dims = [*(TOTALS.values() if spec.layout is Layout.VARLEN else ("batch", *TOTALS)), "heads_q", "heads_kv"]
    args: list[Argument] = []
    for p in spec.params:
        kind = {Type.INT: "Int32", Type.FLOAT: "Float32", Type.BOOL: "Boolean"}[p.type]
        args.append(Argument(safe_name(p.name), kind, f"{kind}({'True' if p.type is Type.BOOL else '1'})"))
    for t in spec.inputs:
        shape = extents(spec, t)
        dims += [x for x in dict.fromkeys(shape) if x.isidentifier() and x not in dims]
        example = fold(f"plain_tensor({', '.join([TENSOR_TYPES[t.dtype], *shape])})")
        args.append(Argument(safe_name(t.name), "cute.Tensor", example))
    return tuple(args), tuple(Dim(d, json.dumps(d.removeprefix("dim_"))) for d in dims)


def call_text(fixed: Sequence[str], args: tuple[Argument, ...], last: Sequence[str] = ()) -> str:
    """How the compiled function is called, on as many lines as it takes."""
    text = f"f({', '.join((*fixed, *(a.name for a in args), *last))})"
    return "\n".join(textwrap.wrap(text, 108, subsequent_indent="  "))


def common_fields(
    plan_set: PlanSet | BackwardPlanSet, printer: CutePrinter, compute: ComputePlan | BackwardCompute, mask: MaskPlan
) -> dict[str, Any]:
    """The fields of `CommonView` that follow from the spec and the tile; `printer` collects the helpers they call."""
    spec, c, tables = plan_set.spec, compute, mask.form.tables
    facts = facts_of(spec, tables)
    args, dims = arguments(spec)
    if mask.map is not None:
        args = (*args, MAP_ARGUMENT)
    element, packed = _ELEMENT[c.dtype]
    forward, out = isinstance(plan_set, PlanSet), spec.out_dtype or c.dtype

    def shape(heads: str, length: str, columns: int) -> str:
        if spec.layout is Layout.VARLEN:
            return f"{TOTALS[length]}, {heads}, {columns}"
        middle = f"{heads}, {length}" if spec.layout is Layout.BHSD else f"{length}, {heads}"
        return f"batch, {middle}, {columns}"

    def extent(true: int, padded: int) -> str:
        note = "" if true == padded else f"  # {true}, padded to WGMMA's k step; TMA fills with zeros and clips"
        return f"{padded}{note}"

    return {
        "target": plan_set.target,
        "element": element,
        "packed_type": packed,
        "head_dim_qk": extent(c.head_dim_qk, c.head_dim_qk_padded),
        "head_dim_v": extent(c.head_dim_v, c.head_dim_v_padded),
        "limits": repr(tuple(plan_set.limits)),
        "mask": mask_view(printer, mask, facts, spec, by_rows=forward),
        **table_fields(printer, tables, facts, spec),
        "has_score": c.has_score,
        "has_softmax": spec.normalizer is Normalizer.SOFTMAX,
        "weight": weight(spec.normalizer, "w.acc_s[i]" if forward else "score", c.has_score),
        "is_ragged": spec.layout.is_ragged,
        "is_varlen": spec.layout is Layout.VARLEN,
        **_of_sequences(spec, args),
        "reference": "one_sequence" if spec.layout.is_ragged else "reference",
        "layout_note": _AXES[spec.layout][0],
        "layout_modes": _AXES[spec.layout][1],
        "arguments": args,
        "dims": dims,
        "shape_q": shape("heads_q", "seqlen_q", c.head_dim_qk),
        "shape_k": shape("heads_kv", "seqlen_kv", c.head_dim_qk),
        "shape_v": shape("heads_kv", "seqlen_kv", c.head_dim_v),
        "shape_o": shape("heads_q", "seqlen_q", c.head_dim_v),
        "check": check_view(spec),
        "torch_dtype": TORCH_TYPES[c.dtype],
        "out_element": "ELEMENT" if out is c.dtype else TENSOR_TYPES[out],
        "out_torch_dtype": "q.dtype" if out is c.dtype else TORCH_TYPES[out],
        "check_head_dim_qk": c.head_dim_qk,
        "check_head_dim_v": c.head_dim_v,
    }


def uses(printer: CutePrinter) -> Uses:
    """Which helpers the printed expressions call."""
    return Uses(**{f: f in printer.used for f in Uses.__dataclass_fields__})


def _of_sequences(spec: AttentionSpec, args: tuple[Argument, ...]) -> dict[str, Any]:
    """The fields of a view about the sequences of a ragged layout, of both directions."""
    varlen = spec.layout is Layout.VARLEN
    names = {t.name for t in spec.lengths}
    packed = [p for t in spec.tensors if (p := part_of_sequence(spec, safe_name(t.name), t)) is not None]
    return {
        "batch": "sequences - 1" if varlen else "sequences",
        "sequences": "cute.size(cu_seqlens_q)" if varlen else "cute.size(seqused_q)",
        "heads_last_note": "(seqlen, head_dim, heads)" if varlen else "(seqlen, head_dim, heads, batch)",
        "last_axis": "2" if varlen else "3",
        "shape_lse": "heads_q, total_q" if varlen else "batch, heads_q, seqlen_q",
        "lengths": tuple(a for a in args if a.name in names),
        "packed": tuple(packed),
        "has_packed": bool(packed),
    }


def part_of_sequence(spec: AttentionSpec, name: str, t: TensorDecl) -> str | None:
    """What puts one sequence's part of `name`, declared as `t`, in its place; None where each has all of it."""
    parts = {"seqlen_q": "own.start_q, own.seqlen_q", "seqlen_kv": "own.start_kv, own.seqlen_kv"}
    axes = [f"({i}, {parts[str(d)]})" for i, d in enumerate(t.dims) if d in parts]
    if not (spec.layout.is_ragged and axes):
        return None
    return statement(f"own.{name}", "self.of_sequence", [f"p.{name}", *axes])
