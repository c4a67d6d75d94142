"""One CTA takes all row tiles: walks of one KV tile and of many, tiles that a warpgroup passes, in turns and not."""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_spec
from test_gallery import verify

from attngen.samples import Shape
from attngen.search import plan
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl

DOCUMENTS = "tensor doc: i32[batch, seqlen_kv] sorted\n  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"
WINDOW = "mask = kv_idx <= q_pos and q_pos - kv_idx < 30"
#: Head dims, mask, tile, lengths, whether warpgroups take turns.
CASES = {
    # A warpgroup whose document ends a walk early passes more tiles than there are stages.
    "documents": ("head_dim = 64", DOCUMENTS, "192 x 32", (600, 600), False),
    "documents in turns": ("head_dim = 128", DOCUMENTS, "192 x 32", (600, 600), True),
    "documents, O in Q": ("head_dim = 256", DOCUMENTS, "128 x 64", (300, 300), True),
    "window": ("head_dim = 64", WINDOW, "256 x 32", (600, 560), False),
    # Every step ends a row tile or begins one.
    "one KV tile": ("head_dim = 64", "mask = kv_idx <= q_pos", "64 x 64", (400, 60), False),
}


@pytest.mark.parametrize("name", CASES)
def test_one_worker_takes_all(name: str) -> None:
    dims, mask, tile, lengths, turns = CASES[name]
    spec = load_spec(f"attn 1\nattention rows {{\n  {dims}\n  {mask}\n  schedule {{ tile = {tile} }}\n}}\n")
    assert [p.schedule.pingpong for p in plan(spec).plans] == [turns]
    module, _ = compile_spec(spec)
    for seed in range(2):
        verify(spec, module, 0, Shape(1, 2, 1, *lengths), seed, workers=1)
