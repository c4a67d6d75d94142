"""advice: which terms of a mask cost a test of every element, and what to write instead, as notes on a good spec."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.diag.diagnostic import Diagnostic, Label, Severity
from attngen.ir.expr import Expr
from attngen.ir.forms import Reason
from attngen.ir.spec import AttentionSpec
from attngen.passes.mask_form import mask_form


def element_wise(spec: AttentionSpec) -> tuple[Diagnostic, ...]:
    """A note (W0401) for each cause that keeps terms of the spec's masks out of key intervals: the first such term,
    how many more there are, why, and the mend. A spec with such terms is served all the same.
    """
    if spec.block_sparse is not None:  # its blocks skip what intervals cannot
        return ()
    causes: dict[tuple[str, str], list[Reason]] = {}
    for mask in dict.fromkeys(_masks(spec)):
        for reason in mask_form(spec, mask).reasons:
            causes.setdefault((reason.why, reason.mend), []).append(reason)
    return tuple(_note(spec, reasons) for reasons in causes.values())


def _masks(spec: AttentionSpec) -> Iterator[Expr]:
    yield from [b.mask for b in spec.branches] or [spec.mask]
    yield from (s.mask for s in spec.segments)


def _note(spec: AttentionSpec, reasons: list[Reason]) -> Diagnostic:
    first, more = reasons[0], len(reasons) - 1
    others = f", and {more} more like it," if more else ""
    return Diagnostic(
        "W0401",
        f"`{spec.name}` tests the mask's term `{_short(first.term)}`{others} element by element",
        Label(first.span, "no interval of keys says this") if first.span else None,
        notes=(f"{first.why}; tiles that it empties are visited all the same",),
        helps=(first.mend,),
        severity=Severity.NOTE,
    )


def _short(term: str) -> str:
    return term if len(term) <= 100 else f"{term[:97]}..."
