"""Rooflines of one call: how long each unit of the GPU is busy at the least, for given lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.ir.plan import KernelPlan, PlanSet
    from attngen.samples import Shape

#: Batches and heads whose tiles are counted; the rest is taken to be alike.
_SAMPLED = 4


@dataclass(frozen=True)
class Roofline:
    """Microseconds of the whole GPU by unit, and how many tiles the loop visits."""

    plan: str
    tiles: int
    visited: int
    masked: int
    mma_us: float
    exp_us: float
    smem_us: float
    issue_us: float
    hbm_us: float
    hbm_bytes: int
    estimate_us: float

    @property
    def bound(self) -> str:
        """The unit that is busy longest."""
        units = {
            "MMA": self.mma_us,
            "exp": self.exp_us,
            "smem": self.smem_us,
            "issue": self.issue_us,
            "HBM": self.hbm_us,
        }
        return max(units, key=lambda u: units[u])


def roofline(plans: PlanSet, shape: Shape, params: dict[str, Any], tensors: dict[str, Any]) -> Roofline:
    """Of the plan that serves these lengths. Captured tensors are counted as read once."""
    from attngen.targets import sm90

    spec = plans.spec
    plan = plans.plans[plans.index(shape.seqlen_q, shape.seqlen_kv)]
    total, visited, masked = _tiles(plans, plan, shape, params, tensors)
    per_tile = 1e6 / (sm90.SMS * sm90.CLOCK_HZ) * visited
    cost, c = plan.cost, plan.compute
    elements = shape.seqlen_q * shape.heads_q * (c.head_dim_qk + c.head_dim_v) + shape.seqlen_kv * shape.heads_kv * (
        c.head_dim_qk + c.head_dim_v
    )
    size = shape.batch * (elements * spec.dtype.bits // 8 + 4 * shape.seqlen_q * shape.heads_q)
    size += sum(t.numel() * t.element_size() for t in tensors.values())
    hbm = size / sm90.HBM_BYTES_PER_SECOND * 1e6
    row_tiles = shape.batch * shape.heads_q * -(-shape.seqlen_q // c.tile_m)
    rows = (
        row_tiles * sm90.ROW_TILE_CYCLES * c.warpgroups * (0.5 + c.head_dim_v / 256) / (sm90.SMS * sm90.CLOCK_HZ) * 1e6
    )
    return Roofline(
        plan.name, total, round(visited), round(masked), cost.mma_cycles * per_tile, cost.exp_cycles * per_tile,
        cost.smem_cycles * per_tile, cost.issue_cycles * per_tile, hbm, size,
        max(cost.mma_cycles / cost.efficiency * per_tile + rows, hbm),
    )  # fmt: skip


def _tiles(
    plans: PlanSet, plan: KernelPlan, shape: Shape, params: dict[str, Any], tensors: dict[str, Any]
) -> tuple[int, float, float]:
    """(all, visited, masked) tiles of tile_m x tile_n of the whole call."""
    from attngen.draw.tiles import tiling
    from attngen.ir.expr import atoms_of, tensors_of

    mask = plans.spec.mask
    read = atoms_of(mask)
    batches = range(min(shape.batch, _SAMPLED)) if "b" in read or tensors_of(mask) else range(1)
    heads = range(min(shape.heads_q, _SAMPLED)) if read & {"h", "h_kv"} else range(1)
    visited = masked = 0.0
    for b in batches:
        for h in heads:
            loop = tiling(plan, shape, batch=b, head=h, params=params, tensors=tensors)
            count = loop.count()
            share = loop.tile_m / plan.compute.tile_m
            visited += (count["full"] + count["partial"]) * share
            masked += count["partial"] * share
    pairs = shape.batch * shape.heads_q / (len(batches) * len(heads))
    total = -(-shape.seqlen_q // plan.compute.tile_m) * -(-shape.seqlen_kv // plan.compute.tile_n)
    return total * shape.batch * shape.heads_q, visited * pairs, masked * pairs
