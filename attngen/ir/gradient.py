"""GradientForm: what the backward of one score computes for each pair, beside P and the matrix products."""

from __future__ import annotations

from enum import StrEnum

from attngen.ir.base import Node
from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, atoms_of, const
from attngen.ir.types import Type


class GradientKind(StrEnum):
    """Over which pairs a captured tensor's contributions are summed before they leave the kernel.

    `sink`: read by the sink; one value a row. `column`: indices that no query moves; the sum over the rows of a key.
    `row`: indices that no key moves; the sum over the keys of a row. `element`: neither.
    Read by the epilogue, no pair matters: `output` is one value for each element of O, `output_row` the sum over the
    columns of a row of O, where no column moves the indices.
    """

    SINK = "sink"
    COLUMN = "column"
    ROW = "row"
    ELEMENT = "element"
    OUTPUT = "output"
    OUTPUT_ROW = "output_row"


#: Kinds whose values follow from O and its gradient alone, row by row, before the main kernel starts.
OF_ROWS = frozenset((GradientKind.SINK, GradientKind.OUTPUT, GradientKind.OUTPUT_ROW))


class Contribution(Node):
    """What one read of a captured tensor adds to its gradient.

    For `column`, `row` and `element`:  grad[indices] += dz * coefficient  over all kept pairs, with dz the gradient of
    the score and `coefficient` = d score / d tensor[indices]; for `output` and `output_row`
    grad[indices] += dO * coefficient  over the elements of O, with `coefficient` = d epilogue / d tensor[indices]. For
    `sink` (one for each tensor, however often the sink
    reads it) `indices` is empty and `coefficient` 1: the kernel gives the gradient of the sink of each row, which the
    host takes through the sink's expression.
    """

    tensor: str
    kind: GradientKind
    indices: tuple[Expr, ...] = ()
    coefficient: Expr = const(1.0)

    @property
    def reads_score(self) -> bool:
        """The coefficient or an index reads `s`."""
        return any("s" in atoms_of(e) for e in (self.coefficient, *self.indices))

    @property
    def is_finite(self) -> bool:
        """See `GradientForm.is_finite`."""
        return is_finite(self.coefficient)


class GradientForm(Node):
    """Derivatives of `score`: of `s` and of every captured tensor declared `grad`.

    `slope` and the coefficients are built from subexpressions of `score`, so that whoever prints all of `formulas` as
    one straight line says each of them once.
    """

    #: The score as the forward has it: recomputed P has the forward's bits.
    score: Expr
    #: d score / d s; the constant 1 where the score adds to `s`.
    slope: Expr
    contributions: tuple[Contribution, ...] = ()
    #: Tensors declared `grad` that no derivative reaches (read in a mask, an index, a condition): gradient zero. What
    #: the epilogue reads is not among them: see `passes.epilogue`.
    zero: tuple[str, ...] = ()

    @property
    def is_identity(self) -> bool:
        """ds = dz: nothing to evaluate."""
        return self.slope == const(1.0)

    @property
    def is_linear(self) -> bool:
        """The slope does not read `s`."""
        return "s" not in atoms_of(self.slope)

    @property
    def keeps_score(self) -> bool:
        """`s` is read after P is made: by the slope or by a contribution."""
        return not self.is_linear or any(c.reads_score for c in self.contributions)

    @property
    def is_finite(self) -> bool:
        """The slope is finite at every finite score, on dropped pairs too.

        Where it is not, dz * slope must be selected to 0 on pairs with P = 0: 0 * inf is NaN.
        """
        return is_finite(self.slope)

    @property
    def in_kernel(self) -> tuple[Contribution, ...]:
        """Contributions with a coefficient for each pair."""
        return tuple(c for c in self.contributions if c.kind not in OF_ROWS)

    @property
    def of_epilogue(self) -> tuple[Contribution, ...]:
        """Contributions with a coefficient for each element of O."""
        return tuple(c for c in self.contributions if c.kind in OF_ROWS and c.kind is not GradientKind.SINK)

    @property
    def formulas(self) -> tuple[Expr, ...]:
        """Score, slope, then the coefficients of `in_kernel`: to be printed together."""
        return self.score, self.slope, *(c.coefficient for c in self.in_kernel)


#: Bounded for every argument but NaN.
_BOUNDED = frozenset(("tanh", "sigmoid"))
#: Finite for finite arguments, overflow apart.
_FINITE = frozenset(("add", "sub", "mul", "neg", "min", "max", "clamp", "abs", "floor", "softplus", "float"))


def is_finite(e: Expr) -> bool:
    """Whether a float expression is finite for finite atoms and params; elements of tensors may be infinite."""
    if isinstance(e, Const | Atom | Param):
        return True
    if isinstance(e, Load):
        return e.type is not Type.FLOAT
    return _applied(e)


def _applied(e: Apply) -> bool:
    if e.type is not Type.FLOAT:
        return True
    if e.fn == "where":
        return all(is_finite(a) for a in e.args[1:])
    if e.fn == "div":
        top, bottom = e.args
        return is_finite(top) and isinstance(bottom, Const) and bottom.value != 0
    if e.fn in _BOUNDED:
        (x,) = e.args
        # x / y may be infinite, which these two take; 0 / 0 is NaN in the score already
        return is_finite(x.args[0] if isinstance(x, Apply) and x.fn == "div" else x)
    return e.fn in _FINITE and all(is_finite(a) for a in e.args)
