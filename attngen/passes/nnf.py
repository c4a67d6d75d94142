"""Negation normal form: `and`/`or` over literals, conditionals taken apart, terms without `kv_idx` left whole."""

from __future__ import annotations

from attngen.ir.expr import Apply, Expr, Load, Param, atoms_of, children, rewrite
from attngen.ir.functions import apply
from attngen.ir.linear import COMPARE, OPPOSITE
from attngen.ir.simplify import negate, simplify
from attngen.ir.types import Type

#: Conditionals, bool comparisons and min/max/abs duplicate what is around them; past this many a term stays whole.
SPLIT_LIMIT = 16


def reads_key(e: Expr) -> bool:
    """Does the value change with the key?"""
    return "kv_idx" in atoms_of(e)


def nnf(e: Expr, negated: bool = False) -> Expr:
    """The same value, `not` only in front of literals that have no opposite (loads, float comparisons).

    Float comparisons keep their `not`: `not a < b` is not `a >= b` where one is NaN.
    """
    return _Splitter().form(simplify(e), negated)


class _Splitter:
    def __init__(self) -> None:
        self.left = SPLIT_LIMIT

    def form(self, e: Expr, negated: bool) -> Expr:
        if not reads_key(e) or not isinstance(e, Apply):
            return negate(e) if negated else e
        a = e.args
        if e.fn == "not":
            return self.form(a[0], not negated)
        if e.fn in ("and", "or"):
            fn = e.fn if not negated else "or" if e.fn == "and" else "and"
            return apply(fn, *(self.form(x, negated) for x in a), span=e.span)
        if self.left and e.fn == "where":
            self.left -= 1
            return self.choice(a[0], a[1], a[2], negated, e.span)
        if self.left and e.fn in ("eq", "ne") and a[0].type is Type.BOOL and not any(_opaque(x) for x in a):
            self.left -= 1
            same = (e.fn == "eq") != negated
            return self.choice(a[0], a[1], negate(a[1]), not same, e.span)
        if e.fn in COMPARE and a[0].type is not Type.BOOL:
            inner = next((w for x in a if (w := _conditional(x)) is not None), None)
            if self.left and inner is not None:
                self.left -= 1
                c, yes, no = inner.args
                return self.choice(c, _put(e, inner, yes), _put(e, inner, no), negated, e.span)
            if negated and a[0].type is Type.INT:
                return apply(OPPOSITE[e.fn], *a, span=e.span)
        return negate(e) if negated else e

    def choice(self, c: Expr, yes: Expr, no: Expr, negated: bool, span: object) -> Expr:
        """`yes if c else no`, both in normal form."""
        left = apply("and", self.form(c, False), self.form(yes, negated))
        right = apply("and", self.form(c, True), self.form(no, negated))
        return apply("or", left, right, span=span)


def _opaque(e: Expr) -> bool:
    """A bool that reads the key and that nothing takes apart."""
    while isinstance(e, Apply) and e.fn == "not":
        e = e.args[0]
    return isinstance(e, Load | Param) and reads_key(e)


def _conditional(e: Expr) -> Apply | None:
    """The first conditional of a number that reads the key, outside of tensor indices."""
    if not isinstance(e, Apply) or not reads_key(e):
        return None
    if e.fn == "where":
        return e
    return next((c for x in children(e) if (c := _conditional(x)) is not None), None)


def _put(e: Apply, old: Expr, new: Expr) -> Expr:
    out = simplify(rewrite(e, lambda n: new if n == old else n))
    return out if out.span is not None or not isinstance(out, Apply) else out.replace(span=e.span)
