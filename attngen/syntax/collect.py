"""Faults, gathered: every fault of a spec is reported, sorted by place, none twice."""

from __future__ import annotations

from collections.abc import Sequence

from attngen.diag.diagnostic import AttnError, Diagnostic, Label, Severity
from attngen.diag.span import Source, Span
from attngen.syntax import limits


class Faults:
    """A growing set of diagnostics."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Span | None, str], Diagnostic] = {}
        self._sources: dict[Source, int] = {}

    def add(
        self,
        code: str,
        message: str,
        at: Span | None = None,
        label: str = "",
        *,
        also: Sequence[Label] = (),
        notes: Sequence[str] = (),
        helps: Sequence[str] = (),
        severity: Severity = Severity.ERROR,
    ) -> None:
        """Record a fault, unless this code already stands at this place."""
        primary = Label(at, label) if at is not None else None
        self.keep(Diagnostic(code, message, primary, tuple(also), tuple(notes), tuple(helps), severity))

    def keep(self, d: Diagnostic) -> None:
        """Record a finished diagnostic."""
        span = d.primary.span if d.primary else None
        if span is not None:
            self._sources.setdefault(span.source, len(self._sources))
        self._found.setdefault((d.code, span, "" if span else d.message), d)

    def sorted(self) -> list[Diagnostic]:
        """By file (in order of first fault) and place; at most `limits.FAULTS` errors."""

        def place(d: Diagnostic) -> tuple[int, int, int, str]:
            span = d.primary.span if d.primary else None
            return (self._sources[span.source], span.start, span.end, d.code) if span else (-1, 0, 0, d.code)

        return sorted(self._found.values(), key=place)[: limits.FAULTS]

    @property
    def any_error(self) -> bool:
        """An error, not only warnings, was recorded."""
        return any(d.severity is Severity.ERROR for d in self._found.values())

    def raise_if_any(self) -> None:
        """Raise all recorded errors as one AttnError."""
        errors = [d for d in self.sorted() if d.severity is Severity.ERROR]
        if errors:
            raise AttnError(*errors)
