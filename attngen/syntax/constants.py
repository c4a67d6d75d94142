"""Values of constant expressions at check time, in Python floats: no torch is loaded for them.

Numerics: float64 with IEEE's infinities and NaN where Python would raise, as the dense evaluation has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attngen.ir.expr import Apply, Const, Expr
from attngen.ir.linear import COMPARE


def value_of(e: Expr) -> float | None:
    """The value of `e` as a float, or None where it reads anything but literals."""
    value = _value(e)
    return None if value is None else _float(value)


def _value(e: Expr) -> Any:
    if isinstance(e, Const):
        return e.value
    if not isinstance(e, Apply):
        return None
    args = [_value(a) for a in e.args]
    return None if any(a is None for a in args) else _FUNCTIONS[e.fn](*args)


def _float(x: float) -> float:
    try:
        return float(x)
    except OverflowError:  # a whole number past float64
        return math.inf if x > 0 else -math.inf


def _div(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _mod(a: int, b: int) -> int:
    return a % (b or 1)


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf if x == 0 else math.nan


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + _exp(-x)) if x >= 0 else _exp(x) / (1.0 + _exp(x))


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(_exp(-abs(x))) if x == x else x


def _extreme(pick: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: math.nan if a != a or b != b else pick(a, b)


def _truncated(x: float) -> int:
    return int(x) if math.isfinite(x) else 0


_min, _max = _extreme(min), _extreme(max)
#: One entry for each row of the function table.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "or": lambda a, b: a or b,
    "and": lambda a, b: a and b,
    "not": lambda a: not a,
    **COMPARE,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _div,
    "floordiv": lambda a, b: a // (b or 1),
    "mod": _mod,
    "neg": lambda a: -a,
    "min": _min,
    "max": _max,
    "clamp": lambda x, low, high: _min(_max(x, low), high),
    "abs": abs,
    "exp": _exp,
    "log": _log,
    "log2": lambda x: _log(x) / math.log(2.0),
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
    "softplus": _softplus,
    "floor": lambda x: float(math.floor(x)) if math.isfinite(x) else x,
    "int": _truncated,
    "float": _float,
    "where": lambda c, a, b: a if c else b,
    "bit": lambda word, i: word >> (i & 31) & 1 == 1,
}
