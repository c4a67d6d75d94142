"""What random specs found in emitted backwards: lines past the limit, and names that the kernels use themselves."""

from __future__ import annotations

import ast

import pytest

from attngen.emit.backward import emit_backward
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

NAMES = ("dq", "dk", "dv", "do", "dlse", "workspace", "dz", "head", "row_0", "batch_idx", "prepare", "finish")


def emitted(declarations: str, score: str, more: str = "", captured: tuple[str, ...] = ()) -> str:
    body = f"head_dim = 64\n {declarations}\n mask = kv_idx <= q_pos\n score = {score}\n {more}\n"
    text = f"attn 1\nattention a {{\n {body}}}"
    return emit_backward(plan_backward(load_spec(text), captured=captured)).text


@pytest.mark.parametrize(
    "score",
    [
        "clamp(-1.25 * s, -3.0, 3.0)",
        "2.0 + s + clamp(s, -3.0, 3.0)",
        "exp(min(s, 2.0)) + log(max(abs(s), 0.25))",
        "s / (1.5 + sigmoid(s)) + (0.5 + 0.0)",
    ],
)
def test_score_and_slope_fit_the_lines(score: str) -> None:
    emitted("", score)


@pytest.mark.parametrize("axes", [("kv_idx",), ("q_idx", "kv_idx")])
def test_gains_fit_the_lines(axes: tuple[str, ...]) -> None:
    dims = ", ".join({"kv_idx": "seqlen_kv", "q_idx": "seqlen_q"}[a] for a in axes)
    score = f"log(max(abs(max(x[{', '.join(axes)}], 2.0)), 0.25))"
    emitted(f"tensor x: f32[{dims}] grad", score, captured=("x",))


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_kernels_are_free_for_specs(name: str) -> None:
    text = emitted(
        f"param {name}: float = 1.0\n tensor x: f32[heads_q] grad", f"s * x[h] * {name}", "sink = x[h]", ("x",)
    )
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    for f in functions:
        arguments = {a.arg for a in f.args.args}
        stored = {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        assert name not in stored & arguments, f.name
    assert any(f"{name}_" in {a.arg for a in f.args.args} for f in functions)
