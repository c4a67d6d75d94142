"""ScoreForm: a score taken apart by how often its parts change over a tile of the accumulator."""

from __future__ import annotations

from typing import Literal

from attngen.ir.base import Node
from attngen.ir.expr import Expr, Param, atoms_of
from attngen.ir.types import DType, Type

#: Names that a form reads beside the spec's, as params that no spec can write: `%name`.
#: First of a thread's keys in a tile (forward) or of its queries (backward), and the distance of an element from it:
#: the same for all rows, known when the kernel is traced.
KV_0 = Param(type=Type.INT, name="%kv_0")
Q_0 = Param(type=Type.INT, name="%q_0")
COLUMN = Param(type=Type.INT, name="%column")
#: An element of Q K^T, and the factor that makes it `s`.
RAW = Param(type=Type.FLOAT, name="%raw")
SCALE = Param(type=Type.FLOAT, name="%softmax_scale")


#: Name of what stream k holds for an element.
LOAD = "%load_{}"


class Stream(Node):
    """A captured tensor that the columns of a tile read one after the other: element `start + column` of a row of it.

    Values read it as the param `%load_k`. `start` and the indices before the last are the same for all columns.
    """

    tensor: str
    dtype: DType
    indices: tuple[Expr, ...]
    start: Expr

    @property
    def by_row(self) -> bool:
        """Rows of a tile read different elements."""
        return any(not atoms_of(i).isdisjoint(("q_idx", "q_pos")) for i in (*self.indices, self.start))


class ScoreTerm(Node):
    """`factor * value`: the factor is the same for all columns of the tile, the value is evaluated for each element."""

    factor: Expr
    value: Expr


class ScoreForm(Node):
    """score = factor * (scale * s + slope * column + distance + sum(term.factor * term.value)) + shift: natural units.

    `column` counts along `axis`, the accumulator's columns: keys from `kv_0`, or queries from `q_0`. None stands for
    a part that the score does not have. All but the terms' values are the same for all columns of the tile: they are
    evaluated once for each row that a thread owns, `factor` once for all its rows. Values read `raw * softmax_scale`
    for `s`, and may read `kv_idx` (or `q_idx`) beside `column`.

    Numerics: what `s - m * float(q_pos - kv_idx)` loses by being `s + m * column - m * float(q_pos - kv_0)` is a
    rounding of the distance to the tile's first key, never of a position: ints are subtracted as ints, and the
    conversions are exact below 2**24.
    """

    axis: Literal["kv", "q"]
    scale: Expr | None
    slope: Expr | None
    shift: Expr | None
    terms: tuple[ScoreTerm, ...] = ()
    #: Elements asked for while Q K^T is being computed, two at a time.
    streams: tuple[Stream, ...] = ()
    #: A sum of terms that read positions only as key minus query (T5's buckets), factors included: a tile of 16 rows
    #: has tile_n + 15 values of it, which its warp evaluates once each. Reads `q_idx`, `kv_idx`.
    distance: Expr | None = None
    #: Positive: a maximum over the columns may be taken before it multiplies.
    factor: Expr | None = None
    #: `s + slope * column + shift` of a scale that is positive: the line is divided by the scale, and the softmax
    #: multiplies the sum by it.
    scale_last: bool = False
