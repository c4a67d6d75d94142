"""Spell the tables of a mask form: where each lies in the workspace, and the search that fills it."""

from __future__ import annotations

from dataclasses import dataclass

from attngen.emit.exprs import CutePrinter, safe_name
from attngen.emit.header import clipped, spelled
from attngen.emit.straight import fold, straight_line
from attngen.ir.tables import AXES, Table
from attngen.passes.facts import Facts
from attngen.passes.lookups import wide_sum

#: What a compiled function with tables takes after the captured tensors.
TABLE_ARGUMENTS = ("tables", "build_tables")
#: Atoms that a method which fills a table finds from the number of its element.
_GIVEN = frozenset(AXES.values())


@dataclass(frozen=True)
class TableView:
    """One table: extents, coordinates of an element, the search."""

    name: str
    shape: str
    note: str
    title: str
    fill: str
    coords: tuple[str, ...]
    place: str
    bindings: tuple[str, ...]
    tensor: str
    axis: int
    value: str
    counts: str


def spell_tables(printer: CutePrinter, tables: tuple[Table, ...], facts: Facts) -> tuple[TableView, ...]:
    """Spell the tables; `printer` collects the helpers that they call."""
    return tuple(_spelled(printer, t, facts) for t in tables)


def describe(t: Table) -> str:
    """What an element of a table is, in the words of a spec."""
    below = "below" if t.side == "first" else "at most"
    return f"elements of {sorted_row(t)} {below} {spelled(t.value)}"


def sorted_row(t: Table) -> str:
    """The row of the sorted tensor that is searched: `doc[b]`."""
    return f"{t.tensor}[{', '.join(spelled(e) for e in t.lead)}]" if t.lead else t.tensor


def _spelled(printer: CutePrinter, t: Table, facts: Facts) -> TableView:
    name, total = safe_name(t.name), wide_sum(t.value, facts)
    parts = [t.value] if total is None else [*total.terms]
    lines, texts = straight_line(printer, [*t.lead, *parts], _GIVEN | {"kv_idx"})
    lead, values = texts[: len(t.lead)], texts[len(t.lead) :]
    value = values[0]
    if total is not None:
        terms = zip(total.terms.values(), values, strict=True)
        summands = [*(_product(c, x) for c, x in terms), *([str(total.const)] if total.const else [])]
        value = fold(" + ".join(summands).replace(" + -", " - "))
    printer.used.add("at")
    tensor = safe_name(t.tensor)
    return TableView(
        name=name,
        shape=", ".join(t.dims) + ("," if len(t.dims) == 1 else ""),
        note=clipped(describe(t), 92 - len(name)),
        title=t.name,
        fill=f"fill_{name}",
        coords=_coords(t.dims),
        place=", ".join(AXES[d] for d in t.dims),
        bindings=(*lines, *([] if f"{tensor} = p.{tensor}" in lines else [f"{tensor} = p.{tensor}"])),
        tensor=tensor,
        axis=len(t.lead),
        value=value,
        counts=f"at({tensor}, {''.join(f'{x}, ' for x in lead)}middle) {'<' if t.side == 'first' else '<='} wanted",
    )


def _product(factor: int, text: str) -> str:
    return f"Int64({text})" if factor == 1 else f"-Int64({text})" if factor == -1 else f"{factor} * Int64({text})"


def _coords(dims: tuple[str, ...]) -> tuple[str, ...]:
    """Lines from the number of an element to its place, the last axis first."""
    lines = [f"{AXES[d]}, slot = slot % p.{d}, slot // p.{d}" for d in reversed(dims[1:])]
    return (*lines, f"{AXES[dims[0]]} = slot")
