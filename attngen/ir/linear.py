"""Linear: an int expression as a sum of integer multiples of opaque terms.

`q_pos` is expanded to `q_idx + seqlen_kv - seqlen_q` on the way in and folded on the way out, so that sums which mean
the same position cancel. Regrouping a sum is exact modulo 2**32, hence for every sum that fits an int32 at its end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attngen.ir.expr import Apply, Atom, Const, Expr, atom, const
from attngen.ir.functions import apply
from attngen.ir.types import Type

Q_IDX, KV_IDX, Q_POS = atom("q_idx"), atom("kv_idx"), atom("q_pos")
SEQLEN_Q, SEQLEN_KV = atom("seqlen_q"), atom("seqlen_kv")


@dataclass(frozen=True, slots=True)
class Linear:
    """`sum(c * t) + const` over `terms` (t -> c, no zero coefficient), in order of first appearance."""

    terms: Mapping[Expr, int]
    const: int = 0

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.const + other)
        total = dict(self.terms)
        for t, c in other.terms.items():
            total[t] = total.get(t, 0) + c
        return Linear({t: c for t, c in total.items() if c}, self.const + other.const)

    def __sub__(self, other: Linear) -> Linear:
        return self + other * -1

    def __mul__(self, factor: int) -> Linear:
        return Linear({t: c * factor for t, c in self.terms.items()} if factor else {}, self.const * factor)

    def __neg__(self) -> Linear:
        return self * -1

    def without(self, term: Expr) -> Linear:
        """The sum of the other terms."""
        return Linear({t: c for t, c in self.terms.items() if t != term}, self.const)

    def with_term(self, term: Expr, value: Linear) -> Linear:
        """`value` in the place of `term`."""
        return self.without(term) + value * self.terms[term]


def linear_of(e: Expr) -> Linear:
    """The sum that an int expression is. `x - x % n` becomes `n * (x // n)`."""
    total = _collect(e)
    for t in list(total.terms):
        if isinstance(t, Apply) and t.fn == "mod":
            x, n = t.args
            product = _times(apply("floordiv", x, n), n)
            other = total.with_term(t, _collect(x) - product)
            if len(other.terms) < len(total.terms):
                total = other
    return total


def _times(a: Expr, b: Expr) -> Linear:
    la, lb = _collect(a), _collect(b)
    if not lb.terms:
        return la * lb.const
    if not la.terms:
        return lb * la.const
    return Linear({apply("mul", a, b): 1})


def _collect(e: Expr) -> Linear:
    if isinstance(e, Const):
        return Linear({}, int(e.value))
    if isinstance(e, Atom) and e.name == "q_pos":
        return Linear({Q_IDX: 1, SEQLEN_KV: 1, SEQLEN_Q: -1})
    if isinstance(e, Apply):
        a = e.args
        if e.fn == "add":
            return _collect(a[0]) + _collect(a[1])
        if e.fn == "sub":
            return _collect(a[0]) - _collect(a[1])
        if e.fn == "neg":
            return -_collect(a[0])
        if e.fn == "int" and a[0].type is Type.INT:
            return _collect(a[0])
        if e.fn == "mul":
            left, right = _collect(a[0]), _collect(a[1])
            if not right.terms:
                return left * right.const
            if not left.terms:
                return right * left.const
    return Linear({e: 1})


def expr_of(total: Linear) -> Expr:
    """The shortest spelling of a sum: positive terms, then negative ones, then the constant."""
    terms = dict(total.terms)
    c = terms.get(Q_IDX, 0)
    if c and terms.get(SEQLEN_Q, 0) == -c:
        kv = terms.get(SEQLEN_KV, 0) - c
        terms = {Q_POS: c, **{t: k for t, k in terms.items() if t not in (Q_IDX, SEQLEN_Q, SEQLEN_KV)}}
        if kv:
            terms[SEQLEN_KV] = kv
    plus = [(t, k) for t, k in terms.items() if k > 0]
    minus = [(t, -k) for t, k in terms.items() if k < 0]
    rest = total.const
    if plus:
        out = _scaled(*plus.pop(0))
    elif not minus:
        return const(rest)
    elif rest > 0:
        out, rest = const(rest), 0
    else:
        out = apply("neg", _scaled(*minus.pop(0)))
    for t, k in plus:
        out = apply("add", out, _scaled(t, k))
    for t, k in minus:
        out = apply("sub", out, _scaled(t, k))
    if rest:
        out = apply("add" if rest > 0 else "sub", out, const(abs(rest)))
    return out


def _scaled(term: Expr, factor: int) -> Expr:
    return term if factor == 1 else apply("mul", term, const(factor))


def compare(op: str, total: Linear, *, span: object = None) -> Expr:
    """`total op 0`, negative terms moved to the right; `a < b` rather than `a + 1 <= b`."""
    if (op, total.const) in (("le", 1), ("ge", -1)):
        op, total = {"le": "lt", "ge": "gt"}[op], Linear(total.terms)
    left = Linear({t: c for t, c in total.terms.items() if c > 0}, max(total.const, 0))
    right = Linear({t: -c for t, c in total.terms.items() if c < 0}, max(-total.const, 0))
    if not total.terms:
        return const(COMPARE[op](total.const, 0))
    return apply(op, expr_of(left), expr_of(right), span=span)


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
#: The comparison that holds exactly where another does not (ints and bools; floats have NaN).
OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
