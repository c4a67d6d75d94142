"""launch: block, cluster and registers at launch."""

from __future__ import annotations

from attngen.ir.plan import ComputePlan, LaunchPlan, MaskPlan
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import Extreme, cover
from attngen.passes.base import Reject
from attngen.targets import sm90

#: What `cluster` of a spec may be: CTAs along the rows, and along the heads.
CLUSTERS = ((1, 1), (2, 1))


def unpaired(spec: AttentionSpec) -> str:
    """Why row tiles of this spec cannot be side by side in a cluster; empty where they can."""
    if spec.layout.is_ragged:
        return f"layout {spec.layout}"
    return "block_sparse" if spec.block_sparse is not None else ""


def plan_launch(compute: ComputePlan, mask: MaskPlan, cluster: tuple[int, int] | None) -> LaunchPlan | Reject:
    """One persistent CTA for each SM: 128 producer-side threads and 128 for each consumer warpgroup.

    `cluster`: two CTAs, of row tiles side by side, where it is (2, 1).
    Rejects   row tiles side by side with more rows than two windows of bounds hold
    """
    n, (across, along) = compute.warpgroups, cluster or (1, 1)
    rows = compute.tile_m * across
    if any(isinstance(t, Extreme) for t in mask.form.tables) and not cover(rows):
        return Reject("launch", f"two windows of bounds do not cover the {rows} rows of a cluster", 2.0)
    return LaunchPlan(threads=128 * (n + 1), cluster=(across, along, 1), launch_registers=sm90.LAUNCH_REGISTERS[n])
