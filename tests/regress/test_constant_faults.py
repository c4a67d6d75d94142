"""A scale of 1 / 0 or log(-1.0) and divisions by a literal zero passed `check` and spoiled results at run time."""

from __future__ import annotations

import math

import pytest
import torch

from attngen.ir.functions import FUNCTIONS
from attngen.syntax import check_text, constants, load_spec
from attngen.syntax.constants import value_of


def faults(clauses: str) -> list[tuple[str, str]]:
    """(code, text under the caret) of every fault."""
    head = "attn 1\n\ndef blocks(n) = kv_idx // n\n\n"
    text = f"{head}attention a {{\n  head_dim = 64\n  param n: int >= 0 = 1\n  {clauses}\n}}\n"
    found = []
    for d in check_text(text):
        assert d.primary is not None and d.helps and d.notes
        found.append((d.code, text[d.primary.span.start : d.primary.span.end]))
    return found


@pytest.mark.parametrize(
    "scale",
    [
        "log(-1.0)",
        "sqrt(-1.0)",
        "exp(1000.0)",
        "-log(0.0)",
        "-0.125",
        "0",
        "head_dim * -1",
        "1.0e30 * 1.0e30 * exp(700.0)",
    ],
)
def test_scale(scale: str) -> None:
    assert faults(f"scale = {scale}") == [("E0311", scale)]


@pytest.mark.parametrize(
    "clauses", ["scale = 0.125", "scale = -0.125\n  score = -s", "scale = 0\n  score = s + 1", "scale = -1.0 / n"]
)
def test_good_scale(clauses: str) -> None:
    assert faults(clauses) == []


@pytest.mark.parametrize(
    ("clauses", "at"),
    [
        ("scale = 1 / 0", "0"),
        ("score = s / 0.0", "0.0"),
        ("score = s / -0.0", "-0.0"),
        ("mask = kv_idx // 0 == 1", "0"),
        ("mask = q_pos % (0) == 1", "0"),
    ],
)
def test_division(clauses: str, at: str) -> None:
    assert faults(clauses) == [("E0312", at)]


def test_division_in_a_def() -> None:
    assert [code for code, _ in faults("mask = blocks(0) == 1")] == ["E0312"]


def test_a_param_may_divide() -> None:
    assert faults("mask = kv_idx // n == 0 and kv_idx % n == 0") == []


def test_every_function_has_a_value() -> None:
    assert set(constants._FUNCTIONS) == set(FUNCTIONS)


@pytest.mark.parametrize(
    "text",
    ["-3 // 2 * 1.5", "7 % -3", "clamp(5, 1, 3) + min(2, 1) - max(0.5, 2)", "exp(0.5) * log(3.0) - log2(5)",
     "sqrt(2.0) + tanh(0.3) + sigmoid(-2.0) + softplus(1.5)", "floor(-1.5) + int(-1.5) + abs(-2)",
     "1.0 if 1 < 2 and not 3 == 4 or false else 2.0", "sigmoid(800.0) + softplus(-800.0)"],
)  # fmt: skip
def test_as_the_dense_evaluation(text: str) -> None:
    from attngen.ref.evaluate import evaluate

    spec = load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  scale = 10 + ({text})\n}}\n")
    value = value_of(spec.scale)
    assert value is not None
    assert math.isclose(value, float(evaluate(spec.scale, {}, dtype=torch.float64)), rel_tol=1e-14)
