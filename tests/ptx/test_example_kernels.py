"""Every example's forward at a grid of small odd shapes, with params at several values, against the dense meaning.

One compilation serves all shapes of an example: what its plan for short lengths is. Captured tensors have the extents
of the shape: odd batches, heads that divide nothing, one row, one key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ptxcheck.compile import compile_spec
from test_gallery import RAGGED, SMALL, SPECS, verify

from attngen.cli.numeric import self_attention
from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape

pytestmark = pytest.mark.dsl
#: A single pair; one row of many keys; odd batches; fewer keys than rows (rows that see none); more, past a tile's end.
SHAPES = [
    Shape(1, 1, 1, 1, 1), Shape(1, 3, 1, 1, 70), Shape(3, 2, 2, 37, 37), Shape(1, 2, 1, 67, 33), Shape(1, 3, 3, 66, 131)
]  # fmt: skip


def values(spec: AttentionSpec) -> list[Mapping[str, Any]]:
    """Defaults, values so small that a mask bites, and the least that the spec allows."""
    least = {p.name: p.minimum for p in spec.params if p.minimum is not None}
    return [{}, SMALL.get(spec.name, {}), least]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_shapes(name: str) -> None:
    spec = SPECS[name]
    module, _ = compile_spec(spec)
    choices = values(spec)
    for n, shape in enumerate(SHAPES):
        if shape.seqlen_q > shape.seqlen_kv and self_attention(spec):
            continue
        verify(spec, module, 0, shape, n, given=choices[n % len(choices)])


@pytest.mark.parametrize("name", sorted(n for n, s in SPECS.items() if s.params))
def test_params(name: str) -> None:
    """All values, at a shape where they matter."""
    spec = SPECS[name]
    module, _ = compile_spec(spec)
    for n, given in enumerate(values(spec)):
        verify(spec, module, 0, Shape(1, 2, 1, 70, 135), n, given=given)


def test_small_values_are_of_params_that_exist() -> None:
    for name, given in SMALL.items():
        assert set(given) <= {p.name for p in {**SPECS, **RAGGED}[name].params}
