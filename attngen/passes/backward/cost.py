"""cost: cycles of one full step of the backward's main kernel by unit, for ranking candidates."""

from __future__ import annotations

from attngen.ir.backward import BackwardCompute
from attngen.ir.expr import Apply, walk
from attngen.ir.gradient import GradientForm
from attngen.ir.plan import Cost
from attngen.targets import sm90

#: Issue slots an element takes: scale and subtract, exp's share, dP - D, times P, two halves of a pack.
SLOTS = 5.0
#: Time over the busiest unit's time where two warpgroups fill each other's gaps (measured, docs/performance.md).
OVERLAP = 1.35
STEP_CYCLES = 300
#: What a KV tile takes beside its steps: K, V and the first Q come, dK and dV leave, and nothing overlaps the first
#: step's products (fitted to short calls, docs/performance.md).
WALK_CYCLES = 8000


def step_cost(c: BackwardCompute, gradient: GradientForm) -> Cost:
    """Cycles that one full step keeps each unit of an SM busy; of a cluster, of its SMs together.

    Operands from shared memory, bytes by warpgroup: S, dP read both tiles (V once for all, if from registers); dV, dK
    read dO and Q (P and dS come from registers); dQ reads its parts of dS and K. dS is written once, and with split
    operands read and written once more on its way to the other CTA; dQ (fp32) or P (split operands) is written and
    read.
    """
    qk, v, m, n, wgs = c.head_dim_qk_padded, c.head_dim_v_padded, c.tile_m, c.tile_n, c.warpgroups
    own = 64  # rows of a WGMMA
    rows, _ = c.dq_shape
    dq_rows = rows // wgs if c.dq_by_rows else rows
    v_rows = 0 if c.v_in_registers else own
    reads = (own * qk + v_rows * v + 2 * m * (qk + v)) * (n // own)
    # Each WGMMA of 64 rows reads the columns again.
    reads += c.dq_parts * n * (dq_rows + c.dq_columns * (dq_rows // own))
    through = (2 * 2 + 2 * 2) * m * n if c.splits_operands else 2 * 4 * m * qk
    smem = (2 * reads + 2 * m * n + through) / sm90.SMEM_BYTES_PER_CYCLE
    mma = 2 * m * n * (3 * qk + 2 * v) / sm90.MMA_FLOP_PER_CYCLE
    calls = (
        [x for e in (gradient.score, gradient.slope) for x in walk(e) if isinstance(x, Apply)] if c.has_score else []
    )
    exp = m * n / sm90.EXP_PER_CYCLE
    issue = m * n * (SLOTS + len(calls)) / sm90.ISSUE_PER_CYCLE
    busy = max(mma, smem, exp + issue) * OVERLAP + STEP_CYCLES * c.cluster
    return Cost(mma_cycles=mma, exp_cycles=exp, smem_cycles=smem, issue_cycles=issue, efficiency=mma / busy)
