"""The function table: everything an expression can apply, one row each.

A row gives the type rule, the dense evaluation (torch), the CuTe-DSL spelling and the derivative. Adding a function
is adding a row; parser names, formatter, checker, reference, kernel printer and docs read the table.

Numerics: `int` is 32-bit in a kernel (64-bit in the dense evaluation), `float` is fp32 in a kernel. `//` and `%` floor,
also for negative operands; division by zero gives an unspecified value, never a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attngen.ir.expr import Apply, Const, Expr, const
from attngen.ir.types import Type

B, I, F = Type.BOOL, Type.INT, Type.FLOAT  # noqa: E741
#: Signatures, tried in order; an int argument converts to float where only a float fits.
NUM1, NUM2, NUM3 = [((I,), I), ((F,), F)], [((I, I), I), ((F, F), F)], [((I, I, I), I), ((F, F, F), F)]
CMP2 = [((I, I), B), ((F, F), B)]
FLOAT1 = [((F,), F)]
Derivative = Callable[[tuple[Expr, ...], Expr], tuple[Expr | None, ...]]


@dataclass(frozen=True, slots=True)
class Function:
    """One row. `derivative(args, y)` gives d y/d arg for each arg (None: zero), `y` being the application itself."""

    name: str
    signatures: Sequence[tuple[tuple[Type, ...], Type]]
    dense: Callable[..., Any]
    #: CuTe-DSL text with {0}, {1}, … for operands that are already safe to place anywhere.
    cute: str
    derivative: Derivative | None
    doc: str
    #: Operator as written in a spec, with its binding strength (larger binds tighter); None for a named function.
    infix: str | None = None
    precedence: int = 100
    #: False for rows that only the compiler makes (conversions, the conditional, unary minus).
    callable_by_name: bool = True


def _torch() -> Any:
    import torch

    return torch


def _floordiv(a: Any, b: Any) -> Any:
    t = _torch()
    safe = t.where(b == 0, t.ones_like(b), b)
    return t.div(a, safe, rounding_mode="floor")


def _mod(a: Any, b: Any) -> Any:
    t = _torch()
    safe = t.where(b == 0, t.ones_like(b), b)
    return t.remainder(a, safe)


def _log2(a: Any) -> Any:
    """Logarithm to base 2, whole at powers of two on every device (buckets truncate it); CUDA promises an ulp only."""
    t = _torch()
    mantissa, exponent = t.frexp(a)
    low = mantissa < 0.7071
    return t.log2(t.where(low, 2 * mantissa, mantissa)) + (exponent - low.to(exponent.dtype))


def apply(fn: str, *args: Expr, span: Any = None) -> Expr:
    """Apply `fn`, converting ints to floats where its signature asks. Raises TypeError where no signature fits."""
    row = FUNCTIONS[fn]
    types = tuple(a.type for a in args)
    for wanted, result in row.signatures:
        if len(wanted) == len(types) and all(w is t or (w is F and t is I) for w, t in zip(wanted, types, strict=True)):
            cast = tuple(a if w is a.type else to_float(a) for w, a in zip(wanted, args, strict=True))
            return Apply(type=result, fn=fn, args=cast, span=span)
    raise TypeError(f"{fn} does not take ({', '.join(types)})")


def to_float(e: Expr) -> Expr:
    """`e` as a float; a literal is converted at once."""
    if e.type is F:
        return e
    if isinstance(e, Const):
        return Const(type=F, value=float(e.value), span=e.span)
    return Apply(type=F, fn="float", args=(e,), span=e.span)


def _c(v: float) -> Expr:
    return const(float(v))


def _where(c: Expr, a: Expr, b: Expr) -> Expr:
    return apply("where", c, a, b)


_LN2 = 0.6931471805599453

_ROWS = [
    Function("or", [((B, B), B)], lambda a, b: a | b, "({0} | {1})", None, "either holds", "or", 10),
    Function("and", [((B, B), B)], lambda a, b: a & b, "({0} & {1})", None, "both hold", "and", 20),
    Function("not", [((B,), B)], lambda a: ~a, "(not {0})", None, "does not hold", "not", 30),
    Function("lt", CMP2, lambda a, b: a < b, "({0} < {1})", None, "less", "<", 40),
    Function("le", CMP2, lambda a, b: a <= b, "({0} <= {1})", None, "less or equal", "<=", 40),
    Function("gt", CMP2, lambda a, b: a > b, "({0} > {1})", None, "greater", ">", 40),
    Function("ge", CMP2, lambda a, b: a >= b, "({0} >= {1})", None, "greater or equal", ">=", 40),
    Function("eq", [*CMP2, ((B, B), B)], lambda a, b: a == b, "({0} == {1})", None, "equal", "==", 40),
    Function("ne", [*CMP2, ((B, B), B)], lambda a, b: a != b, "({0} != {1})", None, "not equal", "!=", 40),
    Function("add", NUM2, lambda a, b: a + b, "({0} + {1})", lambda a, y: (_c(1), _c(1)), "sum", "+", 50),
    Function("sub", NUM2, lambda a, b: a - b, "({0} - {1})", lambda a, y: (_c(1), _c(-1)), "difference", "-", 50),
    Function("mul", NUM2, lambda a, b: a * b, "({0} * {1})", lambda a, y: (a[1], a[0]), "product", "*", 60),
    Function(
        "div", [((F, F), F)], lambda a, b: a / b, "({0} / {1})",
        lambda a, y: (apply("div", _c(1), a[1]), apply("neg", apply("div", y, a[1]))),
        "quotient, always float", "/", 60,
    ),
    Function("floordiv", [((I, I), I)], _floordiv, "floor_div({0}, {1})", None, "quotient rounded down", "//", 60),
    Function("mod", [((I, I), I)], _mod, "floor_mod({0}, {1})", None, "remainder with the divisor's sign", "%", 60),
    Function("neg", NUM1, lambda a: -a, "(-{0})", lambda a, y: (_c(-1),), "negation", "-", 70, callable_by_name=False),
    Function(
        "min", NUM2, lambda a, b: _torch().minimum(a, b), "minimum({0}, {1})",
        lambda a, y: (_where(apply("le", *a), _c(1), _c(0)), _where(apply("le", *a), _c(0), _c(1))), "the smaller",
    ),
    Function(
        "max", NUM2, lambda a, b: _torch().maximum(a, b), "maximum({0}, {1})",
        lambda a, y: (_where(apply("ge", *a), _c(1), _c(0)), _where(apply("ge", *a), _c(0), _c(1))), "the larger",
    ),
    Function(
        "clamp", NUM3, lambda x, a, b: _torch().minimum(_torch().maximum(x, a), b), "minimum(maximum({0}, {1}), {2})",
        lambda a, y: (
            _where(apply("and", apply("ge", a[0], a[1]), apply("le", a[0], a[2])), _c(1), _c(0)),
            _where(apply("and", apply("lt", a[0], a[1]), apply("le", a[1], a[2])), _c(1), _c(0)),
            _where(apply("lt", a[2], apply("max", a[0], a[1])), _c(1), _c(0)),
        ),
        "clamp(x, low, high)",
    ),
    Function(
        "abs", NUM1, lambda a: a.abs(), "maximum({0}, -{0})",
        lambda a, y: (_where(apply("ge", a[0], _c(0)), _c(1), _c(-1)),), "absolute value",
    ),
    Function("exp", FLOAT1, lambda a: a.exp(), "exp({0})", lambda a, y: (y,), "e**x"),
    Function(
        "log", FLOAT1, lambda a: a.log(), "log({0})",
        lambda a, y: (apply("div", _c(1), a[0]),), "natural logarithm",
    ),
    Function(
        "log2", FLOAT1, _log2, "log2({0})",
        lambda a, y: (apply("div", _c(1 / _LN2), a[0]),), "logarithm to base 2",
    ),
    Function("sqrt", FLOAT1, lambda a: a.sqrt(), "sqrt({0})", lambda a, y: (apply("div", _c(0.5), y),), "square root"),
    Function(
        "tanh", FLOAT1, lambda a: a.tanh(), "tanh({0})",
        lambda a, y: (apply("sub", _c(1), apply("mul", y, y)),), "hyperbolic tangent",
    ),
    Function(
        "sigmoid", FLOAT1, lambda a: a.sigmoid(), "sigmoid({0})",
        lambda a, y: (apply("mul", y, apply("sub", _c(1), y)),), "1 / (1 + e**-x)",
    ),
    Function(
        "softplus", FLOAT1, lambda a: _torch().nn.functional.softplus(a, threshold=700.0), "softplus({0})",
        lambda a, y: (apply("sigmoid", a[0]),), "log(1 + e**x)",
    ),
    Function(
        "floor", FLOAT1, lambda a: a.floor(), "floor({0})",
        lambda a, y: (None,), "largest whole number not above x, as float",
    ),
    Function(
        "int", [((I,), I), ((F,), I)], lambda a: a.trunc().long() if a.is_floating_point() else a, "Int32({0})", None,
        "truncates toward zero (table indices)",
    ),
    Function("float", [((I,), F), ((F,), F)], lambda a: a, "Float32({0})", lambda a, y: (_c(1),), "converts an int"),
    Function(
        "bit", [((I, I), B)], lambda a, b: (a >> (b & 31)) & 1 == 1, "has_bit({0}, {1})", None,
        "bit(word, i): whether bit i % 32 of an int32 is set, bit 31 the sign",
    ),
    Function(
        "where", [((B, B, B), B), ((B, I, I), I), ((B, F, F), F)], lambda c, a, b: _torch().where(c, a, b),
        "select({0}, {1}, {2})", lambda a, y: (None, _where(a[0], _c(1), _c(0)), _where(a[0], _c(0), _c(1))),
        "a if c else b", "if", 5, callable_by_name=False,
    ),
]  # fmt: skip

#: What jumps where its float operand moves: a rounding error before it may become a whole step after it.
STEPS = frozenset(("int", "floor", "lt", "le", "gt", "ge", "eq", "ne"))

#: Every function by name.
FUNCTIONS: dict[str, Function] = {row.name: row for row in _ROWS}
