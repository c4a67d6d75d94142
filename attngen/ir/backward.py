"""BackwardPlan: every decision about a backward, in the sections of `plan.KernelPlan`.

One step of the main kernel takes one query tile against the CTA's KV tile. The walk of a KV tile n, as every consumer
of a plan (kernel, plan execution, cost) understands it: the query heads of its KV head one after the other, and of each
the query tiles m, ascending, for which n lies in the live tiles of m as `plan` defines them with this plan's tile_m and
tile_n; `BackwardSchedule.serpentine` is another order of the same steps. A step is masked unless some clause of the
mask form keeps all of n for every row of m (and, with a score, unless m lies within seqlen_q). A walk without any step
takes one masked step, of m = 0. Deterministic plans of several clauses walk all tiles from the first to the last that
some clause touches, so that turns can be counted. A walk by map takes the tiles that its map names, deterministic or
not, and turns are counted over them.
"""

from __future__ import annotations

from typing import Literal

from attngen.ir.base import Node
from attngen.ir.gradient import GradientForm
from attngen.ir.plan import Buffer, Cost, LaunchPlan, MaskPlan, Rejected, SchedulePlan, plan_at
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType

#: Steps of a share of a walk: what a CTA does besides, and the sum of the parts, takes about one.
LEAST_SHARE = 4


class BackwardCompute(Node):
    """MMA shapes, and who computes what. tile_n keys belong to a cluster: 64 to each warpgroup of its one CTA, or 64 to
    each of its two CTAs, whose warpgroups split the operands.

    S^T = K Q^T and dP^T = V dO^T come out with keys as rows, so that P^T and dS^T are register operands of
    dV += P^T dO and dK += dS^T Q.
    """

    dtype: DType
    tile_m: int
    tile_n: int
    warpgroups: int
    head_dim_qk: int
    head_dim_v: int
    #: Extents in shared memory and MMA: next multiple of 16; TMA fills the rest with zeros.
    head_dim_qk_padded: int
    head_dim_v_padded: int
    #: One warpgroup owns dV of all 64 keys of a CTA, the other dK: sums of wide heads fit the registers so. Two CTAs,
    #: a cluster, take one KV tile: they load Q and dO together and each computes half of dQ's columns for both.
    splits_operands: bool = False
    #: dQ^T = K^T dS^T instead of dQ = dS K, for tiles whose rows are no multiple of 64.
    dq_transposed: bool
    #: dV and dK are waited for before dQ starts: their operands' registers are needed.
    drains: bool
    #: dP^T = V dO^T reads V from registers, where it stays for a KV tile: fewer operand bytes from shared memory.
    v_in_registers: bool = False
    #: Scores beyond scaling: evaluated element by element, with their slope.
    has_score: bool
    #: Registers that expressions evaluated element by element take beside the fragments.
    expression_registers: int = 0

    @property
    def cluster(self) -> int:
        """CTAs that share a KV tile."""
        return 2 if self.splits_operands else 1

    @property
    def keys(self) -> int:
        """Keys of a CTA."""
        return self.tile_n // self.cluster

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Rows and columns of dQ's GEMM."""
        m, d = self.tile_m, self.head_dim_qk_padded
        return (d, m) if self.dq_transposed else (m, d)

    @property
    def dq_by_rows(self) -> bool:
        """The warpgroups share out the rows of dQ's GEMM, else its columns."""
        return self.dq_shape[0] == 64 * self.warpgroups

    @property
    def dq_columns(self) -> int:
        """Columns of dQ's GEMM that one warpgroup computes."""
        return self.dq_shape[1] if self.dq_by_rows else self.dq_shape[1] // self.dq_parts

    @property
    def dq_parts(self) -> int:
        """Warpgroups that share out a dQ tile."""
        return self.warpgroups * self.cluster


class BackwardMemory(Node):
    """Shared memory, registers, and the fp32 workspace in global memory."""

    q_stages: int
    do_stages: int
    ds_stages: int
    #: Slots of dQ on its way to global memory; 0: it goes there straight from registers.
    dq_stages: int
    #: Stages of P on its way from the warpgroup that owns dV to the other; 0: each has its own.
    p_stages: int
    #: Bytes of an element of that P: 4 where captured tensors gain from it, whose sums may cancel.
    p_bytes: int = 2
    buffers: tuple[Buffer, ...]
    smem_bytes: int
    smem_limit: int
    #: fp32/packed registers a consumer thread holds at its fullest point.
    fragment_registers: int
    register_limit: int
    #: fp32 words of workspace for each query tile of each head: dQ sums, LSE, D, and turns where deterministic.
    workspace_per_tile: int

    @property
    def q_columns(self) -> int:
        """Columns of a row of Q in shared memory; TMA fills those past the head dim with zeros."""
        return self._columns("sQ")

    @property
    def do_columns(self) -> int:
        """Columns of a row of dO."""
        return self._columns("sdO")

    def _columns(self, name: str) -> int:
        return next(b.shape[1] for b in self.buffers if b.name == name)


class BackwardSchedule(SchedulePlan):
    """Roles and ledger, and which KV tile a CTA takes.

    CTAs are numbered group by group of (batch element, KV head) pairs, in a group KV tile by KV tile, and of a KV tile
    pair by pair; the GPU starts them in the order of their numbers. `order` and `l2_group_bytes` say nothing here.
    """

    #: KV tiles of a pair in the order of their numbers; where additions to dQ take turns, the order of turns.
    kv_order: Literal["ascending", "descending"]
    #: Groups about fill the SMs, and are even in number; else each pair is one.
    grouped: bool
    #: The walk of a CTA with several query heads: not head by head, but all heads of a query tile, then of the next
    #: one; from the last query tile to the first in even waves of CTAs, and back in odd ones (see `wave`).
    serpentine: bool
    #: dQ becomes zero just before it is added to, where L2 still holds the zeros: `prepare` zeroes the first `zero_lag`
    #: pairs, and a warp of the KV tiles of each pair that of the one as many further on. Not where turns are taken.
    zeroes_ahead: bool = False
    #: KV tiles that would leave most SMs idle in a last wave are walked by several CTAs each (`shared`), which leave dK
    #: and dV in parts, in 16 bits, for `add_parts` to sum in order. Where walks are about equal, no turns are taken and
    #: no captured gradient is added up along a walk.
    shares_walks: bool = False

    def shared(self, kv_tiles: int, workers: int, steps: int) -> tuple[int, int]:
        """How many KV tiles one CTA walks alone, and how many CTAs share the walk of each of the others.

        `steps`: of the longest walk. A share takes `LEAST_SHARE` steps of it or more.
        """
        rest = kv_tiles % workers
        shares = max(min(workers // max(rest, 1), steps // LEAST_SHARE), 1) if self.shares_walks else 1
        return (kv_tiles - rest, shares) if rest and shares > 1 else (kv_tiles, 1)

    def wave(self, tile: int, group_tiles: int, ctas: int) -> int:
        """The wave of a KV tile by its number: about as many tiles as there are CTAs, whole waves to a group."""
        waves = max((group_tiles + ctas // 2) // ctas, 1)
        group, rest = divmod(tile, group_tiles)
        return group * waves + rest * waves // group_tiles

    def zero_lag(self, heads: int, n_blocks: int, workers: int) -> int:
        """How many heads lie between one whose KV tiles zero and the one whose dQ they zero.

        `heads`: of dK and dV, over all batch elements.

        More than a group, so that all KV tiles of the later head have higher numbers than those that it waits for; and
        so many that CTAs which take KV tiles at the same time seldom wait for one another.
        """
        return self.group_heads(heads, n_blocks, workers) + -(-workers // n_blocks)

    def group_heads(self, heads: int, n_blocks: int, workers: int) -> int:
        """How many of them a group has; `workers`: SMs. The last one may have fewer."""
        if not self.grouped:
            return 1
        groups = -(-heads // max(1, workers // n_blocks))
        return -(-heads // max(1, groups - groups % 2))


class BackwardPlan(Node):
    """One tile plan of the backward's main kernel; `prepare` and `finish` follow from it."""

    name: str
    compute: BackwardCompute
    mask: MaskPlan
    schedule: BackwardSchedule
    memory: BackwardMemory
    launch: LaunchPlan
    cost: Cost

    @property
    def part_words(self) -> int:
        """fp32 words of workspace for dK and dV of one share of a walk, in 16 bits; 0: no walk is shared.

        A call has at most as many shares as workers, and takes as many parts as it has workers.
        """
        c = self.compute
        return c.tile_n * (c.head_dim_qk_padded + c.head_dim_v_padded) // 2 if self.schedule.shares_walks else 0


class BackwardPlanSet(Node):
    """What one generated backward holds. Plan i serves max(seqlen_q, seqlen_kv) <= limits[i], the last one all."""

    spec: AttentionSpec
    target: str
    gradient: GradientForm
    deterministic: bool
    plans: tuple[BackwardPlan, ...]
    limits: tuple[int, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    others: tuple[BackwardPlan, ...] = ()

    @property
    def long_plan(self) -> BackwardPlan:
        """The one that serves every length above the limits."""
        return self.plans[-1]

    @property
    def pads_rows(self) -> bool:
        """Whether rows of Q or dO in shared memory are wider than products, in any plan."""
        extents = ((p.memory, p.compute) for p in self.plans)
        return any(m.q_columns > c.head_dim_qk_padded or m.do_columns > c.head_dim_v_padded for m, c in extents)

    @property
    def step_cycles(self) -> tuple[int, ...]:
        """Estimated cycles of a full step of each plan, by which a call of few KV tiles chooses; () where it need not:
        there is one plan, or walks are about equal, so that the longest is no longer than the mean.
        """
        uneven = bool(self.limits) and self.long_plan.mask.grows
        return tuple(round(p.cost.cycles) for p in self.plans) if uneven else ()

    def index(self, seqlen_q: int, seqlen_kv: int) -> int:
        """Which plan serves these lengths."""
        return plan_at(self.limits, max(seqlen_q, seqlen_kv))
