"""score-bound: how far scores may lie from 0, where what they are made of says so (softcap, a clamp).

Keeps     the bound: no kept score of any call is further from 0, but by the rounding of fp32
Use       a softmax whose scores stay within reach of one reference takes no maximum (passes/compute)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attngen.ir.expr import Apply, Const, Expr, Param
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Type

Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)


def score_bound(spec: AttentionSpec) -> float:
    """How far from 0 a score may lie in any call, natural units; inf where nothing is known."""
    return max(map(abs, interval(spec.score, spec)))


def interval(e: Expr, spec: AttentionSpec) -> Interval:
    """Between which numbers a float expression lies, whatever a call gives."""
    if isinstance(e, Const) and e.type is not Type.BOOL:
        return float(e.value), float(e.value)
    if isinstance(e, Param):
        return _declared(e, spec)
    if not isinstance(e, Apply) or e.fn not in _INTERVALS:
        return ANY
    # of a choice the condition is the first
    found = _INTERVALS[e.fn](*(interval(x, spec) for x in (e.args[1:] if e.fn == "where" else e.args)))
    return ANY if any(map(math.isnan, found)) else found


def _declared(e: Param, spec: AttentionSpec) -> Interval:
    for p in spec.params:
        if p.name == e.name:
            return (
                -math.inf if p.minimum is None else float(p.minimum),
                math.inf if p.maximum is None else float(p.maximum),
            )
    return ANY


def _product(a: Interval, b: Interval) -> Interval:
    corners = [x * y for x in a for y in b]
    return (math.nan, math.nan) if any(map(math.isnan, corners)) else (min(corners), max(corners))


def _quotient(a: Interval, b: Interval) -> Interval:
    return ANY if b[0] <= 0 <= b[1] else _product(a, (1 / b[1], 1 / b[0]))


def _magnitude(a: Interval) -> Interval:
    return (0.0 if a[0] <= 0 <= a[1] else min(map(abs, a))), max(map(abs, a))


def _clamped(x: Interval, low: Interval, high: Interval) -> Interval:
    return min(max(x[0], low[0]), high[0]), min(max(x[1], low[1]), high[1])


_INTERVALS: dict[str, Callable[..., Any]] = {
    "tanh": lambda a: (-1.0, 1.0),
    "sigmoid": lambda a: (0.0, 1.0),
    "float": lambda a: a,
    "neg": lambda a: (-a[1], -a[0]),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "div": _quotient,
    "abs": _magnitude,
    "min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "clamp": _clamped,
    "where": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
