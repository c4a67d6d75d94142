"""Diagnostic: what is wrong, where, why, and the mend. Data only; `render` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from attngen.diag.span import Span


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Label:
    """A place with a few words under its caret."""

    span: Span
    text: str = ""


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One fault. `code` is a row of `codes.CODES`; `message` stands alone, lowercase, no full stop."""

    code: str
    message: str
    primary: Label | None = None
    secondary: tuple[Label, ...] = ()
    notes: tuple[str, ...] = ()
    helps: tuple[str, ...] = ()
    severity: Severity = Severity.ERROR


class AttnError(Exception):
    """All that attngen raises about its user's input or machine. `str()` is the plain rendering of all diagnostics."""

    def __init__(self, *diagnostics: Diagnostic) -> None:
        self.diagnostics = tuple(diagnostics)
        super().__init__(*diagnostics)

    def __str__(self) -> str:
        from attngen.diag.render import render

        return "\n\n".join(render(d) for d in self.diagnostics)

    @property
    def code(self) -> str:
        """Code of the first diagnostic."""
        return self.diagnostics[0].code


def error(
    code: str,
    message: str,
    *,
    at: Span | None = None,
    label: str = "",
    notes: tuple[str, ...] = (),
    helps: tuple[str, ...] = (),
) -> AttnError:
    """One-diagnostic AttnError."""
    return AttnError(Diagnostic(code, message, Label(at, label) if at else None, (), notes, helps))
