"""Evaluation: shapes, dtypes, indices out of range, and what is read only where it matters."""

from __future__ import annotations

import pytest
import torch
from builders import CAUSAL, FLAG_K, B, K, P, Q, S, X, f, load, positions, x

from attngen.diag.diagnostic import AttnError
from attngen.diag.span import Source, Span
from attngen.ir.types import DType
from attngen.ref.evaluate import evaluate

ENV = positions(3, 5, batch=2, prefix=2)


def value(e: X, tensors: dict[str, torch.Tensor] | None = None, **more: torch.Tensor) -> torch.Tensor:
    return evaluate(e.e, {**ENV, **more}, tensors or {})


def test_shapes_broadcast() -> None:
    assert value(CAUSAL).shape == (1, 1, 3, 5)
    assert value(Q + 1).shape == (1, 1, 3, 1)
    assert value(x(2) * 3).shape == ()
    assert value(FLAG_K, {"flag": torch.zeros(2, 5, dtype=torch.bool)}).shape == (2, 1, 1, 5)


def test_dtypes() -> None:
    """Ints are int64 whatever is captured; floats follow the call."""
    table = {"start": torch.zeros(2, dtype=torch.int32), "sinks": torch.zeros(5, dtype=torch.bfloat16)}
    assert value(load("start", B), table).dtype == torch.int64
    sink = load("sinks", K, dtype=DType.F32)
    assert value(sink, table).dtype == torch.float64
    assert value(f("exp", f("float", K))).dtype == torch.float64
    assert evaluate((f("float", K) / 2 + sink).e, ENV, table, dtype=torch.float32).dtype == torch.float32


def test_floor_semantics() -> None:
    seven = torch.tensor([-7, -7, 7, 7])
    three = torch.tensor([3, -3, 3, -3])
    env = {"a": seven, "b": three}
    from builders import param

    a, b = param("a"), param("b")
    assert evaluate((a // b).e, env).tolist() == [-3, 2, 2, -3]
    assert evaluate((a % b).e, env).tolist() == [2, -1, 1, -2]
    assert evaluate(f("int", f("float", a) / 2).e, env).tolist() == [-3, -3, 3, 3]
    assert evaluate((a // 0).e, env).shape == (4,)  # unspecified, never a fault


def test_index_outside() -> None:
    span = Span(Source("<text>", "flag[b, kv_idx]"), 0, 15)
    flag = X(FLAG_K.e.replace(span=span))
    with pytest.raises(AttnError) as fault:
        value(flag, {"flag": torch.zeros(2, 4, dtype=torch.bool)})
    (d,) = fault.value.diagnostics
    assert d.code == "E0650" and "index 4 is outside axis 1 of tensor `flag`, which has 4 elements" in d.message
    assert d.primary is not None and d.primary.span == span
    assert d.notes[0].endswith("are outside, the first at kv_idx 4")
    with pytest.raises(AttnError, match="index -2"):
        value(load("start", K - P), {"start": torch.zeros(5, dtype=torch.int32)})


def test_read_only_where_it_matters() -> None:
    """`and`, `or`, the conditional and `active` decide what is read, left to right."""
    short = {"flag": torch.ones(1, 3, dtype=torch.bool)}
    past = load("flag", 0, K - P, dtype=DType.BOOL)
    assert value((K < P) | past, short).all()
    assert value((K >= P) & past, short)[0, 0, 0].tolist() == [False, False, True, True, True]
    assert value(f("where", K < P, x(True), past), short).all()
    assert value(f("where", ~(K < P), past, x(True)), short).all()
    active = ENV["kv_idx"] >= 2
    assert evaluate(past.e, ENV, short, active=active)[0, 0, 0].tolist() == [True] * 5
    with pytest.raises(AttnError):
        value(past | (K < P), short)
    assert value((K >= 9) & past, {"flag": torch.ones(1, 0, dtype=torch.bool)}).any().item() is False


def test_clamp() -> None:
    start = {"start": torch.tensor([5, 6, 7], dtype=torch.int32)}
    assert evaluate(load("start", K - P).e, ENV, start, clamp=True)[0, 0, 0].tolist() == [5, 5, 5, 6, 7]
    assert evaluate(load("start", K + 9).e, ENV, start, clamp=True).unique().tolist() == [7]


def test_score_is_a_value_of_the_caller() -> None:
    s = torch.randn(2, 1, 3, 5, dtype=torch.float64)
    assert torch.equal(value(S * 2.0, s=s), s * 2)
    with pytest.raises(KeyError):
        value(S)
