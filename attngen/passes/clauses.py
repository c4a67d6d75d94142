"""Clauses: a formula over solved literals as an OR of key intervals, joined where that can be proved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

from attngen.ir.expr import Apply, Expr, const
from attngen.ir.forms import Clause
from attngen.ir.functions import apply
from attngen.ir.linear import KV_IDX, SEQLEN_KV, linear_of
from attngen.ir.simplify import FALSE, TRUE, negate, simplify
from attngen.passes.facts import Facts, proves_le
from attngen.passes.nnf import reads_key

MAX_CLAUSES = 8
#: Drafts compared pairwise; more of them than this are not tried.
MAX_DRAFTS = 4 * MAX_CLAUSES
#: Conjuncts that may fail to distribute before the rest is left whole.
MAX_FAILURES = 4
#: Bounds of one side of a draft among which redundant ones are looked for.
MAX_BOUNDS = 12
_ZERO = const(0)


@dataclass(frozen=True, slots=True)
class Draft:
    """A clause in the making: all of `lowers`, `uppers`, `rows` and `residual` hold."""

    lowers: tuple[Expr, ...] = ()
    uppers: tuple[Expr, ...] = ()
    rows: tuple[Expr, ...] = ()
    residual: tuple[Expr, ...] = ()

    def meet(self, other: Draft) -> Draft:
        """Both hold."""
        return Draft(
            lowers=self.lowers + other.lowers,
            uppers=self.uppers + other.uppers,
            rows=self.rows + other.rows,
            residual=self.residual + other.residual,
        )


def clauses_of(formula: Expr, facts: Facts) -> tuple[list[Draft], list[Expr]]:
    """The drafts whose OR is `formula`, at most MAX_CLAUSES, and the terms left whole because there were more."""
    whole: list[Expr] = []
    return _distribute(formula, facts, whole), whole


def _distribute(e: Expr, facts: Facts, whole: list[Expr]) -> list[Draft]:
    if not isinstance(e, Apply) or not reads_key(e) or e.fn not in ("and", "or"):
        return _tidy([_literal(e)], facts)
    terms = list(_operands(e, e.fn))
    parts = [_distribute(t, facts, whole) for t in terms]
    if e.fn == "or":
        drafts = [d for part in parts for d in part]
        if len(drafts) <= MAX_DRAFTS and len(out := _tidy(drafts, facts)) <= MAX_CLAUSES:
            return out
        whole.append(e)
        return [Draft(residual=(e,))]
    single = reduce(Draft.meet, (part[0] for part in parts if len(part) == 1), Draft())
    out = _tidy([single], facts) if all(parts) else []
    failures = 0
    for term, part in zip(terms, parts, strict=True):
        if len(part) <= 1:
            continue
        if failures < MAX_FAILURES:
            product = _tidy([d.meet(p) for d in out for p in part], facts)
            if len(product) <= MAX_CLAUSES:
                out = product
                continue
        failures += 1
        whole.append(term)
        out = [replace(d, residual=(*d.residual, term)) for d in out]
    return _tidy(out, facts)


def _operands(e: Expr, fn: str) -> Iterable[Expr]:
    if isinstance(e, Apply) and e.fn == fn:
        for a in e.args:
            yield from _operands(a, fn)
    else:
        yield e


def _literal(e: Expr) -> Draft:
    if not reads_key(e):
        return Draft(rows=tuple(_operands(e, "and")))
    if isinstance(e, Apply) and e.args[0] == KV_IDX and not reads_key(e.args[1]):
        if e.fn == "lt":
            return Draft(uppers=tuple(_operands(e.args[1], "min")))
        if e.fn == "ge":
            return Draft(lowers=tuple(_operands(e.args[1], "max")))
    return Draft(residual=(e,))


def _tidy(drafts: Iterable[Draft], facts: Facts) -> list[Draft]:
    """Drop what cannot hold, then join pairs until none joins."""
    out = [t for d in drafts if (t := _tightened(d, facts)) is not None]
    joined = True
    while joined:
        joined = False
        for i, a in enumerate(out):
            for j in range(i + 1, len(out)):
                union = _union(a, out[j], facts)
                if union is not None:
                    out = [*out[:i], union, *out[i + 1 : j], *out[j + 1 :]]
                    joined = True
                    break
            if joined:
                break
    return out


def _tightened(d: Draft, facts: Facts) -> Draft | None:
    """Without terms that others imply; None where nothing can be kept."""
    rows = tuple(dict.fromkeys(r for r in d.rows if r != TRUE))
    residual = tuple(dict.fromkeys(r for r in d.residual if r != TRUE))
    if FALSE in rows + residual or any(negate(r) in terms for terms in (rows, residual) for r in terms):
        return None
    lowers = _extremes((x for x in d.lowers if not proves_le(x, _ZERO, facts)), facts, largest=True)
    uppers = _extremes((x for x in d.uppers if not proves_le(SEQLEN_KV, x, facts)), facts, largest=False)
    pairs = [(u, low) for u in (*uppers[:MAX_BOUNDS], SEQLEN_KV) for low in (*lowers[:MAX_BOUNDS], _ZERO)]
    if any(proves_le(u, low, facts) for u, low in pairs[:-1]):  # the last one, seqlen_kv and 0, says nothing
        return None
    return Draft(lowers, uppers, rows, residual)


def _extremes(bounds: Iterable[Expr], facts: Facts, *, largest: bool) -> tuple[Expr, ...]:
    bounds = tuple(dict.fromkeys(bounds))
    keep: list[Expr] = []
    for x in bounds if len(bounds) <= MAX_BOUNDS else ():
        if any(_implies(y, x, facts, largest) for y in keep):
            continue
        keep = [y for y in keep if not _implies(x, y, facts, largest)] + [x]
    return tuple(keep) if keep else bounds


def _implies(x: Expr, y: Expr, facts: Facts, largest: bool) -> bool:
    """Does bound x make bound y redundant?"""
    return proves_le(y, x, facts) if largest else proves_le(x, y, facts)


def _lower(d: Draft) -> Expr:
    return reduce(lambda a, b: apply("max", a, b), d.lowers) if d.lowers else _ZERO


def _start(d: Draft) -> Expr:
    """The first key of the interval: the lower bound, 0 at least."""
    return apply("max", _lower(d), _ZERO) if d.lowers else _ZERO


def _upper(d: Draft) -> Expr:
    return reduce(lambda a, b: apply("min", a, b), d.uppers) if d.uppers else SEQLEN_KV


def _same(a: Expr, b: Expr) -> bool:
    gap = linear_of(a) - linear_of(b)
    return not gap.terms and not gap.const


def _alike(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> bool:
    """The same set of bounds."""
    return len(a) == len(b) and all(any(_same(x, y) for y in b) for x in a)


def _union(a: Draft, b: Draft, facts: Facts) -> Draft | None:
    """One draft for both, or None."""
    conditions = set(a.rows) == set(b.rows), set(a.residual) == set(b.residual)
    for small, large in ((a, b), (b, a)):
        if (
            set(large.rows) <= set(small.rows)
            and set(large.residual) <= set(small.residual)
            and proves_le(_lower(large), _start(small), facts)
            and proves_le(_upper(small), _upper(large), facts)
        ):
            return large
    if all(conditions):
        return _joined(a, b, facts)
    if _alike(a.lowers, b.lowers) and _alike(a.uppers, b.uppers):
        if conditions[1]:
            return _tightened(replace(a, rows=(_either(a.rows, b.rows),)), facts)
        if conditions[0] and a.residual and b.residual:
            return _tightened(replace(a, residual=(_either(a.residual, b.residual),)), facts)
    return None


def _either(a: tuple[Expr, ...], b: tuple[Expr, ...]) -> Expr:
    return simplify(apply("or", conjunction(a), conjunction(b)))


def conjunction(terms: tuple[Expr, ...]) -> Expr:
    """`and` of all."""
    return reduce(lambda x, y: apply("and", x, y), terms) if terms else TRUE


def _joined(a: Draft, b: Draft, facts: Facts) -> Draft | None:
    """Two intervals under the same conditions whose union is an interval for every row."""
    if _alike(a.lowers, b.lowers):
        return _tightened(replace(a, uppers=(simplify(apply("max", _upper(a), _upper(b))),)), facts)
    if _alike(a.uppers, b.uppers):
        return _tightened(replace(a, lowers=(simplify(apply("min", _lower(a), _lower(b))),)), facts)
    for first, second in ((a, b), (b, a)):
        # first.lower <= second.lower <= first.upper, from key 0 on: they touch
        start, end = _start(second), apply("max", _upper(first), _ZERO)
        if proves_le(_lower(first), start, facts) and proves_le(start, end, facts):
            upper = simplify(apply("max", _upper(first), _upper(second)))
            return _tightened(replace(first, uppers=(upper,)), facts)
    return None


def clause_of(d: Draft) -> Clause:
    """The finished clause."""
    return Clause(
        lower=simplify(_lower(d)) if d.lowers else None,
        upper=simplify(_upper(d)) if d.uppers else None,
        rows=simplify(conjunction(d.rows)) if d.rows else None,
        residual=simplify(conjunction(d.residual)) if d.residual else None,
    )
