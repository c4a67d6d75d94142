"""Derivatives of an expression by the rules of the function table, forward through its nodes.

Ints and bools are steps: their derivative is zero, and so are those of an element's indices, of a condition and of
`floor`. At a kink (max, abs, clamp) the derivative is one of the two one-sided ones, as the row says.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngen.diag.diagnostic import error
from attngen.ir.expr import Apply, Expr
from attngen.ir.functions import FUNCTIONS
from attngen.ir.types import Type
from attngen.passes.algebra import ONE, ZERO, plus, times


class Derivation:
    """Derivatives of one expression by any of `variables`: atoms, params, elements of tensors.

    Equal elements (`bias[b, kv_idx]` read twice) are one variable, different ones are independent.
    """

    def __init__(self, e: Expr, variables: Sequence[Expr]) -> None:
        self.e, self.variables = e, frozenset(variables)
        self._reads: dict[Expr, frozenset[Expr]] = {}

    def by(self, variable: Expr) -> Expr:
        """d e / d variable, a float expression over what `e` reads, with subexpressions of `e` unchanged in it.

        Raises: E0402 for a function that has no rule.
        """
        return self._of(self.e, variable, {})

    def _below(self, e: Expr) -> frozenset[Expr]:
        """Variables whose change can move `e`."""
        if e in self.variables:
            return frozenset((e,))
        if not isinstance(e, Apply) or e.type is not Type.FLOAT:
            return frozenset()
        found = self._reads.get(e)
        if found is None:
            found = self._reads[e] = frozenset().union(*(self._below(a) for a in e.args))
        return found

    def _of(self, e: Expr, variable: Expr, known: dict[Expr, Expr]) -> Expr:
        if e == variable:
            return ONE
        if variable not in self._below(e):
            return ZERO
        found = known.get(e)
        if found is None:
            assert isinstance(e, Apply)
            inner = [self._of(a, variable, known) for a in e.args]
            found = known[e] = _chained(e, inner)
        return found


def _chained(e: Apply, inner: Sequence[Expr]) -> Expr:
    """The derivative of `e` from those of its operands."""
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
