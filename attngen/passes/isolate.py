"""Isolation: int comparisons solved for `kv_idx`.

Every rewrite holds for each value of the other terms; divisors and factors must be known positive. What comes out is
`kv_idx < e` or `kv_idx >= e` with `e` free of `kv_idx`, joined by `and`/`or`, beside the comparisons that resist.
"""

from __future__ import annotations

from dataclasses import dataclass

from attngen.ir.expr import Apply, Expr, Load
from attngen.ir.functions import apply
from attngen.ir.linear import COMPARE, KV_IDX, Linear, compare, expr_of, linear_of
from attngen.ir.simplify import simplify
from attngen.ir.types import Type
from attngen.passes.facts import Facts, guarded, is_positive
from attngen.passes.lookups import Lookups
from attngen.passes.nnf import SPLIT_LIMIT, reads_key


def isolate(e: Expr, facts: Facts, lookups: Lookups | None = None) -> Expr:
    """Solve every int comparison of a formula in negation normal form; others stay as they are.

    `lookups` collects the tables by which elements of sorted tensors at the key are solved; None: they are not.
    """
    if not reads_key(e) or not isinstance(e, Apply):
        return e
    if e.fn in ("and", "or"):
        return _rejoined(e, tuple(isolate(a, facts, lookups) for a in e.args))
    if e.fn in COMPARE and e.args[0].type is Type.INT:
        solved = _solve(e, _Known(facts.with_tables(lookups.tables) if lookups else facts, lookups))
        return e if solved is None else simplify(solved)
    return e


@dataclass(slots=True)
class _Known:
    """What a comparison is solved with: the facts, and how many more min, max and abs may be taken apart."""

    facts: Facts
    lookups: Lookups | None = None
    splits: int = SPLIT_LIMIT


def _rejoined(e: Apply, args: tuple[Expr, ...]) -> Expr:
    """`e` over new operands."""
    return e if args == e.args else e.replace(args=args)


def _solve(e: Apply, known: _Known) -> Expr | None:
    gap = linear_of(e.args[0]) - linear_of(e.args[1])
    if e.fn in ("eq", "ne"):
        shift, fn = (0, "and") if e.fn == "eq" else (1, "or")
        low, high = _at_most_zero(gap + shift, known), _at_most_zero(-gap + shift, known)
        if low is None and high is None:
            return None
        return apply(fn, low or compare("le", gap + shift), high or compare("le", -gap + shift), span=e.span)
    gap = gap if e.fn in ("lt", "le") else -gap
    return _at_most_zero(gap + (1 if e.fn in ("lt", "gt") else 0), known)


def _or_raw(gap: Linear, known: _Known) -> Expr:
    solved = _at_most_zero(gap, known)
    return compare("le", gap) if solved is None else solved


def _at_most_zero(gap: Linear, known: _Known) -> Expr | None:
    """`gap <= 0` solved for the key; None where no rule applies."""
    keyed = [t for t in gap.terms if reads_key(t)]
    if not keyed:
        return compare("le", gap)
    for t in keyed:
        pieces = _pieces(t) if isinstance(t, Apply) else None
        if pieces is not None:
            if not known.splits:
                return None
            known.splits -= 1
            fn, values = pieces
            # min(a, b) <= u: one of them; max(a, b) <= u: both; >= u the other way round
            join = "or" if (fn == "min") == (gap.terms[t] > 0) else "and"
            first, second = (_or_raw(gap.with_term(t, v), known) for v in values)
            return apply(join, first, second)
    if len(keyed) > 1:
        return None
    (t,) = keyed
    factor, rest = gap.terms[t], gap.without(t)
    if factor > 0:
        return _bound(t, False, _quotient(-rest, factor), known)
    return _bound(t, True, _quotient(rest + -1, -factor) + 1 if factor < -1 else rest, known)


def _quotient(total: Linear, n: int) -> Linear:
    """total // n for a constant n >= 1."""
    if n == 1:
        return total
    out = simplify(apply("floordiv", expr_of(total), expr_of(Linear({}, n))))
    return linear_of(out)


def _times(total: Linear, n: Expr) -> Linear:
    """total * n, the constant part apart: (b + 1) * n is b * n + n."""
    moving = Linear(total.terms)
    product = linear_of(simplify(apply("mul", expr_of(moving), n))) if moving.terms else Linear({})
    return product + linear_of(n) * total.const


def _pieces(t: Apply) -> tuple[str, tuple[Linear, Linear]] | None:
    """(min | max, values) for a term that is the extreme of two."""
    if t.fn in ("min", "max"):
        a, b = t.args
        return t.fn, (linear_of(a), linear_of(b))
    if t.fn == "abs":
        x = linear_of(t.args[0])
        return "max", (x, -x)
    if t.fn == "clamp":
        inner, low, high = t.args
        return "min", (linear_of(apply("max", inner, low)), linear_of(high))
    return None


def _bound(t: Expr, at_least: bool, value: Linear, known: _Known) -> Expr | None:
    """`t >= value` or `t <= value`, solved for the key."""
    if t == KV_IDX:
        if at_least:
            return apply("ge", KV_IDX, guarded(expr_of(value), known.facts))
        return apply("lt", KV_IDX, guarded(expr_of(value + 1), known.facts))
    if isinstance(t, Load):
        return _looked_up(t, at_least, value, known)
    if not isinstance(t, Apply):
        return None
    if t.fn == "floordiv" and not reads_key(t.args[1]) and is_positive(t.args[1], known.facts):
        dividend, n = linear_of(t.args[0]), t.args[1]
        start = _times(value, n)
        # x // n >= value iff x >= value * n;  x // n <= value iff x < value * n + n
        return _at_most_zero(start - dividend if at_least else dividend - start - linear_of(n) + 1, known)
    if t.fn == "mul":
        for x, n in (t.args, t.args[::-1]):
            if reads_key(n) or not is_positive(n, known.facts):
                continue
            if not value.terms and value.const == (0 if at_least else -1):
                # the sign of x * n is the sign of x
                return _at_most_zero(-linear_of(x) if at_least else linear_of(x) + 1, known)
            if at_least:
                edge = linear_of(apply("floordiv", expr_of(value + -1), n)) + 1
                return _at_most_zero(edge - linear_of(x), known)
            return _at_most_zero(linear_of(x) - linear_of(apply("floordiv", expr_of(value), n)), known)
    return None


def _looked_up(t: Load, at_least: bool, value: Linear, known: _Known) -> Expr | None:
    """An element of a sorted tensor at the key against a value of the row: a position of the tensor against its index.

    t[i] >= value iff i >= (elements below value);  t[i] <= value iff i < (elements at most value)
    """
    if known.lookups is None:
        return None
    # t >= x + 1 iff t > x: of the two sides of `first` and `end`, the one whose value is the spec's own
    past = value.const == (1 if at_least else -1)
    value = value + -value.const if past else value
    found = known.lookups.position(t, expr_of(value), "first" if at_least != past else "end", known.facts)
    if found is None:
        return None
    known.facts = known.facts.with_tables(known.lookups.tables)
    edge, index = linear_of(found), linear_of(t.indices[-1])
    return _at_most_zero(edge - index if at_least else index - edge + 1, known)
