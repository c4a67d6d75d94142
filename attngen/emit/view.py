"""What templates of both directions may read.

Numbers, booleans, names, one-line expressions and straight-line bindings; no code. `spell` fills it; `view_forward` and
`view_backward` add what one direction alone reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit.selfcheck import CheckView
from attngen.emit.tables import ExtremeView, LookupView, PlacedTable
from attngen.emit.view_mask import MaskView


@dataclass(frozen=True)
class Formula:
    """A clause of the spec as text, with its value and the names it needs."""

    title: str
    value: str
    bindings: tuple[str, ...]


@dataclass(frozen=True)
class Argument:
    """A run-time scalar or captured tensor of the kernel."""

    name: str
    annotation: str
    example: str


@dataclass(frozen=True)
class Dim:
    """A symbolic extent of the compiled function."""

    name: str
    symbol: str


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
    #: Rows in shared memory are wider than Q K^T sums over; how many k steps a GEMM has.
    pads_k_steps: bool
    k_steps: str
    #: Keys of all rows end by a constant: a walk may be one KV tile, and the compiler know it.
    settles_o: bool
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
    packed: tuple[str, ...]  # statements that put a sequence's part of a captured tensor in its place
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
    packed_tables: tuple[str, ...]  # as `packed`, of tables
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
