"""The numeric grid on the GPU: head dims, dtypes, masks, scores, sinks, groups, lengths, layouts."""

from __future__ import annotations

import pytest
from builders import CAUSAL, MASKS, QP, B, D, H, K, O, Q, S, W, f, load, spec, x
from cases import ALL_MASKS, SCORES, SINKS
from harness import inputs, verify

from attngen.ir.expr import tensors_of
from attngen.ir.types import DType, Layout

HEAD_DIMS = [(d, d) for d in (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128)]
HEAD_DIMS += [(d, d) for d in (136, 144, 160, 176, 192, 208, 224, 240, 248, 256)]
HEAD_DIMS += [(192, 128), (128, 192), (64, 256), (256, 64), (8, 256), (256, 8), (40, 104)]
SHAPES = [(2, 200, 333, 4, 2), (1, 333, 200, 3, 1), (1, 700, 1500, 2, 2)]
LENGTHS = [(1, 1), (1, 129), (129, 1), (63, 64), (64, 65), (127, 80), (191, 79), (192, 81), (193, 160), (255, 256)]
LENGTHS += [(257, 511)]
PARAMS = ({"window": 70, "prefix": 100, "size": 33}, {"window": 1, "prefix": 1, "size": 1}, {"window": 100000})


def needs(*expressions):
    """Names of the captured tensors that expressions read."""
    names = set()
    for e in expressions:
        if e is not None:
            names |= tensors_of(e.e)
    return tuple(sorted(names))


def make(mask=True, score=S, sink=None, **more):
    if sink is not None:
        more["sink"] = sink
    return spec(mask, score, tensors=needs(x(mask), x(score), sink, more.get("epilogue")), **more)


@pytest.mark.parametrize(("d", "dv"), HEAD_DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_head_dims(d, dv, mask):
    s = make(MASKS[mask], d=d, dv=dv)
    for shape in (*SHAPES, (1, 2300, 2500, 2, 1)):
        verify(s, *inputs(s, *shape))


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
@pytest.mark.parametrize("name", sorted(ALL_MASKS))
@pytest.mark.parametrize("d", [64, 128])
def test_masks(name, d, dtype):
    if dtype is DType.FP16 and d == 128 and name not in MASKS:
        pytest.skip("the combination adds nothing")
    s = make(ALL_MASKS[name], d=d, dtype=dtype)
    for i, shape in enumerate(SHAPES):
        for params in PARAMS:
            verify(s, *inputs(s, *shape, seed=i), seed=i, **params)


@pytest.mark.parametrize("score", sorted(SCORES))
@pytest.mark.parametrize("mask", ["full", "causal", "window", "same_document", "two_windows"])
def test_scores(score, mask):
    s = make(ALL_MASKS[mask], SCORES[score], d=64)
    for i, shape in enumerate(SHAPES):
        verify(s, *inputs(s, *shape, seed=i), seed=i, window=90, size=50)


@pytest.mark.parametrize("sink", sorted(SINKS))
@pytest.mark.parametrize("mask", ["full", "window", "nothing", "rows"])
@pytest.mark.parametrize("d", [64, 256])
def test_sinks(sink, mask, d):
    s = make(ALL_MASKS[mask], sink=SINKS[sink], d=d)
    for i, shape in enumerate(SHAPES):
        verify(s, *inputs(s, *shape, seed=i), seed=i, window=40, prefix=150)


def test_epilogue_gate():
    gate = load("gate", B, Q, H, D, dtype=DType.F32)
    s = make(CAUSAL, d=72, epilogue=O * f("sigmoid", gate))
    for shape in SHAPES:
        verify(s, *inputs(s, *shape))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16, 71])
def test_groups(group):
    for mask in ("full", "causal"):
        s = make(MASKS[mask], d=128)
        for hkv in (1, 2):
            verify(s, *inputs(s, 2, 150, 300, group * hkv, hkv))


@pytest.mark.parametrize(("sq", "skv"), LENGTHS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_lengths(sq, skv, d):
    for mask in ("full", "causal", "causal_top_left", "window", "two_windows"):
        s = make(ALL_MASKS[mask], d=d)
        verify(s, *inputs(s, 2, sq, skv, 2, 1), window=33, size=20)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("sq", "skv"), [(0, 100), (100, 0), (0, 0)])
def test_zero_lengths(sq, skv, d):
    for sink in (None, SINKS["per_head"]):
        s = make(CAUSAL, sink=sink, d=d)
        q, k, v = inputs(s, 2, sq, skv, 2, 1)
        o, lse = verify(s, q, k, v)
        assert not o.isnan().any() and not lse.isnan().any()


@pytest.mark.parametrize("d", [64, 128, 256])
def test_bhsd(d):
    s = make(CAUSAL & (QP - K < W), d=d, layout=Layout.BHSD)
    for shape in SHAPES:
        verify(s, *inputs(s, *shape), window=100)


@pytest.mark.parametrize("d", [64, 72, 128])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_large_scores_and_rising_maxima(d, dtype):
    """Row maxima that grow in nearly every tile, and LSE near -100 and +100."""
    for mask in ("full", "causal"):
        s = make(MASKS[mask], d=d, dtype=dtype)
        q, k, v = inputs(s, 1, 500, 1500, 2, 2)
        ramp = torch_ramp(k.shape[1])
        verify(s, q, (k * ramp).to(k.dtype), v)
        verify(s, q.abs(), (k.abs() * 4).to(k.dtype), v)
        verify(s, q.abs(), -(k.abs() * 4).to(k.dtype), v)


def torch_ramp(n):
    import torch

    return torch.linspace(0.1, 6.0, n, device="cuda").view(1, -1, 1, 1)
