"""Forwards of rows whose scores grow from KV tile to KV tile, on the checker: references are raised, O follows."""

from __future__ import annotations

import pytest
import torch
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call

from attngen import samples
from attngen.jit.scale import Scale
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import make_spec

pytestmark = pytest.mark.dsl
CAUSAL = "kv_idx <= q_pos"


@pytest.mark.parametrize("rise", [0.02, 0.3, 1.0], ids=lambda r: f"by {r} a key")
@pytest.mark.parametrize(
    "spec",
    [
        make_spec("rising", head_dim=64, mask=CAUSAL, tile="128x64"),
        make_spec("halves", head_dim=64, dtype="fp16", tile="128x64"),
        make_spec("rows", head_dim=64, score="s + 1.5 * (kv_idx - q_pos) - 0.5 * q_pos", mask=CAUSAL, tile="128x64"),
        make_spec("largest", head_dim=64, score="s + 1.5 * (kv_idx - q_pos)", max_logit=True, tile="128x64"),
        make_spec("sinks", head_dim=64, sink=3.0, max_logit=True, tile="128x64"),
    ],
    ids=lambda s: s.name,
)
def test_rising_scores(spec, rise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seldom, at some tiles, at every tile; one row of four falls while the others of its warp rise."""
    monkeypatch.setattr(samples, "RISE", rise)
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, Shape(1, 1, 1, 150, 400), seed=5)
    q, k = samples.rising(q, k)
    q[:, ::4, :, 0] *= -1
    o, lse, report = attngen_call(module, 0, q, k, v, params=(), tensors=(), scale=Scale(spec).default, layout="bshd")
    assert not report.faults
    assert torch.isfinite(o.float()).all()
    assert_close(o, spec, q, k, v, lse=lse)
