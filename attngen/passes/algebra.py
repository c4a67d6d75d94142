"""Sums, products and choices of derivatives, simplified as they are built.

Exact as real numbers wherever the operands are finite, which is all that a derivative asks for (`simplify` by contrast
keeps every value, NaN and infinities included): `cap * ((1 - t * t) / cap)` is `1 - t * t`. A zero is a choice, never a
factor: `x * (1 if c else 0)` becomes `x if c else 0`, so that an infinite x of the other side does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from attngen.ir.expr import Apply, Const, Expr, const, walk
from attngen.ir.functions import apply

ZERO, ONE = const(0.0), const(1.0)
#: Products and sums of more nodes are not taken apart: they stay as deep as the score has them, and are shared with it.
SMALL = 32


def number(e: Expr) -> float | None:
    """The value of a numeric literal."""
    return float(e.value) if isinstance(e, Const) and not isinstance(e.value, bool) else None


def choose(condition: Expr, a: Expr, b: Expr) -> Expr:
    """`a if condition else b`."""
    if a == b:
        return a
    if isinstance(condition, Const):
        return a if condition.value else b
    return apply("where", condition, a, b)


def _is_small(e: Expr) -> bool:
    return sum(1 for _ in islice(walk(e), SMALL + 1)) <= SMALL


def times(a: Expr, b: Expr) -> Expr:
    """`a * b`."""
    if ZERO in (a, b):
        return ZERO
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Apply) and x.fn == "where" and ZERO in x.args[1:]:
            return choose(x.args[0], times(x.args[1], y), times(x.args[2], y))
    product = _Product()
    product.take(a)
    product.take(b)
    return product.expr()


@dataclass(slots=True)
class _Product:
    """over * product(above) / (under * product(below)): literals apart, so that 50 * (x / 50) is x."""

    over: float = 1.0
    under: float = 1.0
    above: list[Expr] = field(default_factory=list)
    below: list[Expr] = field(default_factory=list)

    def take(self, e: Expr, inverse: bool = False, inside: bool = False) -> None:
        """Multiply by `e`, or divide by it; `inside` a quotient that was large itself."""
        value = number(e)
        if value is not None and (value or not inverse):
            if inverse:
                self.under *= value
            else:
                self.over *= value
        elif isinstance(e, Apply) and e.fn == "neg":
            self.over = -self.over
            self.take(e.args[0], inverse, inside)
        elif isinstance(e, Apply) and e.fn == "div" and (not inside or _is_small(e)):
            self.take(e.args[0], inverse, inside=True)
            self.take(e.args[1], not inverse, inside=True)
        elif (
            isinstance(e, Apply)
            and e.fn == "mul"
            and e.args[0] != e.args[1]
            and (number(e.args[0]) is not None or _is_small(e))
        ):
            # a square stays whole: powers by repeated squaring are shared with the score
            self.take(e.args[0], inverse, inside)
            self.take(e.args[1], inverse, inside)
        else:
            mine, other = (self.below, self.above) if inverse else (self.above, self.below)
            if e in other:
                other.remove(e)
            else:
                mine.append(e)

    def expr(self) -> Expr:
        """The shortest spelling."""
        value = self.over / self.under
        bottom = _joined(self.below)
        top = _joined(self.above)
        if value == -1.0 and top is not None:
            return apply("neg", self._quotient(1.0, top, bottom))
        return self._quotient(value, top, bottom)

    @staticmethod
    def _quotient(value: float, top: Expr | None, bottom: Expr | None) -> Expr:
        if top is None:
            top = const(value)
        elif value != 1.0:
            top = apply("mul", const(value), top)
        return top if bottom is None else apply("div", top, bottom)


def _joined(factors: list[Expr]) -> Expr | None:
    out: Expr | None = None
    for x in factors:
        out = x if out is None else apply("mul", out, x)
    return out


def plus(a: Expr, b: Expr) -> Expr:
    """`a + b`."""
    if a == ZERO:
        return b
    if b == ZERO:
        return a
    if isinstance(a, Apply) and isinstance(b, Apply) and a.fn == b.fn == "where" and a.args[0] == b.args[0]:
        return choose(a.args[0], plus(a.args[1], b.args[1]), plus(a.args[2], b.args[2]))
    terms: dict[Expr, float] = {}
    for e in (a, b):
        _collect(e, 1.0, terms)
    return _sum({t: c for t, c in terms.items() if c})


def _collect(e: Expr, factor: float, terms: dict[Expr, float]) -> None:
    """Add `factor * e` to a sum of terms, each with a literal factor; the literal itself is a multiple of 1."""
    if isinstance(e, Apply) and e.fn in ("add", "sub") and _is_small(e):
        _collect(e.args[0], factor, terms)
        _collect(e.args[1], factor if e.fn == "add" else -factor, terms)
        return
    if isinstance(e, Apply) and e.fn == "neg":
        _collect(e.args[0], -factor, terms)
        return
    value = number(e)
    if value is not None:
        e, factor = ONE, factor * value
    elif isinstance(e, Apply) and e.fn == "mul" and (first := number(e.args[0])) is not None:
        e, factor = e.args[1], factor * first
    terms[e] = terms.get(e, 0.0) + factor


def _sum(terms: dict[Expr, float]) -> Expr:
    """Positive terms first, so that a negation is a subtraction."""
    out: Expr | None = None
    for positive in (True, False):
        for t, c in terms.items():
            if (c > 0) is not positive:
                continue
            term = const(abs(c)) if t == ONE else t if abs(c) == 1.0 else apply("mul", const(abs(c)), t)
            if out is None:
                out = term if positive else apply("neg", term)
            else:
                out = apply("add" if positive else "sub", out, term)
    return ZERO if out is None else out
