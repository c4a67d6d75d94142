"""A BackwardPlanSet spelled for the templates: the BackwardView of `view_backward`."""

from __future__ import annotations

from attngen.emit.captured import packed_outputs, spell_captured
from attngen.emit.exprs import CutePrinter
from attngen.emit.header import backward_docstring, clipped, spelled
from attngen.emit.literal import literal
from attngen.emit.rows import DO_PRE, spell_rows
from attngen.emit.spell import call_text, common_fields, formula, uses
from attngen.emit.straight import ARGS, straight_line
from attngen.emit.tables import build_arguments
from attngen.emit.view import Formula
from attngen.emit.view_backward import BackwardTile, BackwardView
from attngen.emit.weights import backward_fields
from attngen.ir.backward import LEAST_SHARE, BackwardPlan, BackwardPlanSet
from attngen.passes.backward.memory import COUNTER_WORDS
from attngen.passes.epilogue import rewrites_do

_FIXED = (
    "q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv", "workspace", "softmax_scale", "workers",
)  # fmt: skip


def backward_view(plan_set: BackwardPlanSet, kernel_id: str, meta: dict[str, object]) -> BackwardView:
    """Spell a BackwardPlanSet for the templates."""
    spec, gradient, first = plan_set.spec, plan_set.gradient, plan_set.plans[0]
    c = first.compute
    printer = CutePrinter()
    common = common_fields(plan_set, printer, c, first.mask)
    captured = spell_captured(plan_set, printer)
    whole = (*captured.outputs, *((DO_PRE,) if rewrites_do(spec) else ()))
    outputs = tuple(o.name for o in whole)
    has_captured = bool(captured.gains)
    descends = first.schedule.kv_order == "descending"
    has_slope = c.has_score and not gradient.is_identity and not has_captured
    score, slope = Formula("", "", ()), ""
    if c.has_score:
        lines, texts = straight_line(printer, [gradient.score, *([gradient.slope] if has_slope else [])], ARGS["pair"])
        score, slope = Formula(clipped(spelled(spec.score)), texts[0], lines), texts[-1] if has_slope else ""
    rows = spell_rows(plan_set, printer, bool(captured.sinks))
    common["has_packed"] |= bool(captured.packed)
    return BackwardView(
        **common,
        pads_rows=(pads := plan_set.pads_rows),
        row_q="self.plan.q_columns" if pads else "HEAD_DIM_QK",
        row_do="self.plan.do_columns" if pads else "HEAD_DIM_V",
        thr_q="thr_rows_q" if pads else "thr_dk",
        thr_do="thr_rows_do" if pads else "thr_dv",
        pads_k_steps=False,
        settles_o=False,
        k_steps="cute.size(a, mode=[2])",
        docstring=backward_docstring(plan_set, outputs),
        meta=literal(meta),
        call=call_text(
            _FIXED, common["arguments"], (*build_arguments(common["mask"].is_map, common["has_tables"]), *outputs)
        ),
        is_differentiated=True,
        score=score,
        has_slope=has_slope,
        slope=slope,
        slope_note=", and d score / d s" if has_slope else "",
        slope_is_finite=gradient.is_finite,
        to_log2="LOG2E" if c.has_score else "w.scale_log2",
        **backward_fields(spec.normalizer, c.has_score, has_slope, has_captured),
        has_sink=bool(captured.sinks),
        sink=formula(printer, spec.sink if captured.sinks else None, "row"),
        **rows,
        row_arguments=common["arguments"] if rows["has_row_formulas"] else common["lengths"],
        has_packed_arguments=bool(common["packed"]),
        packed_gains=captured.packed,
        packed_sums=captured.packed_sums,
        packed_outputs=packed_outputs(
            *([x.name for x in given] for given in (captured.sinks, rows["output_rows"], rows["output_elements"]))
        ),
        outputs=whole,
        has_outputs=bool(outputs),
        sinks=captured.sinks,
        gains=captured.gains,
        has_captured=has_captured,
        keeps_score=has_captured and gradient.keeps_score,
        keeps_own_score=has_captured and gradient.keeps_score and not c.splits_operands,
        columns=captured.columns,
        rows=captured.rows,
        elements=captured.elements,
        has_columns=bool(captured.columns),
        has_rows=bool(captured.rows),
        reduces_gains=bool(captured.rows or captured.elements),
        num_columns=len(captured.columns),
        num_rows=len(captured.rows),
        gain_lines=captured.lines,
        gain_slope=captured.slope,
        uses=uses(printer),
        plans=tuple(_tile(p) for p in plan_set.plans),
        deterministic=plan_set.deterministic,
        counts_turns=plan_set.deterministic and first.mask.map is not None,
        counter_words=COUNTER_WORDS[c.cluster],
        shape_dk=common["shape_k"].replace("heads_kv", "heads_dkv"),
        shape_dv=common["shape_v"].replace("heads_kv", "heads_dkv"),
        counters_note=_counters_note(plan_set),
        zeroes_ahead=first.schedule.zeroes_ahead,
        shares_walks=first.schedule.shares_walks,
        kernels=f"`prepare`, `kernel`{', `add_parts`' * first.schedule.shares_walks} and `finish`",
        least_share=LEAST_SHARE,
        turn_note="Higher tiles first" if descends else "Lower tiles first",
        kv_descends=descends,
        serpentine=first.schedule.serpentine and not spec.layout.is_ragged,
        order_note="Sequence by sequence."
        if spec.layout.is_ragged
        else f"Group by group of heads, {'last' if descends else 'first'} keys first.",
        ds_stages=first.memory.ds_stages,
        splits_operands=c.splits_operands,
        orders_bulk_adds=first.schedule.zeroes_ahead or (plan_set.deterministic and not c.splits_operands),
        p_stages=first.memory.p_stages,
        p_type="Float32" if has_captured else "Int32",
        p_quads=8 if has_captured else 16,
        p_words=64 if has_captured else 32,
        warpgroups_note=": one owns dV, one dK" if c.splits_operands else "; each owns 64 keys, the M of a WGMMA",
        dq_parts="2 * self.warpgroups" if c.splits_operands else "self.warpgroups",
        owners="1" if c.splits_operands else "plan.warpgroups",
        true_head_dim_qk=c.head_dim_qk,
        true_head_dim_v=c.head_dim_v,
        row_lanes_v=_lanes(c.head_dim_v),
        transposes_dq=any(p.compute.dq_transposed for p in plan_set.plans),
    )


def _counters_note(plan_set: BackwardPlanSet) -> str:
    if plan_set.deterministic:
        return ": KV tiles that have added, by warpgroup; the last of tile 0: handed out"
    if plan_set.plans[0].schedule.zeroes_ahead:
        return ": zeroed parts of a head's dQ in its first; the last of tile 0: KV tiles handed out"
    return "; the last of tile 0 counts KV tiles handed out"


def _lanes(head_dim: int) -> int:
    """Threads that share a row in `prepare`: a power of two, eight elements each."""
    return 1 << (-(-head_dim // 8) - 1).bit_length()


def _tile(p: BackwardPlan) -> BackwardTile:
    return BackwardTile(
        tile_m=p.compute.tile_m,
        warpgroups=p.compute.warpgroups,
        q_stages=p.memory.q_stages,
        do_stages=p.memory.do_stages,
        q_columns=p.memory.q_columns,
        do_columns=p.memory.do_columns,
        dq_stages=p.memory.dq_stages,
        dq_transposed=p.compute.dq_transposed,
        drains=p.compute.drains,
        v_in_registers=p.compute.v_in_registers,
        grouped=p.schedule.grouped,
        producer_registers=p.schedule.roles[0].registers,
        consumer_registers=p.schedule.roles[-1].registers,
    )
