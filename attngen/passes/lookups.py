"""Lookups: positions in sorted tensors, and extremes of other elements over a tile, as elements of tables.

Rewrite   doc[b, kv_idx] >= x  -->  kv_idx >= doc_first[b, q_idx],   doc_first = how many elements of doc[b] are below x
          doc[b, kv_idx] <= x  -->  kv_idx < doc_end[b, q_idx],      doc_end = how many are at most x
Keeps     the value of the comparison at every index inside the tensor, if its last axis never decreases
Takes     int tensors promised `sorted` that the key indexes on their last axis only, by what isolate can solve;
          what is looked for is no position itself (documents over listed keys): such a term stays as it is
Cost      one table of int32 for each value that is looked for, over the axes that it depends on; a binary search each
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from attngen.ir.expr import Apply, Atom, Expr, Load, atom, atoms_of, const, tensors_of
from attngen.ir.functions import apply
from attngen.ir.linear import Linear, linear_of
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import AXES, ROW_BLOCK, Extreme, Table
from attngen.ir.types import DType, Layout, Type
from attngen.passes.facts import INT32, Q_HI, Q_LO, Facts, is_positive, range_of, reads_row
from attngen.passes.nnf import reads_key

_AXIS_OF = {"b": "batch", "h": "heads_q", "h_kv": "heads_q", "q_idx": "seqlen_q", "q_pos": "seqlen_q"}


class Lookups:
    """The tables of one mask, in order of first use."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._taken = {p.name for p in spec.params} | {t.name for t in spec.tensors}
        self._layout = spec.layout
        self._made: dict[tuple[Expr, Expr, str], Table] = {}
        self._extremes: dict[tuple[Expr, bool], Extreme] = {}

    @property
    def tables(self) -> tuple[Table | Extreme, ...]:
        """All tables made so far, those of positions first: others may be about them."""
        return (*self._made.values(), *self._extremes.values())

    def extremes(self, e: Load) -> tuple[Expr, Expr] | None:
        """(least, greatest) value of an int or bool element over the rows q_lo..q_hi of a tile, from tables.

        Two windows of rows cover a tile (`ir.tables.ROW_WINDOW`), with up to a block of rows around it.
        """
        if self._layout.is_ragged or e.type is Type.FLOAT or reads_key(e):  # windows would end with their sequence
            return None
        first = apply("floordiv", Q_LO, const(ROW_BLOCK))
        last = apply("max", apply("sub", apply("floordiv", Q_HI, const(ROW_BLOCK)), const(1)), first)
        found = []
        for greatest in (False, True):
            if (e, greatest) not in self._extremes:
                name = self._name(f"{e.tensor}_{'greatest' if greatest else 'least'}")
                self._extremes[e, greatest] = Extreme(name=name, dims=_dims((e,)), value=e, greatest=greatest)
            table = self._extremes[e, greatest]
            at = [
                Load(
                    type=Type.INT,
                    tensor=table.name,
                    dtype=DType.I32,
                    indices=tuple(block if d == "seqlen_q" else atom(AXES[d]) for d in table.dims),
                    span=e.span,
                )
                for block in (first, last)
            ]
            found.append(apply("max" if greatest else "min", *at))
        return found[0], found[1]

    def position(self, t: Load, value: Expr, side: Literal["first", "end"], facts: Facts) -> Load | None:
        """The element that holds the position of `value` in the tensor that `t` reads; None where no table could."""
        lead, index = t.indices[:-1], t.indices[-1:]
        if t.type is not Type.INT or t.tensor not in facts.sorted or t.tensor in facts.tables or not index:
            return None
        if any(reads_key(e) or tensors_of(e) & facts.tables.keys() for e in (*lead, value)):
            return None  # one launch fills all positions: none may be about another
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
        dims = _dims((*lead, value))
        if self._layout.is_ragged and "batch" not in dims:  # the tensor, lengths and positions are a sequence's
            dims = ("batch", *dims)
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
            packed=self._layout is Layout.VARLEN and "seqlen_q" in dims,
        )

    def _name(self, stem: str) -> str:
        name, n = stem, 2
        while name in self._taken:
            name, n = f"{stem}_{n}", n + 1
        self._taken.add(name)
        return name


def _dims(exprs: Iterable[Expr]) -> tuple[str, ...]:
    """The axes that expressions depend on, one at least."""
    read = {_AXIS_OF[a] for e in exprs for a in atoms_of(e) if a in _AXIS_OF}
    return tuple(d for d in AXES if d in read) or ("batch",)


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
