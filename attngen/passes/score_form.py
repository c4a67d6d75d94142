"""score-form: a score as a sum whose parts change once a tile, once a column, or with every element.

Rewrite   score(s, h, q_idx, kv_idx)  -->  factor * (scale * s + slope * column + terms) + shift, see ir/score.py
Steps     products are distributed over sums as far as one side does not move along the tile's columns; ints that are
          linear in the column's index are split at the tile's first; s is raw * softmax_scale, the scale grouped with
          what else does not move
Keeps     the value, to within the rounding of the regrouped sums and products; nothing is regrouped below a step
          (`int`, `floor`, comparisons), where a rounding error may become a whole
Numerics  fp32 holds every position below 2**24; see docs/passes/compute.md
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, atoms_of, const, params_of, rewrite, walk
from attngen.ir.functions import STEPS, apply
from attngen.ir.linear import COMPARE, KV_IDX, Q_IDX, Linear, expr_of, linear_of
from attngen.ir.score import COLUMN, KV_0, LOAD, Q_0, RAW, SCALE, ScoreForm, ScoreTerm, Stream
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Normalizer, Type

ONE, S = const(1.0), Atom(type=Type.FLOAT, name="s")
#: Keeps a factor positive where a param is zero: zero times the -inf of a dropped pair is NaN.
LEAST = 1e-30
#: What a sum is made of.
_SUMS = frozenset(("add", "sub", "neg", "mul", "div", "float"))
_PLACES = frozenset(("q_idx", "q_pos", "kv_idx"))
#: Operations of a value that are evaluated for each element; more are looked up where key minus query decides them.
CHEAP = 6
Axis = Literal["kv", "q"]
_MOVING = {"kv": frozenset(("kv_idx",)), "q": frozenset(("q_idx", "q_pos"))}


@lru_cache(maxsize=64)
def score_form(score: Expr, axis: Axis, spec: AttentionSpec) -> ScoreForm:
    """The form of `score` along an accumulator's columns: keys in a forward, queries in a backward."""
    return _Split(axis, spec).form(score)


def scales_last(spec: AttentionSpec) -> bool:
    """Whether row maxima are taken before scores are scaled, so that the scale of a call must be positive."""
    if isinstance(spec.score, Atom):
        return True
    return spec.normalizer is Normalizer.SOFTMAX and score_form(spec.score, "kv", spec).scale_last


class _Split:
    def __init__(self, axis: Axis, spec: AttentionSpec) -> None:
        self.axis: Axis = axis
        self.index, self.first = (KV_IDX, KV_0) if axis == "kv" else (Q_IDX, Q_0)
        self.minima = {p.name: p.minimum for p in spec.params}
        self.positive_scale = self.is_positive(spec.scale)

    def still(self, e: Expr) -> bool:
        """The same for every column of a tile."""
        moving = any(n in (COLUMN.name, RAW.name) or n.startswith(LOAD.format("")) for n in params_of(e))
        return not (moving or atoms_of(e) & (_MOVING[self.axis] | {"s"}))

    def form(self, score: Expr) -> ScoreForm:
        parts = self.parts_of(score)
        scale, slope, shift = (parts.pop(x, None) for x in (S, COLUMN, ONE))
        distance = self.distance_of(parts)
        factor = None
        if distance is None and len(parts) == 1 and scale is None and slope is None:
            ((x, f),) = parts.items()
            factor, x = self.taken_out(f, x)
            parts = {x: f if factor is None else ONE}
        terms = tuple(ScoreTerm(factor=f, value=self.applied(x, stepped=False)) for x, f in parts.items())
        streams: dict[Stream, Param] = {}
        if self.axis == "kv":
            terms = tuple(t.replace(value=self.streamed(t.value, streams)) for t in terms)
        line = scale == ONE and slope is not None and not terms and distance is None
        return ScoreForm(
            axis=self.axis, scale=scale, slope=slope, shift=shift, terms=terms, streams=tuple(streams),
            distance=distance, factor=factor, scale_last=line and self.axis == "kv" and self.positive_scale,
        )  # fmt: skip

    def distance_of(self, parts: dict[Expr, Expr]) -> Expr | None:
        """The sum of the parts that cost much and depend on key minus query alone, taken out of `parts`."""
        total: Expr | None = None
        for x, factor in list(parts.items()) if self.axis == "kv" else ():
            moves = atoms_of(factor) & _PLACES or KV_0.name in params_of(factor)
            if not moves and _by_distance(x) and _is_costly(x):
                del parts[x]
                total = _plus(total, _times(factor, x))
        return total

    def streamed(self, value: Expr, streams: dict[Stream, Param]) -> Expr:
        """`value` with loads along the columns as params; notes each in `streams`."""

        def named(e: Expr) -> Expr:
            if not isinstance(e, Load) or e.dtype is DType.BOOL or not e.indices:
                return e
            split = self.at_first(e.indices[-1])
            if split is None or split[1] != 1 or not all(map(self.still, e.indices[:-1])):
                return e
            found = Stream(tensor=e.tensor, dtype=e.dtype, indices=e.indices[:-1], start=split[0])
            return streams.setdefault(found, Param(type=e.type, name=LOAD.format(len(streams))))

        return rewrite(value, named)

    def parts_of(self, e: Expr) -> dict[Expr, Expr]:
        """`sum_of`, each value once: value -> factor."""
        parts: dict[Expr, Expr] = {}
        for factor, x in self.sum_of(e):
            parts[x] = _plus(parts.get(x), factor)
        return parts

    def sum_of(self, e: Expr) -> list[tuple[Expr, Expr]]:
        """(factor, value) of each term; a value is `s`, the column, 1, or what moves in no simpler way."""
        if self.still(e):
            return [(e, ONE)]
        if not isinstance(e, Apply):
            return [(ONE, e)]
        a = e.args
        if e.fn in ("add", "sub", "neg"):
            last = [(_negated(f), x) for f, x in self.sum_of(a[-1])] if e.fn != "add" else self.sum_of(a[1])
            return last if e.fn == "neg" else [*self.sum_of(a[0]), *last]
        if e.fn == "mul":
            for factor, other in (a, a[::-1]):
                if self.still(factor):
                    return [(_times(factor, f), x) for f, x in self.sum_of(other)]
        if e.fn == "div" and self.still(a[1]):
            inverse = _inverse(a[1])
            return [(_times(f, inverse), x) for f, x in self.sum_of(a[0])]
        if e.fn == "float":
            split = self.at_first(a[0])
            if split is not None:
                start, step = split
                return [(apply("float", start), ONE), (const(float(step)), COLUMN)]
        return [(ONE, e)]

    def at_first(self, i: Expr) -> tuple[Expr, int] | None:
        """An int as `start + step * column`, or None where the column moves it in another way."""
        if i.type is not Type.INT:
            return None
        total = linear_of(i)
        step = total.terms.get(self.index, 0)
        if not step or not all(self.still(t) for t in total.terms if t != self.index):
            return None
        return expr_of(total.with_term(self.index, Linear({self.first: 1}))), step

    def element(self, e: Expr, stepped: bool) -> Expr:
        """A value as each element evaluates it: sums regrouped, but below a step."""
        if e == S:
            return apply("mul", RAW, SCALE)
        if not stepped and isinstance(e, Apply) and e.fn in _SUMS and e.type is Type.FLOAT and not self.still(e):
            return self.regrouped(e)
        return self.applied(e, stepped)

    def regrouped(self, e: Apply) -> Expr:
        """raw * scale + shift + slope * column + terms: two multiply-adds before the first term."""
        parts = self.parts_of(e)
        total: Expr | None = None
        for x in (S, ONE, COLUMN, *(x for x in parts if x not in (S, ONE, COLUMN))):
            if x in parts:
                total = _plus(total, self.product(x, parts[x]))
        assert total is not None
        return total

    def product(self, x: Expr, factor: Expr) -> Expr:
        if x == ONE:
            return factor
        if x == S:
            return apply("mul", RAW, _times(factor, SCALE))
        value = apply("float", COLUMN) if x == COLUMN else self.applied(x, stepped=False)
        return _negated(value) if factor == const(-1.0) else value if factor == ONE else apply("mul", value, factor)

    def applied(self, e: Expr, stepped: bool) -> Expr:
        """A value that is no sum: its operands as elements."""
        if isinstance(e, Load):
            return e.replace(indices=tuple(self.element(i, True) for i in e.indices))
        if not isinstance(e, Apply):
            return self.element(e, stepped) if e == S else e
        if e.fn == "float" and isinstance(e.args[0], Apply) and e.args[0].fn == "abs":
            return apply("abs", self.element(apply("float", e.args[0].args[0]), stepped))
        return e.replace(args=tuple(self.element(x, stepped or e.fn in STEPS) for x in e.args))

    def taken_out(self, factor: Expr, value: Expr) -> tuple[Expr | None, Expr]:
        """The factor of the only value where it is positive, or made positive: tanh takes the sign inside."""
        if factor == ONE or atoms_of(factor) & {"q_idx", "q_pos", "kv_idx"} or KV_0.name in params_of(factor):
            return None, value
        if self.is_positive(factor):
            return factor, value
        if not (isinstance(value, Apply) and value.fn == "tanh"):
            return None, value
        sign = apply("where", apply("lt", factor, const(0.0)), const(-1.0), const(1.0))
        return apply("max", apply("abs", factor), const(LEAST)), apply("tanh", apply("mul", sign, value.args[0]))

    def is_positive(self, e: Expr) -> bool:
        """Whether a factor is above zero whatever the call gives."""
        if isinstance(e, Const):
            return e.value > 0
        if isinstance(e, Param):
            minimum = self.minima.get(e.name)
            return minimum is not None and minimum > 0
        return isinstance(e, Apply) and e.fn in ("mul", "add", "float", "div") and all(map(self.is_positive, e.args))


def _by_distance(e: Expr) -> bool:
    """Whether positions count only as key minus query."""
    if isinstance(e, Atom):
        return e.name not in _PLACES and e.name != "s"
    if isinstance(e, Load):
        return all(map(_by_distance, e.indices))
    if not isinstance(e, Apply):
        return True
    if e.fn in COMPARE and e.args[0].type is Type.INT:
        return _by_distance(apply("sub", *e.args))
    if e.type is Type.INT and e.fn in ("add", "sub", "neg", "mul"):
        terms = dict(linear_of(e).terms)
        if terms.pop(Q_IDX, 0) + terms.pop(KV_IDX, 0):
            return False
        return all(_by_distance(t) for t in terms if t != e) and e not in terms
    return all(map(_by_distance, e.args))


def _is_costly(e: Expr) -> bool:
    """Whether to look a value up is cheaper than to evaluate it: it is loaded, or takes more than a few operations."""
    calls = [n for n in walk(e) if isinstance(n, Apply)]
    return any(isinstance(n, Load) for n in walk(e)) or len(calls) > CHEAP


def _plus(a: Expr | None, b: Expr) -> Expr:
    if a is None:
        return b
    if isinstance(b, Apply) and b.fn == "neg":
        return apply("sub", a, b.args[0])
    if isinstance(b, Const) and b.value < 0:
        return apply("sub", a, const(-b.value))
    return apply("add", a, b)


def _negated(e: Expr) -> Expr:
    if isinstance(e, Const):
        return const(-e.value)
    return e.args[0] if isinstance(e, Apply) and e.fn == "neg" else apply("neg", e)


def _times(a: Expr, b: Expr) -> Expr:
    if a == ONE:
        return b
    if b == ONE:
        return a
    for x, y in ((a, b), (b, a)):
        if x == const(-1.0):
            return _negated(y)
    return apply("mul", a, b)


def _inverse(e: Expr) -> Expr:
    return const(1.0 / float(e.value)) if isinstance(e, Const) and e.value else apply("div", ONE, e)
