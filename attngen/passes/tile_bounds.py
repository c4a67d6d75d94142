"""Interval arithmetic over the rows q_lo..q_hi of a tile: the least and largest value of an expression, as expressions.

Sound always. Exact (attained at q_lo or q_hi) for compositions of functions that are monotone in the row. A tensor
element is bounded where no index depends on the row, and for a `sorted` tensor whose last index is monotone in it; any
other int or bool element by tables of its least and greatest value over blocks of rows, where the caller has some. The
caller clips q_hi to seqlen_q - 1 and clamps indices into their tensor: an index that is outside belongs to a row that
keeps nothing (else the mask itself would read outside), and a clamped index stays monotone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from attngen.ir.expr import Apply, Atom, Expr, Load, Param, const
from attngen.ir.forms import Clause, TileBounds
from attngen.ir.functions import apply
from attngen.ir.linear import COMPARE, SEQLEN_KV, SEQLEN_Q, Linear, compare, expr_of, linear_of
from attngen.ir.simplify import FALSE, TRUE, negate, simplify
from attngen.ir.types import Type
from attngen.passes.facts import Facts, compared, is_positive, moves, proves_le, range_of

_ZERO = const(0)
#: Float functions that rounding keeps monotone in a kernel (approximate ones such as exp are not certain to be).
_INCREASING = frozenset({"floor", "float", "int"})


@dataclass(frozen=True, slots=True)
class Bounds:
    """`low <= value <= high` on every row of the tile; None: unknown."""

    low: Expr | None
    high: Expr | None

    @property
    def negated(self) -> Bounds:
        """Of the negative value."""
        return Bounds(_neg(self.high), _neg(self.low))


UNKNOWN = Bounds(None, None)


def _neg(e: Expr | None) -> Expr | None:
    return None if e is None else simplify(apply("neg", e))


def _map(fn: str, *args: Expr | None) -> Expr | None:
    """`fn` of the args; None where one is unknown."""
    known = [a for a in args if a is not None]
    return simplify(apply(fn, *known)) if len(known) == len(args) else None


def bounds_of(e: Expr, facts: Facts) -> Bounds:
    """Bounds of an int or float expression; of what moves (`Facts.moving`), it reads rows only, or rows and keys."""
    if not moves(e, facts):
        return Bounds(e, e)
    if isinstance(e, Atom | Param):
        if e.name in facts.moving:
            return Bounds(*facts.moving[e.name])
        low, high = facts.moving["q_idx"]
        shift = apply("sub", SEQLEN_KV, SEQLEN_Q)
        return Bounds(_map("add", low, shift), _map("add", high, shift))
    if isinstance(e, Load):
        return _load(e, facts)
    if not isinstance(e, Apply):
        return UNKNOWN
    if e.type is Type.INT and e.fn in ("add", "sub", "neg", "mul"):
        total = linear_of(e)
        if total.terms != {e: 1}:
            return _sum(total, facts)
    if e.fn == "where":
        return _where(e, facts)
    if e.fn == "mod":
        return _mod(e, facts)
    args = [bounds_of(a, facts) for a in e.args]
    if e.fn in _INCREASING or e.fn in ("min", "max", "clamp", "add"):
        lows, highs = [a.low for a in args], [a.high for a in args]
        if e.fn in ("min", "max"):
            return Bounds(_extreme(e.fn, lows), _extreme(e.fn, highs))
        return Bounds(_map(e.fn, *lows), _map(e.fn, *highs))
    if e.fn == "neg":
        return args[0].negated
    if e.fn == "sub":
        return Bounds(_map("sub", args[0].low, args[1].high), _map("sub", args[0].high, args[1].low))
    if e.fn == "abs":
        x, y = args[0], args[0].negated
        zero = _ZERO if e.type is Type.INT else const(0.0)
        return Bounds(_extreme("max", [x.low, y.low, zero]), _extreme("max", [x.high, y.high]))
    if e.fn in ("mul", "floordiv", "div"):
        return _scaled(e, args, facts)
    return UNKNOWN


def _extreme(fn: str, values: list[Expr | None]) -> Expr | None:
    return simplify(reduce(lambda a, b: apply(fn, a, b), known)) if (known := _all(values)) else None


def _all(values: list[Expr | None]) -> list[Expr]:
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) else []


def _sum(total: Linear, facts: Facts) -> Bounds:
    low: Linear | None = Linear({}, total.const)
    high = low
    for t, c in total.terms.items():
        b = bounds_of(t, facts)
        small, large = (b.low, b.high) if c > 0 else (b.high, b.low)
        low = None if low is None or small is None else low + linear_of(small) * c
        high = None if high is None or large is None else high + linear_of(large) * c
    return Bounds(None if low is None else expr_of(low), None if high is None else expr_of(high))


def _load(e: Load, facts: Facts) -> Bounds:
    if e.tensor in facts.sorted and not any(moves(i, facts) for i in e.indices[:-1]):
        last = bounds_of(e.indices[-1], facts)
        if last.low is not None and last.high is not None:
            low, high = (e.replace(indices=(*e.indices[:-1], x)) for x in (last.low, last.high))
            return Bounds(low, high)
    found = facts.extremes(e) if facts.extremes is not None and e.type is Type.INT else None
    return UNKNOWN if found is None else Bounds(*found)


def _where(e: Apply, facts: Facts) -> Bounds:
    certain, possible = truth_of(e.args[0], facts)
    yes, no = (bounds_of(a, facts) for a in e.args[1:])

    def pick(fn: str, a: Expr | None, b: Expr | None) -> Expr | None:
        if a is None or b is None:
            return None
        if certain == possible:
            return simplify(apply("where", certain, a, b))
        return simplify(apply("where", certain, a, apply("where", possible, apply(fn, a, b), b)))

    return Bounds(pick("min", yes.low, no.low), pick("max", yes.high, no.high))


def _mod(e: Apply, facts: Facts) -> Bounds:
    n = e.args[1]
    if moves(n, facts):
        return UNKNOWN
    top = simplify(apply("sub", n, const(1)))
    if is_positive(n, facts):
        return Bounds(_ZERO, top)
    return Bounds(_map("min", _map("add", n, const(1)), _ZERO), _map("max", top, _ZERO))


def _scaled(e: Apply, args: list[Bounds], facts: Facts) -> Bounds:
    """Product or quotient: monotone in the row where the other factor does not change with it."""
    a, b = args
    factor, moving = e.args[1], a
    if e.fn == "mul" and not moves(e.args[0], facts):
        factor, moving = e.args[0], b
    if not moves(factor, facts):
        ends = [_map(e.fn, moving.low, factor), _map(e.fn, moving.high, factor)]
        sign = _sign(factor, facts)
        if sign > 0:
            return Bounds(ends[0], ends[1])
        if sign < 0:
            return Bounds(ends[1], ends[0])
        return Bounds(_extreme("min", ends), _extreme("max", ends)) if e.type is Type.INT else UNKNOWN
    if e.fn != "mul" or e.type is not Type.INT:
        return UNKNOWN
    corners = [_map("mul", x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Bounds(_extreme("min", corners), _extreme("max", corners))


def _sign(e: Expr, facts: Facts) -> int:
    if e.type is Type.FLOAT:
        value = getattr(e, "value", 0.0)
        return (value > 0) - (value < 0)
    low, high = range_of(e, facts)
    return 1 if low >= 0 else -1 if high < 0 else 0


def truth_of(e: Expr, facts: Facts) -> tuple[Expr, Expr]:
    """(holds all over the tile, may hold somewhere in it), as bool expressions."""
    if not moves(e, facts):
        return e, e
    if isinstance(e, Param) and e.name in facts.moving:
        return facts.moving[e.name]
    if isinstance(e, Load) and facts.extremes is not None and (found := facts.extremes(e)) is not None:
        return apply("ne", found[0], _ZERO), apply("ne", found[1], _ZERO)
    if isinstance(e, Apply):
        a = e.args
        if e.fn == "not":
            certain, possible = truth_of(a[0], facts)
            return negate(possible), negate(certain)
        if e.fn in ("and", "or"):
            (c1, p1), (c2, p2) = (truth_of(x, facts) for x in a)
            return simplify(apply(e.fn, c1, c2)), simplify(apply(e.fn, p1, p2))
        if e.fn == "where":
            both = apply("and", a[0], a[1]), apply("and", negate(a[0]), a[2])
            return truth_of(apply("or", *both), facts)
        if e.fn in COMPARE and a[0].type is not Type.BOOL:
            return _compare_truth(e, facts)
        if e.fn in ("eq", "ne"):
            same = apply("and", *a), apply("and", *(negate(x) for x in a))
            certain, possible = truth_of(apply("or", *same), facts)
            return (certain, possible) if e.fn == "eq" else (negate(possible), negate(certain))
    return FALSE, TRUE


def _compare_truth(e: Apply, facts: Facts) -> tuple[Expr, Expr]:
    a, b = e.args
    if e.fn == "ne":
        certain, possible = _compare_truth(apply("eq", a, b), facts)  # type: ignore[arg-type]
        return negate(possible), negate(certain)
    if a.type is Type.FLOAT:
        x, y = bounds_of(a, facts), bounds_of(b, facts)
        if e.fn == "eq":
            return FALSE, TRUE
        if e.fn in ("gt", "ge"):
            x, y = x.negated, y.negated
        fn = {"gt": "lt", "ge": "le"}.get(e.fn, e.fn)
        return _map(fn, x.high, y.low) or FALSE, _map(fn, x.low, y.high) or TRUE
    gap = _sum(linear_of(a) - linear_of(b), facts)
    low, high = (None if x is None else compared(linear_of(x), facts) for x in (gap.low, gap.high))
    if e.fn == "eq":
        certain = FALSE if low is None or high is None else apply("and", compare("ge", low), compare("le", high))
        parts = [TRUE if low is None else compare("le", low), TRUE if high is None else compare("ge", high)]
        return simplify(certain), simplify(apply("and", *parts))
    first, last = (high, low) if e.fn in ("lt", "le") else (low, high)
    return (
        FALSE if first is None else simplify(compare(e.fn, first)),
        TRUE if last is None else simplify(compare(e.fn, last)),
    )


def tile_bounds(clause: Clause, facts: Facts) -> TileBounds:
    """Bounds of one clause, clamped to [0, seqlen_kv] and folded with its row condition (forms.TileBounds)."""
    lower = Bounds(_ZERO, _ZERO) if clause.lower is None else bounds_of(clause.lower, facts)
    upper = Bounds(SEQLEN_KV, SEQLEN_KV) if clause.upper is None else bounds_of(clause.upper, facts)
    certain, possible = (TRUE, TRUE) if clause.rows is None else truth_of(clause.rows, facts)
    if clause.residual is not None:
        certain = FALSE
    return TileBounds(
        lower_min=clamped(lower.low, _ZERO, facts),
        lower_max=clamped(lower.high, SEQLEN_KV, facts),
        upper_min=simplify(apply("where", certain, clamped(upper.low, _ZERO, facts), _ZERO)),
        upper_max=simplify(apply("where", possible, clamped(upper.high, SEQLEN_KV, facts), _ZERO)),
    )


def clamped(e: Expr | None, unknown: Expr, facts: Facts) -> Expr:
    """`min(max(e, 0), seqlen_kv)` without the limits that it cannot pass."""
    if e is None:
        return unknown
    e = pruned(e, facts)
    if not proves_le(_ZERO, e, facts):
        e = apply("max", e, _ZERO)
    if not proves_le(e, SEQLEN_KV, facts):
        e = apply("min", e, SEQLEN_KV)
    return simplify(e)


def pruned(e: Expr, facts: Facts) -> Expr:
    """Drop arguments of min/max that another one makes redundant."""
    if isinstance(e, Apply) and e.fn in ("min", "max"):
        a, b = (pruned(x, facts) for x in e.args)
        if proves_le(a, b, facts):
            return a if e.fn == "min" else b
        if proves_le(b, a, facts):
            return b if e.fn == "min" else a
        return apply(e.fn, a, b)
    return e
