"""Backwards of short causal calls took the steps of long ones, whose diagonals waste more rows: 512 tokens at head dim
128 take twenty steps of a head by 80 rows as by 64.
"""

from __future__ import annotations

import pytest

from attngen.emit.backward import emit_backward
from attngen.ir.backward import BackwardPlanSet
from attngen.passes.backward.order import tiles_seen
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec
from attngen.verify.backward import set_faults

CAUSAL = "mask = kv_idx <= q_pos"
WINDOWED = "param window: int >= 1{}\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window"


def planned(clauses: str) -> BackwardPlanSet:
    return plan_backward(load_spec(f"attn 1\nattention a {{\n  head_dim = 128\n  {clauses}\n}}\n"))


def steps(plans: BackwardPlanSet, tile_m: int, length: int) -> int:
    seen = tiles_seen(plans.spec, plans.plans[0].mask.form, tile_m, 128, length, False)
    return sum(end - first for ranges in seen or () for first, end in ranges)


def causal_steps(tile_m: int, length: int) -> int:
    """Counted pair by pair."""
    tiles = {(q // tile_m, k // 128) for q in range(length) for k in range(0, q + 1, 64)}
    return len(tiles)


@pytest.mark.parametrize("clauses", ["", "\n  backward { deterministic = true }"], ids=["unordered", "turns"])
def test_short_causal_calls_have_a_plan_of_lower_steps(clauses: str) -> None:
    plans = planned(CAUSAL + clauses)
    assert [p.name for p in plans.plans] == ["64x128", "80x128"] and set_faults(plans) == []
    (limit,) = plans.limits
    assert [plans.index(*s) for s in ((limit, limit), (limit, 1), (limit + 1, limit), (1, limit + 1))] == [0, 0, 1, 1]
    assert plans.long_plan is plans.plans[1] and not set(plans.plans) & set(plans.others)
    text = emit_backward(plans).text
    assert f"LIMITS = ({limit},)" in text and "tile_m=64," in text and "tile_m=80," in text


def test_steps_are_those_of_the_walks() -> None:
    plans = planned(CAUSAL)
    for length in (512, 1000, 1024):
        for tile_m in (64, 80):
            assert steps(plans, tile_m, length) == causal_steps(tile_m, length)
    assert steps(plans, 64, 512) == steps(plans, 80, 512) == 20


@pytest.mark.parametrize(
    "clauses",
    [
        WINDOWED.format(""),
        "tensor doc: i32[batch, seqlen_kv] sorted\n  mask = doc[b, q_pos] == doc[b, kv_idx]",
        "block_sparse { q = 128, kv = 128, lists = given }",
    ],
    ids=["a param without a default", "documents", "blocks"],
)
def test_walks_that_only_a_call_knows_leave_one_plan(clauses: str) -> None:
    plans = planned(clauses)
    assert len(plans.plans) == 1 and plans.limits == ()


def test_a_short_window_takes_lower_steps_at_any_length() -> None:
    assert [p.name for p in planned(WINDOWED.format(" = 128")).plans] == ["64x128"]
    assert [p.name for p in planned(WINDOWED.format(" = 4096")).plans] == ["64x128", "80x128"]
