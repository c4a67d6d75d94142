"""Prints diagnostics: source and caret for people, one line for editors, JSON for tools, GitHub annotations."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable

from attngen.diag.diagnostic import Diagnostic, Label, Severity
from attngen.diag.span import Span

#: Version of the JSON form; moves when a field changes meaning.
JSON_SCHEMA = 1
_WIDEST = 160
_RED, _YELLOW, _BLUE, _CYAN, _BOLD, _OFF = (f"\x1b[{n}m" for n in ("1;31", "1;33", "1;34", "36", "1", "0"))

_LEVELS = {Severity.ERROR: _RED, Severity.WARNING: _YELLOW, Severity.NOTE: _CYAN}


def render(d: Diagnostic, color: bool = False) -> str:
    """Headline, source line with a caret under the smallest span, notes and helps; no trailing newline."""
    paint = _paint if color else _plain
    level = _LEVELS[d.severity]
    lines = [f"{paint(f'{d.severity.value}[{d.code}]', level)}{paint(': ' + visible(d.message), _BOLD)}"]
    labels = [x for x in (d.primary, *d.secondary) if x is not None]
    width = max((len(str(_first_line(x.span))) for x in labels), default=1) + 1
    bar = paint(f"{' ' * width} |", _BLUE)
    for i, label in enumerate(labels):
        line = _first_line(label.span)
        if i == 0 or label.span.source is not labels[i - 1].span.source:
            lines.append(f"{' ' * width}{paint('-->' if i == 0 else ':::', _BLUE)} {_place(label.span)}")
            lines.append(bar)
        else:
            lines.append(paint(f"{' ' * width} :", _BLUE))
        text, under = _underlined(label, "^" if i == 0 else "-")
        lines.append(f"{paint(f'{line:>{width}} |', _BLUE)} {text}".rstrip())
        lines.append(f"{bar} {paint(under, level if i == 0 else _BLUE)}")
    lines += [f"{paint('note', _BOLD)}: {_block(n, 6)}" for n in d.notes]
    lines += [f"{paint('help', _CYAN)}: {_block(h, 6)}" for h in d.helps]
    lines.append(f"      more: attngen explain {d.code}")
    return "\n".join(lines)


def render_short(d: Diagnostic) -> str:
    """`file:line:column: error[E0302]: message`, one line."""
    where = f"{_place(d.primary.span)}: " if d.primary else ""
    return f"{where}{d.severity.value}[{d.code}]: {' '.join(visible(d.message).split())}"


def render_github(d: Diagnostic) -> str:
    """A GitHub workflow command that annotates the line of a pull request."""
    fields = ""
    if d.primary:
        span = d.primary.span
        (line, column), (end_line, end_column) = span.source.line_col(span.start), span.source.line_col(span.end)
        file = _escape(span.source.name).replace(",", "%2C").replace(":", "%3A")
        fields = f" file={file},line={line},col={column},endLine={end_line},endColumn={end_column},title={d.code}"
    text = "\n".join([d.message, *d.notes, *d.helps])
    level = "notice" if d.severity is Severity.NOTE else d.severity.value
    return f"::{level}{fields}::{_escape(text)}"


def to_json(diagnostics: Iterable[Diagnostic], **more: object) -> str:
    """All diagnostics as one JSON object: `{"schema": 1, "diagnostics": [...]}`. Lines and columns count from 1.

    `more`: further fields of the object.
    """
    return json.dumps({"schema": JSON_SCHEMA, "diagnostics": [_as_dict(d) for d in diagnostics], **more}, indent=2)


def visible(text: str) -> str:
    """`text` with control and direction characters spelled out, so that a spec cannot write to the terminal."""
    return "".join(
        c
        if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
        else f"\\u{ord(c):04x}"
        for c in text
    )


def _as_dict(d: Diagnostic) -> dict[str, object]:
    from attngen.diag.codes import CODES

    return {
        "code": d.code,
        "slug": CODES[d.code].slug if d.code in CODES else "",
        "severity": d.severity.value,
        "message": d.message,
        "primary": _label(d.primary) if d.primary else None,
        "secondary": [_label(x) for x in d.secondary],
        "notes": list(d.notes),
        "helps": list(d.helps),
    }


def _label(x: Label) -> dict[str, object]:
    source = x.span.source
    (line, column), (end_line, end_column) = source.line_col(x.span.start), source.line_col(x.span.end)
    place = {"line": line, "column": column, "end_line": end_line, "end_column": end_column}
    return {"file": source.name, "start": x.span.start, "end": x.span.end, **place, "text": x.text}


def _underlined(label: Label, mark: str) -> tuple[str, str]:
    """The source line, tabs widened and cut to a window around the span, and the line that marks the span under it."""
    source = label.span.source
    line, column = source.line_col(label.span.start)
    raw = source.line(line).rstrip("\r")
    end_line, end_column = source.line_col(label.span.end)
    last = end_column - 1 if end_line == line else len(raw)
    before, inside, after = raw[: column - 1], raw[column - 1 : last], raw[last:]
    if len(raw) > _WIDEST:
        before = "…" + before[-40:] if len(before) > 41 else before
        inside = inside[:79] + "…" if len(inside) > 80 else inside
        after = after[:39] + "…" if len(after) > 40 else after
    before, inside, after = _widen(before), _widen(inside), _widen(after)
    under = " " * _cells(before) + mark * max(1, _cells(inside))
    return before + inside + after, f"{under} {visible(label.text)}".rstrip()


def _widen(text: str) -> str:
    return visible(text.replace("\t", "    "))


def _cells(text: str) -> int:
    """Terminal columns that `text` takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def _first_line(span: Span) -> int:
    return span.source.line_col(span.start)[0]


def _place(span: Span) -> str:
    line, column = span.source.line_col(span.start)
    return f"{_name(span)}:{line}:{column}"


def _name(span: Span) -> str:
    return visible(span.source.name).replace("\n", "\\n")


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _block(text: str, indent: int) -> str:
    return visible(text).replace("\n", "\n" + " " * indent)


def _plain(text: str, _style: str) -> str:
    return text


def _paint(text: str, style: str) -> str:
    return f"{style}{text}{_OFF}"
