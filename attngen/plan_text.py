"""A PlanSet as text: formula, mask form with its reasons, plans with their budgets, rejected candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attngen.diag.words import counted
from attngen.ir.expr import Atom, Const, Expr
from attngen.ir.tables import ROW_BLOCK, ROW_WINDOW, Extreme, dims_in_memory
from attngen.ir.tile_map import map_words
from attngen.ir.types import Layout
from attngen.passes.few import ROUNDS, SMALL_WORTH, paces

if TYPE_CHECKING:
    from attngen.ir.backward import BackwardPlanSet
    from attngen.ir.forms import MaskForm
    from attngen.ir.plan import KernelPlan, MaskPlan, PlanSet, Rejected
    from attngen.ir.spec import AttentionSpec
    from attngen.rooflines import Roofline


def describe(plans: PlanSet, *, everything: bool = False) -> str:
    """The whole report of the forward, without rooflines."""
    blocks = [_formula(plans.spec, plans.target), _mask(plans.plans[0].mask.form, plans.spec), _choice(plans)]
    blocks += [_plan(p) for p in plans.with_small]
    blocks.append(rejected_lines(plans, everything))
    return "\n\n".join("\n".join(b) for b in (list(block) for block in blocks) if b)


def rooflines(found: list[tuple[str, Roofline]]) -> str:
    """One block for each length."""
    lines = []
    for label, r in found:
        skipped = f"{100 * (1 - r.visited / max(1, r.tiles)):.0f} % skipped"
        masked = f"{100 * r.masked / max(1, r.visited):.0f} % of the visited masked"
        lines += [
            f"rooflines, {label}: plan {r.plan}, {r.visited} of {r.tiles} tiles ({skipped}, {masked})",
            f"  MMA {r.mma_us:.0f} us   exp {r.exp_us:.0f} us   smem {r.smem_us:.0f} us   issue {r.issue_us:.0f} us   "
            f"HBM {r.hbm_us:.0f} us ({r.hbm_bytes / 1e6:.0f} MB)",
            f"  bound by {r.bound}; estimate {r.estimate_us:.0f} us",
        ]
        if r.tables_bytes:
            searches = f", searches of {r.search_steps} steps" if r.search_steps else ""
            lines.append(f"  tables {kb(r.tables_bytes)}{searches}")
    return "\n".join(lines)


def _text(e: Expr | None, default: str) -> str:
    from attngen.syntax import print_expr

    return default if e is None else print_expr(e)


def _formula(spec: AttentionSpec, target: str) -> Iterator[str]:
    yield f"{spec.name} for {target}" + (f": {' '.join(spec.doc.split())}" if spec.doc else "")
    dims = (
        f"q, k {spec.head_dim_qk}, v {spec.head_dim_v}"
        if spec.head_dim_qk != spec.head_dim_v
        else str(spec.head_dim_qk)
    )
    yield f"  head_dim  {dims}   {spec.dtype}   {spec.layout}"
    yield f"  scale     {_text(spec.scale, '')}"
    if not isinstance(spec.score, Atom):
        yield f"  score     {_text(spec.score, 's')}"
    yield "  mask      " + (
        "everything is kept" if spec.mask == Const(type=spec.mask.type, value=True) else _text(spec.mask, "true")
    )
    if spec.sink is not None:
        yield f"  sink      {_text(spec.sink, '')}"
    if not isinstance(spec.epilogue, Atom):
        yield f"  epilogue  {_text(spec.epilogue, 'o')}"
    for p in spec.params:
        bounds = "".join(f" {sign} {v}" for sign, v in ((">=", p.minimum), ("<=", p.maximum)) if v is not None)
        yield f"  param     {p.name}: {p.type}{bounds}" + ("" if p.default is None else f" = {p.default}")
    if spec.layout is Layout.VARLEN:
        yield "  lengths   cu_seqlens_q, cu_seqlens_kv: i32[batch + 1], read on the GPU; sequences with most keys first"
    elif spec.layout is Layout.PADDED:
        yield "  lengths   seqused_q, seqused_kv: i32[batch], read on the GPU; sequences with most keys first"
    for t in spec.tensors:
        yield f"  tensor    {t.name}: {t.dtype}[{', '.join(map(str, t.dims))}]" + (" sorted" if t.sorted else "")


def _mask(form: MaskForm, spec: AttentionSpec) -> Iterator[str]:
    inside = "inside the listed blocks" if form.mask != spec.mask else ""  # the map has what `blocks` says
    if form.is_full:
        yield f"mask form: full{inside and f' {inside}'}; no tile is masked except past the end of the keys"
        return
    clauses = "1 interval" if len(form.clauses) == 1 else f"the union of {len(form.clauses)} intervals"
    yield f"mask form: {clauses} of keys for each row" + (f", exact {inside}".rstrip() if form.is_exact else "")
    for i, c in enumerate(form.clauses, 1):
        mark = f"{i}. " if len(form.clauses) > 1 else ""
        rows = f"rows with {_text(c.rows, '')}: " if c.rows is not None else ""
        yield f"  {mark}{rows}{_text(c.lower, '0')} <= kv_idx < {_text(c.upper, 'seqlen_kv')}"
        if c.residual is not None:
            yield f"     and, element by element: {_text(c.residual, '')}"
    for b, i in zip(form.bounds, range(1, len(form.bounds) + 1), strict=True):
        mark = f" of {i}" if len(form.clauses) > 1 else ""
        yield f"  live tiles{mark}: keys {_text(b.lower_min, '0')} up to {_text(b.upper_max, '')}"
        if isinstance(b.upper_min, Const) and b.upper_min.value == 0:
            yield f"  full tiles{mark}: none"
        else:
            yield f"  full tiles{mark}: keys {_text(b.lower_max, '0')} up to {_text(b.upper_min, '')}"
    for t in form.tables:
        if isinstance(t, Extreme):
            which = "greatest" if t.greatest else "least"
            axes = ", ".join(f"seqlen_q / {ROW_BLOCK}" if d == "seqlen_q" else d for d in t.dims)
            yield f"  table {t.name}: i32[{axes}]"
            yield f"    the {which} {_text(t.value, '')} of {ROW_WINDOW} rows"
            continue
        below = "below" if t.side == "first" else "at most"
        row = f"{t.tensor}[{', '.join(_text(e, '') for e in t.lead)}]" if t.lead else t.tensor
        yield f"  table {t.name}: i32[{', '.join(t.dims)}]" + (" sorted" if t.sorted else "")
        yield f"    how many elements of {row} are {below} {_text(t.value, '')}, by a binary search each"
    if form.tables:
        held = [(" * ".join(dims_in_memory(t)), f" / {ROW_BLOCK}" * isinstance(t, Extreme)) for t in form.tables]
        rows = " + ".join(f"{axes}{block}" for axes, block in held)
        yield f"  tables take 4 * ({rows}) bytes, filled before each call by a thread or a warp an element"
    for r in form.reasons:
        yield f"  element-wise term `{r.term}`: {r.why}"
        yield f"    instead: {r.mend}"


def _choice(plans: PlanSet) -> Iterator[str]:
    yield from by_length_lines(plans, "plans")
    if paces(plans):
        yield f"  a call of fewer than {ROUNDS} row tiles an SM takes the plan that ends first there"
    if plans.small is not None:
        rows, share = plans.small.compute.tile_m, f"{100 * SMALL_WORTH:.0f} %"
        yield f"  one with no more tiles of {rows} rows than SMs: {plans.small.name}, where that promises {share},"
        yield "    a kernel of its own, made at the first such call"


def by_length_lines(plans: PlanSet | BackwardPlanSet, label: str) -> Iterator[str]:
    """Which plan serves which lengths."""
    varlen = plans.spec.layout is Layout.VARLEN
    yield f"{label} by {'max(total_q, total_kv) / batch' if varlen else 'max(seqlen_q, seqlen_kv)'}:"
    low = 0
    for name, limit in zip([p.name for p in plans.plans], [*plans.limits, None], strict=True):
        where = f"{low + 1} to {limit}" if limit is not None else (f"from {low + 1}" if low else "all lengths")
        yield f"  {where}: {name}"
        low = limit or low


def kb(n: int) -> str:
    """Bytes, in KB where that loses nothing that matters."""
    return f"{n / 1024:.0f} KB" if n % 1024 == 0 or n > 10240 else f"{n} B"


def _plan(p: KernelPlan) -> Iterator[str]:
    c, m, s, mem = p.compute, p.mask, p.schedule, p.memory
    yield f"plan {p.name}"
    padded = ""
    if (c.head_dim_qk_padded, c.head_dim_v_padded) != (c.head_dim_qk, c.head_dim_v):
        padded = f", head dims padded to {c.head_dim_qk_padded} and {c.head_dim_v_padded} in products"
    groups = counted(c.warpgroups, "consumer warpgroup")
    yield f"  compute    tile_m {c.tile_m}, tile_n {c.tile_n}, {groups}{padded}"
    wide = (mem.columns_qk, mem.columns_v) != (c.head_dim_qk, c.head_dim_v)
    separate = {
        "never": ": weights that no other key moves, no LSE",
        "bounded": f": one reference, 2^{c.reference:.0f}, for all rows",
    }.get(c.rescale.value, "")
    separate += ", maxima of ints" * (c.maxima.value == "ints")
    yield f"             rescale {c.rescale.value}{separate}" + (", scores element by element" if c.has_score else "")
    parts = [
        name
        for name, on in (
            ("masked right edge", m.has_right_edge),
            ("unmasked interior", m.has_interior),
            ("masked left edge", m.has_left_edge),
        )
        if on
    ]
    yield (
        f"  loop       {', '.join(parts) or 'one loop'}; walk {m.walk}; a masked tile tests {m.test}"
        + ("; ranges of each warpgroup's own 64 rows" if m.ranges_per_warpgroup else "")
    )
    yield from map_lines(m, c.tile_m, c.tile_n)
    yield (
        f"  smem       {kb(mem.smem_bytes)} of {kb(mem.smem_limit)}: "
        + ", ".join(
            f"{b.name} {kb(b.bytes)}" if b.alias_of is None else f"{b.name} in {b.alias_of}" for b in mem.buffers
        )
        + f"; {mem.kv_stages} K/V stages"
        + (f"; rows of {mem.columns_qk} and {mem.columns_v} columns" if wide else "")
    )
    split = f"S {c.tile_n // 2}, P {c.tile_n // 4}, O {c.head_dim_v_padded // 2}"
    roles = ", ".join(f"{r.name} {r.registers}" for r in s.roles if r.name != "idle")
    yield f"  registers  {mem.fragment_registers} of {mem.register_limit} for fragments ({split})"
    yield f"             launch {p.launch.launch_registers}, {roles}"
    pairs = ", clusters of 2 CTAs with row tiles side by side, K and V multicast" if p.launch.pairs_ctas else ""
    yield f"  schedule   {p.launch.threads} threads, order {s.order}{pairs}" + (
        (", warpgroups take turns" if s.pingpong else "")
        + (f", {s.pack} query heads of a KV head in a row tile" if s.pack > 1 else "")
    )
    for q in s.pipelines:
        ring = f"{q.stages} stages of {q.buffer}, {q.stage_bytes} B each" if q.stage_bytes else "one word"
        arrivals = f"arrivals {q.full_arrivals} full, {q.empty_arrivals} empty"
        yield f"  pipeline   {q.name}: {ring}, {q.producer} to {q.consumer}, {arrivals}"
    yield "  barriers   " + ", ".join(f"{b.id} {b.name} ({b.threads})" for b in s.named_barriers)
    k = p.cost
    yield (
        f"  full tile  MMA {k.mma_cycles:.0f}, exp {k.exp_cycles:.0f}, smem {k.smem_cycles:.0f}, "
        f"issue {k.issue_cycles:.0f} cycles; estimated {100 * k.efficiency:.0f} % of the dense MMA rate"
    )
    yield from _measured(p)


#: Length at which explain says what a tile map takes.
MAP_LENGTH = 8192


def map_lines(m: MaskPlan, tile_m: int, tile_n: int, **more: bool) -> Iterator[str]:
    """What a tile map takes and how it is made; nothing where a walk has none. `more`: of a backward."""
    if m.map is None:
        return
    of = [name for name, on in (("batch element", m.map.per_batch), ("query head", m.map.per_head)) if on]
    one = {"per_batch": False, "per_head": False, **more}
    sizes = {"batch": 1, "heads_q": 1, "seqlen_q": MAP_LENGTH, "seqlen_kv": MAP_LENGTH}
    words = map_words(one, {"tile_m": tile_m, "tile_n": tile_n}, sizes)
    bits = 3 if more.get("turns") else 2
    yield (
        f"  tile map   {bits} bits a tile{''.join(f', {n}' for n in (['of each ' + ' and '.join(of)] if of else []))}: "
        f"{kb(4 * words)} at {MAP_LENGTH} rows and keys; a launch before the kernel's, a warp for 32 tiles"
    )
    loads = ", ".join(dict.fromkeys(load.tensor for load in m.map.test.loads))
    reads = f" and the least and largest element that it reads of {loads}" if loads else ""
    yield f"             a tile is decided by its ends{reads}, else pair by pair"


def _measured(p: KernelPlan) -> Iterator[str]:
    """The throughput by which the search ranked this tile, where it was measured."""
    from attngen.targets import measured

    mask = "causal" if p.schedule.order == "lpt" else "full"
    group = (p.compute.head_dim_qk, p.compute.head_dim_v, mask)
    found = measured.seconds_per_flop(*group, p.name)
    if found is not None:
        yield measured_line(mask, measured.lengths(*group), found)


def measured_line(mask: str, lengths: Sequence[int], found: Sequence[float]) -> str:
    """Seconds a FLOP by length, as rates."""
    rates = ", ".join(f"{n}: {1e-12 / t:.0f}" for n, t in zip(lengths, found, strict=True))
    return f"  measured   {mask}, TFLOP/s on an H200 by length: {rates}"


def rejected_lines(plans: PlanSet | BackwardPlanSet, everything: bool) -> Iterator[str]:
    """How the candidates fared: what fits too, and what was rejected by which pass and why."""
    yield f"candidates: {len(plans.plans)} chosen, {len(plans.others)} more fit, {len(plans.rejected)} rejected"
    if plans.others:
        names = sorted({(-round(100 * p.cost.efficiency), p.name) for p in plans.others})
        listed = names if everything else names[:8]
        more = ", …" if len(names) > len(listed) else ""
        yield "  fit too: " + ", ".join(f"{name} ({-share} %)" for share, name in listed) + more
    shown = plans.rejected if everything else _nearest(plans)
    for r in shown:
        yield f"  rejected {r.candidate} by {r.by}: {r.why}"
    if len(shown) < len(plans.rejected):
        yield f"  … and {len(plans.rejected) - len(shown)} more, further off (--all)"


def _nearest(plans: PlanSet | BackwardPlanSet) -> list[Rejected]:
    """Of rejected candidates with the same rows, pass and place of O, the smallest tile: the nearest to fit."""
    nearest: dict[tuple[str, str, bool], Rejected] = {}
    for r in plans.rejected:  # in order of falling tile_n
        nearest[r.candidate.split("x")[0], r.by, "(" in r.candidate] = r
    return list(nearest.values())
