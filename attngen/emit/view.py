"""KernelView: what templates may read.

Numbers, booleans, names, one-line expressions and straight-line bindings; no code. `spell` fills it.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit.score import ScoreView
from attngen.emit.selfcheck import CheckView
from attngen.emit.tables import ExtremeView, LookupView, PlacedTable


@dataclass(frozen=True)
class Clause:
    """Expression texts of one clause."""

    lower: str
    upper: str

    @property
    def is_short(self) -> bool:
        """Both fit one line."""
        return len(self.lower) + len(self.upper) < 96


@dataclass(frozen=True)
class Bounds:
    """Expression texts of one clause's bounds over a row tile."""

    lower_min: str
    lower_max: str
    upper_min: str
    upper_max: str


@dataclass(frozen=True)
class Formula:
    """A clause of the spec as text, with its value and the names it needs."""

    title: str
    value: str
    bindings: tuple[str, ...]


@dataclass(frozen=True)
class MapView:
    """A tile map, spelled: its extents, the number of one of its rows, and the test of a tile."""

    title: str
    range_elements: int
    whose: str
    outer: str
    inner: str
    tiles: str
    places: str
    maps: str
    plans: str
    counted: str
    halves: str
    rows: str
    transposed_row: str
    row: str
    batch: str
    head: str
    bindings: tuple[str, ...]
    every: str
    some: str
    keep_bindings: tuple[str, ...]
    keep: str


@dataclass(frozen=True)
class MaskView:
    """The mask pass's slot, spelled."""

    title: str
    is_interval: bool
    is_map: bool
    map: MapView
    is_runs: bool
    by_limits: bool
    has_lower: bool
    has_right_edge: bool
    has_interior: bool
    has_left_edge: bool
    per_warpgroup: bool
    passes_left: bool
    interior_end: str
    clauses: tuple[Bounds, ...]
    bindings: tuple[str, ...]
    rows: tuple[Clause, ...]
    row_bindings: tuple[str, ...]
    keep: str


@dataclass(frozen=True)
class Argument:
    """A run-time scalar or captured tensor of the kernel."""

    name: str
    annotation: str
    example: str


@dataclass(frozen=True)
class Packed:
    """A captured tensor that holds all sequences along some axes: (axis, first, count) of one sequence, as texts."""

    name: str
    axes: str


@dataclass(frozen=True)
class RowResult:
    """A tensor of a number for each row, of packed sequences."""

    name: str


@dataclass(frozen=True)
class Dim:
    """A symbolic extent of the compiled function."""

    name: str
    symbol: str


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
class Uses:
    """Helpers that some expression calls."""

    floor_div: bool
    floor_mod: bool
    exp: bool
    log: bool
    log2: bool
    sqrt: bool
    tanh: bool
    sigmoid: bool
    softplus: bool
    floor: bool
    absolute: bool
    has_bit: bool
    at: bool


@dataclass(frozen=True)
class Weight:
    """The weight of a pair, where no other pair moves it, as text: what it is, and its value in place of the score."""

    title: str
    value: str


@dataclass(frozen=True)
class Output:
    """A tensor that a kernel takes last: a forward's further result, or where a captured tensor's gradient goes.

    `saves_o`, a number, says whether a forward writes O before the epilogue.
    """

    name: str
    example: str
    make: str
    annotation: str = "cute.Tensor"


@dataclass(frozen=True)
class CommonView:
    """What templates of both directions read."""

    docstring: str
    meta: str
    target: str
    element: str
    packed_type: str
    head_dim_qk: str
    head_dim_v: str
    limits: str
    uses: Uses
    mask: MaskView
    has_score: bool
    score: Formula
    has_softmax: bool
    weight: Weight
    outputs: tuple[Output, ...]
    has_outputs: bool
    out_element: str
    out_torch_dtype: str
    has_epilogue: bool
    epilogue: Formula
    has_sink: bool
    sink: Formula
    is_ragged: bool
    is_varlen: bool
    batch: str
    sequences: str
    heads_last_note: str
    last_axis: str
    shape_lse: str
    lengths: tuple[Argument, ...]
    packed: tuple[Packed, ...]
    has_packed: bool
    reference: str
    layout_note: str
    layout_modes: str
    arguments: tuple[Argument, ...]
    has_tables: bool
    has_lookups: bool
    has_extremes: bool
    tables: tuple[PlacedTable, ...]
    lookups: tuple[LookupView, ...]
    extremes: tuple[ExtremeView, ...]
    table_words: str
    packed_tables: tuple[PlacedTable, ...]
    has_packed_tables: bool
    call: str
    dims: tuple[Dim, ...]
    shape_q: str
    shape_k: str
    shape_v: str
    shape_o: str
    check: CheckView
    torch_dtype: str
    check_head_dim_qk: int
    check_head_dim_v: int
    is_differentiated: bool


@dataclass(frozen=True)
class PackView:
    """How rows of a tile are found where query heads of a KV head share it (`is_on`), and where they do not."""

    is_on: bool
    group: int
    #: Queries of a row tile, of a warpgroup's slice of it, and the last of a slice.
    tile_queries: str
    slice_queries: str
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
class KernelView(CommonView):
    """Everything the forward's templates read."""

    summary: str
    split: ScoreView
    holds_values: bool
    has_max_logit: bool
    top_units: str
    saves_o: bool
    reduces_rows: bool
    stages_o: bool
    frees_q_early: bool
    writes_rows: bool
    columns_of_eight: int
    tma_atoms: str
    plans: tuple[PlanView, ...]
    lowest: str
    finish_first_note: str
    pingpong: bool
    rescale_on_growth: bool
    takes_exponentials: bool
    row_note: str
    o_has_own_buffer: bool
    o_in_q_buffer: bool
    q_empty_arrivals: int
    q_empty_note: str
    has_groups: bool
    mixes_orders: bool
    least_heads: int
    order_note: str
    pack: PackView
    walk_arguments: str
    stored_o: str
    packed_rows: tuple[RowResult, ...]
    rows_to_write: str
    row_of_o: str
    row_tiles: str
    tiles: str
    seq_order_note: str


@dataclass(frozen=True)
class Index:
    """One index expression of an element."""

    text: str


@dataclass(frozen=True)
class Gain:
    """What one pair adds to a buffer: its number among those of its kind, the value, and the element."""

    name: str
    number: int
    gain: str
    indices: tuple[Index, ...]


@dataclass(frozen=True)
class OutputGain:
    """What a captured tensor gains through the epilogue: buffer, name of a thread's part, number, factor of dO."""

    name: str
    local: str
    number: int
    gain: str
    #: The dtype of the buffer's elements.
    element: str


@dataclass(frozen=True)
class PackedSum:
    """A buffer with a number for each row or key of packed sequences: where one sequence's begin."""

    name: str
    start: str


@dataclass(frozen=True)
class BackwardTile:
    """The numbers of one tile plan of a backward."""

    tile_m: int
    warpgroups: int
    q_stages: int
    do_stages: int
    dq_stages: int
    dq_transposed: bool
    drains: bool
    v_in_registers: bool
    grouped: bool
    producer_registers: int
    consumer_registers: int


@dataclass(frozen=True)
class BackwardView(CommonView):
    """Everything the backward's templates read. `has_sink`: the gradient of each row's sink is asked for."""

    plans: tuple[BackwardTile, ...]
    deterministic: bool
    counts_turns: bool
    counter_words: int
    counters_note: str
    zeroes_ahead: bool
    shares_walks: bool
    least_share: int
    shape_dk: str
    shape_dv: str
    turn_note: str
    kv_descends: bool
    serpentine: bool
    order_note: str
    ds_stages: int
    splits_operands: bool
    orders_bulk_adds: bool
    p_stages: int
    p_words: int
    p_type: str
    p_quads: int
    warpgroups_note: str
    dq_parts: str
    owners: str
    sinks: tuple[Output, ...]
    rewrites_do: bool
    reads_rows: bool
    given_do: str
    loaded_do: str
    last_there: str
    row_arguments: tuple[Argument, ...]
    has_packed_arguments: bool
    packed_gains: tuple[Packed, ...]
    packed_sums: tuple[PackedSum, ...]
    frag_of_do: str
    has_row_formulas: bool
    row_formulas: str
    output_gains: tuple[OutputGain, ...]
    output_rows: tuple[OutputGain, ...]
    output_elements: tuple[OutputGain, ...]
    has_output_gains: bool
    num_output_gains: int
    gains: tuple[Output, ...]
    has_captured: bool
    keeps_score: bool
    keeps_own_score: bool
    columns: tuple[Gain, ...]
    rows: tuple[Gain, ...]
    elements: tuple[Gain, ...]
    has_columns: bool
    has_rows: bool
    reduces_gains: bool
    num_columns: int
    num_rows: int
    gain_lines: tuple[str, ...]
    gain_slope: str
    has_slope: bool
    weight_slope: str
    packs_kept: bool
    scales_to_log2: bool
    probabilities_note: str
    dp_note: str
    dz_note: str
    past_end_note: str
    slope: str
    slope_note: str
    slope_is_finite: bool
    to_log2: str
    kept: str
    true_head_dim_qk: int
    true_head_dim_v: int
    row_lanes_v: int
    transposes_dq: bool
