"""Sigmoid and relu weights on the checker: forward, backward, deterministic, both ways to share out a KV tile."""

from __future__ import annotations

from dataclasses import replace

import backward_calls as calls
import pytest
import torch
from ptxcheck.compile import compile_spec
from test_gallery import verify

from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.syntax import make_spec

pytestmark = pytest.mark.dsl

CAUSAL = "kv_idx <= q_pos"
SPECS = {
    s.name: s
    for s in (
        make_spec("sig", head_dim=64, mask=CAUSAL, normalizer="sigmoid"),
        make_spec(
            "biased", head_dim=64, score="s - log(float(seqlen_kv))", mask=f"{CAUSAL} and q_pos - kv_idx < 100",
            normalizer="sigmoid",
        ),
        make_spec("capped", head_dim=256, score="2.0 * tanh(s / 2.0)", mask=CAUSAL, normalizer="sigmoid"),
        make_spec(
            "rectified", head_dim=64, head_dim_v=32, score="2.0 * tanh(s / 2.0) + bias[h, kv_idx]", mask=CAUSAL,
            tensors={"bias": {"dims": ("heads_q", "seqlen_kv"), "grad": True}}, normalizer="relu",
        ),
        make_spec("plain_relu", head_dim=64, normalizer="relu", dtype="fp16"),
    )
}  # fmt: skip
SHAPES = [Shape(1, 2, 1, 131, 131), Shape(2, 1, 1, 60, 203), Shape(1, 1, 1, 200, 77)]


@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str) -> None:
    spec = SPECS[name]
    module, _ = compile_spec(spec)
    for seed, shape in enumerate(SHAPES):
        verify(spec, module, 0, shape, seed, lse=False)


def learned(spec: AttentionSpec) -> tuple[str, ...]:
    return tuple(t.name for t in spec.tensors if t.grad)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_backward(name: str, deterministic: bool) -> None:
    spec = SPECS[name]
    if deterministic:
        spec = spec.replace(backward=spec.backward.replace(deterministic=True))
    made = calls.kernels(spec, captured=learned(spec))
    for seed, shape in enumerate(SHAPES[:1] if deterministic else SHAPES):
        c = calls.call(spec, shape, seed=seed)
        calls.verify(made, replace(c, dlse=torch.zeros_like(c.dlse)), seeds=(seed,))
