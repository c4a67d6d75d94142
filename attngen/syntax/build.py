"""Builds surface nodes while the LALR parser reduces: no parse tree exists, and no recursion follows the input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lark import Token

from attngen.diag.diagnostic import error
from attngen.syntax import ast, limits
from attngen.syntax.build_expr import ExpressionBuilder, plain


class Builder(ExpressionBuilder):
    """One method per rule of attn.lark beside those of expressions, called with the children of the rule."""

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
