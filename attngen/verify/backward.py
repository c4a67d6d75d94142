"""verify: invariants of a finished backward plan. A failure is a bug in a pass, never the fault of a user."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.ir.tables import Extreme, cover
from attngen.targets import sm90
from attngen.verify.plan import Check, PlanError, by_length


def verify(plan: BackwardPlan) -> None:
    """Check limits, ledger and coverage of the roles. Raises: PlanError naming the section and what disagrees."""
    for fault in faults(plan):
        raise PlanError(f"backward plan {plan.name}: {fault}")


def verify_set(plan_set: BackwardPlanSet) -> None:
    """Check every plan of a set, and that one kernel file can hold them all.

    Raises:
        PlanError: naming what disagrees.
    """
    for p in plan_set.plans:
        verify(p)
    for fault in set_faults(plan_set):
        raise PlanError(f"backward plans of {plan_set.spec.name}: {fault}")


def set_faults(plan_set: BackwardPlanSet) -> list[str]:
    """Everything wrong between the plans of a set: count, limits, and what one text fixes for all of them."""
    plans = plan_set.plans
    skeletons = {
        (
            p.compute.splits_operands,
            p.compute.has_score,
            p.schedule.kv_order,
            p.schedule.serpentine,
            p.schedule.zeroes_ahead,
            p.schedule.shares_walks,
            p.schedule.roles,
            p.memory.ds_stages,
            p.memory.p_stages,
            p.memory.p_bytes,
            p.mask.model_dump_json(exclude={"form"}),
            p.launch.threads,
        )
        for p in plans
    }
    checks = (
        *by_length([p.name for p in plans], plan_set.limits),
        (len(skeletons) <= 1, "the plans need more than one kernel class"),
    )
    return [text for ok, text in checks if not ok]


def faults(plan: BackwardPlan) -> list[str]:
    """Everything wrong with `plan`."""
    checks = (*_compute(plan), *_memory(plan), *_roles(plan), *_ledger(plan))
    return [text for ok, text in checks if not ok]


def _compute(plan: BackwardPlan) -> Iterator[Check]:
    c = plan.compute
    rows, columns = c.dq_shape
    keys = 64 * (c.cluster if c.splits_operands else c.warpgroups)
    yield c.tile_n == keys, f"compute: tile_n {c.tile_n}, the warpgroups own {keys} keys"
    yield not (c.splits_operands and c.dq_transposed), "compute: split operands take dQ as it is"
    yield not (c.splits_operands and c.v_in_registers), "compute: split operands read V from shared memory"
    # A warp's keys of dS^T go to the other CTA as they lie: 16 rows of one swizzle.
    yield not c.splits_operands or c.tile_m == 64, f"compute: split operands take 64 queries a step, not {c.tile_m}"
    extremes = any(isinstance(t, Extreme) for t in plan.mask.form.tables)
    yield not extremes or cover(c.tile_m), "mask: two windows of rows do not cover a tile"
    yield c.tile_m % 16 == 0 and 16 <= c.tile_m <= 256, f"compute: tile_m {c.tile_m} is no k extent of a WGMMA"
    yield rows % 64 == 0, f"compute: dQ has {rows} rows, not a multiple of 64"
    yield c.dq_columns % 8 == 0 and c.dq_columns <= 256, f"compute: dQ has {c.dq_columns} columns a warpgroup"
    shared = rows * columns // (c.dq_parts if c.dq_by_rows else 1)
    yield shared % (64 * c.dq_columns) == 0, "compute: the warpgroups do not share out dQ evenly"
    for name, true, padded, to in (
        ("qk", c.head_dim_qk, c.head_dim_qk_padded, 32 if c.splits_operands else 16),
        ("v", c.head_dim_v, c.head_dim_v_padded, 16),
    ):
        yield padded % to == 0 and 0 <= padded - true < to, f"compute: head_dim_{name} {true} is padded to {padded}"


def _memory(plan: BackwardPlan) -> Iterator[Check]:
    m, c = plan.memory, plan.compute
    total = sum(b.bytes for b in m.buffers)
    yield m.smem_bytes <= m.smem_limit == sm90.SMEM_BYTES, f"memory: {m.smem_bytes} bytes of {m.smem_limit}"
    head = _head_bytes(plan)
    yield total + head <= m.smem_bytes, f"memory: buffers take {total}, what stands before them {head}: {m.smem_bytes}"
    yield all(b.bytes % 1024 == 0 for b in m.buffers), "memory: a buffer does not end at a multiple of 1024"
    shapes = _shapes(plan)
    found = {b.name: b.shape for b in m.buffers}
    yield found == shapes, f"memory: buffers {found}, the roles use {shapes}"
    for name, extent, columns in (("Q", c.head_dim_qk_padded, m.q_columns), ("dO", c.head_dim_v_padded, m.do_columns)):
        whole = columns == extent or (columns > extent and columns % 32 == 0)
        yield whole, f"memory: rows of {name} of {columns} columns for {extent}"
    for b in m.buffers:
        size = {"sdQ": 4, "sP": m.p_bytes}.get(b.name, 2) * prod(b.shape)
        yield size <= b.bytes < size + 1024, f"memory: {b.name} takes {size} bytes, has {b.bytes}"
        yield b.alias_of is None, f"memory: {b.name} lives in {b.alias_of}: every buffer is in use throughout"
    yield m.q_stages >= 2, "memory: Q takes two stages: one step loads while one computes"
    least = 1 if c.splits_operands else 2  # one: dO is read in one part of a step, and loads in the rest
    yield m.do_stages >= least, f"memory: dO takes {least} stages at least, has {m.do_stages}"
    yield m.ds_stages >= 2, "memory: dS takes two stages: dQ is one step behind"
    last = (m.p_stages, m.dq_stages) if c.splits_operands else (m.dq_stages, m.p_stages)
    yield last[0] >= 1 and last[1] == 0, f"memory: {m.p_stages} stages of P and {m.dq_stages} of dQ"
    yield m.register_limit == sm90.REGISTERS[c.warpgroups][1], f"memory: register limit {m.register_limit}"
    yield m.fragment_registers <= m.register_limit, f"memory: {m.fragment_registers} of {m.register_limit} registers"
    held = _held_registers(plan)
    yield m.fragment_registers >= held, f"memory: {m.fragment_registers} registers, sums, S and dP take {held}"
    words = c.tile_m * c.head_dim_qk_padded
    yield words % (512 * c.dq_parts) == 0, f"memory: a dQ tile of {words} words is not whole quads of every thread"
    counters = m.workspace_per_tile - words - 2 * c.tile_m
    yield (
        counters == 4 * c.cluster,  # one for each warpgroup, one for KV tiles, to 16 bytes
        f"memory: {m.workspace_per_tile} words of workspace, dQ, LSE and D take {words + 2 * c.tile_m}",
    )


def _head_bytes(plan: BackwardPlan) -> int:
    """mbarriers, descriptors of steps, and row statistics in front of the tiles, without what alignment adds."""
    m, n = plan.memory, plan.compute.warpgroups
    rings = m.q_stages + m.do_stages + m.ds_stages + m.p_stages + n * m.dq_stages
    walks = 2  # stages
    rings += 2 if plan.compute.cluster > 1 else 0  # the other CTA's K, tickets
    words = 2 * walks + 2 * m.q_stages + n * m.dq_stages + plan.compute.cluster - 1
    return 16 * (2 + walks + rings) + 4 * (words + plan.compute.tile_m * (m.q_stages + m.do_stages))


def _shapes(plan: BackwardPlan) -> dict[str, tuple[int, ...]]:
    """Every buffer that the roles use."""
    m, c = plan.memory, plan.compute
    qk, v = c.head_dim_qk_padded, c.head_dim_v_padded
    own: dict[str, tuple[int, ...]] = {
        "sK": (c.keys, qk, 1),
        "sV": (c.keys, v, 1),
        "sQ": (c.tile_m, m.q_columns, m.q_stages),
        "sdO": (c.tile_m, m.do_columns, m.do_stages),
    }
    if c.splits_operands:
        return own | {
            "sPeerK": (c.keys, qk // 2, 1),
            "sdS": (c.keys, c.tile_m, 2 * m.ds_stages),
            "sP": (c.keys, c.tile_m, m.p_stages),
        }
    return own | {"sdS": (c.tile_m, c.tile_n, m.ds_stages), "sdQ": (c.tile_m, qk, m.dq_stages)}


def _held_registers(plan: BackwardPlan) -> int:
    """Words of a consumer thread that are there at once whatever the schedule: dK, dV, S, dP, and V if kept there."""
    c = plan.compute
    qk, v = c.head_dim_qk_padded, c.head_dim_v_padded
    return (max(qk, v) if c.splits_operands else qk + v) // 2 + c.tile_m + (v // 4 if c.v_in_registers else 0)


def _roles(plan: BackwardPlan) -> Iterator[Check]:
    n, roles = plan.compute.warpgroups, plan.schedule.roles
    yield plan.launch.threads == 128 * (n + 1), f"launch: {plan.launch.threads} threads for {n} warpgroups"
    registers = plan.launch.launch_registers
    yield registers * plan.launch.threads <= 65536, f"launch: {registers} registers of {plan.launch.threads} threads"
    yield plan.launch.cluster == (plan.compute.cluster, 1, 1), f"launch: a cluster of {plan.launch.cluster}"
    warps = sorted(w for r in roles for w in range(*r.warps))
    yield warps == list(range(4 * (n + 1))), f"schedule: roles cover warps {warps}"
    placed = {r.name: r.warps for r in roles if not r.name.startswith("idle")}
    wanted = {"producer": (0, 1), **{f"consumer {w}": (4 + 4 * w, 8 + 4 * w) for w in range(n)}}
    if not plan.compute.splits_operands:
        wanted |= {f"reducer {w}": (1 + w, 2 + w) for w in range(n)}
    if plan.schedule.zeroes_ahead:
        wanted["zeroer"] = (1 + n, 2 + n)
    yield placed == wanted, f"schedule: roles {placed}, not {wanted}"
    valid = all(24 <= r.registers <= 240 and r.registers % 8 == 0 for r in roles)
    yield valid, "schedule: a register count is no setmaxnreg value"
    for names, of_them in (
        ("consumers", {r.registers for r in roles if r.name.startswith("consumer")}),
        ("other warps", {r.registers for r in roles if not r.name.startswith("consumer")}),
    ):
        yield len(of_them) == 1, f"schedule: {names} differ in registers: {sorted(of_them)}"
    used = sum(32 * (r.warps[1] - r.warps[0]) * r.registers for r in roles)
    yield used <= 64 * 1024, f"schedule: {used} registers of 65536"


def _ledger(plan: BackwardPlan) -> Iterator[Check]:
    c, m, n = plan.compute, plan.memory, plan.compute.warpgroups
    splits = c.splits_operands
    readers = 1 if splits else 4 * n
    zeroers = int(plan.schedule.zeroes_ahead)
    shares, even = plan.schedule.shares_walks, zeroers and not plan.schedule.grouped
    yield even or not shares, "schedule: walks are shared where they are even and dQ is zeroed ahead"
    yield not (splits and zeroers), "schedule: split operands have no warp that zeroes dQ ahead"
    wanted = {"k": (1, readers), "v": (1, readers), "walk": (1, 4 * n + (0 if splits else n) + zeroers)}
    wanted |= {"q": (1, 4 * n), "do": (1, 4 * n)}
    wanted |= {"ds": (4 * n, 4 * n * c.cluster)}  # with split operands, of 4 warps of each CTA
    wanted |= {"p": (4, 4), "peer_k": (1, 1), "ticket": (1, 1)} if splits else {"dq": (4, 1)}
    found = {p.name: (p.full_arrivals, p.empty_arrivals) for p in plan.schedule.pipelines}
    yield found == wanted, f"schedule: arrivals {found}, the roles make {wanted}"
    stages = {"k": 1, "v": 1, "walk": 2, "q": m.q_stages, "do": m.do_stages, "ds": m.ds_stages}
    stages |= {"p": m.p_stages, "peer_k": 1, "ticket": 1} if splits else {"dq": m.dq_stages}
    buffers = {"k": "sK", "v": "sV", "walk": "walks", "q": "sQ", "do": "sdO", "ds": "sdS", "p": "sP", "dq": "sdQ"}
    buffers |= {"peer_k": "sPeerK", "ticket": "ticket"}
    qk, v, statistics = 2 * c.head_dim_qk_padded, 2 * c.head_dim_v_padded, 4 * c.tile_m
    landing = {"k": c.keys * qk, "v": c.keys * v}
    landing |= {"q": 2 * c.tile_m * m.q_columns + statistics, "do": 2 * c.tile_m * m.do_columns + statistics}
    landing |= {"peer_k": c.keys * qk // 2, "ticket": 4, "ds": c.keys * c.tile_m * 2} if splits else {}
    for p in plan.schedule.pipelines:
        if p.name in stages:
            yield p.stages == stages[p.name], f"schedule: {p.name} has {p.stages} stages, memory {stages[p.name]}"
            yield p.buffer == buffers[p.name], f"schedule: {p.name} fills {p.buffer}, not {buffers[p.name]}"
            announced = landing.get(p.name, 0)
            yield p.stage_bytes == announced, f"schedule: {p.name} announces {p.stage_bytes} bytes, {announced} land"
    named = {b.id: b.threads for b in plan.schedule.named_barriers}
    yield len(named) == len(plan.schedule.named_barriers), "schedule: two named barriers share a number"
    own = {3 + w: 128 for w in range(n)} if splits else {0: 128 * (n + 1)}  # two CTAs meet as a cluster
    meet = {1 + w: 128 * n for w in range(n if splits else 1)} | own
    deterministic = any(b.name.startswith("turn") for b in plan.schedule.named_barriers)
    turns = {5 + w: 128 for w in range(n)} if splits and deterministic else {}
    yield named == meet | turns, f"schedule: named barriers {named}, the roles meet at {meet | turns}"
