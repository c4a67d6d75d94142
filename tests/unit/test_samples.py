"""Sample arguments respect what a spec promises."""

from __future__ import annotations

import pytest
import torch

from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.syntax import load_spec

SPEC = load_spec(
    """attn 1
attention x {
  head_dim = 64, v = 32
  param w: int >= 1 <= 9
  param f: float = 0.5
  param on: bool = true
  tensor doc: i32[batch, seqlen_kv] sorted
  tensor t: f32[7, heads_q]
  tensor m: bool[batch, seqlen_q]
  mask = doc[b, kv_idx] >= 0 and on and kv_idx < w * 100 and m[b, q_idx]
  score = s * f + t[0, h]
}
"""
)
SHAPE = samples.Shape(2, 4, 2, 50, 70)


def test_shapes_and_promises() -> None:
    q, k, v = samples.qkv(SPEC, SHAPE)
    assert (q.shape, k.shape, v.shape) == ((2, 50, 4, 64), (2, 70, 2, 64), (2, 70, 2, 32))
    made = samples.tensors(SPEC, SHAPE)
    assert made["doc"].shape == (2, 70) and bool((made["doc"].diff() >= 0).all()) and made["doc"].dtype == torch.int32
    assert len(made["doc"][0].unique()) > 1
    assert made["t"].shape == (7, 4) and made["m"].dtype == torch.bool


def test_the_same_seed_gives_the_same_numbers() -> None:
    for a, b in zip(samples.qkv(SPEC, SHAPE, seed=3), samples.qkv(SPEC, SHAPE, seed=3), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(samples.qkv(SPEC, SHAPE, seed=3)[0], samples.qkv(SPEC, SHAPE, seed=4)[0])


def test_params() -> None:
    assert samples.params(SPEC) == {"w": 1, "f": 0.5, "on": True}
    assert samples.params(SPEC, {"w": "4", "f": "2", "on": "false"}) == {"w": 4, "f": 2.0, "on": False}


@pytest.mark.parametrize(
    ("given", "code"),
    [({"u": "1"}, "E0601"), ({"w": "many"}, "E0603"), ({"w": "10"}, "E0603"), ({"on": "maybe"}, "E0603")],
)
def test_params_that_do_not_fit(given, code) -> None:
    with pytest.raises(AttnError) as fault:
        samples.params(SPEC, given)
    assert fault.value.code == code
