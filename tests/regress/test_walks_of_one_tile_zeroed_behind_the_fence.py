"""A walk that is one KV tile by a constant: LLVM saw through its loops and made the zeros of O again, as constants,
between the fence and the products that add to them, which PTX leaves undefined.
"""

from __future__ import annotations

import pytest
import torch
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call

from attngen import samples
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
TEXT = """
attn 1
attention few {{
  head_dim = 64
  mask     = kv_idx < {0}
  schedule {{ tile = 128 x 64 }}
}}
"""


@pytest.mark.parametrize("keys", [50, 64, 100])
def test_walks_of_one_tile_zeroed_behind_the_fence(keys: int) -> None:
    spec = load_spec(TEXT.format(keys))
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, Shape(1, 2, 1, 150, 77), seed=3)
    o, lse, report = attngen_call(module, 0, q, k, v, params=(), tensors=(), scale=0.5, layout="bshd")
    assert not report.faults
    assert torch.isfinite(o.float()).all()
    assert_close(o, spec, q, k, v, lse=lse, scale=0.5)
