"""verify: invariants of a finished plan. A failure is a bug in a pass, never the user's fault."""

from __future__ import annotations

from attngen.ir.plan import KernelPlan
from attngen.targets import sm90


class PlanError(AssertionError):
    """A plan breaks an invariant."""


def verify(plan: KernelPlan) -> None:
    """Check limits, ledger and coverage of the roles.

    Raises:
        PlanError: naming the slot and the numbers that disagree.
    """
    for fault in faults(plan):
        raise PlanError(f"plan {plan.name}: {fault}")


def faults(plan: KernelPlan) -> list[str]:
    """Everything wrong with `plan`."""
    c, m, s = plan.compute, plan.memory, plan.schedule
    out: list[str] = []

    def expect(ok: bool, text: str) -> None:
        if not ok:
            out.append(text)

    expect(c.tile_m == 64 * c.warpgroups, f"compute: tile_m {c.tile_m} is not 64 x {c.warpgroups} warpgroups")
    expect(c.tile_n % 16 == 0 and 16 <= c.tile_n <= 256, f"compute: tile_n {c.tile_n} is no WGMMA extent")
    expect(
        c.head_dim_qk_padded % 16 == 0 and c.head_dim_v_padded % 16 == 0,
        "compute: padded head dims are not multiples of 16",
    )
    used = sum(b.bytes for b in m.buffers)
    expect(
        used < m.smem_bytes <= min(m.smem_limit, sm90.SMEM_BYTES),
        f"memory: buffers {used}, total {m.smem_bytes}, limit {m.smem_limit}",
    )
    expect(all(b.bytes % 1024 == 0 for b in m.buffers), "memory: a buffer breaks 1024-byte alignment")
    names = {b.name: b for b in m.buffers}
    for b in m.buffers:
        if b.alias_of is not None:
            host = names.get(b.alias_of)
            size = 2 * b.shape[0] * b.shape[1] * b.shape[2]
            expect(host is not None and size <= host.bytes, f"memory: {b.name} does not fit in {b.alias_of}")
    expect(m.fragment_registers < m.register_limit, f"memory: {m.fragment_registers} registers of {m.register_limit}")
    registers = sum((r.warps[1] - r.warps[0]) * 32 * r.registers for r in s.roles)
    expect(registers <= 65536, f"schedule: roles take {registers} registers of 65536")
    expect(
        all(24 <= r.registers <= 240 and r.registers % 8 == 0 for r in s.roles),
        "schedule: a register count is no setmaxnreg value",
    )
    covered = sorted(w for r in s.roles for w in range(*r.warps))
    expect(covered == list(range(4 * (c.warpgroups + 1))), "schedule: roles do not cover the warps once")
    ids = [b.id for b in s.named_barriers]
    expect(len(set(ids)) == len(ids) and max(ids) < 16, f"schedule: named barriers {ids}")
    expect(
        sum(b.name.startswith("turn") for b in s.named_barriers) == (c.warpgroups if s.pingpong else 0),
        "schedule: turns",
    )
    for p in s.pipelines:
        consumers = 4 if p.name == "q" else 4 * c.warpgroups
        wanted = 1 if p.name == "q" and m.o_in_q else consumers
        expect(p.full_arrivals == 1 and p.empty_arrivals == wanted, f"schedule: pipeline {p.name} arrivals")
        if p.buffer in names:
            host = names[p.buffer]
            expect(
                0 <= host.bytes - p.stage_bytes * p.stages < 1024,
                f"schedule: pipeline {p.name} announces {p.stage_bytes} x {p.stages} of {host.bytes}",
            )
    expect(plan.launch.threads == 128 * (c.warpgroups + 1), "launch: threads")
    mask = plan.mask
    expect(mask.walk == ("interval" if len(mask.form.clauses) == 1 else "runs"), "mask: walk")
    expect(len(mask.form.clauses) == len(mask.form.bounds), "mask: one bound for each clause")
    expect(mask.test == "elements" or mask.form.is_exact, "mask: limits cannot decide a residual")
    return out
