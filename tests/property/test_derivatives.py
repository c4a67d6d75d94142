"""Symbolic derivatives against finite differences and torch's autograd: each row of the table, and random scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_exprs import PARAMS, TENSORS, exprs

from attngen.ir.expr import Apply, Atom, Expr, Load, atom, const, walk
from attngen.ir.functions import FUNCTIONS, apply
from attngen.ir.gradient import is_finite
from attngen.ir.types import DType, Type
from attngen.passes.algebra import ZERO, choose, plus, times
from attngen.passes.derive import Derivation
from attngen.ref.evaluate import Tensor, evaluate

POINTS = 96
#: Where an argument of a row is drawn: logarithms and roots have poles, quotients too.
RANGES = {"log": (0.2, 3.0), "log2": (0.2, 3.0), "sqrt": (0.2, 3.0), "div": (0.4, 2.0)}
ROWS = [
    (n, types)
    for n, row in FUNCTIONS.items()
    for types, out in row.signatures
    if out is Type.FLOAT and Type.FLOAT in types
]
S = atom("s")


def smooth(f: Callable[[float], Tensor], h: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The central difference at 0, and where it can be trusted: one-sided differences agree (no kink, no jump)."""
    up, down, middle = f(h), f(-h), f(0.0)
    right, left = (up - middle) / h, (middle - down) / h
    central = (up - down) / (2 * h)
    return central, (right - left).abs() < 1e-3 * (1 + central.abs())


@pytest.mark.parametrize(("name", "types"), ROWS, ids=[f"{n}-{'-'.join(t)}" for n, t in ROWS])
def test_rows(name: str, types: tuple[Type, ...]) -> None:
    """Every signature that takes a float to a float, by each of its arguments."""
    low, high = RANGES.get(name, (-2.0, 2.0))
    g = torch.Generator().manual_seed(len(name))
    env: dict[str, Tensor] = {}
    for i, t in enumerate(types):
        draws = {
            Type.BOOL: lambda: torch.rand(POINTS, generator=g) < 0.5,
            Type.FLOAT: lambda: torch.rand(POINTS, generator=g, dtype=torch.float64) * (high - low) + low,
        }
        env[f"x{i}"] = draws[t]()
    args = tuple(Atom(type=t, name=f"x{i}") for i, t in enumerate(types))
    y = apply(name, *args)
    for x in args:
        symbolic = Derivation(y, (x,)).by(x)
        if x.type is not Type.FLOAT:
            continue
        numeric, good = smooth(lambda h, x=x: evaluate(y, env | {x.name: env[x.name] + h}))  # type: ignore[misc]
        leaf = env[x.name].clone().requires_grad_()
        value = evaluate(y, env | {x.name: leaf})
        (torchs,) = torch.autograd.grad(value.sum(), leaf)
        found = torch.broadcast_to(evaluate(symbolic, env), numeric.shape)
        assert good.sum() > POINTS * 3 // 4
        torch.testing.assert_close(found[good], numeric[good], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[good], torchs[good], rtol=1e-12, atol=1e-12)


SHAPE = (2, 2, 5, 7)


def values(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Atoms and params, and captured tensors, of a small grid; `s` away from round numbers."""
    b, heads, sq, skv = SHAPE
    g = torch.Generator().manual_seed(seed)
    q = torch.arange(sq).view(1, 1, -1, 1)
    h = torch.arange(heads).view(1, -1, 1, 1)
    sizes = {"seqlen_q": sq, "seqlen_kv": skv, "heads_q": heads}
    env = {
        "s": torch.randn(SHAPE, generator=g, dtype=torch.float64) * 3,
        "b": torch.arange(b).view(-1, 1, 1, 1), "h": h, "h_kv": h, "q_idx": q, "q_pos": q + skv - sq,
        "kv_idx": torch.arange(skv).view(1, 1, 1, -1), **{n: torch.tensor(v) for n, v in sizes.items()},
        **{n: torch.tensor(v, dtype=torch.float64 if t is Type.FLOAT else None) for n, (t, v) in PARAMS.items()},
    }  # fmt: skip
    extents = {"b": b, "h": heads, "q_idx": sq, "kv_idx": skv}
    tensors: dict[str, Tensor] = {}
    for n, (dtype, axes) in TENSORS.items():
        size = [extents[a] for a in axes]
        if dtype is DType.F32:
            tensors[n] = torch.randn(size, generator=g, dtype=torch.float64)
        else:
            tensors[n] = torch.randint(0, 2 if dtype is DType.BOOL else 4, size, generator=g).to(
                torch.bool if dtype is DType.BOOL else torch.int64
            )
    return env, tensors


def variables(e: Expr) -> list[Expr]:
    """`s` and the float elements that `e` reads."""
    return [S, *dict.fromkeys(n for n in walk(e) if isinstance(n, Load) and n.type is Type.FLOAT)]


@settings(max_examples=250)
@given(exprs(Type.FLOAT, depth=5), st.integers(0, 5))
def test_random_scores(e: Expr, seed: int) -> None:
    """By `s` and by each element: equal to torch's autograd wherever the score is smooth there."""
    env, tensors = values(seed)
    by_element = Derivation(e, variables(e))
    assume(any(by_element.by(x) != ZERO for x in variables(e)))
    for x in variables(e):
        symbolic = torch.broadcast_to(evaluate(by_element.by(x), env, tensors), SHAPE)
        assert torch.isfinite(symbolic).all()

        def moved(h: float, x: Expr = x) -> Tensor:
            if x == S:
                return torch.broadcast_to(evaluate(e, env | {"s": env["s"] + h}, tensors), SHAPE)
            assert isinstance(x, Load)
            return torch.broadcast_to(evaluate(e, env, tensors | {x.tensor: tensors[x.tensor] + h}), SHAPE)

        numeric, good = smooth(moved)
        magnitude = 1 + float(numeric.abs().max())
        torch.testing.assert_close(symbolic[good], numeric[good], rtol=1e-3, atol=1e-5 * magnitude)
        # each tensor is read at one place only (random_exprs), so that torch's gradient is the sum over the pairs there
        leaf = (env["s"] if x == S else tensors[x.tensor]).clone().requires_grad_()  # type: ignore[union-attr]
        inputs = (env | {"s": leaf}, tensors) if x == S else (env, tensors | {x.tensor: leaf})  # type: ignore[union-attr]
        y = torch.broadcast_to(evaluate(e, *inputs), SHAPE)
        if y.requires_grad and good.all():
            (torchs,) = torch.autograd.grad(y.sum(), leaf)
            axes = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}
            kept = set(axes.values()) if x == S else {axes[i.name] for i in x.indices}  # type: ignore[union-attr]
            summed = [i for i in range(4) if i not in kept]
            torch.testing.assert_close(symbolic.sum(summed) if summed else symbolic, torchs, rtol=1e-9, atol=1e-9)


@settings(max_examples=200)
@given(exprs(Type.FLOAT, depth=4), st.integers(0, 3))
def test_finite_means_finite(e: Expr, seed: int) -> None:
    """What `is_finite` promises holds at large scores, whatever float elements hold."""
    env, tensors = values(seed)
    env["s"] = env["s"] * 1e6
    tensors = {n: torch.full_like(t, torch.inf) if t.is_floating_point() else t for n, t in tensors.items()}
    for x in (e, Derivation(e, (S,)).by(S)):
        if is_finite(x):
            assert torch.isfinite(evaluate(x, env, tensors)).all()


@settings(max_examples=200)
@given(exprs(Type.FLOAT, depth=3), exprs(Type.FLOAT, depth=3), exprs(Type.BOOL, depth=2), st.integers(0, 3))
def test_algebra(a: Expr, b: Expr, c: Expr, seed: int) -> None:
    """Sums, products and choices have the value of their plain spelling."""
    env, tensors = values(seed)

    def value(e: Expr) -> Tensor:
        return torch.broadcast_to(evaluate(e, env, tensors), SHAPE)

    built = [
        (plus(a, b), apply("add", a, b)),
        (times(a, b), apply("mul", a, b)),
        (choose(c, a, b), apply("where", c, a, b)),
        (times(apply("where", c, a, ZERO), b), apply("mul", apply("where", c, a, ZERO), b)),
        (times(a, apply("div", b, const(7.0))), apply("div", apply("mul", a, b), const(7.0))),
        (plus(times(a, const(3.0)), apply("neg", a)), apply("mul", a, const(2.0))),
        (plus(a, apply("sub", b, a)), b),
    ]
    for got, plain in built:
        scale = 1 + max(float(value(a).abs().max()), float(value(b).abs().max())) ** 2
        torch.testing.assert_close(value(got), value(plain), rtol=1e-9, atol=1e-12 * scale)


@given(exprs(Type.FLOAT, depth=5))
def test_derivatives_of_steps_are_zero(e: Expr) -> None:
    """Ints, bools, floor and conditions stop every derivative."""
    stopped = apply("float", apply("int", apply("clamp", e, const(-9.0), const(9.0))))
    for y in (stopped, apply("floor", e), apply("where", apply("gt", e, const(0.5)), const(1.0), const(2.0))):
        assert all(Derivation(y, variables(y)).by(x) == ZERO for x in variables(y))
        assert isinstance(y, Apply)
