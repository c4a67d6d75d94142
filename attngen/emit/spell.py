"""A PlanSet spelled for the templates: the KernelView of `view`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

from attngen.emit.exprs import CutePrinter, dim_name, safe_name
from attngen.emit.header import clipped, docstring, spelled, sum_text
from attngen.emit.score import NO_SCORE, spell_score
from attngen.emit.selfcheck import check_view
from attngen.emit.spell_map import MAP_ARGUMENT, NO_MAP, map_view
from attngen.emit.straight import fold, straight_line
from attngen.emit.tables import build_arguments, table_fields
from attngen.emit.view import (
    Argument,
    Bounds,
    Clause,
    Dim,
    Formula,
    KernelView,
    MaskView,
    Output,
    Packed,
    PackView,
    PlanView,
    RowResult,
    Uses,
)
from attngen.emit.weights import weight
from attngen.ir.backward import BackwardCompute, BackwardPlanSet
from attngen.ir.expr import Atom, Const, Expr
from attngen.ir.forms import Clause as MaskClause
from attngen.ir.functions import apply
from attngen.ir.plan import ComputePlan, KernelPlan, MaskPlan, PlanSet, Rescale
from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import KNOWN_DIMS, DType, Layout, Normalizer, Type
from attngen.passes.epilogue import further_names
from attngen.passes.facts import Facts, facts_of, may_underflow
from attngen.passes.schedule import GROUP_HEADS

_BSHD = ("(batch, seqlen, heads, head_dim)", "[1, 3, 2, 0]")
#: Axes of q, k, v and o, and those of (seqlen, head_dim, heads, batch) among them.
_AXES = {
    Layout.BSHD: _BSHD,
    Layout.BHSD: ("(batch, heads, seqlen, head_dim)", "[2, 3, 1, 0]"),
    Layout.PADDED: _BSHD,
    Layout.VARLEN: ("(seqlen, heads, head_dim)", "[0, 2, 1]"),
}
_ELEMENT = {DType.BF16: ("cutlass.BFloat16", "bf16x2"), DType.FP16: ("cutlass.Float16", "f16x2")}
#: References below this are none: `score * log2(e) - reference` would be off by more than P and its sum hold.
_LOWEST = {DType.BF16: "-(2.0**31)", DType.FP16: "-(2.0**27)"}
TENSOR_TYPES = {
    DType.BF16: "cutlass.BFloat16",
    DType.FP16: "cutlass.Float16",
    DType.F32: "Float32",
    DType.I32: "Int32",
    DType.BOOL: "Boolean",
}
TORCH_TYPES = {DType.BF16: "torch.bfloat16", DType.FP16: "torch.float16", DType.F32: "torch.float32"}
ARGS = {
    "bounds": frozenset({"b", "h", "q_lo", "q_hi"}),
    "row": frozenset({"b", "h", "q_idx"}),
    "pair": frozenset({"b", "h", "q_idx", "kv_idx", "s"}),
    "output": frozenset({"o", "b", "h", "q_idx", "d"}),
}


def literal(meta: dict[str, object]) -> str:
    """A dict of plain values as Python text, one entry a line, lists of dicts one item a line, nothing past 120."""

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(k)}: {inline(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(inline(v) for v in value) + "]"
        return json.dumps(value) if isinstance(value, str) else repr(value)

    def entry(value: object, room: int, indent: str) -> str:
        text = inline(value)
        tables = isinstance(value, list) and value and isinstance(value[0], dict)
        if not isinstance(value, dict | list) or (len(text) <= room and not tables):
            return text
        deeper, room = indent + "    ", 118 - len(indent) - 4
        if isinstance(value, list):
            items = [f"{deeper}{entry(v, room, deeper)},\n" for v in value]
            return "[\n" + "".join(items) + f"{indent}]"
        fields = [f"{deeper}{json.dumps(k)}: {entry(v, room - len(k) - 4, deeper)},\n" for k, v in value.items()]
        return "{\n" + "".join(fields) + f"{indent}}}"

    return entry(meta, 0, "")


def formula(printer: CutePrinter, e: Expr | None, args: str) -> Formula:
    if e is None:
        return Formula("", "", ())
    lines, (value,) = straight_line(printer, [e], ARGS[args])
    return Formula(clipped(spelled(e)), value, lines)


def mask_view(printer: CutePrinter, mask: MaskPlan, facts: Facts, whole: Expr, *, by_rows: bool) -> MaskView:
    """Spell the mask slot. `whole`: the spec's mask, that a tile map is made of; it has a row for each query tile where
    `by_rows`, else for each KV tile.
    """
    form = mask.form
    rows = tuple(_row_clause(c, facts) for c in form.clauses)
    by_limits = mask.test == "limits"
    lower = any(c.lower is not None for c in form.clauses)
    bounds = [(b.lower_min, b.lower_max, b.upper_min, b.upper_max) for b in form.bounds]
    bound_lines, bound_texts = straight_line(printer, [e for b in bounds for e in b], ARGS["bounds"])
    row_exprs = [e for pair in rows for e in pair] if by_limits else [form.mask]
    row_lines, row_texts = straight_line(printer, row_exprs, ARGS["row"] if by_limits else ARGS["pair"])
    return MaskView(
        title=clipped(spelled(form.mask)),
        is_interval=mask.walk == "interval",
        is_map=mask.map is not None,
        map=NO_MAP if mask.map is None else map_view(printer, mask.map, whole, by_rows=by_rows),
        is_runs=mask.walk == "runs",
        by_limits=by_limits,
        has_lower=lower,
        has_right_edge=mask.has_right_edge,
        has_interior=mask.has_interior,
        has_left_edge=mask.has_left_edge,
        per_warpgroup=mask.ranges_per_warpgroup,
        passes_left=mask.ranges_per_warpgroup and lower,
        interior_end="full_min" if mask.has_left_edge else "live_min",
        clauses=tuple(Bounds(*bound_texts[i : i + 4]) for i in range(0, len(bound_texts), 4)),
        bindings=bound_lines,
        rows=tuple(Clause(*row_texts[i : i + 2]) for i in range(0, len(row_texts), 2)) if by_limits else (),
        row_bindings=row_lines,
        keep="" if by_limits else row_texts[0],
    )


def _row_clause(c: MaskClause, facts: Facts) -> tuple[Expr, Expr]:
    """[lower, upper) of one clause for a row, empty where the clause does not apply to it.

    The kernel subtracts a column from both, which must not wrap.
    """
    zero = Const(type=Type.INT, value=0)
    lower = c.lower if c.lower is not None else zero
    upper = c.upper if c.upper is not None else Atom(type=Type.INT, name="seqlen_kv")
    lower, upper = (apply("max", e, zero) if may_underflow(e, facts) else e for e in (lower, upper))
    return lower, upper if c.rows is None else apply("where", c.rows, upper, zero)


def arguments(spec: AttentionSpec) -> tuple[tuple[Argument, ...], tuple[Dim, ...]]:
    """Kernel arguments after the fixed ones, params first, and every symbolic extent in order of first use."""
    dims = ["batch", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv"]
    known = {"head_dim": str(spec.head_dim_qk), "head_dim_v": str(spec.head_dim_v)}
    if spec.layout is Layout.VARLEN:
        dims = [*TOTALS.values(), "heads_q", "heads_kv"]
        known |= TOTALS
    args: list[Argument] = []
    for p in spec.params:
        kind = {Type.INT: "Int32", Type.FLOAT: "Float32", Type.BOOL: "Boolean"}[p.type]
        args.append(Argument(safe_name(p.name), kind, f"{kind}({'True' if p.type is Type.BOOL else '1'})"))
    for t in spec.inputs:
        shape: list[str] = []
        for d in t.dims:
            if isinstance(d, int):
                shape.append(str(d))
            elif d in known:
                shape.append(known[d])
            else:
                word = d if d in KNOWN_DIMS else dim_name(d)
                if word not in dims:
                    dims.append(word)
                shape.append(word)
        extents = "".join(f", {x}" for x in (shape or ["1"]))
        example = fold(f"plain_tensor({TENSOR_TYPES[t.dtype]}{extents})")
        args.append(Argument(safe_name(t.name), "cute.Tensor", example))
    return tuple(args), tuple(Dim(d, json.dumps(d.removeprefix("dim_"))) for d in dims)


#: Axes of packed sequences.
TOTALS = {"seqlen_q": "total_q", "seqlen_kv": "total_kv"}
_FORWARD = ("q", "k", "v", "o", "lse", "tile_counter", "softmax_scale", "workers")


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
        "mask": mask_view(printer, mask, facts, spec.mask, by_rows=forward),
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


def kernel_view(plan_set: PlanSet, kernel_id: str, meta: dict[str, object]) -> KernelView:
    """Spell a PlanSet for the templates."""
    spec, first = plan_set.spec, plan_set.plans[0]
    c = first.compute
    printer = CutePrinter()
    common = common_fields(plan_set, printer, c, first.mask)
    has_sink, has_epilogue = spec.sink is not None, not isinstance(spec.epilogue, Atom)
    score = Formula(clipped(spelled(spec.score)), "", ()) if c.has_score else Formula("", "", ())
    split = (
        spell_score(printer, plan_set.score, whole=not common["has_softmax"])
        if plan_set.score is not None
        else NO_SCORE
    )
    sink = formula(printer, spec.sink, "row")
    epilogue = formula(printer, spec.epilogue, "output") if has_epilogue else Formula("", "", ())
    in_q, stages_o = first.memory.o_in_q, first.memory.stages_o
    more = further_outputs(spec, common["shape_o"], common["shape_lse"], stages_o)
    softmax, saves_o = common["has_softmax"], any(o.name == "saves_o" for o in more)
    last = (*build_arguments(common["mask"].is_map, common["has_tables"]), *(o.name for o in more))
    return KernelView(
        **common,
        docstring=docstring(plan_set, kernel_id),
        summary=f"O = {sum_text(spec)}(score(scale * Q K^T), kept where the mask holds) V for {plan_set.target}.",
        meta=literal(meta),
        call=call_text(
            (*_FORWARD, *(["seq_order"] * spec.layout.is_ragged)),
            common["arguments"],
            last,
        ),
        outputs=more,
        has_outputs=bool(more),
        has_max_logit=spec.max_logit,
        holds_values=first.mask.test == "limits" or split.has_held,
        top_units="LN2" if softmax else "1.0" if c.has_score else "p.softmax_scale",
        reduces_rows=softmax or spec.max_logit,
        stages_o=stages_o,
        frees_q_early=not in_q,
        saves_o=saves_o,
        writes_rows=saves_o or not stages_o,
        columns_of_eight=c.head_dim_v // 8,
        tma_atoms="tma_q, tma_k, tma_v" + (", tma_o" if stages_o else ""),
        is_differentiated=False,
        lowest=_LOWEST[c.dtype],
        plans=tuple(_plan_view(p) for p in plan_set.plans),
        uses=uses(printer),
        score=score,
        split=split,
        has_sink=has_sink,
        sink=sink,
        has_epilogue=has_epilogue,
        epilogue=epilogue,
        finish_first_note="Score and mask of the first tile." if c.has_score else "Mask of the first tile.",
        pingpong=first.schedule.pingpong,
        rescale_on_growth=c.rescale is Rescale.ON_GROWTH,
        takes_exponentials=spec.normalizer is not Normalizer.RELU,
        row_note="O and LSE" if softmax else "O",
        o_has_own_buffer=stages_o and not in_q,
        o_in_q_buffer=in_q,
        q_empty_arrivals=1 if in_q else 4,
        q_empty_note="the warp that stores O" if in_q else "the warps of the warpgroup",
        **_order(plan_set, spec.layout.is_ragged),
        pack=_pack(first.schedule.pack),
        **_ragged(spec, stages_o),
    )


def _order(plan_set: PlanSet, is_ragged: bool) -> dict[str, Any]:
    """The fields about the order of row tiles: plans walk groups of heads, or head by head, or some do either."""
    grouped = [p.schedule.l2_group_bytes > 0 for p in plan_set.plans]
    mixed = any(grouped) and not all(grouped)
    note = "Head by head, last rows first."
    if any(grouped):
        note = f"Longest row tiles first, heads of a group{' (or one)' * mixed} side by side."
    walk = "m_blocks, group_heads" if any(grouped) else "m_blocks"
    return {
        "has_groups": any(grouped),
        "mixes_orders": mixed,
        "least_heads": GROUP_HEADS,
        "order_note": note,
        "walk_arguments": "seq_order" if is_ragged else walk,
    }


def _pack(group: int) -> PackView:
    on = group > 1
    return PackView(
        is_on=on,
        group=group,
        tile_queries="self.tile_queries" if on else "self.tile_m",
        slice_queries="QUERIES" if on else "64",
        last_query="QUERIES - 1" if on else "63",
        rows="[row // GROUP, row // GROUP + 8 // GROUP]" if on else "[row, row + 8]",
        head="h * GROUP + row % GROUP" if on else "h",
        seqlen_q="cute.size(mQ, mode=[0, 1])" if on else "cute.size(mQ, mode=[0])",
        heads_q="cute.size(mQ, mode=[2]) * GROUP" if on else "cute.size(mQ, mode=[2])",
        walked_heads="heads_kv" if on else "heads_q",
        walked_of="p.heads_kv" if on else "p.heads_q",
        kv_head="h" if on else "h // p.qhead_per_kvhead",
        o_head="w.walked_head" if on else "w.h",
    )


def _of_sequences(spec: AttentionSpec, args: tuple[Argument, ...]) -> dict[str, Any]:
    """The fields of a view about the sequences of a ragged layout, of both directions."""
    varlen = spec.layout is Layout.VARLEN
    names = {t.name for t in spec.lengths}
    packed = [p for t in spec.tensors if (p := packed_axes(spec, safe_name(t.name), t)) is not None]
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


def packed_axes(spec: AttentionSpec, name: str, t: TensorDecl) -> Packed | None:
    """What of `name`, a tensor declared as `t`, belongs to one sequence; None where all of it does."""
    parts = {"seqlen_q": "own.start_q, own.seqlen_q", "seqlen_kv": "own.start_kv, own.seqlen_kv"}
    axes = [f"({i}, {parts[str(d)]})" for i, d in enumerate(t.dims) if d in parts]
    return Packed(name, ", ".join(axes)) if spec.layout.is_ragged and axes else None


def _ragged(spec: AttentionSpec, stages_o: bool) -> dict[str, Any]:
    """Those that a forward alone reads."""
    varlen, ragged = spec.layout is Layout.VARLEN, spec.layout.is_ragged
    rows = [n for n, on in (("mLSE", spec.normalizer is Normalizer.SOFTMAX), ("max_logit", spec.max_logit)) if on]
    return {
        "stored_o": "self.ragged(self.heads_last(o))" if stages_o else "self.heads_last(o)",
        "packed_rows": tuple(RowResult(n) for n in rows) if varlen else (),
        "rows_to_write": "w.p.rows_q" if ragged else "w.p.seqlen_q",
        "row_of_o": "w.p.start_q + w.q_idx[r], None, w.h" if varlen else "w.q_idx[r], None, w.h, w.b",
        "row_tiles": "total_q // self.tile_m + sequences"
        if varlen
        else "cute.ceil_div(total_q, self.tile_m) * sequences",
        "tiles": "row_tiles * cute.size(mQ, mode=[2])" if ragged else "m_blocks * heads",
        "seq_order_note": "2 * batch + 3" if varlen else "2 * batch + 1",
    }


def further_outputs(spec: AttentionSpec, shape_o: str, shape_lse: str, stages_o: bool) -> tuple[Output, ...]:
    """What a forward takes after the spec's own arguments, as `passes.epilogue.further_names` lists it."""
    known = (
        Output("o_pre", f"{'tma' if stages_o else 'row'}_tensor({shape_o})", "torch.empty_like(o)"),
        Output("saves_o", "Int32(0)", "0", "Int32"),
        Output("max_logit", f"plain_tensor(Float32, {shape_lse})", "torch.empty_like(lse)"),
    )
    wanted = further_names(spec)
    return tuple(o for o in known if o.name in wanted)


def _plan_view(p: KernelPlan) -> PlanView:
    return PlanView(
        warpgroups=p.compute.warpgroups,
        tile_n=p.compute.tile_n,
        kv_stages=p.memory.kv_stages,
        producer_registers=p.schedule.roles[0].registers,
        consumer_registers=p.schedule.roles[-1].registers,
        l2_group_bytes=p.schedule.l2_group_bytes,
    )
