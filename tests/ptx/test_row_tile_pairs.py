"""Forwards whose CTAs go in clusters of two, on the checker: values, races, messages to CTAs that have left."""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_spec
from test_gallery import verify

from attngen.samples import Shape
from attngen.syntax import make_spec

pytestmark = pytest.mark.dsl
CAUSAL = "kv_idx <= q_pos"
DOCUMENTS = {"doc": {"dtype": "i32", "dims": ("batch", "seqlen_kv"), "sorted": True}}


@pytest.mark.parametrize(
    "spec",
    [
        make_spec("causal", head_dim=128, mask=CAUSAL),  # warpgroups pass tiles that only the other CTA's see
        make_spec("full", head_dim=72, head_dim_v=40, dtype="fp16", layout="bhsd"),
        make_spec("window", head_dim=64, mask=f"{CAUSAL} and q_pos - kv_idx < 50"),
        make_spec("sinks", head_dim=64, mask=f"kv_idx < 30 or ({CAUSAL} and q_pos - kv_idx < 40)"),  # runs
        make_spec("documents", head_dim=64, mask=f"{CAUSAL} and doc[b, q_pos] == doc[b, kv_idx]", tensors=DOCUMENTS),
        make_spec("wide", head_dim=256, out_dtype="f32", max_logit=True),  # O in Q's bytes, or none in shared memory
        make_spec("weights", head_dim=64, normalizer="sigmoid", mask=CAUSAL),
        make_spec("causal", head_dim=64, mask=CAUSAL, pack_gqa=2),
        make_spec("alone", head_dim=64, mask=CAUSAL, tile="64x128"),  # one warpgroup
    ],
    ids=lambda s: s.name + str(s.schedule.pack_gqa or ""),
)  # fmt: skip
def test_pairs(spec) -> None:
    """Pairs with one row tile and with two, several a cluster; fewer keys than rows; one row."""
    spec = spec.replace(schedule=spec.schedule.replace(cluster=(2, 1)))
    module, _ = compile_spec(spec)
    rows = module.ATTN_META["plans"][-1]["tile_m"] + 70
    for seed, shape in enumerate([Shape(1, 2, 1, rows, rows), Shape(2, 2, 1, 1, 150), Shape(1, 2, 1, 90, 33)]):
        if spec.tensors and shape.seqlen_q > shape.seqlen_kv:
            continue
        verify(spec, module, len(module.PLANS) - 1, shape, seed)
