"""simplify: the same value in fewer operations.

Ints: sums are collected (`linear`), floor divisions and remainders by constants shed what divides out, `min`/`max` of
sums that differ by a constant pick one. Floats: only what holds for every value, NaN and infinities included, and
folding of constants (in double precision). Nothing is folded to a constant outside the int32 range.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attngen.ir.expr import Apply, Const, Expr, const, rewrite
from attngen.ir.functions import apply
from attngen.ir.linear import COMPARE, OPPOSITE, Linear, expr_of, linear_of
from attngen.ir.types import Type

TRUE, FALSE = const(True), const(False)
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def simplify(e: Expr) -> Expr:
    """An expression of the same type and value at every point; idempotent up to the order of terms."""
    return rewrite(e, _node)


def negate(e: Expr) -> Expr:
    """`not e`, pushed through int comparisons and double negations."""
    return _node(apply("not", e, span=e.span))


def _node(e: Expr) -> Expr:
    if not isinstance(e, Apply):
        return e
    rule = _RULES.get(e.fn)
    out = rule(e) if rule else _folded(e)
    if out is not e and out.span is None and e.span is not None and not isinstance(out, Const):
        out = out.replace(span=e.span)
    return out


def _fits(value: int) -> bool:
    return INT32_MIN <= value <= INT32_MAX


def _number(e: Expr) -> float | None:
    return e.value if isinstance(e, Const) and e.type is not Type.BOOL else None


def _sum(e: Apply) -> Expr:
    """add, sub, neg, mul."""
    if e.type is Type.INT:
        total = linear_of(e)
        if not all(_fits(c) for c in (*total.terms.values(), total.const)):
            return e
        out = expr_of(total)
        return e if out == e else out
    a = e.args
    zero, one = [_number(x) == 0.0 for x in a], [_number(x) == 1.0 for x in a]
    if e.fn == "neg" and isinstance(a[0], Apply) and a[0].fn == "neg":
        return a[0].args[0]
    if e.fn == "sub" and zero[1]:
        return a[0]
    if e.fn in ("mul", "div") and one[1]:
        return a[0]
    if e.fn == "mul" and one[0]:
        return a[1]
    return _folded(e)


def _split(x: Expr, n: int) -> tuple[Linear, Linear]:
    """x = n * first + second, the second with coefficients in [0, n)… only where a term divides out entirely."""
    total = linear_of(x)
    whole = Linear({t: c // n for t, c in total.terms.items() if c % n == 0}, total.const // n)
    rest = Linear({t: c for t, c in total.terms.items() if c % n}, total.const % n)
    return whole, rest


def _floordiv(e: Apply) -> Expr:
    x, d = e.args
    n = _number(d)
    if n is None or n == 0:
        return e
    n = int(n)
    if n == 1:
        return x
    if n < 0:
        return _node(apply("floordiv", expr_of(-linear_of(x)), const(-n))) if _fits(-n) else e
    if isinstance(x, Apply) and x.fn == "floordiv" and isinstance(x.args[1], Const):
        inner = int(x.args[1].value)
        if inner > 0 and _fits(inner * n):
            return _node(apply("floordiv", x.args[0], const(inner * n)))
    whole, rest = _split(x, n)
    if not rest.terms:
        return expr_of(whole + rest.const // n)
    if whole.terms or whole.const:
        return expr_of(whole + Linear({apply("floordiv", expr_of(rest), d): 1}))
    return e


def _mod(e: Apply) -> Expr:
    x, d = e.args
    n = _number(d)
    if n is None or n <= 0:
        return e
    _, rest = _split(x, int(n))
    if not rest.terms:
        return const(rest.const % int(n))
    out = apply("mod", expr_of(rest), d)
    return e if out == e else out


def _extreme(e: Apply) -> Expr:
    """min, max: ints decide by a constant difference, also against the arguments of a nested one."""
    a, b = e.args
    if a == b:
        return a
    if e.type is not Type.INT:
        return _folded(e)
    flat = [x for side in (a, b) for x in _flat(side, e.fn)]
    keep: list[Expr] = []
    for x in flat:
        for i, y in enumerate(keep):
            gap = linear_of(x) - linear_of(y)
            if not gap.terms:
                if (gap.const < 0) == (e.fn == "min") and gap.const:
                    keep[i] = x
                break
        else:
            keep.append(x)
    if len(keep) == len(flat):
        return e
    out = keep[0]
    for x in keep[1:]:
        out = apply(e.fn, out, x)
    return out


def _flat(e: Expr, fn: str) -> list[Expr]:
    if isinstance(e, Apply) and e.fn == fn:
        return [x for a in e.args for x in _flat(a, fn)]
    return [e]


def _clamp(e: Apply) -> Expr:
    if e.type is not Type.INT:
        return _folded(e)
    x, low, high = e.args
    return _node(apply("min", _node(apply("max", x, low)), high))


def _abs(e: Apply) -> Expr:
    value = _number(e.args[0])
    return e if value is None else const(abs(value))


def _compare(e: Apply) -> Expr:
    a, b = e.args
    if a.type is Type.INT:
        gap = linear_of(a) - linear_of(b)
        return e if gap.terms else const(COMPARE[e.fn](gap.const, 0))
    if a.type is Type.BOOL:
        for x, y in ((a, b), (b, a)):
            if isinstance(y, Const):
                return x if bool(y.value) == (e.fn == "eq") else negate(x)
        return const(e.fn == "eq") if a == b else e
    left, right = _number(a), _number(b)
    return e if left is None or right is None else const(COMPARE[e.fn](left, right))


def _not(e: Apply) -> Expr:
    (x,) = e.args
    if isinstance(x, Const):
        return const(not x.value)
    if isinstance(x, Apply) and x.fn == "not":
        return x.args[0]
    if isinstance(x, Apply) and x.fn in OPPOSITE and x.args[0].type is not Type.FLOAT:
        return _compare(apply(OPPOSITE[x.fn], *x.args, span=x.span))  # type: ignore[arg-type]
    return e


def _connective(e: Apply) -> Expr:
    unit, zero = (TRUE, FALSE) if e.fn == "and" else (FALSE, TRUE)
    a, b = e.args
    if a in (unit, b):
        return b
    if b == unit:
        return a
    return zero if zero in (a, b) or negate(a) == b else e


def _where(e: Apply) -> Expr:
    c, a, b = e.args
    if isinstance(c, Const):
        return a if c.value else b
    if a == b:
        return a
    if e.type is Type.BOOL:
        if isinstance(a, Const):
            return _node(apply("or", c, b)) if a.value else _node(apply("and", negate(c), b))
        if isinstance(b, Const):
            return _node(apply("or", negate(c), a)) if b.value else _node(apply("and", c, a))
    return e


_FOLD: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "min": min,
    "max": max,
    "clamp": lambda x, a, b: min(max(x, a), b),
    "exp": math.exp,
    "log": math.log,
    "log2": math.log2,
    "sqrt": math.sqrt,
    "tanh": math.tanh,
    "floor": lambda a: float(math.floor(a)),
    "sigmoid": lambda a: 1 / (1 + math.exp(-a)),
    "float": float,
    "int": lambda a: int(a),
}


def _folded(e: Apply) -> Expr:
    values = [_number(a) for a in e.args]
    if e.fn == "int" and e.args[0].type is Type.INT:
        return e.args[0]
    if e.fn == "float" and e.args[0].type is Type.FLOAT:
        return e.args[0]
    if e.fn not in _FOLD or e.type is Type.BOOL or any(v is None or v != v for v in values):
        return e
    try:
        out = _FOLD[e.fn](*values)
    except (ArithmeticError, ValueError):
        return e
    if not math.isfinite(out) or (e.type is Type.INT and not _fits(int(out))):
        return e
    return const(int(out)) if e.type is Type.INT else const(float(out))


_RULES: dict[str, Callable[[Apply], Expr]] = {
    **dict.fromkeys(("add", "sub", "neg", "mul", "div"), _sum),
    **dict.fromkeys(COMPARE, _compare),
    **dict.fromkeys(("and", "or"), _connective),
    **dict.fromkeys(("min", "max"), _extreme),
    "floordiv": _floordiv,
    "mod": _mod,
    "clamp": _clamp,
    "abs": _abs,
    "not": _not,
    "where": _where,
}
