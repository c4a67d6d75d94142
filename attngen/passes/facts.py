"""What is known about the ints of a spec before any call: signs, ranges, order.

Lengths are below 2**30, so positions, tile bounds and their differences fit an int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, atom, atoms_of, const, substitute, walk
from attngen.ir.functions import apply
from attngen.ir.linear import Q_IDX, SEQLEN_KV, SEQLEN_Q, Linear, expr_of, linear_of
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import Extreme, Table
from attngen.ir.types import Type

#: Lengths, and with them positions, are below this.
LENGTH_LIMIT = 2**30
INT32 = (-(2**31), 2**31 - 1)
Q_LO, Q_HI = atom("q_lo"), atom("q_hi")
#: What changes with the row of a tile, between which values.
ROWS: Mapping[str, tuple[Expr, Expr]] = {"q_idx": (Q_LO, Q_HI)}
_ROW_ATOMS = frozenset({"q_idx", "q_pos"})


@dataclass(frozen=True, slots=True)
class Facts:
    """Declared ranges of int params, the tensors and tables whose last axis never decreases, all tables, and what moves
    inside a tile: atoms and params by name, between which values (`q_pos` moves where `q_idx` does).
    """

    params: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    sorted: frozenset[str] = frozenset()
    tables: Mapping[str, Table] = field(default_factory=dict)
    #: Makes tables of the least and the greatest value over a tile, where no rule says them; None: there are none.
    extremes: Callable[[Load], tuple[Expr, Expr] | None] | None = field(default=None, compare=False)
    moving: Mapping[str, tuple[Expr, Expr]] = field(default_factory=lambda: ROWS)

    def with_tables(self, tables: Iterable[Table | Extreme]) -> Facts:
        """These facts and those of more tables of positions."""
        known = {**self.tables, **{t.name: t for t in tables if isinstance(t, Table)}}
        return replace(self, tables=known, sorted=self.sorted | {t.name for t in known.values() if t.sorted})


def facts_of(spec: AttentionSpec, tables: Iterable[Table | Extreme] = ()) -> Facts:
    """Read off the declarations, and off the tables of a form."""
    ranges = {}
    for p in spec.params:
        if p.type is Type.INT:
            low = INT32[0] if p.minimum is None else int(p.minimum)
            high = INT32[1] if p.maximum is None else int(p.maximum)
            ranges[p.name] = (low, high)
    return Facts(ranges, frozenset(t.name for t in spec.tensors if t.sorted)).with_tables(tables)


def reads_row(e: Expr) -> bool:
    """Does the value change with the query row?"""
    return not _ROW_ATOMS.isdisjoint(atoms_of(e))


def moves(e: Expr, facts: Facts) -> bool:
    """Does the value change inside a tile?"""
    names = {n.name for n in walk(e) if isinstance(n, Atom | Param)}
    return not names.isdisjoint(facts.moving) or ("q_pos" in names and "q_idx" in facts.moving)


def range_of(e: Expr, facts: Facts) -> tuple[int, int]:
    """Smallest and largest value of an int expression that its form shows, in unbounded integers."""
    if isinstance(e, Const):
        return int(e.value), int(e.value)
    if isinstance(e, Param):
        return facts.params.get(e.name, INT32)
    if isinstance(e, Atom):
        if e.name == "q_pos":
            return 1 - LENGTH_LIMIT, LENGTH_LIMIT - 2
        return (1 if e.name in ("batch", "heads_q", "heads_kv") else 0), LENGTH_LIMIT - 1
    if isinstance(e, Load):
        return (0, LENGTH_LIMIT - 1) if e.tensor in facts.tables else INT32
    if e.fn not in _RANGES:
        return INT32
    return _RANGES[e.fn](e, facts)


def _sum_range(total: Linear, facts: Facts) -> tuple[int, int]:
    low = high = total.const
    for t, c in total.terms.items():
        a, b = _product(t, facts) if isinstance(t, Apply) and t.fn == "mul" else range_of(t, facts)
        low, high = low + min(c * a, c * b), high + max(c * a, c * b)
    return low, high


def _product(e: Apply, facts: Facts) -> tuple[int, int]:
    a, b = (range_of(x, facts) for x in e.args)
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def _quotient(e: Apply, facts: Facts) -> tuple[int, int]:
    (low, high), (small, large) = (range_of(x, facts) for x in e.args)
    if small < 1:
        return min(low, -high, -abs(low)), max(high, -low, abs(high))
    corners = [x // d for x in (low, high) for d in (small, large)]
    return min(corners), max(corners)


def _remainder(e: Apply, facts: Facts) -> tuple[int, int]:
    small, large = range_of(e.args[1], facts)
    return min(small + 1, 0), max(large - 1, 0)


def _smaller(e: Apply, facts: Facts) -> tuple[int, int]:
    (a, b), (c, d) = (range_of(x, facts) for x in e.args)
    return min(a, c), min(b, d)


def _larger(e: Apply, facts: Facts) -> tuple[int, int]:
    (a, b), (c, d) = (range_of(x, facts) for x in e.args)
    return max(a, c), max(b, d)


def _branches(e: Apply, facts: Facts) -> tuple[int, int]:
    (a, b), (c, d) = (range_of(x, facts) for x in e.args[1:])
    return min(a, c), max(b, d)


def _magnitude(e: Apply, facts: Facts) -> tuple[int, int]:
    low, high = range_of(e.args[0], facts)
    return (0 if low <= 0 <= high else min(abs(low), abs(high))), max(abs(low), abs(high))


def _clamped(e: Apply, facts: Facts) -> tuple[int, int]:
    x, low, high = e.args
    return range_of(apply("min", apply("max", x, low), high), facts)


def _affine(e: Apply, facts: Facts) -> tuple[int, int]:
    return _sum_range(linear_of(e), facts)


_RANGES: dict[str, Callable[[Apply, Facts], tuple[int, int]]] = {
    **dict.fromkeys(("add", "sub", "neg", "mul"), _affine),
    "floordiv": _quotient,
    "mod": _remainder,
    "min": _smaller,
    "max": _larger,
    "clamp": _clamped,
    "abs": _magnitude,
    "where": _branches,
}


def is_positive(e: Expr, facts: Facts) -> bool:
    """Is an int expression at least 1, always?"""
    return range_of(e, facts)[0] >= 1


def proves_le(a: Expr, b: Expr, facts: Facts) -> bool:
    """Is a <= b for every row of every call? False says nothing."""
    return _nonnegative(linear_of(b) - linear_of(a), facts)


def _nonnegative(total: Linear, facts: Facts, depth: int = 8) -> bool:
    """Is the sum >= 0? Follows min/max and n * (x // n), then puts rows at the end that makes the sum smallest."""
    if depth:
        for t, c in total.terms.items():
            if isinstance(t, Load) and (edge := _of_own_run(t, c, facts)) is not None:
                if _nonnegative(total.with_term(t, edge), facts, depth - 1):
                    return True
                continue
            if not isinstance(t, Apply):
                continue
            if t.fn in ("min", "max"):
                cases = (_nonnegative(total.with_term(t, linear_of(x)), facts, depth - 1) for x in t.args)
                return all(cases) if (c > 0) == (t.fn == "min") else any(cases)
            found = _rounded_down(t, c, facts)
            if found is not None:
                x, n, k = found
                # k * (n * (x // n)) lies in [k * (x - n + 1), k * x] for k > 0
                value = linear_of(x) if k < 0 else linear_of(x) - linear_of(n) + 1
                if _nonnegative(total.without(t) + value * k, facts, depth - 1):
                    return True
    for t in (Q_HI, Q_LO, Q_IDX):
        c = total.terms.get(t, 0)
        if c < 0 and t is not Q_HI:
            total = total.with_term(t, Linear({SEQLEN_Q: 1}, -1))
        elif c > 0 and t is not Q_HI:
            total = total.without(t)
        elif c > 0:
            total = total.with_term(t, Linear({Q_LO: 1}))
    return _sum_range(total, facts)[0] >= 0


def _of_own_run(t: Load, c: int, facts: Facts) -> Linear | None:
    """What an element of a table cannot pass on the side that makes `c * t` small: first <= around < end.

    A position outside its tensor is clamped to it, and then this may not hold; a mask that reads there keeps nothing.
    """
    table = facts.tables.get(t.tensor)
    if table is None or table.around is None or (table.side == "end") != (c > 0):
        return None
    around = table.around
    if "seqlen_q" in table.dims:
        row = t.indices[-1]
        pos = apply("add", row, apply("sub", SEQLEN_KV, SEQLEN_Q))
        around = substitute(around, {"q_idx": row, "q_pos": pos})
    return linear_of(around) + (1 if table.side == "end" else 0)


def _rounded_down(t: Apply, c: int, facts: Facts) -> tuple[Expr, Expr, int] | None:
    """(x, n, k) where c * t is k * n * (x // n) with n >= 1."""
    if t.fn == "floordiv" and isinstance(t.args[1], Const):
        size = int(t.args[1].value)
        return (t.args[0], t.args[1], c // size) if size > 0 and c % size == 0 else None
    if t.fn == "mul":
        for quotient, n in (t.args, t.args[::-1]):
            if isinstance(quotient, Apply) and quotient.fn == "floordiv" and quotient.args[1] == n:
                return (quotient.args[0], n, c) if is_positive(n, facts) else None
    return None


def guarded(bound: Expr, facts: Facts) -> Expr:
    """`bound` (a lower or upper key bound) such that a huge param or tensor element cannot overflow it.

    Only where it lies in [0, seqlen_kv) does a bound matter. A kernel subtracts a column from it, so its least value
    keeps LENGTH_LIMIT from the end of an int32. A sum R ± p with one param or element p that may leave that range gets
    p limited to ±2**30, provided R + 2**30 >= seqlen_kv and R - 2**30 <= 0: there the bound is already past its end.
    A bound that is p alone is left to who subtracts from it (`emit.spell_mask`).
    With several unlimited params a sum that overflows at the element (`kv_idx + offset`) is the caller's fault; their
    difference wraps back to the right value.
    """
    total = linear_of(bound)
    low, high = _sum_range(total, facts)
    if INT32[0] + LENGTH_LIMIT <= low and high <= INT32[1]:
        return bound
    wide = _wide(total, facts)
    if wide is None:
        return bound
    rest = total.without(wide)
    if not rest.terms and not rest.const and total.terms[wide] == 1:
        return bound
    past_end = _nonnegative(rest + LENGTH_LIMIT - Linear({SEQLEN_KV: 1}), facts)
    before_start = _nonnegative(-rest + LENGTH_LIMIT, facts)
    return expr_of(_limited(total, wide, facts)) if past_end and before_start else bound


def compared(gap: Linear, facts: Facts) -> Linear:
    """A difference compared with 0, such that a huge param or tensor element cannot overflow a side of the comparison.

    `q_hi + seqlen_kv < seqlen_q + n`: where the rest stays within ±2**30, n limited to that decides alike.
    """
    sides = (
        Linear({t: abs(c) for t, c in gap.terms.items() if (c > 0) == positive}, abs(gap.const))
        for positive in (False, True)
    )
    if all(INT32[0] <= low and high <= INT32[1] for low, high in (_sum_range(s, facts) for s in sides)):
        return gap
    wide = _wide(gap, facts)
    if wide is None:
        return gap
    rest = gap.without(wide)
    for end in (Q_LO, Q_HI):  # the last row of a tile is a row as well
        rest = rest.with_term(end, Linear({Q_IDX: 1})) if end in rest.terms else rest
    inside = all(_nonnegative(x + LENGTH_LIMIT, facts) for x in (rest, -rest))
    return _limited(gap, wide, facts) if inside else gap


def _wide(total: Linear, facts: Facts) -> Expr | None:
    """The only param or element of a sum that may pass ±2**30, if it stands there once and nowhere else."""
    wide = [t for t in total.terms if isinstance(t, Param | Load) and _exceeds(range_of(t, facts))]
    if len(wide) != 1 or abs(total.terms[wide[0]]) != 1:
        return None
    if any(wide[0] in walk(t) for t in total.without(wide[0]).terms):  # block * (x // block) + block stays near x
        return None
    return wide[0]


def _limited(total: Linear, wide: Expr, facts: Facts) -> Linear:
    """The sum with one of its terms limited to ±2**30."""
    small, large = range_of(wide, facts)
    limited = wide
    if small < -LENGTH_LIMIT:
        limited = apply("max", limited, const(-LENGTH_LIMIT))
    if large > LENGTH_LIMIT:
        limited = apply("min", limited, const(LENGTH_LIMIT))
    return total.with_term(wide, Linear({limited: 1}))


def may_underflow(bound: Expr, facts: Facts) -> bool:
    """Could `bound` less a column leave an int32? Only a bound that no row needs is so small: 0 does as well."""
    if isinstance(bound, Apply) and bound.fn in ("min", "max", "where"):
        values = (may_underflow(a, facts) for a in bound.args if a.type is Type.INT)
        return all(values) if bound.fn == "max" else any(values)
    total = linear_of(bound)
    for t, c in total.terms.items():
        low, high = _product(t, facts) if isinstance(t, Apply) and t.fn == "mul" else range_of(t, facts)
        if min(c * low, c * high) < -LENGTH_LIMIT:
            return True
    return False


def _exceeds(bounds: tuple[int, int]) -> bool:
    return bounds[0] < -LENGTH_LIMIT or bounds[1] > LENGTH_LIMIT
