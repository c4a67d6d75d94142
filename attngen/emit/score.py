"""Spell a ScoreForm: what a row brings to a tile, and what an element adds to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from attngen.emit.exprs import PART, CutePrinter, safe_name
from attngen.emit.header import clipped, spelled
from attngen.emit.straight import WIDTH, fold, straight_line
from attngen.ir.expr import Apply, Atom, Const, Expr, Param, atoms_of, params_of, walk
from attngen.ir.functions import apply
from attngen.ir.score import KV_0, SCALE, ScoreForm, Stream
from attngen.ir.types import DType, Type
from attngen.passes.score_form import ONE

#: What leaves room for the rest of the docstring's line.
FORMULA_WIDTH = 44
_SHIFT_NOTE = ": what all its keys have in common, in log2 units, then what `score` takes"
_LINE_NOTE = ": what all its keys have in common, and the slope, in log2 units"
#: `x * LOG2E` is x in log2 units.
_LOG2E = Param(type=Type.FLOAT, name="%LOG2E")
ARGUMENTS = frozenset({"b", "h", "q_idx", "kv_idx"})
_ROW = {"kv": frozenset({"b", "h", "q_idx"}), "q": frozenset({"b", "h", "kv_idx"})}


class _RowPrinter(CutePrinter):
    """Prints what is evaluated once a row: as it stands, ints subtracted as ints."""

    def __init__(self, printer: CutePrinter) -> None:
        self.used = printer.used

    def lowered(self, e: Expr) -> Expr:
        """Nothing is lowered."""
        return e


@dataclass(frozen=True)
class StreamView:
    """What is read along the keys: its fragment, where a thread's first element stands, an element's place."""

    name: str
    placer: str
    title: str
    words: str
    rows: str
    extent: str
    value: str
    bindings: tuple[str, ...]
    row: str
    start: str


@dataclass(frozen=True)
class ScoreView:
    """What the templates read of a score.

    `row_values` are evaluated once a row and tile, the shift first, in log2 units. `value` is one element less the
    shift; times `units` it is in log2 units; `formula` says it in a line. Where a term is added as it stands, natural
    units save a multiplication.
    """

    has_shift: bool
    has_rows: bool
    #: The score is a line along the keys beside `s`: the softmax adds it as it subtracts the reference. `has_lead`:
    #: whether a row may grow is told by the elements alone, and by how much the line lifts them at most.
    is_line: bool
    has_lead: bool
    row_bindings: tuple[str, ...]
    row_values: tuple[str, ...]
    bindings: tuple[str, ...]
    value: str
    formula: str
    shift_note: str
    result: str
    units: str
    has_loads: bool
    has_streams: bool
    has_bf16_streams: bool
    has_fp16_streams: bool
    streams: tuple[StreamView, ...]
    has_distance: bool
    distance_bindings: tuple[str, ...]
    distance: str
    units_note: str
    has_factor: bool
    factor_bindings: tuple[str, ...]
    factor: str
    has_held: bool
    held_bindings: tuple[str, ...]
    held_values: tuple[str, ...]


NO_SCORE = ScoreView(
    has_shift=False, has_rows=False, is_line=False, has_lead=False, row_bindings=(), row_values=(), bindings=(),
    value="", formula="", shift_note="",
    result="", units="", has_loads=False, has_streams=False, has_bf16_streams=False, has_fp16_streams=False, streams=(),
    has_distance=False, distance_bindings=(), distance="", units_note="", has_factor=False, factor_bindings=(),
    factor="", has_held=False, held_bindings=(), held_values=(),
)  # fmt: skip


def spell_score(printer: CutePrinter, form: ScoreForm, *, whole: bool = False, exact_maxima: bool = False) -> ScoreView:
    """Spell the form; `printer` collects the helpers that it calls.

    `whole`: in natural units, factor and shift included, for what does not subtract a reference afterwards.
    `exact_maxima`: the largest score of a row is a result.
    """
    given = _ROW[form.axis]
    if whole and form.factor is not None:
        form = form.replace(terms=(form.terms[0].replace(factor=form.factor),), factor=None)
    # in natural units the softmax converts, in the FFMA that subtracts; it scales there, too, where the scale is last
    natural = whole or any(t.factor == ONE for t in form.terms)
    last = form.scale_last and not whole
    units = (lambda e: e) if natural else _log2
    held: dict[str, Expr] = {}
    named: list[tuple[str, Expr]] = []
    if form.shift is not None:
        named.append(("shift", form.shift if whole else _log2(form.shift)))
    if form.scale is not None and not last:
        named.append(("scale", units(SCALE if form.scale == ONE else apply("mul", form.scale, SCALE))))
    if form.slope is not None:
        named.append(("slope", _log2(form.slope) if last else units(form.slope)))
    if last:
        named = [(n, _hoisted(e, held)) for n, e in named]
    factors = ["" if t.factor == ONE else f"factor_{k}" for k, t in enumerate(form.terms)]
    named += [(f, units(t.factor)) for f, t in zip(factors, form.terms, strict=True) if f]
    rows = _RowPrinter(printer)
    row_bindings, row_values = straight_line(rows, [e for _, e in named], given)
    if held:
        left = ", ".join(n.removeprefix(PART) for n in held)
        row_bindings = (f"({left},) = from_head" if len(held) == 1 else f"{left} = from_head", *row_bindings)
    bindings, texts = straight_line(printer, [t.value for t in form.terms], given)
    inside = [n for n, _ in named if whole or n != "shift"]
    if inside:
        bindings = (f"({inside[0]},) = row" if len(inside) == 1 else f"{', '.join(inside)} = row", *bindings)
    if form.streams:
        kinds = ("Int32" if s.dtype is DType.I32 else "Float32" for s in form.streams)
        bindings = (*(f"load_{k} = {kind}(loads[{k}])" for k, kind in enumerate(kinds)), *bindings)
    apart_by_distance = [] if form.distance is None else [units(form.distance)]
    distance_bindings, distance = straight_line(printer, apart_by_distance, ARGUMENTS)
    if distance:
        bindings = (f"distance = loads[{len(form.streams)}]", *bindings)
    value, words = _sum(form, factors, texts, whole) if not last else ("", _LINE)
    if form.terms and len(value) > WIDTH:
        names = [f"term_{k}" for k in range(len(texts))]
        bindings = (*bindings, *(f"{n} = {t}" for n, t in zip(names, texts, strict=True)))
        value, _ = _sum(form, factors, names, whole)
    lead = [] if form.factor is None else [_log2(form.factor)]
    factor_bindings, factor = straight_line(rows, lead, given - {"q_idx", "kv_idx"})
    held_bindings, held_values = straight_line(rows, list(held.values()), given - {"q_idx", "kv_idx"})
    apart = form.shift is not None and not whole
    return ScoreView(
        has_shift=apart,
        has_rows=bool(named),
        is_line=last,
        has_lead=last and not exact_maxima,
        row_bindings=row_bindings,
        row_values=row_values,
        bindings=bindings,
        value=fold(value),
        formula=clipped(words, FORMULA_WIDTH),
        shift_note=_LINE_NOTE if last else _SHIFT_NOTE if apart else "",
        result=_RESULTS["factor" if form.factor is not None else "natural" if natural else "log2"]
        + (", less `w.shift` of its row" if apart else ""),
        units="self.score_factor(p, b, h)" if lead else _UNITS["last" if last else "natural" if natural else "log2"],
        has_held=bool(held),
        held_bindings=held_bindings,
        held_values=held_values,
        has_loads=bool(form.streams) or form.distance is not None,
        has_streams=bool(form.streams),
        has_bf16_streams=any(s.dtype is DType.BF16 for s in form.streams),
        has_fp16_streams=any(s.dtype is DType.FP16 for s in form.streams),
        has_distance=form.distance is not None,
        distance_bindings=distance_bindings,
        distance="".join(distance),
        units_note="natural" if natural else "log2",
        streams=tuple(_stream(rows, k, s) for k, s in enumerate(form.streams)),
        has_factor=form.factor is not None,
        factor_bindings=factor_bindings,
        factor="".join(factor),
    )


def _stream(printer: CutePrinter, number: int, s: Stream) -> StreamView:
    bindings, (*leading, start) = straight_line(printer, [*s.indices, s.start], _ROW["kv"])
    name = safe_name(s.tensor)
    if not any(line.startswith(f"{name} = ") for line in bindings):
        bindings = (*bindings, f"{name} = p.{name}")
    kind, name_here = _KINDS[s.dtype], f"load_{number}"
    if s.dtype.bits == 32:
        words, value = 4, f"w.{name_here}[2 * j + e{' + r * (self.tile_n // 4)' if s.by_row else ''}]"
    else:
        words, value = 8, f"half_{s.dtype.value}(w.{name_here}[j{' + r * (self.tile_n // 8)' if s.by_row else ''}], e)"
    return StreamView(
        name=name_here,
        placer=f"place_{number}",
        title=clipped(
            f"{s.tensor}[{', '.join([*map(spelled, s.indices), 'key'])}]", FORMULA_WIDTH - 2
        ),  # more is said beside it
        words=kind if s.dtype.bits == 32 else "Int32",
        rows="2" if s.by_row else "1",
        extent=f"{'2 * ' if s.by_row else ''}self.tile_n // {words}",
        value=value,
        bindings=bindings,
        row=f"row_of({', '.join([name, *leading])})",
        start=start,
    )


#: Element types.
_KINDS = {
    DType.F32: "Float32", DType.I32: "Int32", DType.BF16: "cutlass.BFloat16", DType.FP16: "cutlass.Float16"
}  # fmt: skip


_RESULTS = {
    "factor": "over `score_factor`", "natural": "in natural units", "log2": "in log2 units",
}  # fmt: skip
#: What makes log2 units of the score.
_UNITS = {"last": "p.softmax_scale * LOG2E", "natural": "Float32(LOG2E)", "log2": "Float32(1.0)"}
_LINE = "raw * scale + slope * column"


def _hoisted(e: Expr, held: dict[str, Expr]) -> Expr:
    """`e` with what is the same for all rows and tiles as params; notes each in `held`."""
    moving = atoms_of(e) & {"q_idx", "q_pos"} or KV_0.name in params_of(e)
    if isinstance(e, Atom) or all(isinstance(x, Const) or x == _LOG2E for x in walk(e) if not isinstance(x, Apply)):
        return e
    if moving:
        return e.replace(args=tuple(_hoisted(a, held) for a in e.args)) if isinstance(e, Apply) else e
    for name, x in held.items():
        if x == e:
            return Param(type=e.type, name=name)
    name = f"{PART}held_{len(held)}"
    held[name] = e
    return Param(type=e.type, name=name)


def _log2(e: Expr) -> Expr:
    return _LOG2E if e == ONE else apply("mul", e, _LOG2E)


def _sum(form: ScoreForm, factors: list[str], values: tuple[str, ...] | list[str], whole: bool) -> tuple[str, str]:
    """The sum as nested multiply-adds, what is the same for all rows innermost; and as a formula."""
    shift = ["shift"] if whole and form.shift is not None else []
    by_distance = ["distance"] if form.distance is not None else []
    words = [*(["slope * column"] if form.slope is not None else []), *shift, *by_distance]
    text = " + ".join(words)
    for k, (factor, value) in enumerate(zip(factors, values, strict=True)):
        if factor:
            text = f"fma({value}, {factor}, {text})" if text else f"{_grouped(value)} * {factor}"
        else:
            text = f"{_grouped(value)} + {text}" if text else value
        words.insert(0, f"{factor} * term_{k}" if factor else f"term_{k}")
    if form.scale is not None:
        text = f"fma(raw, scale, {text})" if text else "raw * scale"
        words.insert(0, "scale * raw")
    return text or "Float32(0.0)", "score / score_factor" if form.factor is not None else " + ".join(words) or "0"


#: A name, or a call with at most two more inside one another.
_TIGHT = re.compile(r"\w+(\(([^()]|\(([^()]|\([^()]*\))*\))*\))?")


def _grouped(text: str) -> str:
    return text if _TIGHT.fullmatch(text) else f"({text})"
