"""Derivatives of an expression by the rules of the function table, forward through its nodes.

Ints and bools are steps: their derivative is zero, and so are those of an element's indices, of a condition and of
`floor`. At a kink (max, abs, clamp) the derivative is one of the two one-sided ones, as the row says.
"""

from __future__ import annotations

from attngen.diag.diagnostic import error
from attngen.ir.expr import Apply, Expr
from attngen.ir.functions import FUNCTIONS
from attngen.ir.types import Type
from attngen.passes.algebra import ONE, ZERO, plus, times


def derivative(e: Expr, by: Expr) -> Expr:
    """d e / d by, a float expression over what `e` reads; `by` is an atom, a param or one element of a tensor.

    Simplified as it is built; subexpressions of `e` appear in it unchanged. Equal elements (`bias[b, kv_idx]` read
    twice) are one variable, different ones are independent.
    Raises: E0402 for a function that has no rule.
    """
    return _Derivation(by).of(e)


class _Derivation:
    """Derivatives by one variable, each node once."""

    def __init__(self, by: Expr) -> None:
        self.by = by
        self.known: dict[Expr, Expr] = {}

    def of(self, e: Expr) -> Expr:
        if e == self.by:
            return ONE
        if not isinstance(e, Apply) or e.type is not Type.FLOAT:
            return ZERO
        found = self.known.get(e)
        if found is None:
            found = self.known[e] = self._applied(e)
        return found

    def _applied(self, e: Apply) -> Expr:
        inner = [self.of(a) for a in e.args]
        if all(x == ZERO for x in inner):
            return ZERO
        rule = FUNCTIONS[e.fn].derivative
        if rule is None:
            raise error(
                "E0402",
                f"the derivative of `{e.fn}` is not known, so that no gradient passes through it",
                at=e.span,
                label=f"`{e.fn}` of a value that needs a gradient",
                helps=("write it with functions that have a derivative, or leave out `grad`",),
            )
        total: Expr = ZERO
        for outer, x in zip(rule(e.args, e), inner, strict=True):
            if outer is not None:
                total = plus(total, times(outer, x))
        return total
