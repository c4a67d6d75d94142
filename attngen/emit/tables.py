"""Spell the tables of a mask form: where each lies in the workspace, and how it is filled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attngen.emit.exprs import CutePrinter, safe_name
from attngen.emit.header import clipped, spelled
from attngen.emit.straight import fold, statement, straight_line
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import AXES, ROW_BLOCK, Extreme, Table, dims_in_memory
from attngen.passes.facts import Facts
from attngen.passes.lookups import wide_sum


def build_arguments(is_map: bool, has_tables: bool) -> tuple[str, ...]:
    """What a compiled function takes after the captured tensors, and after `tile_map` where the mask has one."""
    return (*(("build_map",) if is_map else ()), *(("tables", "build_tables") if has_tables else ()))


#: Atoms that a method which fills a table finds from the number of its element.
_GIVEN = frozenset((*AXES.values(), "kv_idx"))


@dataclass(frozen=True)
class PlacedTable:
    """A table and its extents."""

    name: str
    shape: str


@dataclass(frozen=True)
class LookupView:
    """A table of positions: coordinates of an element, the search."""

    name: str
    note: str
    title: str
    fill: str
    coords: tuple[str, ...]
    place: str
    bindings: tuple[str, ...]
    end: str
    value: str
    counts: str


@dataclass(frozen=True)
class ExtremeView:
    """A table of extremes: coordinates of an element, the value of a row, what combines two."""

    name: str
    note: str
    fill: str
    coords: tuple[str, ...]
    place: str
    bindings: tuple[str, ...]
    value: str
    combine: str


def table_fields(
    printer: CutePrinter, tables: Sequence[Table | Extreme], facts: Facts, spec: AttentionSpec
) -> dict[str, Any]:
    """The fields of `CommonView` about tables; `printer` collects the helpers that they call."""
    if tables:
        printer.used.add("at")
    words = Counter(" * ".join(_extents(t, "-(-seqlen_q // {})")) for t in tables)
    lookups = tuple(_lookup(printer, t, facts, spec) for t in tables if isinstance(t, Table))
    extremes = tuple(_extreme(printer, t) for t in tables if isinstance(t, Extreme))
    blocks = "cute.ceil_div(seqlen_q, {})"
    return {
        "has_tables": bool(tables),
        "has_lookups": bool(lookups),
        "has_extremes": bool(extremes),
        "tables": tuple(PlacedTable(safe_name(t.name), _tuple(_extents(t, blocks))) for t in tables),
        "lookups": lookups,
        "extremes": extremes,
        "table_words": " + ".join(f"{n} * {text}" if n > 1 else text for text, n in words.items()),
        "packed_tables": tuple(_of_sequence(safe_name(t.name)) for t in tables if isinstance(t, Table) and t.packed),
        "has_packed_tables": any(isinstance(t, Table) and t.packed for t in tables),
    }


def _of_sequence(name: str) -> str:
    """What puts one sequence's part of a table in its place."""
    return statement(f"own.{name}", "self.table_of", ["p", f"p.{name}", "start_q", "seqlen_q"])


def _extents(t: Table | Extreme, blocks: str) -> list[str]:
    dims = dims_in_memory(t)
    return [blocks.format(ROW_BLOCK) if isinstance(t, Extreme) and d == "seqlen_q" else d for d in dims]


def _tuple(parts: list[str]) -> str:
    return ", ".join(parts) + ("," if len(parts) == 1 else "")


def _lookup(printer: CutePrinter, t: Table, facts: Facts, spec: AttentionSpec) -> LookupView:
    name, total = safe_name(t.name), wide_sum(t.value, facts)
    parts = [t.value] if total is None else [*total.terms]
    lines, texts = straight_line(printer, [*t.lead, *parts], _GIVEN)
    lead, values = texts[: len(t.lead)], texts[len(t.lead) :]
    value = values[0]
    if total is not None:
        terms = zip(total.terms.values(), values, strict=True)
        summands = [*(_product(c, x) for c, x in terms), *([str(total.const)] if total.const else [])]
        value = fold(" + ".join(summands).replace(" + -", " - "))
    tensor = safe_name(t.tensor)
    below = "below" if t.side == "first" else "at most"
    dims, place = dims_in_memory(t), "row" if t.packed else "q_idx"
    last = spec.tensor(t.tensor).dims[-1]
    own = spec.layout.is_ragged and last in ("seqlen_q", "seqlen_kv")  # a sequence's part ends with it
    end = f"p.{last}" if own else f"{tensor}.shape[{len(t.lead)}]"
    row = f"{t.tensor}[{', '.join(spelled(e) for e in t.lead)}]" if t.lead else t.tensor
    return LookupView(
        name=name,
        note=clipped(f"elements of {row} are {below} {spelled(t.value)}", 92 - len(t.name)),
        title=t.name,
        fill=f"fill_{name}",
        coords=(*_coords(dims, place, "p.seqlen_q"), *(["b, q_idx = self.place_of(p, row)"] if t.packed else [])),
        place=", ".join(place if d == "seqlen_q" else AXES[d] for d in dims),
        bindings=(*lines, *([] if f"{tensor} = p.{tensor}" in lines else [f"{tensor} = p.{tensor}"])),
        end=f"Int32({end})",
        value=value,
        counts=f"at({tensor}, {''.join(f'{x}, ' for x in lead)}middle) {'<' if t.side == 'first' else '<='} wanted",
    )


def _product(factor: int, text: str) -> str:
    return f"Int64({text})" if factor == 1 else f"-Int64({text})" if factor == -1 else f"{factor} * Int64({text})"


def _extreme(printer: CutePrinter, t: Extreme) -> ExtremeView:
    name = safe_name(t.name)
    lines, (value,) = straight_line(printer, [t.value], _GIVEN)
    which = "Greatest" if t.greatest else "Least"
    return ExtremeView(
        name=name,
        note=clipped(f"{which} {spelled(t.value)} of the window's rows.", 90),
        fill=f"fill_{name}",
        coords=_coords(t.dims, "block", f"cute.ceil_div(p.seqlen_q, {ROW_BLOCK})"),
        place=", ".join("block" if d == "seqlen_q" else AXES[d] for d in t.dims),
        bindings=lines,
        value=value,
        combine="cutlass.max" if t.greatest else "cutlass.min",
    )


def _coords(dims: tuple[str, ...], row: str, rows: str) -> tuple[str, ...]:
    """Lines from the number of an element to its place, the last axis first."""

    def axis(d: str) -> tuple[str, str]:
        return (row, rows) if d == "seqlen_q" else (AXES[d], f"p.{d}")

    lines = [f"{name}, slot = slot % {extent}, slot // {extent}" for name, extent in map(axis, reversed(dims[1:]))]
    return (*lines, f"{axis(dims[0])[0]} = slot")
