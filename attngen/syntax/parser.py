"""Text to surface syntax: bounds and characters first, then the LALR parser; its faults become diagnostics."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

from lark import Lark, UnexpectedCharacters, UnexpectedToken

from attngen.diag.diagnostic import AttnError, error
from attngen.diag.span import Source, Span
from attngen.syntax import ast, limits, table
from attngen.syntax.build import Builder
from attngen.syntax.build_expr import plain
from attngen.syntax.faults import bad_character, bad_token

#: Language versions that this attngen reads.
VERSIONS = (1,)
_VERSION = re.compile(r"(?:\s|#[^\n]*(?:\n|$))*attn[ \t]+([0-9]+)")
_PIECES = re.compile(r'"(?:[^"\\\n]|\\.)*"|#[^\n]*|[()\[\]{}]')
_CLOSES = {")": "(", "]": "[", "}": "{"}


def parse_file(source: Source) -> ast.File:
    """Parse a whole file. Raises AttnError E01xx, for the first fault only."""
    _check_text(source)
    found = _VERSION.match(source.text)
    if found and (len(found[1]) > 9 or int(found[1]) not in VERSIONS):
        raise error(
            "E0106",
            f"language version {found[1][:12]} is not known",
            at=Span(source, found.start(1), found.end(1)),
            label="this attngen reads version 1",
            helps=("write `attn 1`, or install an attngen that knows this version",),
        )
    result = _parse(source, "start")
    assert isinstance(result, ast.File)
    return result


def parse_expression(source: Source) -> ast.SurfaceExpr:
    """Parse one expression, as the Python API takes them. Raises AttnError E01xx."""
    _check_text(source)
    node: ast.SurfaceExpr = plain(_parse(source, "expr"))
    return node


@cache
def _tools() -> tuple[Builder, Lark]:
    builder = Builder()
    return builder, table.parser(builder)


def _parse(source: Source, start: str) -> object:
    builder, lark = _tools()
    builder.begin(source)
    try:
        return lark.parse(source.text, start=start)
    except UnexpectedToken as fault:
        raise bad_token(source, fault, _open_brackets(source, fault.token.start_pos or 0)) from None
    except UnexpectedCharacters as fault:
        raise bad_character(source, fault.pos_in_stream or 0) from None


def _check_text(source: Source) -> None:
    """Size, characters and nesting, before anything else looks at the text."""
    text = source.text
    if len(text) > limits.FILE_BYTES or len(text.encode("utf-8", "surrogatepass")) > limits.FILE_BYTES:
        raise error(
            "E0108",
            f"{source.name} is larger than {limits.FILE_BYTES >> 20} MiB",
            helps=("a spec is a few lines of mathematics; large data belongs in a captured `tensor`",),
        )
    if not text.isascii() or _CONTROL.search(text):
        for i, c in enumerate(text):
            if (c < " " and c not in "\n\t" and not (c == "\r" and text[i + 1 : i + 2] == "\n")) or (
                c > "~" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
            ):
                raise error(
                    "E0102",
                    f"character U+{ord(c):04X} is not allowed",
                    at=Span(source, i, i + 1),
                    label="here",
                    notes=("control, direction and unassigned characters could hide what a spec says",),
                    helps=("remove it",),
                )
    for match, depth in _brackets(text):
        if depth > limits.NESTING:
            raise error(
                "E0108",
                f"more than {limits.NESTING} brackets open at once",
                at=Span(source, match.start(), match.end()),
                label="this one is too deep",
                helps=("name parts of the expression with `let` or `def`",),
            )


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def _brackets(text: str) -> list[tuple[re.Match[str], int]]:
    """Every bracket with the number of brackets open after it."""
    found, depth = [], 0
    for match in _PIECES.finditer(text):
        if match[0] in ("(", "[", "{"):
            depth += 1
        elif match[0] in _CLOSES:
            depth -= 1
        else:
            continue
        found.append((match, depth))
        if depth > limits.NESTING:
            break
    return found


def _open_brackets(source: Source, end: int) -> list[Span]:
    """Brackets open at `end`, innermost last."""
    stack: list[tuple[str, Span]] = []
    for match, _ in _brackets(source.text):
        if match.start() >= end > 0:
            break
        if match[0] in _CLOSES:
            if stack and stack[-1][0] == _CLOSES[match[0]]:
                stack.pop()
        else:
            stack.append((match[0], Span(source, match.start(), match.end())))
    return [span for _, span in stack]


__all__ = ["VERSIONS", "AttnError", "parse_expression", "parse_file"]
