"""Builds the nodes of expressions (expr.lark), with the places that every node has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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


class ExpressionBuilder:
    """One method per rule of expr.lark, called with the children of the rule; included rules arrive with a prefix."""

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
