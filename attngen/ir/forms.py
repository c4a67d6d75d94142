"""MaskForm: a mask as a union of per-row key intervals, and the bounds of those intervals over a tile of rows."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from attngen.ir.base import Node
from attngen.ir.expr import Expr
from attngen.ir.tables import Extreme, Table


class Clause(Node):
    """Keeps key `kv_idx` of row `q_idx` iff  rows  and  lower <= kv_idx < upper  and  residual.

    `lower`, `upper` (int) and `rows` (bool) never read `kv_idx`. None stands for 0, `seqlen_kv`, true and true.
    """

    lower: Expr | None = None
    upper: Expr | None = None
    rows: Expr | None = None
    #: What no interval could say; tested element by element inside the interval.
    residual: Expr | None = None


class Reason(Node):
    """Why a term of the mask stayed element-wise, and what to write instead. `span` is the term."""

    term: str
    why: str
    mend: str


class TileBounds(Node):
    """Bounds of one clause over rows q_lo..q_hi (inclusive), int expressions that read neither `q_idx` nor `kv_idx`.

    For every row of the tile to which the clause may apply: lower_min <= lower <= lower_max and
    upper_min <= upper <= upper_max, already clamped to [0, seqlen_kv]. A clause that does not apply to some row, or has
    a residual, has upper_min = 0 (no key is kept for sure); one that applies to no row has upper_max = 0.
    """

    lower_min: Expr
    lower_max: Expr
    upper_min: Expr
    upper_max: Expr


class MaskForm(Node):
    """The mask equals the OR of `clauses` (none: nothing is kept). `tables`: those that clauses and bounds read."""

    mask: Expr
    clauses: tuple[Clause, ...]
    bounds: tuple[TileBounds, ...]
    reasons: tuple[Reason, ...] = ()
    tables: tuple[Table | Extreme, ...] = ()

    @model_serializer(mode="wrap")
    def _lean(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without tables where there are none: a kernel's name hashes this, and should not move with what it lacks."""
        out: dict[str, Any] = handler(self)
        if not self.tables:
            out.pop("tables", None)
        return out

    @cached_property
    def is_full(self) -> bool:
        """Every key of every row is kept."""
        return len(self.clauses) == 1 and self.clauses[0] == Clause()

    @property
    def is_exact(self) -> bool:
        """Intervals alone decide; nothing is tested element by element."""
        return all(c.residual is None for c in self.clauses)
