"""`attngen fmt`: a spec in its one canonical layout, every comment kept.

A file is cut into units (a clause, the head or the end of a block, an item), units become rows, rows are aligned and
printed. Blank lines are kept, one at most. Comments stand before their unit or behind it; one from the middle of an
expression moves before it. Formatting twice changes nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from attngen.diag.span import Source, Span
from attngen.syntax import ast
from attngen.syntax.parser import parse_file
from attngen.syntax.unparse import WIDTH, bounds, broken, entry_value, expression, formal, string

#: Column where trailing comments start, further right only where the code is longer.
_COMMENT_COLUMN = 42
_PIECES = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*')


@dataclass(slots=True)
class Unit:
    """A piece of text that stays on its own line(s). `word`, `name`: padded to align; `value` may break over lines."""

    start: int
    end: int
    depth: int
    kind: str
    word: str = ""
    name: str = ""
    value: ast.SurfaceExpr | str | None = None
    #: Lines that stand before the last one as they are (doc texts).
    above: tuple[str, ...] = ()
    leading: list[tuple[int, str]] = field(default_factory=list)
    trailing: str = ""
    lines: list[str] = field(default_factory=list)
    #: A blank line stands before the unit (before its leading comments).
    blank: bool = False
    #: Places in `leading` (its length: the unit itself) before which a blank line stands.
    inner_blanks: frozenset[int] = frozenset()

    @property
    def apart(self) -> bool:
        """A blank line parts the unit's code from the unit before it."""
        return self.blank or bool(self.inner_blanks)


def format_text(text: str, name: str = "<text>") -> str:
    """Canonical layout of a spec's text. Raises AttnError E01xx where it does not parse."""
    text = text.removeprefix("\ufeff")  # an editor's byte order mark, which `check` and `compile` pass over too
    source = Source(name, text)
    file = parse_file(source)
    comments = [m for m in _PIECES.finditer(text) if m[0][0] == "#"]
    units = list(_units(file, source, [m.start() for m in comments]))
    tail = _attach(comments, units, source)
    _place_blanks(units, source)
    _print(units)
    return _join(units, tail, source)


# -- units ------------------------------------------------------------------------------------------------------------


def _units(file: ast.File, source: Source, comments: list[int]) -> Iterator[Unit]:
    version = file.version.span
    start = source.text.rfind("attn", 0, version.start)
    yield Unit(start, version.end, 0, "version", word=f"attn {file.version.text}")
    for item in file.items:
        span = item.span
        if isinstance(item, ast.Include):
            yield Unit(span.start, span.end, 0, "include", word=f"include {string(item.path)}")
        elif isinstance(item, ast.Define):
            args = f"({', '.join(map(formal, item.formals))})" if item.formals is not None else ""
            yield Unit(span.start, span.end, 0, "def", word="def", name=item.name.text + args, value=item.body)
        else:
            yield from _attention(item, source, comments)


def _attention(item: ast.Attention, source: Source, comments: list[int]) -> Iterator[Unit]:
    base = f" extends {item.base.text}" if item.base else ""
    head = f"attention {item.name.text}{base} {{"
    above = tuple(map(string, item.doc))
    brace = _brace(source, item.head.end)
    if not item.clauses and not any(brace <= c < item.span.end for c in comments):
        yield Unit(item.span.start, item.span.end, 0, "whole", word=head + "}", above=above)
        return
    yield Unit(item.span.start, brace, 0, "open", word=head, above=above)
    for clause in item.clauses:
        yield from _clause(clause, source, comments)
    yield Unit(item.span.end - 1, item.span.end, 0, "close", word="}")


def _brace(source: Source, at: int) -> int:
    """End of the first `{` at or after `at`, comments skipped."""
    for m in re.compile(r"#[^\n]*|\{").finditer(source.text, at):
        if m[0] == "{":
            return m.end()
    return at


def _clause(clause: ast.Clause, source: Source, comments: list[int]) -> Iterator[Unit]:
    start, end = clause.span.start, clause.span.end
    word = clause.word.text
    if isinstance(clause, ast.Nested):
        yield Unit(start, _brace(source, clause.name.span.end), 1, "open", word=f"{word} {clause.name.text} {{")
        for s in clause.settings:
            yield Unit(s.span.start, s.span.end, 2, "setting", word=s.word.text, value=s.value)
        yield Unit(end - 1, end, 1, "close", word="}")
    elif isinstance(clause, ast.Block):
        inline = ", ".join(f"{e.name.text} = {entry_value(e)}" for e in clause.entries)
        text = f"{word} {{ {inline} }}" if inline else f"{word} {{}}"
        brace = _brace(source, clause.word.span.end)
        if len(text) + 2 <= WIDTH and not any(brace <= c < end for c in comments):
            yield Unit(start, end, 1, "block", word=text)
            return
        yield Unit(start, brace, 1, "open", word=f"{word} {{")
        for e in clause.entries:
            yield Unit(e.span.start, e.span.end, 2, "setting", word=e.name.text, value=entry_value(e))
        yield Unit(end - 1, end, 1, "close", word="}")
    elif isinstance(clause, ast.Let):
        yield Unit(start, end, 1, "let", word="let", name=clause.name.text, value=clause.value)
    elif isinstance(clause, ast.Param):
        default = f" = {expression(clause.default)}" if clause.default is not None else ""
        yield Unit(
            start,
            end,
            1,
            "declaration",
            word="param",
            value=f"{clause.name.text}: {clause.type.text}{bounds(clause.bounds)}{default}",
        )
    elif isinstance(clause, ast.Tensor):
        dims = ", ".join(d.text for d in clause.dims)
        flags = "".join(f" {f.text}" for f in clause.flags)
        yield Unit(
            start, end, 1, "declaration", word="tensor", value=f"{clause.name.text}: {clause.dtype.text}[{dims}]{flags}"
        )
    else:
        yield Unit(start, end, 1, "setting", word=word, value=_setting_value(clause))


def _setting_value(clause: ast.Setting | ast.HeadDim | ast.VView | ast.Words) -> ast.SurfaceExpr | str:
    if isinstance(clause, ast.Setting):
        return clause.value
    if isinstance(clause, ast.HeadDim):
        return clause.qk.text + (f", v = {clause.v.text}" if clause.v is not None else "")
    if isinstance(clause, ast.VView):
        return f"{clause.of.text}[{clause.start.text}:{clause.stop.text}]"
    return ", ".join(w.text for w in clause.values)


# -- comments and blank lines -----------------------------------------------------------------------------------------


def _attach(comments: list[re.Match[str]], units: list[Unit], source: Source) -> list[tuple[int, str]]:
    """Give every comment to a unit; what stands behind the last unit is returned."""
    tail: list[tuple[int, str]] = []
    i = 0
    for m in comments:
        text, line = m[0].rstrip(), source.line_col(m.start())[0]
        while i < len(units) and units[i].end <= m.start():
            i += 1
        before = units[i - 1] if i else None
        if i < len(units) and units[i].start < m.start():
            units[i].leading.append((line, text))
        elif before is not None and source.line_col(before.end - 1)[0] == line:
            before.trailing = text
        elif i < len(units):
            units[i].leading.append((line, text))
        else:
            tail.append((line, text))
    return tail


def _place_blanks(units: list[Unit], source: Source) -> None:
    """Decide where a blank line stands: where one stood, and around attention blocks; never just inside a brace."""
    last = 0
    for previous, unit in zip([None, *units], units, strict=False):
        first = min([source.line_col(unit.start)[0], *(line for line, _ in unit.leading)])
        unit.blank = previous is not None and first > last + 1
        if previous is not None and unit.depth == 0 and unit.kind in ("open", "whole"):
            unit.blank = True
        if previous is not None and previous.kind == "open":
            unit.blank = False
        elif previous is not None and previous.depth == 0 and previous.kind in ("close", "whole"):
            unit.blank = True
        if unit.kind == "close" and not unit.leading:
            unit.blank = False
        own = [*(line for line, _ in unit.leading), source.line_col(unit.start)[0]]
        unit.inner_blanks = frozenset(i for i in range(1, len(own)) if own[i] > own[i - 1] + 1)
        last = max([last, source.line_col(max(unit.end - 1, 0))[0], *(line for line, _ in unit.leading)])


# -- rows -------------------------------------------------------------------------------------------------------------


def _print(units: list[Unit]) -> None:
    run: list[Unit] = []
    for unit in units:
        if run and (unit.apart or unit.kind != run[-1].kind or unit.depth != run[-1].depth):
            _align(run)
            run = []
        run.append(unit)
    _align(run)


def _align(run: list[Unit]) -> None:
    """Print a run of like units, their `=` (or keywords) under each other."""
    words = max(len(u.word) for u in run)
    names = max(len(u.name) for u in run)
    for u in run:
        indent = "  " * u.depth
        if u.value is None:
            u.lines = [*u.above, indent + u.word]
            continue
        if u.kind == "declaration":
            head = f"{indent}{u.word:<{words}} "
        elif u.kind == "let":
            head = f"{indent}let {u.name:<{names}} = "
        elif u.kind == "def":
            head = f"def {u.name} = "
        else:
            head = f"{indent}{u.word:<{words}} = "
        if isinstance(u.value, str):
            u.lines = [head + u.value]
            continue
        pieces = broken(u.value, len(head))
        if u.kind == "def" and (len(pieces) > 1 or len(head) + len(pieces[0]) > WIDTH):
            u.lines = [head.rstrip(), *("  " + p for p in broken(u.value, 2))]
        else:
            u.lines = [head + pieces[0], *(" " * len(head) + p for p in pieces[1:])]


def _join(units: list[Unit], tail: list[tuple[int, str]], source: Source) -> str:
    rows: list[str] = []
    columns = _comment_columns(units)
    for unit, column in zip(units, columns, strict=True):
        rows += [""] * unit.blank
        indent = "  " * (unit.depth + (unit.kind == "close"))
        for i, (_, text) in enumerate(unit.leading):
            rows += [""] * (i in unit.inner_blanks) + [indent + text]
        rows += [""] * (len(unit.leading) in unit.inner_blanks and unit.kind != "close") + unit.lines
        if unit.trailing:
            rows[-1] = f"{rows[-1]:<{column}}{unit.trailing}"
    last = source.line_col(units[-1].end - 1)[0]
    for line, text in tail:
        rows += [""] * (line > last + 1)
        rows.append(text)
        last = line
    return "\n".join(rows) + "\n"


def _comment_columns(units: list[Unit]) -> list[int]:
    """Column of the trailing comment of each unit: one for each run of units without a blank line between."""
    columns: list[int] = []
    run: list[Unit] = []
    for unit in [*units, None]:
        if unit is None or unit.apart:
            longest = max((len(u.lines[-1]) for u in run if u.trailing), default=0)
            columns += [max(_COMMENT_COLUMN, longest + 2)] * len(run)
            run = []
        if unit is not None:
            run.append(unit)
    return columns


__all__ = ["Span", "format_text"]
