"""Values of a trace: typed expressions of a spec, built by torch's rules for 0-dimensional tensors.

A spec has no infinity. A float of a trace therefore carries a condition beside its expression, `dead`, under which it
is -inf; a key whose score is -inf does not exist, so at the end the condition becomes part of the mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attngen.ir.expr import Apply, Const, Expr, const
from attngen.ir.functions import apply
from attngen.ir.types import Type
from attngen.syntax import limits

_FLIPPED = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
TRUE, FALSE = const(True), const(False)


class Untraceable(Exception):
    """What a spec cannot say: code, message, and what to write instead. The trace adds the place."""

    def __init__(self, code: str, message: str, *helps: str, notes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.code, self.message, self.helps, self.notes = code, message, helps, notes


@dataclass(frozen=True, slots=True)
class Value:
    """An expression with the number of its nodes and its depth (shared operands counted as often as they print)."""

    expr: Expr
    size: int = 1
    depth: int = 1
    #: Where a float is -inf; None: nowhere.
    dead: Value | None = None

    @property
    def type(self) -> Type:
        return self.expr.type

    @property
    def constant(self) -> bool | int | float | None:
        return self.expr.value if isinstance(self.expr, Const) and self.dead is None else None


def literal(value: bool | int | float) -> Value:
    """A Python number. Raises Untraceable for what neither int nor fp32 holds."""
    if isinstance(value, float):
        if math.isnan(value) or value > limits.FLOAT32_MAX:
            raise Untraceable(
                "E0701",
                f"the value {value} has no place in a score",
                "a spec has finite numbers, and -inf as what takes a key out",
            )
        if value < -limits.FLOAT32_MAX:
            return Value(const(0.0), dead=Value(TRUE))
    elif not isinstance(value, bool) and not limits.INT32_MIN < value <= limits.INT32_MAX:
        raise Untraceable("E0701", f"the number {value} does not fit a 32-bit int", "write a float where one is meant")
    return Value(const(value))


def finite(v: Value, what: str) -> Value:
    """`v` as an operand of a function that has no meaning for -inf here."""
    if v.dead is not None:
        raise Untraceable(
            "E0701",
            f"-inf reaches {what}",
            "let -inf be the last thing: `torch.where(keep, score, -float('inf'))`, or return the condition as a "
            "mask_mod",
            notes=("a spec has no infinity; a key is taken out by the mask",),
        )
    return v


def call(fn: str, *values: Value) -> Value:
    """A function of the language on finite values, constants folded where bools decide."""
    for v in values:
        finite(v, f"`{fn}`")
    size, depth = 1 + sum(v.size for v in values), 1 + max(v.depth for v in values)
    if size > limits.NODES or depth > limits.DEPTH:
        raise Untraceable(
            "E0701",
            f"the expression grows past {limits.NODES} operations or a depth of {limits.DEPTH} here",
            "put what is large into a captured tensor and index it",
            notes=("loops over Python numbers unroll, and a value that is used twice is written twice",),
        )
    return Value(apply(fn, *(v.expr for v in values)), size, depth)


def as_number(v: Value) -> Value:
    """A bool as 0 or 1, as torch promotes it."""
    if v.type is not Type.BOOL:
        return v
    if isinstance(v.expr, Const):
        return literal(int(v.expr.value))
    return Value(apply("where", v.expr, const(1), const(0)), v.size + 3, v.depth + 1)


def as_float(v: Value) -> Value:
    v = as_number(v)
    if v.type is Type.FLOAT:
        return v
    if isinstance(v.expr, Const):
        return literal(float(v.expr.value))
    return Value(apply("float", v.expr), v.size + 1, v.depth + 1)


def as_bool(v: Value) -> Value:
    """True where a number is not zero."""
    if v.type is Type.BOOL:
        return v
    if v.constant is not None:
        return Value(TRUE if v.constant else FALSE)
    return call("ne", v, literal(0 if v.type is Type.INT else 0.0))


def both(a: Value, b: Value) -> Value:
    if FALSE in (a.expr, b.expr):
        return Value(FALSE)
    return b if a.expr == TRUE else a if b.expr == TRUE else call("and", a, b)


def either(a: Value, b: Value) -> Value:
    if TRUE in (a.expr, b.expr):
        return Value(TRUE)
    return b if a.expr == FALSE else a if b.expr == FALSE else call("or", a, b)


def negated(a: Value) -> Value:
    """Not `a`; a comparison of ints turns around."""
    e = a.expr
    if isinstance(e, Const):
        return Value(const(not e.value))
    if isinstance(e, Apply) and e.fn == "not":
        return Value(e.args[0], a.size - 1, a.depth - 1)
    if isinstance(e, Apply) and e.fn in _FLIPPED and e.args[0].type is Type.INT:
        return Value(apply(_FLIPPED[e.fn], *e.args), a.size, a.depth)
    return call("not", a)


def dead_of(v: Value) -> Value:
    """The condition under which `v` is -inf."""
    return v.dead or Value(FALSE)


def with_dead(v: Value, dead: Value) -> Value:
    """`v`, and -inf where `dead`."""
    return Value(v.expr, v.size, v.depth, None if dead.expr == FALSE else dead)


def alive(v: Value) -> Value:
    """The finite part of `v`."""
    return Value(v.expr, v.size, v.depth)


def gone(v: Value) -> bool:
    """Whether `v` is -inf everywhere."""
    return dead_of(v).expr == TRUE


def choose(test: Value, then: Value, other: Value) -> Value:
    """torch.where."""
    if {then.type, other.type} != {Type.BOOL}:
        then, other = as_number(then), as_number(other)
        if Type.FLOAT in (then.type, other.type):
            then, other = as_float(then), as_float(other)
    if test.expr in (TRUE, FALSE):
        return then if test.expr == TRUE else other
    if then.expr in (TRUE, FALSE):
        return either(test, other) if then.expr == TRUE else both(negated(test), other)
    if other.expr in (TRUE, FALSE):
        return either(negated(test), then) if other.expr == TRUE else both(test, then)
    if gone(then):
        return with_dead(alive(other), either(test, dead_of(other)))
    if gone(other):
        return with_dead(alive(then), either(negated(test), dead_of(then)))
    dead = either(both(test, dead_of(then)), both(negated(test), dead_of(other)))
    return with_dead(call("where", test, alive(then), alive(other)), dead)
