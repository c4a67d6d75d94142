"""Emission: printed text has the value of the expression, for the kernel and for its self-check."""

from __future__ import annotations

import ast
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from random_exprs import PARAMS, exprs

from attngen.emit.check_exprs import ScalarPrinter, TorchPrinter
from attngen.emit.exprs import CutePrinter, lower
from attngen.emit.straight import WIDTH, fold, straight_line
from attngen.ir.expr import Expr, Param, atom, const
from attngen.ir.functions import FUNCTIONS, apply
from attngen.ir.types import Type
from attngen.ref.evaluate import evaluate

KINDS = st.sampled_from((Type.BOOL, Type.INT, Type.FLOAT))

# ---- values at one point: what the kernel's text computes there ------------------------------------------------------

POINT: dict[str, Any] = {
    "b": 1, "h": 2, "h_kv": 1, "q_idx": 5, "kv_idx": 3, "q_pos": 9, "seqlen_q": 11, "seqlen_kv": 15, "heads_q": 4,
    "heads_kv": 2, "batch": 2, "s": 1.375,
}  # fmt: skip
GENERATOR = torch.Generator().manual_seed(1)
CAPTURED = {
    "doc": torch.randint(0, 4, (2, 15), generator=GENERATOR),
    "slopes": torch.rand(4, generator=GENERATOR, dtype=torch.float64),
    "bias": torch.randn(2, 4, 11, 15, generator=GENERATOR, dtype=torch.float64),
    "flag": torch.rand(2, 15, generator=GENERATOR) < 0.5,
}


def scalar(value: Any) -> Any:
    """A number whose comparisons give bools that `~` inverts, as those of the DSL do."""
    return (
        np.bool_(value) if isinstance(value, bool) else np.int64(value) if isinstance(value, int) else np.float64(value)
    )


def _at(tensor: torch.Tensor, *index: Any) -> Any:
    inside = tuple(max(min(int(i), n - 1), 0) for i, n in zip(index, tensor.shape, strict=True))
    return scalar(tensor[inside].item())


def _typed(kind: type) -> Any:
    def convert(x: Any) -> Any:
        return scalar(kind(float(x)) if kind is float else kind(int(x)))

    return convert


def _select(condition: Any, a: Any, b: Any) -> Any:
    """As the kernel's: the type is that of a numeric operand; two Python numbers would become fp32."""
    typed = next((x for x in (a, b) if isinstance(x, np.generic)), np.float64(0))
    return type(typed)(a if condition else b)


def _unary(f: Any) -> Any:
    return lambda x: scalar(f(torch.tensor(float(x), dtype=torch.float64)).item())


DSL: dict[str, Any] = {
    "cutlass": SimpleNamespace(
        min=lambda a, b: scalar(min(int(a), int(b))), max=lambda a, b: scalar(max(int(a), int(b)))
    ),
    "cute": SimpleNamespace(
        arch=SimpleNamespace(
            fmin=lambda a, b: scalar(min(float(a), float(b))), fmax=lambda a, b: scalar(max(float(a), float(b)))
        )
    ),
    "floor_div": lambda a, b: scalar(int(a) // int(b)),
    "floor_mod": lambda a, b: scalar(int(a) - (int(a) // int(b)) * int(b)),
    "has_bit": lambda a, b: np.bool_(int(a) >> (int(b) & 31) & 1),
    "select": _select,
    "absolute": lambda x: abs(x),
    "Int32": _typed(int),
    "Float32": _typed(float),
    "Boolean": _typed(bool),
    "at": _at,
    "NEG_INF": -math.inf,
    **{
        name: _unary(f)
        for name, f in {
            "exp": torch.exp, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "tanh": torch.tanh,
            "sigmoid": torch.sigmoid, "floor": torch.floor,
            "softplus": lambda x: torch.nn.functional.softplus(x, threshold=700.0),
        }.items()
    },
}  # fmt: skip


def at_point(e: Expr) -> Any:
    """The dense value of `e` at POINT."""
    env = {n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for n, v in POINT.items()}
    env |= {n: torch.tensor(v, dtype=torch.float64 if t is Type.FLOAT else None) for n, (t, v) in PARAMS.items()}
    return evaluate(e, env, CAPTURED).item()


def kernel_names() -> dict[str, Any]:
    return {
        **DSL,
        **{n: scalar(v) for n, v in POINT.items()},
        **{n: scalar(v) for n, (_, v) in PARAMS.items()},
        **CAPTURED,
    }


def same(found: Any, expected: Any) -> bool:
    found = found.item() if isinstance(found, np.generic) else found
    if isinstance(expected, float):
        return isinstance(found, float) and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(expected) and found == expected


def finite(*values: Any) -> bool:
    return all(math.isfinite(v) and abs(v) < 2**53 for v in values)


# ---- the CuTe printer ------------------------------------------------------------------------------------------------


@given(KINDS.flatmap(lambda kind: exprs(kind)))
def test_kernel_text_has_the_value_of_the_expression(e: Expr) -> None:
    """Parentheses, operators and calls: Python reads the text as the tree that was printed."""
    expected = at_point(e)
    assume(finite(expected))
    found = eval(CutePrinter().text(e), {"__builtins__": {}}, kernel_names())
    assert same(found, expected)


@given(st.lists(KINDS.flatmap(lambda kind: exprs(kind, 5)), min_size=1, max_size=3))
def test_straight_line_keeps_values_and_lines_short(many: list[Expr]) -> None:
    given_ = frozenset(("b", "h", "q_idx", "kv_idx", "s"))
    expected = [at_point(e) for e in many]
    assume(finite(*expected))
    printer = CutePrinter()
    lines, texts = straight_line(printer, many, given_)
    names = {n: v for n, v in kernel_names().items() if n in DSL or n in given_}
    problem = {n: scalar(POINT[n]) for n in ("seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "batch")}
    problem |= {n: scalar(v) for n, (_, v) in PARAMS.items()} | CAPTURED
    names["p"] = SimpleNamespace(**problem, qhead_per_kvhead=np.int64(2))
    exec("\n".join(lines), {"__builtins__": {}}, names)
    for text, value in zip(texts, expected, strict=True):
        found = eval(text, {"__builtins__": {}}, names)
        assert same(found, value)
    assert all(len(x) <= WIDTH + 32 for text in (*lines, *texts) for x in text.split("\n"))
    assert printer.used <= set(DSL)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_prints(name: str) -> None:
    """One call of each row and signature, evaluated at the point."""
    values = {Type.BOOL: Param(type=Type.BOOL, name="on"), Type.INT: atom("q_idx"), Type.FLOAT: atom("s")}
    for args, _ in FUNCTIONS[name].signatures:
        e = apply(name, *(values[a] for a in args))
        assert same(eval(CutePrinter().text(e), {"__builtins__": {}}, kernel_names()), at_point(e))


def test_spelling() -> None:
    q, kv, s, on = atom("q_idx"), atom("kv_idx"), atom("s"), Param(type=Type.BOOL, name="on")
    printed = {
        CutePrinter().text(e)
        for e in (
            apply("sub", q, apply("sub", kv, q)),
            apply("sub", apply("sub", q, kv), q),
            apply("mul", apply("add", q, kv), q),
            apply("and", apply("lt", q, kv), apply("or", on, apply("eq", q, kv))),
            apply("not", apply("le", q, kv)),
            apply("neg", apply("add", q, kv)),
            apply("min", q, kv),
            apply("max", s, const(0.0)),
            apply("div", s, const(3.0)),
            apply("div", const(1.0), s),
            apply("float", apply("sub", q, kv)),
            apply("where", on, const(16), const(0)),
            apply("not", const(True)),
        )
    }
    assert printed == {
        "q_idx - (kv_idx - q_idx)",
        "q_idx - kv_idx - q_idx",
        "(q_idx + kv_idx) * q_idx",
        "(q_idx < kv_idx) & (on | (q_idx == kv_idx))",
        "~(q_idx <= kv_idx)",
        "-(q_idx + kv_idx)",
        "cutlass.min(q_idx, kv_idx)",
        "cute.arch.fmax(s, 0.0)",
        "s * 0.3333333333333333",
        "1.0 / s",
        "Float32(q_idx) - Float32(kv_idx)",
        "select(on, Int32(16), 0)",
        "True == False",
    }


def test_a_division_before_a_step_stays_a_division() -> None:
    """int(q / 41) at q = 41 is 1; 41 * fp32(1 / 41) is below 1 and would be table row 0."""
    assert np.float32(41) * np.float32(1 / 41) < 1
    quotient = apply("div", atom("s"), const(41.0))
    assert CutePrinter().text(apply("int", quotient)) == "Int32(s / 41.0)"
    assert CutePrinter().text(apply("floor", quotient)) == "floor(s / 41.0)"
    assert CutePrinter().text(apply("ge", apply("mul", quotient, atom("s")), const(1.0))) == "s / 41.0 * s >= 1.0"
    assert CutePrinter().text(apply("int", apply("div", atom("s"), const(8.0)))) == "Int32(s * 0.125)"
    assert lower(quotient) == apply("mul", atom("s"), const(1 / 41.0))


def test_fold_breaks_what_nothing_shortens() -> None:
    text = "at(t, " + ", ".join(f"argument_number_{i}_of_many" for i in range(12)) + ")"
    folded = fold(text)
    assert max(len(x) for x in folded.split("\n")) <= WIDTH + 1
    assert ast.dump(ast.parse(folded)) == ast.dump(ast.parse(text))
    assert fold("short") == "short"


# ---- the printers of the self-check ----------------------------------------------------------------------------------


def _take(tensor: torch.Tensor, *indices: Any) -> torch.Tensor:
    inside = [torch.as_tensor(i).clamp(0, n - 1) for i, n in zip(indices, tensor.shape, strict=True)]
    return tensor[tuple(inside)]


TORCH_NAMES: dict[str, Any] = {
    "torch": torch,
    "take": _take,
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float64 if isinstance(x, float) else None),
    "floor_div": lambda a, b: torch.div(torch.as_tensor(a), torch.as_tensor(b), rounding_mode="floor"),
    "has_bit": lambda a, b: (torch.as_tensor(a) >> (torch.as_tensor(b) & 31)) & 1 == 1,
    "log2": torch.log2,
    "NEG_INF": -math.inf,
}


@given(KINDS.flatmap(lambda kind: exprs(kind, 4)))
def test_torch_text_has_the_value_of_the_expression(e: Expr) -> None:
    """On a grid of positions, sizes and params being Python numbers as in the self-check."""
    shape = {"b": (-1, 1, 1, 1), "h": (-1, 1, 1), "q_idx": (-1, 1), "kv_idx": (-1,)}
    extent = {"b": 2, "h": 4, "q_idx": 11, "kv_idx": 15}
    grid = {n: torch.arange(extent[n]).reshape(shape[n]) for n in shape}
    grid |= {"h_kv": grid["h"] // 2, "q_pos": grid["q_idx"] + 4}
    grid["s"] = torch.randn(2, 4, 11, 15, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    sizes = {n: v for n, v in POINT.items() if n not in grid}
    numbers = {n: v for n, (_, v) in PARAMS.items()}
    env = {
        n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for n, v in (sizes | numbers).items()
    }
    expected = evaluate(e, {**grid, **env}, CAPTURED)
    lines, (text,) = straight_line(TorchPrinter(), [e], frozenset(POINT), from_problem=False)
    names = {**TORCH_NAMES, **grid, **sizes, **numbers, **CAPTURED}
    exec("\n".join(lines), names)
    found = torch.as_tensor(eval(text, names))
    found, expected = torch.broadcast_tensors(found, expected)
    if e.type is Type.FLOAT:
        torch.testing.assert_close(found.double(), expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    else:
        assert torch.equal(found, expected.to(found.dtype)) and (e.type is not Type.BOOL or found.dtype is torch.bool)


@given(exprs(Type.FLOAT, 4, score=False))
def test_scale_text_is_plain_python(e: Expr) -> None:
    """The default scale reads params only: replace the rest by constants."""
    from attngen.ir.expr import Atom, Load, rewrite

    plain = {Type.BOOL: const(True), Type.INT: const(3), Type.FLOAT: const(0.5)}
    e = rewrite(e, lambda n: plain[n.type] if isinstance(n, Load | Atom) else n)
    expected = at_point(e)
    assume(finite(expected))
    text = ScalarPrinter().text(e)
    names = {"math": math, **{n: v for n, (_, v) in PARAMS.items()}}
    assert same(eval(text, names), expected)
