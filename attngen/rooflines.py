"""Rooflines of one call: how long each unit of the GPU is busy at the least, for given lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from attngen.ir.backward import BackwardPlan, BackwardPlanSet
    from attngen.ir.plan import KernelPlan, PlanSet
    from attngen.samples import Shape

#: Batches and heads whose tiles are counted; the rest is taken to be alike.
_SAMPLED = 4


@dataclass(frozen=True)
class _Busy:
    """Microseconds of the whole GPU by unit for one kernel, and how many tiles its loop visits."""

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


@dataclass(frozen=True)
class Roofline(_Busy):
    """Of a forward.

    `tables_bytes`: of the mask's tables; `search_steps`: most loads one after the other that an element of them takes.
    """

    estimate_us: float
    tables_bytes: int = 0
    search_steps: int = 0


def roofline(plans: PlanSet, shape: Shape, params: dict[str, Any], tensors: dict[str, Any]) -> Roofline:
    """Of the plan that serves these lengths. Captured tensors are counted as read once."""
    from attngen.ir.tables import Table, axes_of, words
    from attngen.targets import sm90

    spec = plans.spec
    plan = plans.plans[plans.index(shape.seqlen_q, shape.seqlen_kv)]
    total, visited, masked, _ = _counted(plan, shape, params, tensors)
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
    tables = plan.mask.form.tables
    extents = {"batch": shape.batch, "heads_q": shape.heads_q, "seqlen_q": shape.seqlen_q}
    searched = [tensors[t.tensor].shape[-1] for t in tables if isinstance(t, Table)]
    return Roofline(
        plan.name, total, round(visited), round(masked), cost.mma_cycles * per_tile, cost.exp_cycles * per_tile,
        cost.smem_cycles * per_tile, cost.issue_cycles * per_tile, hbm, size,
        max(cost.cycles * per_tile + rows, hbm),
        4 * words([{"dims": axes_of(t)} for t in tables], extents), max((n.bit_length() for n in searched), default=0),
    )  # fmt: skip


@dataclass(frozen=True)
class BackwardRoofline(_Busy):
    """Of a backward's main kernel; the kernels around it are bound by HBM alone.

    `tiles`, `visited` and `masked` count query tiles against KV tiles, over all query heads. `hbm_*`: the main kernel,
    `around_*`: `prepare` and `finish`. `reduced_bytes`: fp32 words of dQ that are added in L2. `workspace_bytes` and
    `tensor_bytes` (q, k, v, O, dO, LSE, dQ, dK, dV) are the memory of a call. Where the plan is deterministic, `turns`
    counts ordered additions, one for each visited tile and warpgroup, and `longest` those that follow one another for
    one query tile.
    """

    around_us: float
    around_bytes: int
    reduced_bytes: int
    workspace_bytes: int
    tensor_bytes: int
    turns: int
    longest: int
    estimate_us: float


def roofline_backward(
    plans: BackwardPlanSet, shape: Shape, params: dict[str, Any], tensors: dict[str, Any]
) -> BackwardRoofline:
    """Of the plan that serves these lengths. Tensors are counted as read or written once by each kernel that does."""
    from attngen.targets import sm90

    spec = plans.spec
    plan = plans.plans[plans.index(shape.seqlen_q, shape.seqlen_kv)]
    c, cost = plan.compute, plan.cost
    total, visited, masked, longest = _counted(plan, shape, params, tensors)
    per_tile = 1e6 / (sm90.SMS * sm90.CLOCK_HZ) * visited
    element = spec.dtype.bits // 8
    rows, keys = shape.batch * shape.heads_q * shape.seqlen_q, shape.batch * shape.heads_kv * shape.seqlen_kv
    q, o = rows * c.head_dim_qk * element, rows * c.head_dim_v * element
    kv = keys * (c.head_dim_qk + c.head_dim_v) * element
    workspace = 4 * shape.batch * shape.heads_q * -(-shape.seqlen_q // c.tile_m) * plan.memory.workspace_per_tile
    parts = 4 * sm90.SMS * plan.part_words
    captured = sum(t.numel() * t.element_size() for t in tensors.values())
    # prepare: O, dO, LSE in, the workspace out; main: Q, dO, K, V in, dK, dV out; finish: the workspace in, dQ out.
    around = 2 * o + 8 * rows + workspace + workspace + q
    main = q + o + 2 * kv + captured
    hbm, around_us = (x / sm90.HBM_BYTES_PER_SECOND * 1e6 for x in (main, around))
    return BackwardRoofline(
        plan=plan.name,
        tiles=total,
        visited=round(visited),
        masked=round(masked),
        mma_us=cost.mma_cycles * per_tile,
        exp_us=cost.exp_cycles * per_tile,
        smem_us=cost.smem_cycles * per_tile,
        issue_us=cost.issue_cycles * per_tile,
        hbm_us=hbm,
        hbm_bytes=main,
        around_us=around_us,
        around_bytes=around,
        reduced_bytes=round(visited) * 4 * c.tile_m * c.head_dim_qk_padded,
        workspace_bytes=workspace + parts,
        tensor_bytes=2 * q + 2 * o + 2 * kv + 4 * rows,
        turns=round(visited) * c.warpgroups if plans.deterministic else 0,
        longest=longest if plans.deterministic else 0,
        estimate_us=max(cost.cycles * per_tile, hbm) + around_us,
    )


def _counted(
    plan: KernelPlan | BackwardPlan, shape: Shape, params: dict[str, Any], tensors: dict[str, Any]
) -> tuple[int, float, float, int]:
    """(all, visited, masked) tiles of tile_m x tile_n of the whole call, and the most that one row tile sees.

    A backward visits the same pairs of tiles as a forward with its tile: it asks from the other side.
    """
    from attngen.draw.tiles import tiling
    from attngen.ir.expr import atoms_of, tensors_of

    mask = plan.mask.form.mask
    read = atoms_of(mask)
    batches = range(min(shape.batch, _SAMPLED)) if "b" in read or tensors_of(mask) else range(1)
    heads = range(min(shape.heads_q, _SAMPLED)) if read & {"h", "h_kv"} else range(1)
    visited = masked = 0.0
    longest = 0
    for b in batches:
        for h in heads:
            loop = tiling(cast("KernelPlan", plan), shape, batch=b, head=h, params=params, tensors=tensors)
            count = loop.count()
            share = loop.tile_m / plan.compute.tile_m
            visited += (count["full"] + count["partial"]) * share
            masked += count["partial"] * share
            seen = (sum(s.first - s.last + 1 for s in row.segments) for row in loop.rows)
            longest = max(longest, *seen) if loop.rows else longest
    pairs = shape.batch * shape.heads_q / (len(batches) * len(heads))
    total = -(-shape.seqlen_q // plan.compute.tile_m) * -(-shape.seqlen_kv // plan.compute.tile_n)
    return total * shape.batch * shape.heads_q, visited * pairs, masked * pairs, longest
