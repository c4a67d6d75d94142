"""BackwardView: what the backward's templates may read. `spell_backward` fills it."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit.view import Argument, CommonView, Output


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
class BackwardTile:
    """The numbers of one tile plan of a backward."""

    tile_m: int
    warpgroups: int
    q_stages: int
    do_stages: int
    q_columns: int
    do_columns: int
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
    #: Rows of Q and dO in shared memory may be wider than products; their columns, and the slices of a thread of the
    #: TiledMma that see a whole row.
    pads_rows: bool
    row_q: str
    row_do: str
    thr_q: str
    thr_do: str
    deterministic: bool
    counts_turns: bool
    counter_words: int
    counters_note: str
    zeroes_ahead: bool
    shares_walks: bool
    kernels: str
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
    packed_gains: tuple[str, ...]  # as `packed`, of buffers with a captured tensor's axes
    packed_sums: tuple[str, ...]  # of those with a number for each row or key
    packed_outputs: tuple[str, ...]  # of those that the rows' kernel writes
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
