"""KernelPlan: every decision about one kernel, in five sections, each filled by the pass of its name.

A tile walk, as every consumer of a plan (kernel, plan execution, cost) understands it. For rows q_lo..q_hi (a CTA's
tile, or one warpgroup's 64 rows where `ranges_per_warpgroup`) clause c of the mask form gives
    live_c = [lower_min // tile_n, ceil(upper_max / tile_n))
    full_c = [ceil(lower_max / tile_n), upper_min // tile_n)
in KV tiles. `walk`:
    interval   one clause: descend from live to its start: masked tiles right of full, full tiles unmasked, masked tiles
               left of it
    runs       several clauses: descend through all tiles that are live for some clause; a tile that is full for some
               clause is unmasked, every other one is masked
    map        `block_sparse`: descend through the tiles of which the map says that some pair is kept; a tile of which
               all are is unmasked, every other one is masked. Bounds play no part
A tile that holds keys past seqlen_kv is never full (upper_min <= seqlen_kv sees to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from attngen.ir.base import Node
from attngen.ir.forms import MaskForm
from attngen.ir.score import ScoreForm
from attngen.ir.spec import AttentionSpec
from attngen.ir.tile_map import TileMap
from attngen.ir.types import DType

#: Query heads of a KV head whose rows may share a tile: rows r and r + 8, which a thread holds, are then of one head.
PACKS = (1, 2, 4, 8)
#: Tile plans of one file.
MAX_PLANS = 3


class Rescale(StrEnum):
    """When O and the row sum follow a grown row maximum."""

    ON_GROWTH = "on_growth"  # when one outgrew its reference by far (exact: one reference for O, sum and LSE)
    BOUNDED = "bounded"  # scores stay within reach of one reference, known beforehand: no row has a maximum
    NEVER = "never"  # weights that no other key moves (sigmoid, relu): no reference, no sum, no LSE


class Maxima(StrEnum):
    """How a thread finds, in each KV tile, whether a row outgrew its reference."""

    FLOATS = "floats"  # the greatest of its elements: two at a time
    INTS = "ints"  # that of their bits, three at a time: 0 where all are negative, the float's then behind the vote


class ComputePlan(Node):
    """MMA shapes and where operands live. A consumer warpgroup owns 64 rows: tile_m = 64 * warpgroups."""

    dtype: DType
    tile_m: int
    tile_n: int
    warpgroups: int
    head_dim_qk: int
    head_dim_v: int
    #: Extents in MMA: of Q K^T the next multiple of its k step, 16, of P V that of its n, 8.
    head_dim_qk_padded: int
    head_dim_v_padded: int
    rescale: Rescale
    maxima: Maxima = Maxima.FLOATS
    #: log2 units: how far scores may outgrow their row's reference, and how far above the maximum a new one lies.
    growth: float = 0.0
    headroom: float = 0.0
    #: log2 units: the reference of all rows where scores are bounded.
    reference: float = 0.0
    #: Scores beyond scaling: evaluated element by element.
    has_score: bool
    #: Registers that expressions evaluated element by element take beside the fragments (coordinates, loads in flight).
    expression_registers: int = 0


class MaskPlan(Node):
    """Which KV tiles run, which of them are masked, and how an element is tested."""

    form: MaskForm
    walk: Literal["interval", "runs", "map"]
    #: limits: per-row bounds, held over the walk, as a bit for each column; elements: evaluate the mask expression.
    test: Literal["limits", "elements"]
    has_right_edge: bool
    has_interior: bool
    has_left_edge: bool
    ranges_per_warpgroup: bool
    #: What a walk by map goes by.
    map: TileMap | None = None

    @property
    def grows(self) -> bool:
        """Whether later rows keep more keys (causal), so that row tiles differ in work."""
        return self.has_right_edge and not self.has_left_edge and not self.form.is_full

    @model_serializer(mode="wrap")
    def _plain(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without a map no trace of one: what is hashed of other plans does not move."""
        fields: dict[str, Any] = serialize(self)
        if self.map is None:
            fields.pop("map", None)
        return fields


class Pipeline(Node):
    """A ring of shared-memory stages guarded by full/empty mbarriers."""

    name: str
    buffer: str
    stages: int
    producer: str
    consumer: str
    #: Bytes that one stage's loads announce on the full barrier; 0 for a mailbox.
    stage_bytes: int
    full_arrivals: int
    empty_arrivals: int


class NamedBarrier(Node):
    """A hardware barrier by number; 0 belongs to the whole CTA."""

    id: int
    name: str
    threads: int


class Role(Node):
    """What a set of warps does."""

    name: str
    warps: tuple[int, int]
    registers: int


class SchedulePlan(Node):
    """Roles, tile order, and the synchronisation ledger that the emitted text is checked against."""

    roles: tuple[Role, ...]
    pipelines: tuple[Pipeline, ...]
    named_barriers: tuple[NamedBarrier, ...]
    pingpong: bool
    order: Literal["linear", "lpt"]
    #: Heads walk the row tiles together in groups whose K and V fit this many bytes of L2; 0: one head after the other.
    l2_group_bytes: int
    #: Query heads of a KV head whose rows share a tile, row = query * pack + head; 1: a tile has rows of one head.
    pack: int = 1


class Buffer(Node):
    """A shared-memory buffer. `alias_of`: it lives in another's bytes."""

    name: str
    bytes: int
    shape: tuple[int, ...]
    alias_of: str | None = None


class MemoryPlan(Node):
    """Shared memory and registers."""

    kv_stages: int
    buffers: tuple[Buffer, ...]
    smem_bytes: int
    smem_limit: int
    o_in_q: bool
    #: fp32/packed registers a consumer thread holds across the loop: S, P, O and what the expressions need.
    fragment_registers: int
    register_limit: int

    @property
    def columns_qk(self) -> int:
        """Columns of a row of Q or K in shared memory; TMA fills those past the head dim with zeros."""
        return self._shape("sK")[1]

    @property
    def columns_v(self) -> int:
        """Columns of a row of V or O in shared memory."""
        return self._shape("sV")[1]

    def _shape(self, name: str) -> tuple[int, ...]:
        return next(b.shape for b in self.buffers if b.name == name)

    @property
    def stages_o(self) -> bool:
        """O leaves through shared memory, by TMA; else from registers, where its dtype is not that of Q's bytes."""
        return any(b.name == "sO" for b in self.buffers)


class LaunchPlan(Node):
    """Grid and block."""

    threads: int
    cluster: tuple[int, int, int]
    launch_registers: int

    @property
    def pairs_ctas(self) -> bool:
        """Whether two CTAs are a cluster."""
        return self.cluster != (1, 1, 1)


class Cost(Node):
    """Cycles of one full tile on one SM by unit, and the ranking estimate. Rooflines: max of the first four."""

    mma_cycles: float
    exp_cycles: float
    smem_cycles: float
    issue_cycles: float
    #: Estimated share of the dense MMA rate in the full-tile steady state.
    efficiency: float

    @property
    def cycles(self) -> float:
        """Estimated cycles of a full tile in the steady state."""
        return self.mma_cycles / self.efficiency


class KernelPlan(Node):
    """One tile plan."""

    name: str
    compute: ComputePlan
    mask: MaskPlan
    schedule: SchedulePlan
    memory: MemoryPlan
    launch: LaunchPlan
    cost: Cost


class Rejected(Node):
    """A candidate that a pass turned down."""

    candidate: str
    by: str
    why: str


def plan_at(limits: Sequence[int], length: int) -> int:
    """Which of a file's plans serves a length: plan i up to limits[i], the last one all others."""
    return next((i for i, limit in enumerate(limits) if length <= limit), len(limits))


class PlanSet(Node):
    """What one generated file holds: at most three tile plans of a spec; `plans[i]` serves launches whose max(seqlen_q,
    seqlen_kv) is at most `limits[i]`, the last one all others (len(limits) = len(plans) - 1, ascending)."""

    spec: AttentionSpec
    target: str
    plans: tuple[KernelPlan, ...]
    #: How often the parts of the score are evaluated; None where the score is `s`.
    score: ScoreForm | None = None
    limits: tuple[int, ...]
    #: The one plan of a kernel beside this file's, for calls whose row tiles leave SMs idle (`passes.few`).
    small: KernelPlan | None = None
    rejected: tuple[Rejected, ...] = ()
    others: tuple[KernelPlan, ...] = ()

    @property
    def with_small(self) -> tuple[KernelPlan, ...]:
        """Those of the file, then the one beside it, if there is one."""
        return self.plans if self.small is None else (*self.plans, self.small)

    def index(self, seqlen_q: int, seqlen_kv: int) -> int:
        """Which plan serves these lengths."""
        return plan_at(self.limits, max(seqlen_q, seqlen_kv))
