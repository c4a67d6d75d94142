"""Spell what captured tensors gain in a backward: buffers, coefficients, elements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.emit.exprs import CutePrinter, safe_name
from attngen.emit.spell import TENSOR_TYPES, TORCH_TYPES, TOTALS, extents, part_of_sequence
from attngen.emit.straight import ARGS, fold, statement, straight_line
from attngen.emit.view import Output
from attngen.emit.view_backward import Gain, Index
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.gradient import OF_ROWS, Contribution, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout

_ROWS = ("batch", "heads_q", "seqlen_q")
_COLUMNS = ("batch", "heads_q", "seqlen_kv")


@dataclass(frozen=True)
class Captured:
    """The fields of the view that follow from the contributions."""

    outputs: tuple[Output, ...]
    sinks: tuple[Output, ...]
    gains: tuple[Output, ...]
    columns: tuple[Gain, ...]
    rows: tuple[Gain, ...]
    elements: tuple[Gain, ...]
    #: Of a ragged layout: what of `elements` is one sequence's, and where the sums of one begin.
    packed: tuple[str, ...]
    packed_sums: tuple[str, ...]
    lines: tuple[str, ...]
    slope: str


def output_names(plan_set: BackwardPlanSet) -> tuple[str, ...]:
    """Names of the buffers, one for each contribution, in order."""
    kinds = [f"d_{safe_name(c.tensor)}_{c.kind.value}" for c in plan_set.gradient.contributions]
    return tuple(n if kinds.count(n) == 1 else f"{n}_{i}" for i, n in enumerate(kinds))


def _of_sequence(target: str, name: str, start: str) -> str:
    """What puts one sequence's part of a number for each row or key in its place."""
    return statement(target, "self.statistics_from", ["p", name, start])


def packed_outputs(sinks: Sequence[str], rows: Sequence[str], elements: Sequence[str]) -> tuple[str, ...]:
    """What puts one sequence's parts of buffers that the rows' kernel writes in their places: numbers, rows of O."""
    return (
        *(statement(n, "self.from_row", ["p", n, "start_q"]) for n in elements),
        *(_of_sequence(n, n, "start_q") for n in (*sinks, *rows)),
    )


def spell_captured(plan_set: BackwardPlanSet, printer: CutePrinter) -> Captured:
    """Spell the contributions of a plan set."""
    spec, gradient = plan_set.spec, plan_set.gradient
    named = list(zip(output_names(plan_set), gradient.contributions, strict=True))
    outputs = [(_output(name, c, spec), c) for name, c in named]
    inside = [(name, c) for name, c in named if c.kind not in OF_ROWS]
    exprs = [gradient.slope, *(c.coefficient for _, c in inside)]
    places = [i for _, c in inside if c.kind is GradientKind.ELEMENT for i in c.indices]
    lines, texts = straight_line(printer, [*exprs, *places], ARGS["pair"]) if inside else ((), ("",))
    factors = [f"slope = {texts[0]}"] if inside and not gradient.is_identity else []
    slope = _times("slope", gradient.is_finite) if factors else "None"
    rest = iter(texts[1 + len(inside) :])
    found: dict[GradientKind, list[Gain]] = {kind: [] for kind in GradientKind}
    for k, (text, (name, c)) in enumerate(zip(texts[1:], inside, strict=False)):
        read = c.indices if c.kind is GradientKind.ELEMENT else ()
        indices = tuple(Index(next(rest)) for _ in read) or (Index("0"),)
        if text != "1.0":
            factors.append(f"gain_{k} = {text}")
        gain = "dz" if text == "1.0" else _times(f"gain_{k}", c.is_finite)
        found[c.kind].append(Gain(name, len(found[c.kind]), gain, indices))
    return Captured(
        outputs=tuple(o for o, _ in outputs),
        sinks=tuple(o for o, c in outputs if c.kind is GradientKind.SINK),
        gains=tuple(o for o, c in outputs if c.kind not in OF_ROWS),
        columns=tuple(found[GradientKind.COLUMN]),
        rows=tuple(found[GradientKind.ROW]),
        elements=tuple(found[GradientKind.ELEMENT]),
        packed=tuple(
            p
            for name, c in inside
            if c.kind is GradientKind.ELEMENT and (p := part_of_sequence(spec, name, spec.tensor(c.tensor))) is not None
        ),
        packed_sums=tuple(
            _of_sequence(f"own.{name}", f"p.{name}", "start_kv" if c.kind is GradientKind.COLUMN else "start_q")
            for name, c in inside
            if c.kind in (GradientKind.COLUMN, GradientKind.ROW) and spec.layout is Layout.VARLEN
        ),
        lines=(*lines, *factors),
        slope=slope,
    )


def _times(factor: str, is_finite: bool) -> str:
    """dz times a derivative, 0 where dz is: a derivative that may be infinite must not make it NaN."""
    product = f"dz * {factor}"
    return product if is_finite else f"select(dz == 0.0, 0.0, {product})"


def _output(name: str, c: Contribution, spec: AttentionSpec) -> Output:
    varlen = spec.layout is Layout.VARLEN
    if c.kind is GradientKind.ELEMENT:
        shape = ", ".join(extents(spec, spec.tensor(c.tensor)))
        position = len(spec.params) + [t.name for t in spec.inputs].index(c.tensor)
        return Output(
            name, fold(f"plain_tensor(Float32, {shape})"), f"torch.zeros_like(extra[{position}], dtype=torch.float32)"
        )
    if c.kind is GradientKind.OUTPUT:
        kind = spec.tensor(c.tensor).dtype
        make = f"torch.empty_like(o, dtype={TORCH_TYPES[kind]})"
        return Output(name, f"row_tensor({TENSOR_TYPES[kind]}, *shape_o)", make)
    last = _COLUMNS if c.kind is GradientKind.COLUMN else _ROWS
    shape = f"{last[1]}, {TOTALS[last[2]]}" if varlen else ", ".join(last)
    made = f"k.shape[{2 if spec.layout is Layout.BHSD else 0 if varlen else 1}]"
    made = f"heads_q, {made}" if varlen else f"batch, heads_q, {made}"
    make = f"lse.new_zeros(({made}))" if c.kind is GradientKind.COLUMN else "torch.zeros_like(lse)"
    return Output(name, f"plain_tensor(Float32, {shape})", make)
