"""launch: block, cluster and registers at launch."""

from __future__ import annotations

from attngen.ir.plan import ComputePlan, LaunchPlan
from attngen.targets import sm90


def plan_launch(compute: ComputePlan) -> LaunchPlan:
    """One persistent CTA for each SM: 128 producer-side threads and 128 for each consumer warpgroup."""
    n = compute.warpgroups
    return LaunchPlan(threads=128 * (n + 1), cluster=(1, 1, 1), launch_registers=sm90.LAUNCH_REGISTERS[n])
