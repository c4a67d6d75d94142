"""Kernels whose row tiles hold several query heads of a KV head, on the checker: values, races, writes."""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_spec
from test_gallery import verify

from attngen.samples import Shape
from attngen.syntax import make_spec

pytestmark = pytest.mark.dsl
CAUSAL = "kv_idx <= q_pos"


@pytest.mark.parametrize(
    ("pack", "spec"),
    [
        (8, make_spec("causal", head_dim=128, mask=CAUSAL)),
        (4, make_spec("window", head_dim=64, mask=f"{CAUSAL} and q_pos - kv_idx < 50", layout="bhsd")),
        (
            2,
            make_spec(
                "sinks", head_dim=72, mask=f"kv_idx < 30 or {CAUSAL}", dtype="fp16", sink="sinks[h]",
                tensors={"sinks": {"dims": ("heads_q",)}},
            ),
        ),
        (8, make_spec("wide", head_dim=128, out_dtype="f32", max_logit=True)),
    ],
    ids=lambda x: getattr(x, "name", x),
)  # fmt: skip
def test_packed(pack: int, spec) -> None:
    """One row, rows past a tile's end in several groups, fewer keys than rows."""
    packed = spec.replace(schedule=spec.schedule.replace(pack_gqa=pack))
    module, _ = compile_spec(packed)
    for seed, shape in enumerate(
        [Shape(2, pack, 1, 1, 150), Shape(1, 2 * pack, 2, 300 // pack, 203), Shape(1, pack, 1, 40, 33)]
    ):
        verify(packed, module, len(module.PLANS) - 1, shape, seed)
