"""Expressions of ints and bools in plain Python, over columns of values: what tile bounds need, without torch.

Follows `FUNCTIONS`: `//` and `%` floor, and a divisor of 0 counts as 1, as in the dense evaluation. Ints are unbounded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any

from attngen.ir.expr import Apply, Const, Expr, Load, walk
from attngen.ir.types import Type

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "or": operator.or_, "and": operator.and_, "not": operator.not_, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne, "add": operator.add,
    "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": operator.abs, "min": min, "max": max,
    "floordiv": lambda a, b: a // (b or 1), "mod": lambda a, b: a % (b or 1),
    "clamp": lambda x, low, high: min(max(x, low), high), "where": lambda c, a, b: a if c else b, "int": int,
    "bit": lambda word, i: word >> (i & 31) & 1 == 1,
}  # fmt: skip


def takes(e: Expr) -> bool:
    """Whether `e` is made of ints and bools alone and reads no captured tensor."""
    return not any(
        isinstance(n, Load) or n.type is Type.FLOAT or (isinstance(n, Apply) and n.fn not in _FUNCTIONS)
        for n in walk(e)
    )


def column(e: Expr, env: Mapping[str, Any], length: int) -> list[Any]:
    """`length` values of `e`, which `takes` accepts. `env`: for each atom and param a number, or a list of `length`."""
    value = _value(e, env)
    return value if isinstance(value, list) else [value] * length


def _value(e: Expr, env: Mapping[str, Any]) -> Any:
    """A number where every operand is one, else a list."""
    if isinstance(e, Const):
        return e.value
    if not isinstance(e, Apply):
        return env[e.name]  # type: ignore[union-attr]
    operands = [_value(a, env) for a in e.args]
    if not any(isinstance(x, list) for x in operands):
        return _FUNCTIONS[e.fn](*operands)
    return list(map(_FUNCTIONS[e.fn], *(x if isinstance(x, list) else repeat(x) for x in operands)))
