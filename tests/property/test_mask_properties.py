"""mask_form against brute force: the clauses are the mask, the bounds hold on every tile."""

from __future__ import annotations

import pytest
import torch
from builders import (
    CAUSAL,
    DOC_K,
    FIRST,
    FLAG_K,
    FLAG_Q,
    MASKS,
    QP,
    SK,
    SQ,
    START,
    B,
    C,
    H,
    K,
    P,
    Q,
    W,
    X,
    f,
    load,
    positions,
    spec,
    x,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.ir.expr import Expr
from attngen.ir.forms import Clause, MaskForm, TileBounds
from attngen.ir.simplify import simplify
from attngen.passes.facts import facts_of
from attngen.passes.isolate import isolate
from attngen.passes.mask_form import mask_form
from attngen.passes.nnf import nnf
from attngen.ref.evaluate import evaluate
from attngen.ref.tables import table_values

BATCH, HEADS = 2, 2
TENSOR_NAMES = ("start", "doc", "first", "late", "flag", "row_flag")


def tensors_for(sq: int, skv: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 8, shape, generator=g, dtype=torch.int32)

    return {
        "start": ints(BATCH),
        "doc": ints(BATCH, skv).sort(-1).values,
        "first": ints(BATCH, sq).sort(-1).values,
        "late": ints(BATCH, sq),
        "flag": ints(BATCH, skv) > 2,
        "row_flag": ints(BATCH, sq) > 2,
    }


def value(e: Expr, env: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], *shape: int) -> torch.Tensor:
    return torch.broadcast_to(evaluate(e, env, tensors), (BATCH, HEADS, *shape))


def kept_by(c: Clause, env: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    keep = torch.ones((), dtype=torch.bool)
    if c.lower is not None:
        keep = keep & (env["kv_idx"] >= evaluate(c.lower, env, tensors))
    if c.upper is not None:
        keep = keep & (env["kv_idx"] < evaluate(c.upper, env, tensors))
    for e in (c.rows, c.residual):
        if e is not None:
            keep = keep & evaluate(e, env, tensors)
    return keep


def check_clauses(
    form: MaskForm, env: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], sq: int, skv: int
) -> None:
    shape = (BATCH, HEADS, sq, skv)
    wanted = torch.broadcast_to(evaluate(form.mask, env, tensors), shape)
    got = torch.zeros(shape, dtype=torch.bool)
    for c in form.clauses:
        got = got | kept_by(c, env, tensors)
    assert torch.equal(got, wanted)


def check_bounds(
    c: Clause, t: TileBounds, env: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], sq: int, skv: int,
    q_lo: int, q_hi: int, exact: bool,
) -> None:  # fmt: skip
    rows = slice(q_lo, q_hi + 1)

    def per_row(e: Expr | None, default: int | bool) -> torch.Tensor:
        found = torch.tensor(default) if e is None else evaluate(e, env, tensors)
        return torch.broadcast_to(found, (BATCH, HEADS, sq, 1))[:, :, rows, 0]

    tile = {n: v for n, v in env.items() if n not in ("q_idx", "q_pos", "kv_idx")}
    tile |= {"q_lo": torch.tensor(q_lo), "q_hi": torch.tensor(q_hi)}
    low_min, low_max, up_min, up_max = (
        torch.broadcast_to(evaluate(e, tile, tensors), (BATCH, HEADS, 1, 1))[:, :, 0, 0]
        for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max)
    )
    lower, upper = per_row(c.lower, 0).clamp(0, skv), per_row(c.upper, skv).clamp(0, skv)
    applies = per_row(c.rows, True)
    for b in range(BATCH):
        for h in range(HEADS):
            on = applies[b, h]
            lo, up = lower[b, h][on], upper[b, h][on]
            if len(lo):
                assert low_min[b, h] <= lo.min() and lo.max() <= low_max[b, h]
                assert up_min[b, h] <= up.min() and up.max() <= up_max[b, h]
            if c.residual is not None or not bool(on.all()):
                assert up_min[b, h] == 0
            if exact:
                assert (low_min[b, h], low_max[b, h]) == (lo.min(), lo.max())
                assert (up_min[b, h], up_max[b, h]) == (up.min(), up.max())


def check(mask: X, sq: int, skv: int, params: dict[str, int], seed: int, exact: bool = False) -> MaskForm:
    form = mask_form(spec(mask, tensors=TENSOR_NAMES))
    env, tensors = positions(sq, skv, BATCH, HEADS, **params), tensors_for(sq, skv, seed)
    tensors |= table_values(form.tables, env, tensors)
    check_clauses(form, env, tensors, sq, skv)
    for q_lo in range(0, sq, 3):
        for q_hi in {q_lo, min(q_lo + 2, sq - 1), sq - 1}:
            for c, t in zip(form.clauses, form.bounds, strict=True):
                check_bounds(c, t, env, tensors, sq, skv, q_lo, q_hi, exact)
    return form


small = st.integers(-4, 9).map(x)
#: The document of a row, whose position may lie before the first key.
DOC_Q = load("doc", B, f("clamp", QP, 0, SK - 1))
#: A row's own value, in no order.
LATE = load("late", B, Q)
leaves = st.sampled_from([K, K, K, Q, QP, QP, W, P, C, SQ, SK, H, B, START, FIRST, LATE, DOC_K, DOC_K, DOC_Q]) | small


def numbers(inner: st.SearchStrategy[X]) -> st.SearchStrategy[X]:
    return st.one_of(
        st.tuples(st.sampled_from(["add", "sub", "min", "max"]), inner, inner).map(lambda t: f(*t)),
        st.tuples(inner, st.sampled_from([-3, -1, 2, 3])).map(lambda t: t[0] * t[1]),
        st.tuples(inner, st.sampled_from([2, 3, -2, C, C, W])).map(lambda t: f("floordiv", *t)),
        st.tuples(inner, st.sampled_from([2, 3, C])).map(lambda t: f("mod", *t)),
        st.tuples(inner, inner).map(lambda t: f("mul", *t)),
        inner.map(lambda a: f("abs", a)),
        st.tuples(inner, inner, inner).map(lambda t: f("clamp", *t)),
        st.tuples(comparisons(inner), inner, inner).map(lambda t: f("where", *t)),
    )


def comparisons(inner: st.SearchStrategy[X]) -> st.SearchStrategy[X]:
    return st.tuples(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]), inner, inner).map(lambda t: f(*t))


ints = st.recursive(leaves, numbers, max_leaves=4)
bools = st.recursive(
    comparisons(ints) | st.sampled_from([CAUSAL, FLAG_K, FLAG_Q, DOC_K == FIRST, K / 2 < 1.5, Q / 2 < 1.5]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["and", "or", "and", "or", "eq", "ne"]), inner, inner).map(lambda t: f(*t)),
        inner.map(lambda a: ~a),
        st.tuples(inner, inner, inner).map(lambda t: f("where", *t)),
    ),
    max_leaves=5,
)
params = st.fixed_dictionaries(
    {"window": st.integers(-3, 12), "prefix": st.integers(-2, 12), "size": st.integers(1, 5)}
)


@given(bools, st.integers(1, 8), st.integers(1, 9), params, st.integers(0, 99))
def test_any_mask(mask: X, sq: int, skv: int, values: dict[str, int], seed: int) -> None:
    """The OR of the clauses is the mask at every (q_idx, kv_idx), and bounds hold on every tile."""
    form = check(mask, sq, skv, values, seed)
    assert len(form.clauses) <= 8
    assert form.is_exact or form.reasons


@given(bools, st.integers(1, 6), st.integers(1, 6), params, st.integers(0, 99))
def test_rewrites_keep_the_value(mask: X, sq: int, skv: int, values: dict[str, int], seed: int) -> None:
    """simplify, nnf and isolate each give an equal formula."""
    facts = facts_of(spec(mask, tensors=TENSOR_NAMES))
    env, tensors = positions(sq, skv, BATCH, HEADS, **values), tensors_for(sq, skv, seed)
    wanted = value(mask.e, env, tensors, sq, skv)
    for e in (simplify(mask.e), nnf(mask.e), isolate(nnf(mask.e), facts)):
        assert torch.equal(value(e, env, tensors, sq, skv), wanted)
    assert torch.equal(value(nnf(mask.e, negated=True), env, tensors, sq, skv), ~wanted)


@given(ints, st.integers(1, 6), st.integers(1, 6), params, st.integers(0, 99))
def test_simplify_keeps_ints(e: X, sq: int, skv: int, values: dict[str, int], seed: int) -> None:
    env, tensors = positions(sq, skv, BATCH, HEADS, **values), tensors_for(sq, skv, seed)
    once = simplify(e.e)
    assert torch.equal(value(once, env, tensors, sq, skv), value(e.e, env, tensors, sq, skv))
    assert simplify(once) == once


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=15)
@given(sizes=st.sampled_from([(9, 9), (5, 9), (9, 5), (1, 7), (7, 1)]), values=params, seed=st.integers(0, 99))
def test_standard_masks_are_exact(name: str, sizes: tuple[int, int], values: dict[str, int], seed: int) -> None:
    """One interval, no residual, and bounds attained on every tile."""
    form = check(MASKS[name], *sizes, values, seed, exact=True)
    assert form.is_exact and len(form.clauses) == 1 and not form.reasons
