"""Blockwise execution with small blocks: lanes of batch elements and heads, cut key blocks, gradients."""

from __future__ import annotations

import pytest
import torch
from cases import qkv, tensors_for
from test_three_way import VALUES, assert_equal, make

from attngen.ref import blockwise, dense


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two KV heads of two query heads each in a lane: 5 heads make three lanes, the last one short."""
    monkeypatch.setattr(blockwise, "ROWS", 32)
    monkeypatch.setattr(blockwise, "KEYS", 48)
    monkeypatch.setattr(blockwise, "SCORES", 2 * 2 * 32 * 48)


@pytest.mark.parametrize(("batch", "heads"), [(2, (10, 5)), (5, (2, 1)), (3, (1, 1))])
@pytest.mark.parametrize("mask", ["causal", "longformer", "left_pad", "full"])
def test_lanes(mask: str, batch: int, heads: tuple[int, int]) -> None:
    s = make(mask, "alibi", "per_head")
    q, k, v = qkv(s, batch, 70, 130, *heads)
    t = tensors_for(s, batch, 70, 130, heads[0])
    want = dense.attention(s, q, k, v, VALUES, t)
    o, lse = blockwise.attention(s, q, k, v, VALUES, t)
    assert_equal(o, want.o, 1e-11)
    assert_equal(lse, want.lse.float(), 1e-6)


@pytest.mark.parametrize(
    ("score", "wanted"),
    [*((s, w) for s in ("none", "softcap", "bias") for w in "qkv"), ("none", "scale"), ("bias", "bias")],
)
def test_gradients(score: str, wanted: str) -> None:
    """Blocks that reuse memory must not do so where autograd still needs it, whichever operand has the gradient."""
    s = make("causal", score, "per_head")
    q, k, v = qkv(s, 2, 70, 130, 4, 2)
    t = tensors_for(s, 2, 70, 130, 4)
    scale = torch.tensor(0.3, dtype=torch.float64)
    leaf = {"q": q, "k": k, "v": v, "scale": scale, **t}[wanted].requires_grad_()
    weight = torch.randn(2, 70, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got, want = (
        torch.autograd.grad((run(s, q, k, v, VALUES, t, scale)[0] * weight).sum(), leaf)[0]
        for run in (blockwise.attention, dense.attention)
    )
    assert want.abs().max() > 0
    assert_equal(got, want, 1e-10)


def test_pieces() -> None:
    """Dead keys are left out, full ranges stand alone unless they are short, neighbours that are alike are one."""
    pieces = blockwise._pieces
    assert pieces([(0, 300)], [(0, 200)]) == [(0, 200, True), (200, 300, False)]
    assert pieces([(0, 300)], [(20, 30)]) == [(0, 300, False)]
    assert pieces([(10, 300)], [(400, 0)]) == [(10, 300, False)]
    assert pieces([(0, 100), (300, 400)], [(0, 100), (330, 400)]) == [
        (0, 100, True),
        (300, 330, False),
        (330, 400, True),
    ]
    assert pieces([(0, 200), (100, 300)], [(0, 200), (100, 300)]) == [(0, 300, True)]
    assert pieces([], []) == []
