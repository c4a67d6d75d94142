"""Random small FlexAttention functions: what they compute on grids is what their traced spec computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attngen
from attngen.ref.evaluate import evaluate
from attngen.syntax import load_spec

BATCH, HEADS, ROWS, KEYS = 2, 3, 5, 7
GENERATOR = torch.Generator().manual_seed(9)
TABLE = torch.randn(11, HEADS, generator=GENERATOR)
IDS = torch.randint(-4, 5, (BATCH, 13), generator=GENERATOR)
MARKS = torch.rand(7, generator=GENERATOR) < 0.5
OFFSET, FACTOR = torch.tensor(3), torch.tensor(-0.75)

#: A function of the five arguments that a score_mod has.
Node = Callable[[Any, Any, Any, Any, Any], Any]


def apply(f: Callable[..., Any], *nodes: Node) -> Node:
    return lambda *x: f(*(n(*x) for n in nodes))


def constant(value: Any) -> Node:
    return lambda *x: value


def indices(depth: int) -> st.SearchStrategy[Node]:
    leaves: list[Node] = [(lambda *x, n=n: x[n]) for n in range(1, 5)]
    leaf = st.sampled_from([*leaves, lambda *x: x[3] + OFFSET])
    if not depth:
        return leaf
    inner, small = indices(depth - 1), st.integers(1, 5)
    two = [
        lambda a, c: a + c, lambda a, c: a - c, lambda a, c: a * c, torch.minimum, torch.maximum,
        lambda a, c: torch.where(a > c, a, c - 1), lambda a, c: a // (c.abs() + 1), lambda a, c: a % (c * c + 1),
    ]  # fmt: skip
    one = [
        lambda a, n: a // n, lambda a, n: a % n, lambda a, n: n - a, lambda a, n: abs(a), lambda a, n: a.clamp(-n, n),
        lambda a, n: a & (2**n - 1), lambda a, n: a >> n, lambda a, n: n // (a.abs() + 1), lambda a, n: -a**2 + n,
        lambda a, n: torch.div(a, n, rounding_mode="trunc"), lambda a, n: (a / n).to(torch.int32),
        lambda a, n: (a > n).int(), lambda a, n: IDS[0, a % 13],
    ]  # fmt: skip
    return st.one_of(
        leaf,
        st.builds(apply, st.sampled_from(two), inner, inner),
        st.builds(lambda f, a, n: apply(f, a, constant(n)), st.sampled_from(one), inner, small),
    )


def conditions(depth: int) -> st.SearchStrategy[Node]:
    compare = [
        lambda a, c: a < c, lambda a, c: a <= c, lambda a, c: a > c, lambda a, c: a >= c, lambda a, c: a == c,
        lambda a, c: a != c, lambda a, c: a >= 2, lambda a, c: MARKS[(a + c) % 7],
    ]  # fmt: skip
    leaf = st.builds(apply, st.sampled_from(compare), indices(1), indices(1))
    if not depth:
        return leaf
    inner = conditions(depth - 1)
    join = [
        lambda a, c: a & c, lambda a, c: a | c, lambda a, c: a ^ c, lambda a, c: a & ~c, torch.logical_or,
        lambda a, c: torch.where(a, c, ~c), lambda a, c: a == c, lambda a, c: a * c,
        lambda a, c: torch.logical_not(a) | c,
    ]  # fmt: skip
    return st.one_of(leaf, st.builds(apply, st.sampled_from(join), inner, inner))


def scores(depth: int) -> st.SearchStrategy[Node]:
    leaf = st.one_of(
        st.just(lambda *x: x[0]),
        st.builds(lambda i: apply(lambda a: a * 0.125, i), indices(1)),
        st.builds(lambda i: lambda *x: TABLE[i(*x) % 11, x[2]], indices(1)),
    )
    if not depth:
        return leaf
    inner = scores(depth - 1)
    two = [
        lambda a, c: a + c, lambda a, c: a - c, lambda a, c: a * c, lambda a, c: a / (1 + c * c), torch.maximum,
        lambda a, c: torch.minimum(a, c), lambda a, c: torch.add(a, c, alpha=0.5), lambda a, c: a % (c.abs() + 1),
    ]  # fmt: skip
    one = [
        torch.tanh, lambda a: torch.sigmoid(a) * FACTOR, lambda a: torch.exp(-a.abs()),
        lambda a: torch.log(a.abs() + 1), torch.abs,
        lambda a: 2.0 - a, lambda a: torch.clamp(a, -1, 1.5), lambda a: torch.floor(a * 3), lambda a: a**3, torch.relu,
        lambda a: 1 / (a.abs() + 1), lambda a: a.square(),
    ]  # fmt: skip
    return st.one_of(
        leaf,
        st.builds(apply, st.sampled_from(two), inner, inner),
        st.builds(apply, st.sampled_from(one), inner),
        st.builds(lambda c, a, e: apply(torch.where, c, a, e), conditions(1), inner, inner),
        st.builds(lambda c, a: apply(lambda x, y: x * 0.5 + y, c, a), conditions(0), inner),
    )


def hidden(depth: int) -> st.SearchStrategy[Node]:
    """Scores that are -inf somewhere, and what keeps -inf."""
    takes = [lambda x, y: torch.where(x, y, -torch.inf), lambda x, y: torch.where(x, -torch.inf, y)]
    base = st.builds(apply, st.sampled_from(takes), conditions(1), scores(1))
    if not depth:
        return st.one_of(scores(2), base)
    inner = hidden(depth - 1)
    two = [lambda a, c: a + c, torch.minimum]
    one = [
        lambda a: a * 2.0,
        lambda a: a / 3,
        lambda a: a - 1,
        lambda a: torch.maximum(a, torch.full_like(a, -torch.inf)),
    ]
    return st.one_of(
        base,
        st.builds(apply, st.sampled_from(two), inner, inner),
        st.builds(apply, st.sampled_from(one), inner),
        st.builds(lambda c, a, e: apply(torch.where, c, a, e), conditions(0), inner, inner),
    )


def grids() -> tuple[torch.Tensor, ...]:
    sizes = (BATCH, HEADS, ROWS, KEYS)
    b, h, q, k = (torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate(sizes))
    return torch.randn(sizes, generator=GENERATOR, dtype=torch.float64), b, h, q, k


@settings(max_examples=120, deadline=None)
@given(score=st.one_of(scores(3), hidden(2)), mask=conditions(2))
def test_traced_functions_mean_what_they_compute(score: Node, mask: Node) -> None:
    s, b, h, q, k = grids()

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask(None, b, h, q_idx, kv_idx)

    def score_mod(score_: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score(score_, b, h, q_idx, kv_idx)

    found = attngen.from_flex(score_mod, mask_mod, head_dim=8)
    assert load_spec(found.text) == found.spec
    wanted_mask = torch.broadcast_to(mask_mod(b, h, q, k), s.shape)
    wanted = torch.broadcast_to(torch.as_tensor(score_mod(s, b, h, q, k), dtype=torch.float64), s.shape)
    wanted = torch.where(wanted_mask, wanted, -torch.inf)

    env = {"s": s, "b": b, "h": h, "q_idx": q, "kv_idx": k}
    env |= {name: torch.tensor(value) for name, value in found.params.items()}
    keep = torch.broadcast_to(evaluate(found.spec.mask, env, found.tensors), s.shape)
    value = torch.broadcast_to(evaluate(found.spec.score, env, found.tensors), s.shape)
    torch.testing.assert_close(torch.where(keep, value, -torch.inf), wanted, rtol=1e-6, atol=1e-6)
