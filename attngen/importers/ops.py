"""torch's functions in the language: one row a name, for functions, methods and operators alike.

A row takes operands that are already values. What torch does to 0-dimensional tensors of bool, int32 and float32 is the
meaning: bools count as 0 and 1 in arithmetic, `/` is a float, `//` and `%` floor, float meets int as a float.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from attngen.importers.value import (
    Untraceable,
    Value,
    alive,
    as_bool,
    as_float,
    as_number,
    both,
    call,
    choose,
    dead_of,
    either,
    finite,
    gone,
    literal,
    negated,
    with_dead,
)
from attngen.ir.types import Type


def arithmetic(fn: str, *values: Value) -> Value:
    """An operator of the language after torch's promotion of bools."""
    return call(fn, *(as_number(v) for v in values))


def add(a: Value, b: Value) -> Value:
    if a.type is b.type is Type.BOOL:
        return either(a, b)
    dead = either(dead_of(a), dead_of(b))
    return with_dead(arithmetic("add", alive(a), alive(b)), dead)


def sub(a: Value, b: Value) -> Value:
    finite(b, "the right side of `-`")
    return with_dead(arithmetic("sub", alive(a), b), dead_of(a))


def mul(a: Value, b: Value) -> Value:
    if a.type is b.type is Type.BOOL:
        return both(a, b)
    for x, factor in ((a, b), (b, a)):
        value = factor.constant
        if x.dead is not None and value is not None and value > 0:
            return with_dead(arithmetic("mul", alive(a), alive(b)), x.dead)
    return arithmetic("mul", a, b)


def div(a: Value, b: Value) -> Value:
    divisor = b.constant
    if a.dead is not None and divisor is not None and divisor > 0:
        return with_dead(arithmetic("div", alive(a), b), a.dead)
    return _nonzero(arithmetic, "div", a, b)


def floordiv(a: Value, b: Value) -> Value:
    a, b = as_number(a), as_number(b)
    if a.type is b.type is Type.INT:
        return _nonzero(call, "floordiv", a, b)
    return call("floor", _nonzero(call, "div", a, b))


def mod(a: Value, b: Value) -> Value:
    a, b = as_number(a), as_number(b)
    if a.type is b.type is Type.INT:
        return _nonzero(call, "mod", a, b)
    return call("sub", a, call("mul", b, call("floor", _nonzero(call, "div", a, b))))


def _nonzero(build: Callable[..., Value], fn: str, a: Value, b: Value) -> Value:
    if b.constant == 0:
        raise Untraceable("E0701", "this divides by zero", "divide by another number; a key is taken out by the mask")
    return build(fn, a, b)


def power(a: Value, b: Value) -> Value:
    """Whole exponents by products, a base that is a positive number by exp, otherwise exp(b log a) for a > 0."""
    a, b = as_number(a), as_number(b)
    exponent, base = b.constant, a.constant
    if exponent is not None and float(exponent).is_integer() and abs(exponent) <= 16:
        n = int(exponent)
        one = literal(1.0 if Type.FLOAT in (a.type, b.type) else 1)
        if n < 0 and one.type is Type.INT:
            raise Untraceable("E0701", "an int has no negative power", "convert it to float first")
        whole = one if n == 0 else as_float(a) if one.type is Type.FLOAT else a
        for _ in range(abs(n) - 1):
            whole = call("mul", whole, a)
        return call("div", literal(1.0), whole) if n < 0 else whole
    if exponent == 0.5:
        return call("sqrt", a)
    if exponent == -0.5:
        return call("div", literal(1.0), call("sqrt", a))
    if base is not None and base > 0 and b.type is Type.FLOAT:
        return call("exp", call("mul", b, literal(math.log(base))))
    if base is not None and base > 0:
        if isinstance(base, float):
            return call("exp", call("mul", as_float(b), literal(math.log(base))))
        raise Untraceable(
            "E0701",
            f"{base} to a power that is a traced int",
            "write a float base (`2.0 ** h`), or capture a table of the powers",
            notes=("torch computes it in ints; the language has powers of floats",),
        )
    raise Untraceable(
        "E0701", "a power of which neither side is a number", "write exp(b * log(a)), or products, as it is meant"
    )


def least(a: Value, b: Value) -> Value:
    dead = either(dead_of(a), dead_of(b))
    return with_dead(arithmetic("min", alive(a), alive(b)), dead)


def most(a: Value, b: Value) -> Value:
    if gone(a) or gone(b):
        return as_float(b if gone(a) else a)
    return arithmetic("max", a, b)


def clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    if low is None and high is None:
        return x
    if low is None or gone(low):
        return x if high is None else least(x, high)
    return most(x, low) if high is None else arithmetic("clamp", x, low, high)


def bitwise(word: str, a: Value, b: Value) -> Value:
    """`&`, `|` and `^`: of bools; `&` of an int with 2**n - 1 is a remainder."""
    if a.type is b.type is Type.BOOL:
        return both(a, b) if word == "&" else either(a, b) if word == "|" else call("ne", a, b)
    for x, m in ((a, b), (b, a)):
        bits = m.constant
        low_bits = isinstance(bits, int) and bits >= 0 and bits & (bits + 1) == 0
        if word == "&" and x.type is m.type is Type.INT and low_bits:
            return call("mod", x, literal(int(bits or 0) + 1))
    raise Untraceable(
        "E0701",
        f"`{word}` of {a.type} and {b.type}",
        "compare ints before joining them, `(a > 0) & (b > 0)`; bit tricks are written with // and %",
        notes=("comparisons bind looser than & and |: each needs parentheses of its own",),
    )


def invert(a: Value) -> Value:
    if a.type is not Type.BOOL:
        raise Untraceable("E0701", f"`~` of {a.type}", "write `~` of a condition: `~(a > 0)`")
    return negated(a)


def shift(word: str, a: Value, b: Value) -> Value:
    count = b.constant
    if not isinstance(count, int) or not 0 <= count < 31 or a.type is not Type.INT:
        raise Untraceable("E0701", f"`{word}` by what is no number", "multiply or floor-divide")
    return call("floordiv" if word == ">>" else "mul", a, literal(1 << count))


def truncated(a: Value) -> Value:
    return call("float", call("int", a)) if a.type is Type.FLOAT else a


def rounded_down(a: Value) -> Value:
    a = as_number(a)
    return call("floor", a) if a.type is Type.FLOAT else a


def divided(a: Value, b: Value, mode: object) -> Value:
    """torch.div with a rounding mode."""
    if mode is None:
        return div(a, b)
    if mode == "floor":
        return floordiv(a, b)
    quotient = call("int", div(a, b))
    return quotient if as_number(a).type is as_number(b).type is Type.INT else as_float(quotient)


def to_int(a: Value) -> Value:
    a = as_number(a)
    return call("int", a) if a.type is Type.FLOAT else a


def _one(fn: str) -> Callable[[Value], Value]:
    return lambda a: arithmetic(fn, a)


def _two(fn: str) -> Callable[[Value, Value], Value]:
    return lambda a, b: arithmetic(fn, a, b)


def _same(fn: str) -> Callable[[Value, Value], Value]:
    """Comparison for equality, of bools too."""
    return lambda a, b: call(fn, a, b) if a.type is b.type else arithmetic(fn, a, b)


def _scaled(fn: str, by: float) -> Callable[[Value], Value]:
    """`fn` in another base: exp(x by), or log(x) by."""
    if fn == "exp":
        return lambda a: call("exp", call("mul", as_float(a), literal(by)))
    return lambda a: call("mul", arithmetic(fn, a), literal(by))


def _log_sigmoid(a: Value) -> Value:
    return call("neg", call("softplus", call("neg", as_float(a))))


_LN2 = math.log(2.0)
ONE: dict[str, Callable[[Value], Value]] = {
    "neg": _one("neg"), "negative": _one("neg"), "positive": as_number,
    "abs": _one("abs"), "absolute": _one("abs"), "fabs": _one("abs"),
    "exp": _one("exp"), "exp2": _scaled("exp", _LN2), "expm1": lambda a: sub(arithmetic("exp", a), literal(1.0)),
    "log": _one("log"), "log2": _one("log2"), "log10": _scaled("log", 1 / math.log(10.0)),
    "log1p": lambda a: arithmetic("log", add(literal(1.0), a)),
    "sqrt": _one("sqrt"), "rsqrt": lambda a: call("div", literal(1.0), arithmetic("sqrt", a)),
    "square": lambda a: arithmetic("mul", a, a), "reciprocal": lambda a: arithmetic("div", literal(1.0), a),
    "tanh": _one("tanh"), "sigmoid": _one("sigmoid"), "expit": _one("sigmoid"),
    "logsigmoid": _log_sigmoid, "log_sigmoid": _log_sigmoid,
    "relu": lambda a: most(a, literal(0.0 if a.type is Type.FLOAT else 0)),
    "silu": lambda a: mul(as_float(a), arithmetic("sigmoid", a)),
    "floor": rounded_down, "ceil": lambda a: a if a.type is Type.INT else call("neg", call("floor", call("neg", a))),
    "trunc": truncated, "fix": truncated,
    "sign": lambda a: choose(arithmetic("gt", a, literal(0)), literal(1),
                             choose(arithmetic("lt", a, literal(0)), literal(-1), literal(0))),
    "logical_not": lambda a: negated(as_bool(a)), "bitwise_not": invert, "invert": invert,
    "float": as_float, "double": as_float, "int": to_int, "long": to_int, "short": to_int, "bool": as_bool,
}  # fmt: skip
TWO: dict[str, Callable[[Value, Value], Value]] = {
    "add": add, "sub": sub, "subtract": sub, "mul": mul, "multiply": mul,
    "radd": lambda a, b: add(b, a), "rsub": lambda a, b: sub(b, a), "rmul": lambda a, b: mul(b, a),
    "truediv": div, "true_divide": div, "rdiv": lambda a, b: div(b, a), "rtruediv": lambda a, b: div(b, a),
    "floordiv": floordiv, "floor_divide": floordiv, "rfloordiv": lambda a, b: floordiv(b, a),
    "remainder": mod, "mod": mod, "rmod": lambda a, b: mod(b, a),
    "pow": power, "float_power": lambda a, b: power(as_float(a), b), "rpow": lambda a, b: power(b, a),
    "minimum": least, "fmin": least, "maximum": most, "fmax": most,
    "lt": _two("lt"), "le": _two("le"), "gt": _two("gt"), "ge": _two("ge"), "eq": _same("eq"), "ne": _same("ne"),
    "less": _two("lt"), "less_equal": _two("le"), "greater": _two("gt"), "greater_equal": _two("ge"),
    "not_equal": _same("ne"),
    "and": lambda a, b: bitwise("&", a, b), "rand": lambda a, b: bitwise("&", b, a),
    "or": lambda a, b: bitwise("|", a, b), "ror": lambda a, b: bitwise("|", b, a),
    "xor": lambda a, b: bitwise("^", a, b), "rxor": lambda a, b: bitwise("^", b, a),
    "bitwise_and": lambda a, b: bitwise("&", a, b), "bitwise_or": lambda a, b: bitwise("|", a, b),
    "bitwise_xor": lambda a, b: bitwise("^", a, b),
    "logical_and": lambda a, b: both(as_bool(a), as_bool(b)), "logical_or": lambda a, b: either(as_bool(a), as_bool(b)),
    "logical_xor": lambda a, b: call("ne", as_bool(a), as_bool(b)),
    "lshift": lambda a, b: shift("<<", a, b), "bitwise_left_shift": lambda a, b: shift("<<", a, b),
    "rshift": lambda a, b: shift(">>", a, b), "bitwise_right_shift": lambda a, b: shift(">>", a, b),
}  # fmt: skip
