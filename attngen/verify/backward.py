"""verify: invariants of a finished backward plan. A failure is a bug in a pass, never the fault of a user."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir.backward import BackwardPlan
from attngen.targets import sm90
from attngen.verify.plan import PlanError

Check = tuple[bool, str]


def verify(plan: BackwardPlan) -> None:
    """Check limits, ledger and coverage of the roles. Raises: PlanError naming the slot and what disagrees."""
    for fault in faults(plan):
        raise PlanError(f"backward plan {plan.name}: {fault}")


def faults(plan: BackwardPlan) -> list[str]:
    """Everything wrong with `plan`."""
    checks = (*_compute(plan), *_memory(plan), *_roles(plan), *_ledger(plan))
    return [text for ok, text in checks if not ok]


def _compute(plan: BackwardPlan) -> Iterator[Check]:
    c = plan.compute
    rows, columns = c.dq_shape
    keys = 64 if c.splits_operands else 64 * c.warpgroups
    yield c.tile_n == keys, f"compute: tile_n {c.tile_n}, the warpgroups own {keys} keys"
    yield not (c.splits_operands and c.dq_transposed), "compute: split operands take dQ as it is"
    yield c.tile_m % 16 == 0 and 16 <= c.tile_m <= 256, f"compute: tile_m {c.tile_m} is no k extent of a WGMMA"
    yield rows % 64 == 0, f"compute: dQ has {rows} rows, not a multiple of 64"
    yield c.dq_columns % 8 == 0 and c.dq_columns <= 256, f"compute: dQ has {c.dq_columns} columns a warpgroup"
    shared = rows * columns // (c.warpgroups if c.dq_by_rows else 1)
    yield shared % (64 * c.dq_columns) == 0, "compute: the warpgroups do not share out dQ evenly"
    for name, true, padded in (
        ("qk", c.head_dim_qk, c.head_dim_qk_padded),
        ("v", c.head_dim_v, c.head_dim_v_padded),
    ):
        yield padded % 16 == 0 and 0 <= padded - true < 16, f"compute: head_dim_{name} {true} is padded to {padded}"


def _memory(plan: BackwardPlan) -> Iterator[Check]:
    m, c = plan.memory, plan.compute
    total = sum(b.bytes for b in m.buffers)
    yield m.smem_bytes <= m.smem_limit == sm90.SMEM_BYTES, f"memory: {m.smem_bytes} bytes of {m.smem_limit}"
    yield total < m.smem_bytes, f"memory: buffers take {total} of {m.smem_bytes} bytes, nothing is left for mbarriers"
    yield all(b.bytes % 1024 == 0 for b in m.buffers), "memory: a buffer does not end at a multiple of 1024"
    yield m.q_stages >= 2 and m.do_stages >= 2, "memory: Q and dO take two stages: one step loads while one computes"
    yield m.ds_stages >= 2, "memory: dS takes two stages: dQ is one step behind"
    yield m.fragment_registers <= m.register_limit, f"memory: {m.fragment_registers} of {m.register_limit} registers"
    words = c.tile_m * c.head_dim_qk_padded
    yield words % (512 * c.warpgroups) == 0, f"memory: a dQ tile of {words} words is not whole quads of every thread"


def _roles(plan: BackwardPlan) -> Iterator[Check]:
    warps = sorted(w for r in plan.schedule.roles for w in range(*r.warps))
    yield warps == list(range(plan.launch.threads // 32)), f"schedule: roles cover warps {warps}"
    consumers = [r for r in plan.schedule.roles if r.name.startswith("consumer")]
    yield len(consumers) == plan.compute.warpgroups, f"schedule: {len(consumers)} consumers"
    used = 128 * (plan.schedule.roles[0].registers + sum(r.registers for r in consumers))
    yield used <= 64 * 1024, f"schedule: {used} registers of 65536"


def _ledger(plan: BackwardPlan) -> Iterator[Check]:
    n = plan.compute.warpgroups
    splits = plan.compute.splits_operands
    wanted = {"k": (1, 0), "v": (1, 0), "walk": (1, 0), "q": (1, 4 * n), "do": (1, 4 * n)}
    wanted |= {"ds": (4, 4 * n), "p": (4, 4)} if splits else {"ds": (4 * n, 4 * n), "dq": (4, 1)}
    found = {p.name: (p.full_arrivals, p.empty_arrivals) for p in plan.schedule.pipelines}
    yield found == wanted, f"schedule: arrivals {found}, the roles make {wanted}"
    ids = [b.id for b in plan.schedule.named_barriers]
    yield len(set(ids)) == len(ids) and max(ids) < 16, f"schedule: named barriers {ids}"
    statistics = 4 * plan.compute.tile_m
    bytes_of = {p.name: p.stage_bytes for p in plan.schedule.pipelines}
    c = plan.compute
    for name, columns in (("q", c.head_dim_qk_padded), ("do", c.head_dim_v_padded)):
        announced = c.tile_m * columns * 2 + statistics
        yield bytes_of[name] == announced, f"schedule: {name} announces {bytes_of[name]} bytes, {announced} land"
