"""Ints in plain Python: the same values as the dense evaluation, for every function of ints and bools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_exprs import PARAMS, B, I, exprs

from attngen.ir import integers
from attngen.ir.expr import Apply, Expr, Param, atom, const
from attngen.ir.functions import FUNCTIONS, apply
from attngen.ref.evaluate import evaluate

ROWS = list(range(-7, 8))
NUMBERS = {"b": 1, "h": 3, "h_kv": 1, "seqlen_q": 15, "seqlen_kv": 12, "heads_q": 4} | {
    n: v for n, (_, v) in PARAMS.items()
}
COLUMNS = {"q_idx": ROWS, "kv_idx": [x * x for x in ROWS], "q_pos": [x - 3 for x in ROWS], "q_lo": ROWS}


def check(e: Expr) -> None:
    got = integers.column(e, NUMBERS | COLUMNS, len(ROWS))
    env = {n: torch.tensor(v) for n, v in (NUMBERS | COLUMNS).items()}
    assert got == evaluate(e, env).expand(len(ROWS)).tolist()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from((I, B)).flatmap(lambda kind: exprs(kind, score=False)))
def test_agrees_with_the_dense_evaluation(e: Expr) -> None:
    if integers.takes(e):
        check(e)


INTS = [
    (row.name, args) for row in FUNCTIONS.values() for args, out in row.signatures if {*args, out} <= {I, B}
]  # fmt: skip


@pytest.mark.parametrize(("name", "types"), INTS)
def test_every_function_of_ints(name, types) -> None:
    """Columns and numbers as operands, a divisor of 0 among them."""
    for ints in ((atom("q_idx"), atom("q_pos"), const(4)), (const(5), atom("q_idx"), atom("kv_idx"))):
        bools = [apply("gt", x, const(0)) for x in ints]
        e = apply(name, *((ints if t is I else bools)[i] for i, t in enumerate(types)))
        assert integers.takes(e)
        check(e)


def test_floats_and_loads_are_left_to_torch() -> None:
    wide = apply("int", Param(type=FUNCTIONS["exp"].signatures[0][1], name="cap"))
    assert not integers.takes(wide)
    assert isinstance(wide, Apply) and integers.takes(apply("int", atom("q_lo")))
