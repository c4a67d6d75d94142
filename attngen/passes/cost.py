"""cost: cycles of one full tile by unit, and an estimate of a whole launch for ranking candidates."""

from __future__ import annotations

from functools import lru_cache

from attngen.ir.expr import Apply, Atom, Expr, Param, children
from attngen.ir.plan import ComputePlan, Cost, KernelPlan, MaskPlan
from attngen.ir.score import COLUMN, LOAD, RAW
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.passes.score_form import ONE, score_form
from attngen.targets import sm90

#: Issue slots an element takes: scale and subtract, max, add, half a pack, half a share of the loop.
SLOTS = 5.5
#: Issue slots and calls on the special-function unit by normaliser; sigmoid: scale, add; relu: scale, max.
_WEIGHT = {Normalizer.SOFTMAX: (SLOTS, 1), Normalizer.SIGMOID: (3.0, 2), Normalizer.RELU: (3.0, 0)}
#: An element of a stream: half a load of two, taken apart. One by distance: a load from shared memory, added.
STREAM_SLOTS, DISTANCE_SLOTS = 1.5, 2.0
#: Calls that run on the special-function unit beside exp2.
_MUFU = {"exp", "log", "log2", "sqrt", "tanh", "sigmoid", "softplus", "div"}


def tile_cost(spec: AttentionSpec, compute: ComputePlan) -> Cost:
    """Cycles that one full KV tile keeps each unit of an SM busy."""
    c = compute
    elements = c.tile_m * c.tile_n
    mma, exp, issue = (elements * x for x in element_cycles(spec, c.head_dim_qk_padded, c.head_dim_v_padded))
    q_reads = c.tile_m * c.head_dim_qk_padded
    kv_reads = c.warpgroups * c.tile_n * (c.head_dim_qk_padded + c.head_dim_v_padded)
    smem = 2 * (q_reads + kv_reads) / sm90.SMEM_BYTES_PER_CYCLE
    # MUFU and the other pipes share the issue port of their scheduler: in the measured kernels their times add up
    busy = max(mma, exp + issue, smem) * sm90.OVERLAP[c.warpgroups] + sm90.TILE_CYCLES
    return Cost(mma_cycles=mma, exp_cycles=exp, smem_cycles=smem, issue_cycles=issue, efficiency=mma / busy)


def element_cycles(spec: AttentionSpec, head_dim_qk: int, head_dim_v: int) -> tuple[float, float, float]:
    """Cycles of an SM that an element of S takes: of the tensor cores (padded head dims), of the special-function unit,
    of issue slots.
    """
    slots, mufu = (own + more for own, more in zip(_WEIGHT[spec.normalizer], score_work(spec), strict=True))
    mma = 2 * (head_dim_qk + head_dim_v) / sm90.MMA_FLOP_PER_CYCLE
    return mma, mufu / sm90.EXP_PER_CYCLE, slots / sm90.ISSUE_PER_CYCLE


@lru_cache(maxsize=64)
def score_work(spec: AttentionSpec) -> tuple[float, int]:
    """Issue slots and calls on the special-function unit that a score adds to an element, as its form spells it.

    What is the same for all columns of a tile is evaluated once a row, and not counted.
    """
    if isinstance(spec.score, Atom):
        return 0.0, 0
    form = score_form(spec.score, "kv", spec)
    calls: list[str] = []
    for term in form.terms:
        _moving_calls(term.value, calls)
    slots = len(calls) + sum(t.factor != ONE for t in form.terms) + sum(STREAM_SLOTS for _ in form.streams)
    if form.scale_last:
        slots += 1
    else:
        slots += (form.scale is not None) + 0.5 * (form.slope is not None)
    return slots + DISTANCE_SLOTS * (form.distance is not None), sum(fn in _MUFU for fn in calls)


def _moving_calls(e: Expr, found: list[str]) -> bool:
    """Note what is called once an element: whether `e` moves along a tile's columns."""
    if isinstance(e, Atom):
        return e.name in ("kv_idx", "s")
    if isinstance(e, Param):
        return e in (RAW, COLUMN) or e.name.startswith(LOAD.format(""))
    moves = any([_moving_calls(x, found) for x in children(e)])
    if moves:
        found.append(e.fn if isinstance(e, Apply) else "load")
    return moves


def kv_tile_cycles(plan: KernelPlan) -> float:
    """Estimated cycles of one full KV tile in the steady state."""
    return plan.cost.cycles


def row_tile_cycles(plan: KernelPlan) -> float:
    """Estimated cycles of a row tile beside its KV tiles: first GEMM, epilogue."""
    return sm90.ROW_TILE_CYCLES * plan.compute.warpgroups * (0.5 + plan.compute.head_dim_v / 256)


def launch_cycles(plan: KernelPlan, seqlen: int) -> float:
    """Estimated cycles of one head at seqlen_q = seqlen_kv = seqlen, spread over no particular number of SMs."""
    c = plan.compute
    tile, row = kv_tile_cycles(plan), row_tile_cycles(plan)
    m_blocks = -(-seqlen // c.tile_m)
    return sum(_live_tiles(plan.mask, c, m, seqlen) * tile + row for m in range(m_blocks))


def _live_tiles(mask: MaskPlan, c: ComputePlan, m_block: int, seqlen: int) -> float:
    """KV tiles a row tile runs: all, or (masks whose work grows with the row) about those up to the diagonal."""
    n_blocks = -(-seqlen // c.tile_n)
    if mask.form.is_full or not mask.has_right_edge or mask.walk == "map":
        return n_blocks
    rows = min((m_block + 1) * c.tile_m, seqlen)
    own = rows - (c.tile_m / 2 if mask.ranges_per_warpgroup else 0)
    return min(n_blocks, max(own / c.tile_n, 1))
