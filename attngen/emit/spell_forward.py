"""A PlanSet spelled for the templates: the KernelView of `view_forward`."""

from __future__ import annotations

from typing import Any

from attngen.emit.exprs import CutePrinter
from attngen.emit.header import clipped, docstring, spelled, sum_text
from attngen.emit.literal import literal
from attngen.emit.score import NO_SCORE, spell_score
from attngen.emit.spell import call_text, common_fields, formula, uses
from attngen.emit.tables import build_arguments
from attngen.emit.view import Formula, Output
from attngen.emit.view_forward import KernelView, PackView, PairView, PlanView, RowResult
from attngen.ir.expr import Atom, Const, atoms_of
from attngen.ir.plan import KernelPlan, Maxima, PlanSet, Rescale
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout, Normalizer
from attngen.passes.epilogue import further_names
from attngen.passes.schedule import GROUP_HEADS

#: References below this are none: `score * log2(e) - reference` would be off by more than P and its sum hold.
_LOWEST = {DType.BF16: "-(2.0**31)", DType.FP16: "-(2.0**27)"}
_FORWARD = ("q", "k", "v", "o", "lse", "tile_counter", "softmax_scale", "workers")


def kernel_view(plan_set: PlanSet, kernel_id: str, meta: dict[str, object]) -> KernelView:
    """Spell a PlanSet for the templates."""
    spec, first = plan_set.spec, plan_set.plans[0]
    c = first.compute
    printer = CutePrinter()
    common = common_fields(plan_set, printer, c, first.mask)
    has_sink, has_epilogue = spec.sink is not None, not isinstance(spec.epilogue, Atom)
    score = Formula(clipped(spelled(spec.score)), "", ()) if c.has_score else Formula("", "", ())
    split = (
        spell_score(printer, plan_set.score, whole=not common["has_softmax"], exact_maxima=spec.max_logit)
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
        **_row_fields(first),
        settles_o=all(isinstance(clause.upper, Const) for clause in first.mask.form.clauses),
        is_differentiated=False,
        lowest=_LOWEST[c.dtype],
        plans=tuple(_plan_view(p) for p in plan_set.plans),
        uses=uses(printer),
        score=score,
        split=split,
        has_sink=has_sink,
        sink=sink,
        has_epilogue=has_epilogue,
        reads_sink_weight="sink_weight" in atoms_of(spec.epilogue),
        epilogue=epilogue,
        finish_first_note="Score and mask of the first tile." if c.has_score else "Mask of the first tile.",
        pingpong=first.schedule.pingpong,
        growth=str(c.growth),
        headroom=str(c.headroom),
        is_bounded=c.rescale is Rescale.BOUNDED,
        follows_maxima=(follows := c.rescale is Rescale.ON_GROWTH),
        takes_maxima=follows or spec.max_logit,
        int_maxima=c.maxima is Maxima.INTS,
        bounds_rows=follows and (c.maxima is Maxima.INTS or split.has_lead),
        fixed_reference=repr(c.reference),
        headroom_note="" if c.headroom else ": P in fp16 has no exponents to spare",
        takes_exponentials=spec.normalizer is not Normalizer.RELU,
        row_note="O and LSE" if softmax else "O",
        o_has_own_buffer=stages_o and not in_q,
        o_in_q_buffer=in_q,
        q_empty_arrivals=1 if in_q else 4,
        q_empty_note="the warp that stores O" if in_q else "the warps of the warpgroup",
        **_slices(common["mask"].passes_left),
        pack=(pack := _pack(first.schedule.pack)),
        pair=(pair := _pair(first.launch.pairs_ctas, pack)),
        **_order(plan_set, spec.layout.is_ragged, pair),
        **_rows(spec, stages_o, pair),
    )


def _row_fields(plan: KernelPlan) -> dict[str, Any]:
    """The fields about rows in shared memory, which are wider than products where that takes fewer boxes of TMA."""
    c, m = plan.compute, plan.memory
    pads_qk, pads_v = m.columns_qk > c.head_dim_qk_padded, m.columns_v > c.head_dim_v_padded
    return {
        "columns_qk": m.columns_qk,
        "columns_v": m.columns_v,
        "pads_k_steps": pads_qk,
        "k_steps": "steps or cute.size(a, mode=[2])" if pads_qk else "cute.size(a, mode=[2])",
        "pads_v": pads_v,
        "row_qk": "COLUMNS_QK" if pads_qk else "HEAD_DIM_QK",
        "row_v": "COLUMNS_V" if pads_v else "HEAD_DIM_V",
        "fresh_s": "False, STEPS_QK" if pads_qk else "False",
        "mma_rows": "t.mma_rows" if pads_v else "t.mma_pv",
        "thr_rows": "thr_rows" if pads_v else "thr_pv",
    }


def _slices(last_first: bool) -> dict[str, Any]:
    """The fields about which slice of Q is loaded first: as the warpgroups end their walks of the tile before."""
    if last_first:
        return {
            "slices_of_q": "cutlass.range_constexpr(self.warpgroups - 1, -1, -1)",
            "slices_note": "last rows end first",
        }
    return {"slices_of_q": "cutlass.range_constexpr(self.warpgroups)", "slices_note": "as their turns end"}


def _order(plan_set: PlanSet, is_ragged: bool, pair: PairView) -> dict[str, Any]:
    """The fields about the order of row tiles: plans walk groups of heads, or head by head, or some do either."""
    grouped = [p.schedule.l2_group_bytes > 0 for p in plan_set.plans]
    mixed = any(grouped) and not all(grouped)
    note = "Head by head, last rows first."
    if any(grouped):
        note = f"Longest row tiles first, heads of a group{' (or one)' * mixed} side by side."
    walk = f"{pair.blocks}, group_heads" if any(grouped) else pair.blocks
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
        slice_first="m_block * self.tile_queries + wg * QUERIES" if on else "row_0",
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


def _pair(on: bool, pack: PackView) -> PairView:
    queries = pack.tile_queries
    if not on:
        return PairView(
            is_on=False,
            blocks="m_blocks",
            blocks_of="p.m_blocks",
            block="p.m_blocks - 1 - row",
            whose_block="m_block",
            first_query=f"m_block * {queries}",
            queries=queries,
        )
    return PairView(
        is_on=True,
        blocks="m_pairs",
        blocks_of="p.m_pairs",
        block="2 * (p.m_pairs - 1 - row) + p.rank",
        whose_block="m_block of this CTA",
        first_query=f"m_block // 2 * (2 * {queries})",
        queries=f"2 * {queries}",
    )


def _rows(spec: AttentionSpec, stages_o: bool, pair: PairView) -> dict[str, Any]:
    """The fields about packed sequences, and about where rows of O and of row results lie."""
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
        "tiles": "row_tiles * cute.size(mQ, mode=[2])" if ragged else f"{pair.blocks} * heads",
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
