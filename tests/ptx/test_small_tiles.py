"""Kernels of small tiles, made for calls whose wide row tiles leave SMs idle, on the checker: values, races, writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ptxcheck.compile import compile_spec
from test_gallery import verify

from attngen import specs
from attngen.options import Options
from attngen.passes.few import Sibling
from attngen.samples import Shape
from attngen.search import plan

pytestmark = pytest.mark.dsl
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Example, the attention in it, the schedule's wish, and how far its params let a row reach.
CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any]]] = {
    "causal": ("causal", None, {}, {}),
    "a window, sinks, head dim 64": ("gpt_oss", "gpt_oss_local", {}, {"window": 29}),
    "O in the bytes of Q": ("gemma2", "gemma2_local", {}, {"keys": 50, "cap": 2.0}),
    "documents": ("packing", "packing_ids", {}, {}),
    "heads of a group share a tile": ("causal", None, {"pack_gqa": 4}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_small_tiles(name: str) -> None:
    """Few heads, past a tile's end; more keys than rows, two batch elements; one CTA that takes all."""
    example, block, wish, params = CASES[name]
    found = plan(specs.resolve((EXAMPLES / f"{example}.attn").read_text(), block, Options.parse(wish)))
    assert found.small is not None
    c, pack = found.small.compute, found.small.schedule.pack
    spec = Sibling(pack, (c.tile_m, c.tile_n)).of(found.spec)
    module, _ = compile_spec(spec)
    shapes = [(Shape(1, 2 * pack, 2, 131, 131), {}), (Shape(2, pack, 1, 60, 203), {"workers": 1})]
    for seed, (shape, options) in enumerate(shapes):
        verify(spec, module, 0, shape, seed, given=params, **options)
