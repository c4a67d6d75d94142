"""The backward as text: slope, gradients of captured tensors, memory, determinism, plans, rejected candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attngen.diag.words import counted
from attngen.ir.gradient import GradientKind
from attngen.passes.backward.choose import measured_lengths, rates
from attngen.passes.epilogue import epilogue_slope, has_epilogue
from attngen.plan_text import by_length_lines, kb, map_lines, measured_line, rejected_lines

if TYPE_CHECKING:
    from attngen.diag.diagnostic import Diagnostic
    from attngen.ir.backward import BackwardPlan, BackwardPlanSet
    from attngen.ir.gradient import Contribution
    from attngen.rooflines import BackwardRoofline

#: What the kernel writes of a captured gradient, and who turns it into the tensor's.
_KINDS = {
    GradientKind.SINK: "fp32 (batch, heads_q, seqlen_q), the gradient of each row's sink; the host differentiates its "
    "expression",
    GradientKind.COLUMN: "fp32 (batch, heads_q, seqlen_kv), summed over the rows of a key by the thread that owns it; "
    "the host scatters it",
    GradientKind.ROW: "fp32 (batch, heads_q, seqlen_q), summed over the keys of a row by fp32 reductions; the host "
    "scatters it",
    GradientKind.ELEMENT: "fp32 of the tensor's declared shape, by fp32 reductions",
    GradientKind.OUTPUT: "a value of the tensor's dtype for each element of O, before the main kernel; the host "
    "scatters it",
    GradientKind.OUTPUT_ROW: "fp32 (batch, heads_q, seqlen_q), summed over the columns of O before the main kernel; "
    "the host scatters it",
}


def describe_backward(
    plans: BackwardPlanSet | None, refused: tuple[Diagnostic, ...] = (), *, everything: bool = False
) -> str:
    """The whole report, without rooflines. `refused`: why there are no plans, or which gradients they leave out."""
    blocks = [_refused(plans is None, refused)]
    if plans is not None:
        blocks = [
            _head(plans),
            _determinism(plans),
            _refused(False, refused),
            by_length_lines(plans, "backward plans"),
            *(_plan(p, plans.deterministic) for p in plans.plans),
        ]
        blocks.append(rejected_lines(plans, everything))
    return "\n\n".join("\n".join(b) for b in (list(block) for block in blocks) if b)


def rooflines_backward(found: list[tuple[str, BackwardRoofline]]) -> str:
    """One block for each length."""
    lines = []
    for label, r in found:
        skipped = f"{100 * (1 - r.visited / max(1, r.tiles)):.0f} % skipped"
        masked = f"{100 * r.masked / max(1, r.visited):.0f} % of the visited masked"
        lines += [
            f"rooflines of the backward, {label}: plan {r.plan}, {r.visited} of {r.tiles} tiles ({skipped}, {masked})",
            f"  MMA {r.mma_us:.0f} us   exp {r.exp_us:.0f} us   smem {r.smem_us:.0f} us   issue {r.issue_us:.0f} us   "
            f"HBM {r.hbm_us:.0f} us ({r.hbm_bytes / 1e6:.0f} MB)",
            f"  before and after the main kernel: HBM {r.around_us:.0f} us ({r.around_bytes / 1e6:.0f} MB)",
            f"  fp32 reductions of dQ in L2 {r.reduced_bytes / 1e6:.0f} MB; workspace {r.workspace_bytes / 1e6:.0f} "
            f"MB; inputs, outputs and gradients {r.tensor_bytes / 1e6:.0f} MB",
        ]
        if r.turns:
            lines.append(
                f"  turns: {r.turns} ordered additions, up to {r.longest} one after the other for a query tile"
            )
        lines.append(f"  bound by {r.bound}; estimate {r.estimate_us:.0f} us")
    return "\n".join(lines)


def reads(c: Contribution) -> str:
    """What of the tensor a contribution belongs to, as the spec says it."""
    from attngen.syntax import print_expr

    return f"{c.tensor}[{', '.join(print_expr(i) for i in c.indices)}]" if c.indices else c.tensor


def workspace_formula(p: BackwardPlan) -> str:
    """Bytes of the workspace of a call."""
    tiles = f"4 * batch * heads_q * ceil(seqlen_q / {p.compute.tile_m}) * {p.memory.workspace_per_tile} bytes"
    return tiles + (f" + {4 * p.part_words} an SM" if p.part_words else "")


def _refused(whole: bool, refused: tuple[Diagnostic, ...]) -> Iterator[str]:
    if whole:
        yield "backward: refused; the forward is served"
    for d in refused:
        yield f"  {'' if whole else 'left out: '}{d.code} {d.message}"
        yield from (f"    {note}" for note in d.notes)
        yield from (f"    instead: {mend}" for mend in d.helps)


def _head(plans: BackwardPlanSet) -> Iterator[str]:
    from attngen.syntax import print_expr

    form, longest = plans.gradient, plans.long_plan
    yield "backward: dQ, dK, dV" + "".join(f", d {n}" for n in dict.fromkeys(c.tensor for c in form.contributions))
    yield f"  slope     d score / d s = {print_expr(form.slope)}"
    for c in form.contributions:
        yield f"  gradient  {reads(c)}, by {c.kind.value}: {_KINDS[c.kind]}"
        if c.kind is not GradientKind.SINK:
            of = "epilogue" if c in form.of_epilogue else "score"
            yield f"            d {of} / d {c.tensor} = {print_expr(c.coefficient)}"
    for name in form.zero:
        yield f"  gradient  {name}: zero, no derivative reaches it"
    if has_epilogue(plans.spec):
        yield f"  epilogue  dO before it = dO * ({print_expr(epilogue_slope(plans.spec))}), in `prepare`"
    o = "O before the epilogue" if has_epilogue(plans.spec) else "O"
    yield f"  saved     q, k, v, {o}, and LSE: 4 * batch * heads_q * seqlen_q bytes; nothing of seqlen_q * seqlen_kv"
    words = longest.memory.workspace_per_tile / longest.compute.tile_m
    yield f"  workspace {workspace_formula(longest)}: fp32 dQ, LSE, D; {4 * words:.0f} bytes a row and head"
    for p, limit in zip(plans.plans, plans.limits, strict=False):
        yield f"            up to {limit}: {workspace_formula(p)}"
    yield f"  peak      inputs, outputs, gradients, saved, workspace{_extra(plans)}"


def _extra(plans: BackwardPlanSet) -> str:
    buffers = dict.fromkeys(c.tensor for c in plans.gradient.contributions)
    return f", and the fp32 buffers of {', '.join(buffers)}" if buffers else ""


def _determinism(plans: BackwardPlanSet) -> Iterator[str]:
    p = plans.long_plan
    words = turn_words(plans)
    if plans.deterministic:
        yield "deterministic: every gradient has the same bits from run to run"
        first = "higher" if p.schedule.kv_order == "descending" else "lower"
        yield (
            f"  dQ        by turns: a KV tile adds to a query tile after all {first} KV tiles have; {words} words "
            "of each query tile's workspace count them"
        )
        yield (
            f"  turns     one for each KV tile of {p.compute.tile_n} keys and warpgroup that a query tile sees, each a "
            "wait, an addition that is waited for, and a release"
        )
        yield "  dK, dV    by construction: one CTA sums them over all queries and query heads"
    else:
        kinds = (GradientKind.ROW, GradientKind.ELEMENT)
        reduced = ["dQ", *dict.fromkeys(f"d {c.tensor}" for c in plans.gradient.contributions if c.kind in kinds)]
        yield f"deterministic: no; the fp32 sums of {', '.join(reduced)} follow the order in which CTAs come"
        yield "  dK, dV    have the same bits from run to run all the same, by construction"
        if p.schedule.shares_walks:
            yield "            parts of shared walks are added up in order"
        yield "  instead   `backward { deterministic = true }` costs counters, and turns that wait for one another"


def turn_words(plans: BackwardPlanSet) -> int:
    """Words of a query tile's workspace that count turns."""
    return plans.long_plan.compute.dq_parts if plans.deterministic else 0


def _plan(p: BackwardPlan, deterministic: bool) -> Iterator[str]:
    c, m, s, mem = p.compute, p.mask, p.schedule, p.memory
    yield f"backward plan {p.name}"
    shares = "64 keys each"
    if c.splits_operands:
        shares = f"one owns dV, the other dK, of the same {c.keys} keys of a CTA; {c.cluster} CTAs exchange dS"
    padded = ""
    if (c.head_dim_qk_padded, c.head_dim_v_padded) != (c.head_dim_qk, c.head_dim_v):
        padded = f", head dims padded to {c.head_dim_qk_padded} and {c.head_dim_v_padded}"
    groups = counted(c.warpgroups, "consumer warpgroup")
    yield f"  compute    tile_m {c.tile_m}, tile_n {c.tile_n}, {groups}, {shares}{padded}"
    wide = (mem.q_columns, mem.do_columns) != (c.head_dim_qk_padded, c.head_dim_v_padded)
    rows, columns = c.dq_shape
    dq = "dQ^T = K^T dS^T" if c.dq_transposed else "dQ = dS K"
    meanwhile = "; dV and dK are done before dQ starts" if c.drains else "; dK runs on while dQ is staged"
    if c.splits_operands:
        meanwhile = f" to {c.dq_parts} warpgroups; dV and dK run while it is added"
    yield f"             {dq}, {rows} x {columns}, shared out by {'rows' if c.dq_by_rows else 'columns'}{meanwhile}"
    if c.v_in_registers:
        yield "             dP^T = V dO^T reads V from registers"
    loop = "some steps are unmasked" if m.has_interior else "every step is masked"
    yield f"  loop       query tiles of every query head that see the KV tile; {loop}; a masked step tests {m.test}"
    yield from map_lines(m, c.tile_m, c.tile_n, by_keys=True, turns=deterministic)
    yield (
        f"  smem       {kb(mem.smem_bytes)} of {kb(mem.smem_limit)}: "
        + ", ".join(f"{b.name} {kb(b.bytes)}" for b in mem.buffers)
        + f"; stages of Q {mem.q_stages}, dO {mem.do_stages}, dS {mem.ds_stages}, "
        + (f"dQ {mem.dq_stages}" if mem.dq_stages else "dQ none (added from registers)")
        + (f", P {mem.p_stages}" if mem.p_stages else "")
        + (f"; rows of Q and dO of {mem.q_columns} and {mem.do_columns} columns" if wide else "")
    )
    sums = (
        f"dK or dV {max(c.head_dim_qk_padded, c.head_dim_v_padded) // 2}"
        if c.splits_operands
        else f"dK {c.head_dim_qk_padded // 2}, dV {c.head_dim_v_padded // 2}"
    )
    split = f"{sums}, S and dP {c.tile_m}, dQ {c.tile_m * c.head_dim_qk_padded // (128 * c.dq_parts)}"
    split += f", expressions {c.expression_registers}" if c.expression_registers else ""
    roles = ", ".join(f"{r.name} {r.registers}" for r in s.roles if r.name != "idle")
    yield f"  registers  {mem.fragment_registers} of {mem.register_limit} for fragments ({split})"
    yield f"             launch {p.launch.launch_registers}, {roles}"
    heads = "as many heads together as fill the SMs" if s.grouped else "one head after the other"
    if s.serpentine:
        heads += ", query heads of a KV head in a serpentine walk"
    if s.zeroes_ahead:
        heads += "; dQ zeroed a few heads ahead"
    if s.shares_walks:
        heads += "; walks of a short last wave shared among CTAs"
    ctas = "one CTA" if c.cluster == 1 else f"a cluster of {c.cluster} CTAs"
    yield f"  schedule   {p.launch.threads} threads, {ctas} a KV tile and KV head; KV tiles {s.kv_order}, {heads}"
    for q in s.pipelines:
        arrivals = f"arrivals {q.full_arrivals} full, {q.empty_arrivals} empty"
        size = f", {q.stage_bytes} B each" if q.stage_bytes else ""
        yield f"  pipeline   {q.name}: {q.stages} of {q.buffer}{size}, {q.producer} to {q.consumer}, {arrivals}"
    yield "  barriers   " + ", ".join(f"{b.id} {b.name} ({b.threads})" for b in s.named_barriers)
    k = p.cost
    yield (
        f"  full step  MMA {k.mma_cycles:.0f}, exp {k.exp_cycles:.0f}, smem {k.smem_cycles:.0f}, "
        f"issue {k.issue_cycles:.0f} cycles; {reduced_bytes(p)} B of fp32 reductions; "
        f"estimated {100 * k.efficiency:.0f} % of the dense MMA rate"
    )
    if not deterministic and (found := rates(p)):
        yield measured_line("full", measured_lengths(p), found)


def reduced_bytes(p: BackwardPlan) -> int:
    """fp32 bytes of dQ that one step adds to the workspace."""
    return 4 * p.compute.tile_m * p.compute.head_dim_qk_padded
