"""Tables: int32 arrays that a kernel of their own computes from captured tensors before the kernels that read them.

A table holds one position of a `sorted` tensor for each query row (and batch element and head, where it depends on
them). It stands in the clauses and bounds of a mask form as an ordinary element: `doc_first[b, q_idx]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from attngen.ir.base import Node
from attngen.ir.expr import Expr

#: Axes that a table may have, in this order, and the atom that indexes each.
AXES: dict[str, str] = {"batch": "b", "heads_q": "h", "seqlen_q": "q_idx"}


class Table(Node):
    """For every element, how many elements of `tensor[*lead, :]` are below `value` (`first`) or at most that (`end`).

    With a sorted tensor that is the first position that holds `value` or more, or more than it. Elements lie in
    [0, extent of the tensor's last axis] whatever the tensor holds. Whether the tensor is sorted is the caller's
    promise: where it is broken the positions are others, no more.
    """

    name: str
    #: A subset of `AXES`, in their order: what `lead` and `value` depend on.
    dims: tuple[str, ...]
    tensor: str
    #: Indices of the tensor's leading axes, and what is looked for: ints without `kv_idx`.
    lead: tuple[Expr, ...]
    value: Expr
    side: Literal["first", "end"]
    #: The position on the tensor's last axis whose own element `value` is, if it is one: first <= around < end.
    around: Expr | None = None
    #: The table never falls along its last axis, which is `seqlen_q`.
    sorted: bool = False
    #: Rows of all sequences stand one behind the other: in memory there is no axis of them.
    packed: bool = False


#: Rows from one element of an `Extreme` to the next, and rows that an element is about: two elements cover any tile of
#: up to 3 * ROW_BLOCK + 1 rows, and one of 4 * ROW_BLOCK that begins at a multiple of ROW_BLOCK.
ROW_BLOCK, ROW_WINDOW = 64, 128


class Extreme(Node):
    """The least or the greatest value of an int or bool expression over the rows [64 i, 64 i + 128) of seqlen_q.

    Rows past the end count as the last one. Bools count as 0 and 1. Along its last axis a table of this kind has an
    element for every 64 rows; it bounds over a tile what no rule bounds: elements of tensors that are not sorted.
    """

    name: str
    #: A subset of `AXES`, in their order, `seqlen_q` among them.
    dims: tuple[str, ...]
    value: Expr
    greatest: bool


def cover(rows: int) -> bool:
    """Whether two windows, the first one's block that of a tile's first row, the other's that before its last row's or
    the same, hold all `rows` rows of any tile of that many, which begins at a multiple of them.
    """
    return rows <= (4 * ROW_BLOCK if rows % ROW_BLOCK == 0 else 3 * ROW_BLOCK + 1)


def axes_of(table: Table | Extreme) -> list[Any]:
    """Its dims as `ATTN_META["tables"]` has them, see `elements`."""
    return [
        ["seqlen_q", ROW_BLOCK] if d == "seqlen_q" and isinstance(table, Extreme) else d for d in dims_in_memory(table)
    ]


def dims_in_memory(table: Table | Extreme) -> tuple[str, ...]:
    """Its dims without the axis that packed sequences do not have."""
    packed = isinstance(table, Table) and table.packed
    return tuple(d for d in table.dims if not (packed and d == "batch"))


def words(rows: Iterable[Mapping[str, Any]], sizes: Mapping[str, int]) -> int:
    """int32 words of the tables that `ATTN_META["tables"]` lists, in a call of these extents (by axis name)."""
    return sum(elements(row["dims"], sizes) for row in rows)


def elements(dims: Sequence[Any], sizes: Mapping[str, int]) -> int:
    """Elements of one table. A dim is an axis, a number, or [axis, block]: as many blocks as cover the axis."""
    total = 1
    for d in dims:
        if isinstance(d, str):
            total *= sizes[d]
        elif isinstance(d, int):
            total *= d
        else:
            total *= -(-sizes[d[0]] // d[1])
    return total
