"""Gradients of the dense meaning, and the symbolic derivatives of the function table."""

from __future__ import annotations

import pytest
import torch
from builders import CAUSAL, QP, B, D, H, K, O, Q, S, f, load, spec
from cases import BIAS, F32, SCORES, SINKS, qkv, tensors_for
from test_three_way import VALUES, make

from attngen.ir.expr import Atom
from attngen.ir.functions import FUNCTIONS, Function, apply
from attngen.ir.types import Type
from attngen.ref import dense
from attngen.ref.evaluate import evaluate

MASKS = ("causal", "window", "nothing", "longformer", "left_pad", "rows", "bd3lm")


def gradients(s, b: int, sq: int, skv: int, hq: int, hkv: int):  # type: ignore[no-untyped-def]
    q, k, v = (x.requires_grad_() for x in qkv(s, b, sq, skv, hq, hkv))
    t = tensors_for(s, b, sq, skv, hq)
    learned = [x.requires_grad_() for x in t.values() if x.is_floating_point()]
    out = dense.attention(s, q, k, v, VALUES, t)
    weights = torch.linspace(-1, 1, out.o.numel(), dtype=out.o.dtype).view_as(out.o)
    finite = torch.where(torch.isfinite(out.lse), out.lse, torch.zeros_like(out.lse))
    loss = (out.o * weights).sum() + finite.sum()
    grads = torch.autograd.grad(loss, [q, k, v, *learned], allow_unused=True)
    return out, grads


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sink", SINKS)
def test_finite_and_zero_for_empty_rows(mask: str, score: str, sink: str) -> None:
    """No NaN anywhere; rows that keep nothing get no gradient."""
    s = make(mask, score, sink)
    out, grads = gradients(s, 2, 7, 5, 4, 2)
    for g in grads:
        assert g is None or torch.isfinite(g).all()
    share_free = out.lse == -torch.inf if SINKS[sink] is None else (out.o == 0).all(-1).transpose(1, 2)
    dq = grads[0].transpose(1, 2)
    assert (dq[share_free] == 0).all()
    if mask == "nothing":
        assert all(g is None or not g.any() for g in grads[:3])


def test_against_finite_differences() -> None:
    """gradcheck over q, k, v, a bias, slopes, sinks and a gate at once, with rows and keys that are dropped."""
    gate = load("gate", B, Q, H, D, dtype=F32)
    score = f("tanh", S / 3.0) * 3.0 + BIAS - load("slopes", H, dtype=F32) * f("abs", QP - K)
    s = spec(
        CAUSAL & (QP - K < 3), score, sink=SINKS["per_head"], epilogue=O * f("sigmoid", gate),
        tensors=("bias", "slopes", "sinks", "gate"), d=3, dv=2,
    )  # fmt: skip
    names = [t.name for t in s.tensors]
    inputs = [*qkv(s, 1, 5, 4, 2, 1), *(x.double() for x in tensors_for(s, 1, 5, 4, 2).values())]

    def call(q, k, v, *rest):  # type: ignore[no-untyped-def]
        out = dense.attention(s, q, k, v, tensors=dict(zip(names, rest, strict=True)))
        return out.o, out.lse

    assert torch.autograd.gradcheck(call, [x.requires_grad_() for x in inputs], atol=1e-6)


def test_masked_elements_do_not_poison() -> None:
    """sqrt(0) and log(0) at dropped keys, and log(0) at kept ones, leave gradients finite."""
    for score in (S + f("sqrt", BIAS), S + f("log", BIAS)):
        s = spec(CAUSAL, score, tensors=("bias",))
        q, k, v = (x.requires_grad_() for x in qkv(s, 1, 4, 4, 1, 1))
        bias = torch.ones(4, 4, dtype=torch.float64).tril()[None, None].clone()
        if score is not None and score.e.args[1].fn == "log":
            bias[0, 0, 3, 1] = 0.0
        bias.requires_grad_()
        out = dense.attention(s, q, k, v, tensors={"bias": bias})
        for g in torch.autograd.grad(out.o.square().sum(), (q, k, v, bias)):
            assert torch.isfinite(g).all()


def test_broadcast_bias_gradient_is_summed() -> None:
    """An extent-1 axis of a captured tensor receives the sum over it."""
    s = make("causal", "bias")
    q, k, v = qkv(s, 2, 4, 5, 2, 1)
    full = torch.randn(1, 2, 1, 5, dtype=torch.float64).expand(2, 2, 4, 5).clone().requires_grad_()
    small = full.detach()[:1, :, :1].clone().requires_grad_()
    grads = [
        torch.autograd.grad(dense.attention(s, q, k, v, tensors={"bias": x}).o.square().sum(), x)[0]
        for x in (full, small)
    ]
    torch.testing.assert_close(grads[1], grads[0].sum((0, 2), keepdim=True))


POINTS = {"log": (0.2, 3.0), "log2": (0.2, 3.0), "sqrt": (0.2, 3.0), "div": (0.4, 2.0)}
DIFFERENTIABLE = [n for n, row in FUNCTIONS.items() if row.derivative is not None]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_symbolic_derivative(name: str) -> None:
    """d y / d arg of the table, evaluated, against central differences of the dense evaluation."""
    row: Function = FUNCTIONS[name]
    types = next((t for t, out in row.signatures if out is Type.FLOAT and Type.INT not in t), row.signatures[0][0])
    low, high = POINTS.get(name, (-2.0, 2.0))
    g = torch.Generator().manual_seed(1)
    env: dict[str, torch.Tensor] = {}
    args = []
    for i, t in enumerate(types):
        atom = Atom(type=t, name=f"x{i}")
        if t is Type.BOOL:
            env[atom.name] = torch.rand(64, generator=g) < 0.5
        else:
            env[atom.name] = torch.rand(64, generator=g, dtype=torch.float64) * (high - low) + low
        args.append(atom)
    y = apply(name, *args)
    assert row.derivative is not None
    parts = row.derivative(tuple(args), y)
    assert len(parts) == len(args)
    h = 1e-6
    for atom, part in zip(args, parts, strict=True):
        if atom.type is Type.BOOL:
            assert part is None
            continue
        up, down = ({**env, atom.name: env[atom.name] + d} for d in (h, -h))
        numeric = (evaluate(y, up) - evaluate(y, down)) / (2 * h)
        symbolic = torch.zeros_like(numeric) if part is None else torch.broadcast_to(evaluate(part, env), numeric.shape)
        # a jump or a kink within h of a point is no fault of the derivative
        smooth = (numeric - (evaluate(y, up) - evaluate(y, env)) / h).abs() < 1e-3
        assert smooth.sum() > 48
        torch.testing.assert_close(symbolic[smooth], numeric[smooth], rtol=1e-5, atol=1e-6)


def test_every_float_function_has_a_derivative() -> None:
    """What yields a float can be differentiated."""
    missing = [
        n for n, row in FUNCTIONS.items() if row.derivative is None and any(o is Type.FLOAT for _, o in row.signatures)
    ]
    assert missing == []
