"""verify: invariants of a finished plan. A failure is a bug in a pass, never the fault of a user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from attngen.ir.plan import MAX_PLANS, PACKS, Buffer, KernelPlan, Maxima, PlanSet, Rescale
from attngen.ir.tables import Extreme, cover
from attngen.ir.types import DType
from attngen.targets import sm90

#: Bytes in front of the buffers: mbarriers and the mailbox, up to the first 1024-byte boundary.
HEAD_BYTES = 1024


class PlanError(AssertionError):
    """A plan breaks an invariant."""


def verify(plan: KernelPlan) -> None:
    """Check limits, ledger and coverage of the roles.

    Raises:
        PlanError: naming the section and the numbers that disagree.
    """
    for fault in faults(plan):
        raise PlanError(f"plan {plan.name}: {fault}")


def verify_set(plan_set: PlanSet) -> None:
    """Check every plan of a set, and that one kernel file can hold them all.

    Raises:
        PlanError: naming what disagrees.
    """
    for p in plan_set.with_small:
        verify(p)
    for fault in set_faults(plan_set):
        raise PlanError(f"plans of {plan_set.spec.name}: {fault}")


def faults(plan: KernelPlan) -> list[str]:
    """Everything wrong with `plan`."""
    checks = (*_compute(plan), *_memory(plan), *_roles(plan), *_barriers(plan), *_launch(plan), *_mask(plan))
    return [text for ok, text in checks if not ok]


def set_faults(plan_set: PlanSet) -> list[str]:
    """Everything wrong between the plans of a set: count, limits, and what one skeleton fixes for all of them."""
    plans, limits, small = plan_set.plans, plan_set.limits, plan_set.small
    skeletons = {
        (
            p.memory.o_in_q,
            p.memory.columns_qk,
            p.memory.columns_v,
            p.schedule.pingpong,
            p.mask.model_dump_json(exclude={"form"}),
            p.compute.rescale,
            p.compute.maxima,
            p.compute.growth,
            p.compute.headroom,
            p.compute.reference,
            p.launch.cluster,
            p.compute.has_score,
        )
        for p in plans
    }
    checks = (
        *by_length([p.name for p in plans], limits),
        (len(skeletons) <= 1, "the plans need more than one kernel class"),
        (small is None or small.compute.warpgroups == 1, "the small plan has more than one warpgroup"),
        (small is None or all(small.mask.form == p.mask.form for p in plans), "the small plan has another mask"),
        (
            small is None or all(p.compute.warpgroups > 1 for p in plans),
            "a plan of the file is as small as the one beside it",
        ),
        (
            small is None or not (plan_set.spec.layout.is_ragged or small.mask.map),
            "a call of ragged sequences or with a map goes by length: no small plan",
        ),
    )
    return [text for ok, text in checks if not ok]


Check = tuple[bool, str]


def by_length(names: Sequence[str], limits: Sequence[int]) -> Iterator[Check]:
    """How many plans a file of either direction holds, and up to which length each serves."""
    yield 1 <= len(names) <= MAX_PLANS, f"{len(names)} plans, at most {MAX_PLANS}"
    yield len(limits) == len(names) - 1, f"{len(limits)} limits for {len(names)} plans"
    yield all(0 < a < b for a, b in pairwise((*limits, 1 << 62))), f"limits {tuple(limits)} do not ascend"
    yield len(set(names)) == len(names), "two plans are the same tile"


def _compute(plan: KernelPlan) -> Iterator[Check]:
    c = plan.compute
    yield c.tile_m == 64 * c.warpgroups, f"compute: tile_m {c.tile_m} is not 64 x {c.warpgroups} warpgroups"
    yield 1 <= c.warpgroups <= sm90.MAX_WARPGROUPS, f"compute: {c.warpgroups} warpgroups of {sm90.MAX_WARPGROUPS}"
    yield c.tile_n % 16 == 0 and 16 <= c.tile_n <= 256, f"compute: tile_n {c.tile_n} is no WGMMA extent"
    for name, true, padded, step in (
        ("qk", c.head_dim_qk, c.head_dim_qk_padded, 16),
        ("v", c.head_dim_v, c.head_dim_v_padded, 8),
    ):
        yield padded % step == 0 and 0 <= padded - true < step, f"compute: head_dim_{name} {true} is padded to {padded}"
        yield step <= padded <= 256, f"compute: head_dim_{name} {padded} is no WGMMA extent"
    above, below = (15, 14) if c.dtype is DType.FP16 else (64, 64)
    held = 0 <= c.growth <= above and 0 <= c.headroom <= below
    ints = c.maxima is not Maxima.INTS or c.rescale is Rescale.ON_GROWTH
    yield ints, f"compute: maxima of ints are none, rescale {c.rescale} takes none"
    yield held, f"compute: P of {c.dtype} relative to a reference outgrown by {c.growth}, or {c.headroom} too high"


def _memory(plan: KernelPlan) -> Iterator[Check]:
    c, m = plan.compute, plan.memory
    names = {b.name: b for b in m.buffers}
    used = sum(b.bytes for b in m.buffers)
    limit = min(m.smem_limit, sm90.SMEM_BYTES)
    wanted = ["sK", "sO", "sQ", "sV"] if m.stages_o else ["sK", "sQ", "sV"]
    found = sorted(b.name for b in m.buffers if b.name != "sDistance")
    yield found == wanted, f"memory: buffers {sorted(names)}"
    yield used + HEAD_BYTES == m.smem_bytes, f"memory: buffers take {used} and {HEAD_BYTES}, total {m.smem_bytes}"
    yield m.smem_bytes <= limit, f"memory: total {m.smem_bytes}, limit {limit}"
    yield all(b.bytes % 1024 == 0 for b in m.buffers), "memory: a buffer breaks 1024-byte alignment"
    qk, v = (next((b.shape[1] for b in m.buffers if b.name == name), 0) for name in ("sK", "sV"))
    for name, extent, columns in (("qk", c.head_dim_qk_padded, qk), ("v", c.head_dim_v_padded, v)):
        whole = columns in (16, 32) or (columns > 32 and columns % 32 == 0)
        yield whole and extent <= columns, f"memory: rows of {columns} columns for head_dim_{name} {extent}"
    shapes = {
        "sQ": (64, qk, c.warpgroups),
        "sO": (64, v, c.warpgroups),
        "sK": (c.tile_n, qk, m.kv_stages),
        "sV": (c.tile_n, v, m.kv_stages),
        "sDistance": (-(-(c.tile_n + 15) // 32) * 32, 4 * c.warpgroups, 2),  # fp32
    }
    for b in m.buffers:
        if b.name in shapes:
            yield b.shape == shapes[b.name], f"memory: {b.name} has shape {b.shape}, not {shapes[b.name]}"
        host = b if b.alias_of is None else names.get(b.alias_of)
        fits = host is not None and _size(b) <= host.bytes
        yield fits, f"memory: {b.name} ({_size(b)} bytes) does not fit in {b.alias_of or 'its own bytes'}"
        yield b.alias_of is None or b.bytes == 0, f"memory: {b.name} lives in {b.alias_of} and has bytes of its own"
        yield b.alias_of is not None or b.bytes - _size(b) < 1024, f"memory: {b.name} wastes {b.bytes - _size(b)} bytes"
    alias = names["sO"].alias_of if "sO" in names else None
    yield alias == ("sQ" if m.o_in_q else None), f"memory: sO lives in {alias}, o_in_q is {m.o_in_q}"
    yield m.kv_stages >= 1, f"memory: {m.kv_stages} KV stages"
    yield m.fragment_registers < m.register_limit, f"memory: {m.fragment_registers} registers of {m.register_limit}"
    held = c.tile_n // 2 + c.tile_n // 4 + c.head_dim_v_padded // 2
    yield m.fragment_registers >= held, f"memory: {m.fragment_registers} registers, S, P and O take {held}"


def _size(b: Buffer) -> int:
    """Bytes of a buffer's 16-bit elements."""
    size = 2
    for extent in b.shape:
        size *= extent
    return size


def _roles(plan: KernelPlan) -> Iterator[Check]:
    c, s = plan.compute, plan.schedule
    registers = sum((r.warps[1] - r.warps[0]) * 32 * r.registers for r in s.roles)
    yield registers <= 65536, f"schedule: roles take {registers} registers of 65536"
    valid = all(24 <= r.registers <= 240 and r.registers % 8 == 0 for r in s.roles)
    yield valid, "schedule: a register count is no setmaxnreg value"
    covered = sorted(w for r in s.roles for w in range(*r.warps))
    yield covered == list(range(4 * (c.warpgroups + 1))), "schedule: roles do not cover the warps once"
    first = s.roles[0]
    yield first.name == "producer" and first.warps == (0, 1), f"schedule: warp 0 is {first.name}, not the producer"
    consumers = [r for r in s.roles if r.name.startswith("consumer")]
    yield len(consumers) == c.warpgroups, f"schedule: {len(consumers)} consumers for {c.warpgroups} warpgroups"
    yield len({r.registers for r in consumers}) == 1, "schedule: consumers differ in registers"
    limit = plan.memory.register_limit
    yield all(r.registers == limit for r in consumers), f"schedule: consumers do not hold the {limit} registers planned"
    others = {r.registers for r in s.roles if r not in consumers}
    yield len(others) == 1, "schedule: the producer's warpgroup has more than one register count"
    yield s.l2_group_bytes >= 0, f"schedule: {s.l2_group_bytes} bytes of L2"
    yield s.pack in PACKS, f"schedule: {s.pack} heads share a row tile"
    yield s.pack == 1 or plan.mask.map is None, "schedule: a map has a row of bits a query head"


def _barriers(plan: KernelPlan) -> Iterator[Check]:
    c, m, s = plan.compute, plan.memory, plan.schedule
    ids = [b.id for b in s.named_barriers]
    yield len(set(ids)) == len(ids) and all(0 <= i < 16 for i in ids), f"schedule: named barriers {ids}"
    wanted = {(0, "cta", plan.launch.threads)}
    wanted |= {(5 + w, f"store of warpgroup {w}", 128) for w in range(c.warpgroups) if plan.memory.stages_o}
    wanted |= {(1 + w, f"turn of warpgroup {w}", 256) for w in range(c.warpgroups) if s.pingpong}
    for b in s.named_barriers:
        yield (b.id, b.name, b.threads) in wanted, f"schedule: barrier {b.id} ({b.name}, {b.threads} threads)"
    turns = sum(b.name.startswith("turn") for b in s.named_barriers)
    yield turns == (c.warpgroups if s.pingpong else 0), f"schedule: {turns} turns for {c.warpgroups} warpgroups"
    yield len(s.named_barriers) == len(wanted), f"schedule: {len(s.named_barriers)} named barriers of {len(wanted)}"
    yield not s.pingpong or c.warpgroups > 1, "schedule: one warpgroup has nobody to take turns with"
    names, ctas = [p.name for p in s.pipelines], plan.launch.cluster[0]
    told = ["ticket"] if ctas > 1 else []
    yield names == ["q", "k", "v", "mailbox", *told], f"schedule: pipelines {names}"
    hosts = {b.name: b for b in m.buffers}
    stages = {"q": c.warpgroups, "k": m.kv_stages, "v": m.kv_stages, "mailbox": 1, "ticket": 1}
    buffers = {"q": "sQ", "k": "sK", "v": "sV", "mailbox": "slot", "ticket": "ticket"}
    warps = 4 * c.warpgroups
    empties = {"q": 1 if m.o_in_q else 4, "k": ctas * warps, "v": ctas * warps, "mailbox": warps, "ticket": 1}
    for p in s.pipelines:
        empty = empties.get(p.name)
        arrivals = (p.full_arrivals, p.empty_arrivals)
        yield arrivals == (1, empty), f"schedule: pipeline {p.name} arrivals {arrivals}, not {(1, empty)}"
        yield p.stages == stages.get(p.name), f"schedule: pipeline {p.name} has {p.stages} stages"
        yield p.buffer == buffers.get(p.name), f"schedule: pipeline {p.name} guards {p.buffer}"
        yield p.producer == "producer", f"schedule: pipeline {p.name} is produced by {p.producer}"
        yield p.consumer != p.producer, f"schedule: pipeline {p.name} has one role at both ends"
        host = hosts.get(p.buffer)
        bytes_ = _size(host) // host.shape[2] if host is not None and host.shape[2] else 4 if p.name == "ticket" else 0
        yield (
            p.stage_bytes == bytes_,
            f"schedule: pipeline {p.name} announces {p.stage_bytes} bytes, a stage is {bytes_}",
        )


def _launch(plan: KernelPlan) -> Iterator[Check]:
    c, launch = plan.compute, plan.launch
    threads = 128 * (c.warpgroups + 1)
    yield launch.threads == threads, f"launch: {launch.threads} threads, the roles need {threads}"
    at_launch = launch.launch_registers
    yield at_launch * threads <= 65536 and at_launch % 8 == 0, f"launch: {at_launch} registers for {threads} threads"
    low, high = plan.schedule.roles[0].registers, plan.schedule.roles[-1].registers
    yield low <= at_launch <= high, f"launch: {at_launch} registers, setmaxnreg goes down to {low} and up to {high}"
    yield launch.cluster in ((1, 1, 1), (2, 1, 1)), f"launch: cluster {launch.cluster}"
    yield not launch.pairs_ctas or plan.mask.map is None, "launch: row tiles of a pair have maps of their own"


def _mask(plan: KernelPlan) -> Iterator[Check]:
    mask = plan.mask
    one = len(mask.form.clauses) == 1
    wanted = "map" if mask.map is not None else "interval" if one else "runs"
    yield mask.walk == wanted, f"mask: walk {mask.walk} over {len(mask.form.clauses)} clauses, not {wanted}"
    yield len(mask.form.clauses) == len(mask.form.bounds), "mask: one bound for each clause"
    yield mask.test == "elements" or mask.form.is_exact, "mask: limits cannot decide a residual"
    yield mask.has_right_edge or mask.form.is_full or _only_lower(plan), "mask: no masked tiles for a right edge"
    yield mask.has_interior or not mask.form.is_full, "mask: a full mask without unmasked tiles"
    extremes = any(isinstance(t, Extreme) for t in mask.form.tables)
    rows = plan.compute.tile_m * plan.launch.cluster[0]
    yield not extremes or cover(rows), "mask: two windows of rows do not cover a tile"
    both = mask.has_right_edge and mask.has_interior and not mask.ranges_per_warpgroup
    yield both or mask.map is None, "mask: a map tells of masked and unmasked tiles, of a whole row tile"
    yield not mask.has_left_edge or mask.has_interior, "mask: a left edge without an interior"
    alone = plan.compute.warpgroups == 1
    yield not mask.ranges_per_warpgroup or (one and not alone), "mask: nothing to tell warpgroups apart"


def _only_lower(plan: KernelPlan) -> bool:
    clauses = plan.mask.form.clauses
    return len(clauses) == 1 and clauses[0] == clauses[0].replace(upper=None, rows=None, residual=None)
