"""KernelView: what the forward's templates may read. `spell_forward` fills it."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit.score import ScoreView
from attngen.emit.view import CommonView


@dataclass(frozen=True)
class RowResult:
    """A tensor of a number for each row, of packed sequences."""

    name: str


@dataclass(frozen=True)
class PlanView:
    """The numbers of one tile plan."""

    warpgroups: int
    tile_n: int
    kv_stages: int
    producer_registers: int
    consumer_registers: int
    l2_group_bytes: int


@dataclass(frozen=True)
class PackView:
    """How rows of a tile are found where query heads of a KV head share it (`is_on`), and where they do not."""

    is_on: bool
    group: int
    #: Queries of a row tile; the first of a warpgroup's slice of it, and how far behind it the last is.
    tile_queries: str
    slice_first: str
    last_query: str
    #: A thread's queries and their query head.
    rows: str
    head: str
    #: Extents in the kernel, where Q is seen as the tiles see it.
    seqlen_q: str
    heads_q: str
    #: Heads that are walked, in the kernel and of the problem; the KV head of such a one; that of a row tile's O.
    walked_heads: str
    walked_of: str
    kv_head: str
    o_head: str


@dataclass(frozen=True)
class PairView:
    """What differs where a cluster of two CTAs takes two row tiles side by side (`is_on`)."""

    is_on: bool
    #: The number of row tiles, or of pairs of them, of a head, in the kernel and of the problem.
    blocks: str
    blocks_of: str
    #: This CTA's row tile from the place of its (pair's) in the order, and what it is.
    block: str
    whose_block: str
    #: The first query and the number of queries of the row tiles whose KV tiles are loaded together.
    first_query: str
    queries: str


@dataclass(frozen=True)
class KernelView(CommonView):
    """Everything the forward's templates read."""

    summary: str
    split: ScoreView
    holds_values: bool
    has_max_logit: bool
    top_units: str
    saves_o: bool
    reads_sink_weight: bool
    reduces_rows: bool
    stages_o: bool
    frees_q_early: bool
    writes_rows: bool
    columns_of_eight: int
    tma_atoms: str
    #: Columns of a row of Q and K, of V and O, in shared memory, and their names; rows that P V has fewer columns than.
    columns_qk: int
    columns_v: int
    row_qk: str
    row_v: str
    pads_v: bool
    #: How Q K^T is issued: S starts anew, and of so many k steps; the TiledMma that sees a whole row of V or O, and its
    #: slice of a thread.
    fresh_s: str
    mma_rows: str
    thr_rows: str
    plans: tuple[PlanView, ...]
    lowest: str
    finish_first_note: str
    pingpong: bool
    growth: str
    headroom: str
    headroom_note: str
    is_bounded: bool
    follows_maxima: bool
    takes_maxima: bool
    #: Whether maxima are those of ints, and whether they are exact only where a warp votes for them.
    int_maxima: bool
    bounds_rows: bool
    fixed_reference: str
    takes_exponentials: bool
    row_note: str
    o_has_own_buffer: bool
    o_in_q_buffer: bool
    q_empty_arrivals: int
    q_empty_note: str
    slices_of_q: str
    slices_note: str
    has_groups: bool
    mixes_orders: bool
    least_heads: int
    order_note: str
    pack: PackView
    pair: PairView
    walk_arguments: str
    stored_o: str
    packed_rows: tuple[RowResult, ...]
    rows_to_write: str
    row_of_o: str
    row_tiles: str
    tiles: str
    seq_order_note: str
