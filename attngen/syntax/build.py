"""Builds surface nodes while the LALR parser reduces: no parse tree exists, and no recursion follows the input."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from lark import Token

from attngen.diag.diagnostic import error
from attngen.diag.span import Source, Span
from attngen.ir.functions import FUNCTIONS
from attngen.syntax import ast, limits

#: Function name by operator: `+` is `add`. Unary minus is not an infix operator of its own, so it is added by hand.
INFIX = {row.infix: name for name, row in FUNCTIONS.items() if row.infix and name not in ("neg", "where", "not")}


class _State(threading.local):
    """The source that this thread is parsing."""

    source: Source


class Builder:
    """One method per rule, called with the children of the rule. Rules of expr.lark arrive with a prefix."""

    def __init__(self) -> None:
        self._state = _State()

    def begin(self, source: Source) -> None:
        """Spans made from now on point into `source`."""
        self._state.source = source

    def __getattr__(self, name: str) -> Callable[[Sequence[Any]], Any]:
        if name.startswith("expr__"):
            return getattr(self, name.removeprefix("expr__"))  # type: ignore[no-any-return]
        raise AttributeError(name)

    # -- places ---------------------------------------------------------------------------------------------------

    def _span(self, first: Any, last: Any = None) -> Span:
        start, end = _range(first)[0], _range(last if last is not None else first)[1]
        return Span(self._state.source, start, end)

    def _word(self, token: Token) -> ast.Word:
        if len(token) > limits.NAME_CHARS:
            raise error(
                "E0108",
                f"name of {len(token)} characters",
                at=self._span(token),
                label="too long",
                helps=(f"use at most {limits.NAME_CHARS} characters",),
            )
        return ast.Word(str(token), self._span(token))

    def _depth(self, parts: Sequence[Any], span: Span) -> int:
        depth: int = 1 + max(p.depth for p in parts)
        if depth > limits.DEPTH:
            raise error(
                "E0108",
                f"expression deeper than {limits.DEPTH} operations",
                at=span,
                label="this one is too deep",
                helps=("split it with `let` or `def`, or group a long chain with parentheses: `(a or b) or (c or d)`",),
            )
        return depth

    # -- expressions ----------------------------------------------------------------------------------------------

    def integer(self, c: Sequence[Any]) -> ast.Number:
        return self._number(c[0])

    floating = integer

    def _number(self, token: Token, minus: Token | None = None) -> ast.Number:
        span, text = (
            self._span(minus if minus is not None else token, token),
            ("-" if minus is not None else "") + token,
        )
        if token.type == "INT":
            value: int | float = int(text) if len(text) <= 12 else limits.INT32_MAX + 1
            fits = limits.INT32_MIN <= value <= limits.INT32_MAX
            # 2147483648 is good only behind a minus sign, which comes later: `negation` checks again.
            fits = fits or (minus is None and text == str(-limits.INT32_MIN))
            what, helps = "a 32-bit int", ("positions are 32-bit; write a float (`1.0e10`) where a number is meant",)
        else:
            value = float(text) if len(text) <= 64 else float("inf")
            fits = abs(value) <= limits.FLOAT32_MAX
            what, helps = "a 32-bit float", ("the largest float is about 3.4e38; use at most 64 characters",)
        if not fits:
            shown = text if len(text) <= 24 else text[:20] + "…"
            raise error("E0111", f"number {shown} does not fit {what}", at=span, label="out of range", helps=helps)
        return ast.Number(value, text, span)

    def true(self, c: Sequence[Any]) -> ast.Bool:
        return ast.Bool(c[0] == "true", self._span(c[0]))

    false = true

    def name(self, c: Sequence[Any]) -> ast.Name:
        word = self._word(c[0])
        return ast.Name(word.text, word.span)

    def parens(self, c: Sequence[Any]) -> Any:
        # Places around it cover the parentheses, and `-(128)` stays a negation: the literal inside is no longer bare.
        return _Parens(plain(c[1]), self._span(c[0], c[2]))

    def arguments(self, c: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(plain(x) for x in c[::2])

    def call(self, c: Sequence[Any]) -> ast.Call:
        args, span = c[2] or (), self._span(c[0], c[3])
        return ast.Call(self._word(c[0]), args, span, self._depth(args, span) if args else 1)

    def load(self, c: Sequence[Any]) -> ast.Load:
        span = self._span(c[0], c[3])
        return ast.Load(self._word(c[0]), c[2], span, self._depth(c[2], span))

    def unary(self, c: Sequence[Any]) -> ast.Unary | ast.Number:
        op, operand = c
        if op == "-" and isinstance(operand, ast.Number) and not operand.text.startswith("-"):
            text = operand.text
            return self._number(
                Token(
                    "FLOAT" if isinstance(operand.value, float) else "INT",
                    text,
                    operand.span.start,
                    end_pos=operand.span.end,
                ),
                op,
            )
        value = plain(operand)
        span = self._span(op, operand)
        return ast.Unary("neg" if op == "-" else "not", value, span, self._depth((value,), span))

    def binary(self, c: Sequence[Any]) -> ast.Binary:
        left, op, right = c
        span = self._span(left, right)
        left, right = plain(left), plain(right)
        return ast.Binary(INFIX[str(op)], left, right, span, self._depth((left, right), span))

    def compare(self, c: Sequence[Any]) -> ast.Compare:
        span = self._span(c[0], c[-1])
        parts = tuple(plain(x) for x in c[::2])
        ops = tuple(INFIX[str(x)] for x in c[1::2])
        # A chain of n comparisons is an `and` of n nodes.
        depth = self._depth(parts, span) + len(ops) - 1
        if depth > limits.DEPTH:
            self._depth((ast.Unary("not", parts[0], span, limits.DEPTH),), span)
        return ast.Compare(parts[0], tuple(zip(ops, parts[1:], strict=True)), span, depth)

    def conditional(self, c: Sequence[Any]) -> ast.Conditional:
        span = self._span(c[0], c[4])
        then, test, other = plain(c[0]), plain(c[2]), plain(c[4])
        return ast.Conditional(test, then, other, span, self._depth((test, then, other), span))

    # -- clauses --------------------------------------------------------------------------------------------------

    def setting(self, c: Sequence[Any]) -> ast.Setting:
        return ast.Setting(self._word(c[0]), plain(c[2]), self._span(c[0], c[2]))

    nested_setting = setting

    def head_dim(self, c: Sequence[Any]) -> ast.HeadDim:
        last = c[6] if c[6] is not None else c[2]
        v = self._number(c[6]) if c[6] is not None else None
        return ast.HeadDim(self._word(c[0]), self._number(c[2]), v, self._span(c[0], last))

    def v_view(self, c: Sequence[Any]) -> ast.VView:
        return ast.VView(
            self._word(c[0]), self._word(c[2]), self._number(c[4]), self._number(c[6]), self._span(c[0], c[7])
        )

    def words(self, c: Sequence[Any]) -> ast.Words:
        return ast.Words(self._word(c[0]), tuple(self._word(t) for t in c[2::2]), self._span(c[0], c[-1]))

    def let(self, c: Sequence[Any]) -> ast.Let:
        return ast.Let(self._word(c[0]), self._word(c[1]), plain(c[3]), self._span(c[0], c[3]))

    def negative(self, c: Sequence[Any]) -> ast.Number:
        return self._number(c[1], c[0])

    def _value(self, x: Any) -> ast.Number | ast.Bool:
        if not isinstance(x, Token):
            return x  # type: ignore[no-any-return]
        return self._number(x) if x.type in ("INT", "FLOAT") else ast.Bool(x == "true", self._span(x))

    def at_least(self, c: Sequence[Any]) -> ast.Bound:
        return ast.Bound(self._value(c[1]), None, self._span(c[0], c[1]))

    def at_most(self, c: Sequence[Any]) -> ast.Bound:
        return ast.Bound(None, self._value(c[1]), self._span(c[0], c[1]))

    def within(self, c: Sequence[Any]) -> ast.Bound:
        return ast.Bound(self._value(c[1]), self._value(c[3]), self._span(c[0], c[3]))

    def param(self, c: Sequence[Any]) -> ast.Param:
        bounds = tuple(x for x in c if isinstance(x, ast.Bound))
        default = self._value(c[-1]) if c[-1] is not None else None
        last = next(x for x in reversed(c) if x is not None)
        return ast.Param(self._word(c[0]), self._word(c[1]), self._word(c[3]), bounds, default, self._span(c[0], last))

    def tensor(self, c: Sequence[Any]) -> ast.Tensor:
        close = next(i for i, x in enumerate(c) if x.type == "RSQB")
        dims = tuple(self._number(x) if x.type == "INT" else self._word(x) for x in c[5:close:2])
        flags = tuple(self._word(x) for x in c[close + 1 :])
        return ast.Tensor(self._word(c[0]), self._word(c[1]), self._word(c[3]), dims, flags, self._span(c[0], c[-1]))

    def entry(self, c: Sequence[Any]) -> ast.Entry:
        token = c[2]
        value: ast.Shape | ast.Bool | ast.Word | ast.Number
        if token.type == "SHAPE":
            value = self._shape(token)
        else:
            value = self._word(token) if token.type == "NAME" else self._value(token)
        return ast.Entry(self._word(c[0]), value, self._span(c[0], token))

    def _shape(self, token: Token) -> ast.Shape:
        cut = token.index("x")
        start = token.start_pos or 0
        sides = []
        for begin, text in ((0, token[:cut]), (cut + 1, token[cut + 1 :])):
            at = start + begin + len(text) - len(text.lstrip())
            word = text.strip()
            sides.append(self._word(Token("NAME", word, at, end_pos=at + len(word))))
        return ast.Shape(sides[0], sides[1], self._span(token))

    def block(self, c: Sequence[Any]) -> ast.Block:
        body = c[2:-1]
        entries = tuple(x for x in body if isinstance(x, ast.Entry))
        last: Any = None
        for x in body:
            if isinstance(x, ast.Entry) and isinstance(last, ast.Entry):
                self._new_line(last, x, "entries", "a comma or a new line")
            last = x if x is not None else last
        return ast.Block(self._word(c[0]), entries, self._span(c[0], c[-1]))

    def nested(self, c: Sequence[Any]) -> ast.Nested:
        settings = tuple(c[3:-1])
        for a, b in pairwise(settings):
            self._new_line(a, b, "clauses", "a new line")
        return ast.Nested(self._word(c[0]), self._word(c[1]), settings, self._span(c[0], c[-1]))

    # -- items ----------------------------------------------------------------------------------------------------

    def string(self, token: Token) -> str:
        """The text of a string token, escapes undone."""
        if len(token) > limits.STRING_CHARS:
            raise error(
                "E0108",
                f"string longer than {limits.STRING_CHARS} characters",
                at=self._span(token),
                label="too long",
                helps=("split a doc text into several strings, one a line",),
            )
        return re.sub(r"\\(.)", r"\1", token[1:-1])

    def include(self, c: Sequence[Any]) -> ast.Include:
        return ast.Include(self.string(c[1]), self._span(c[1]), self._span(c[0], c[1]))

    def formals(self, c: Sequence[Any]) -> tuple[ast.Formal, ...]:
        return tuple(x for x in c if isinstance(x, ast.Formal))

    def formal(self, c: Sequence[Any]) -> ast.Formal:
        bounds = tuple(x for x in c if isinstance(x, ast.Bound))
        kind = self._word(c[2]) if len(c) > 2 and c[2] is not None else None
        last = next(x for x in reversed(c) if x is not None)
        return ast.Formal(self._word(c[0]), kind, bounds, self._span(c[0], last))

    def definition(self, c: Sequence[Any]) -> ast.Define:
        formals = (c[3] or ()) if c[2] is not None else None
        return ast.Define(self._word(c[1]), formals, plain(c[6]), self._span(c[0], c[6]))

    def attention(self, c: Sequence[Any]) -> ast.Attention:
        strings = [x for x in c if isinstance(x, Token) and x.type == "STRING"]
        rest = c[len(strings) :]
        clauses = tuple(rest[5:-1])
        for a, b in pairwise(clauses):
            self._new_line(a, b, "clauses", "a new line")
        base = self._word(rest[3]) if rest[3] is not None else None
        doc = tuple(self.string(s) for s in strings)
        head = self._span(rest[0], rest[3] if rest[3] is not None else rest[1])
        return ast.Attention(self._word(rest[1]), base, doc, clauses, self._span(c[0], c[-1]), head)

    def version(self, c: Sequence[Any]) -> ast.Number:
        return self._number(c[1])

    def start(self, c: Sequence[Any]) -> ast.File:
        if len(c) - 1 > limits.ITEMS:
            raise error(
                "E0108",
                f"more than {limits.ITEMS} definitions and attention blocks in one file",
                at=c[limits.ITEMS].span,
            )
        return ast.File(c[0], tuple(c[1:]))

    def _new_line(self, a: Any, b: Any, what: str, separator: str) -> None:
        if "\n" not in self._state.source.text[a.span.end : b.span.start]:
            word = b.word if hasattr(b, "word") else b.name
            raise error(
                "E0109",
                f"two {what} on one line",
                at=word.span,
                label=f"`{word.text}` starts another one",
                helps=(f"put {separator} before `{word.text}`",),
            )


class _Parens:
    """A node that stood in parentheses, until the node around it takes it."""

    __slots__ = ("node", "span")

    def __init__(self, node: ast.SurfaceExpr, span: Span) -> None:
        self.node, self.span = node, span


def plain(x: Any) -> Any:
    """The node itself, parentheses around it forgotten."""
    return x.node if isinstance(x, _Parens) else x


def _range(x: Any) -> tuple[int, int]:
    if isinstance(x, Token):
        return x.start_pos or 0, x.end_pos or 0
    return x.span.start, x.span.end
