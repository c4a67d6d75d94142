"""Lookups: positions in sorted tensors, as elements of tables.

Rewrite   doc[b, kv_idx] >= x  -->  kv_idx >= doc_first[b, q_idx],   doc_first = how many elements of doc[b] are below x
          doc[b, kv_idx] <= x  -->  kv_idx < doc_end[b, q_idx],      doc_end = how many are at most x
Keeps     the value of the comparison at every index inside the tensor, if its last axis never decreases
Takes     int tensors promised `sorted` that the key indexes on their last axis only, by anything that isolate can solve
Cost      one table of int32 for each value that is looked for, over the axes that it depends on; a binary search each
"""

from __future__ import annotations

from typing import Literal

from attngen.ir.expr import Apply, Atom, Expr, Load, atom, atoms_of
from attngen.ir.linear import Linear, linear_of
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import AXES, Table
from attngen.ir.types import Type
from attngen.passes.facts import INT32, Facts, is_positive, range_of, reads_row
from attngen.passes.nnf import reads_key

_AXIS_OF = {"b": "batch", "h": "heads_q", "h_kv": "heads_q", "q_idx": "seqlen_q", "q_pos": "seqlen_q"}


class Lookups:
    """The tables of one mask, in order of first use."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._taken = {p.name for p in spec.params} | {t.name for t in spec.tensors}
        self._ragged = spec.layout.is_ragged  # a table's rows would end with their sequence: not made yet
        self._made: dict[tuple[Expr, Expr, str], Table] = {}

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables made so far."""
        return tuple(self._made.values())

    def position(self, t: Load, value: Expr, side: Literal["first", "end"], facts: Facts) -> Load | None:
        """The element that holds the position of `value` in the tensor that `t` reads; None where no table could."""
        lead, index = t.indices[:-1], t.indices[-1:]
        if t.type is not Type.INT or t.tensor not in facts.sorted or t.tensor in facts.tables or not index:
            return None
        if self._ragged or any(reads_key(e) for e in (*lead, value)):
            return None
        key = t.replace(indices=lead), value, side
        if key not in self._made:
            self._made[key] = self._table(t, lead, value, side, facts)
        table = self._made[key]
        return Load(
            type=Type.INT,
            tensor=table.name,
            dtype=t.dtype,
            indices=tuple(atom(AXES[d]) for d in table.dims),
            span=t.span,
        )

    def _table(
        self, t: Load, lead: tuple[Expr, ...], value: Expr, side: Literal["first", "end"], facts: Facts
    ) -> Table:
        read = {_AXIS_OF[a] for e in (*lead, value) for a in atoms_of(e) if a in _AXIS_OF}
        dims = tuple(d for d in AXES if d in read) or ("batch",)
        own = isinstance(value, Load) and value.tensor == t.tensor and value.indices[:-1] == lead
        still = not any(reads_row(e) for e in lead)
        return Table(
            name=self._name(f"{t.tensor}_{side}"),
            dims=dims,
            tensor=t.tensor,
            lead=lead,
            value=value,
            side=side,
            around=value.indices[-1] if own and isinstance(value, Load) else None,
            sorted="seqlen_q" in dims and still and rises(value, facts),
        )

    def _name(self, stem: str) -> str:
        name, n = stem, 2
        while name in self._taken:
            name, n = f"{stem}_{n}", n + 1
        self._taken.add(name)
        return name


def rises(e: Expr, facts: Facts) -> bool:
    """Is an int expression certain never to fall from a row to the next one? Tables compute sums without overflow."""
    if not reads_row(e) or isinstance(e, Atom):
        return True
    if isinstance(e, Load):
        return (
            e.tensor in facts.sorted and not any(reads_row(i) for i in e.indices[:-1]) and rises(e.indices[-1], facts)
        )
    if not isinstance(e, Apply):
        return False
    total = linear_of(e)
    if total.terms != {e: 1}:
        return all(not reads_row(t) or (c > 0 and rises(t, facts)) for t, c in total.terms.items())
    if e.fn in ("min", "max"):
        return all(rises(a, facts) for a in e.args)
    if e.fn in ("floordiv", "mul") and not reads_row(e.args[1]):
        certain = is_positive(e.args[1], facts) if e.fn == "floordiv" else range_of(e.args[1], facts)[0] >= 0
        return certain and rises(e.args[0], facts)
    return False


def wide_sum(value: Expr, facts: Facts) -> Linear | None:
    """A value as the sum that it is, where that may leave an int32: it is then added up in 64 bits. Else None."""
    low, high = range_of(value, facts)
    return None if INT32[0] <= low and high <= INT32[1] else linear_of(value)
