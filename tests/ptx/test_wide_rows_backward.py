"""Rows of Q and dO that are wider in shared memory than their head dim: what lies past it is not summed."""

from __future__ import annotations

import pytest
from backward_calls import call, kernels, verify
from ragged_calls import Call, Gradients

from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
#: Head dims, further clauses; columns of a row of Q, of dO.
CASES = {
    "40": ("head_dim = 40", "dtype = fp16", (64, 64)),
    "72, no room": ("head_dim = 72", "", (80, 80)),
    "104": ("head_dim = 104", "", (128, 128)),
    "144, swizzles of 64 bytes": ("head_dim = 144", "", (144, 144)),
    "v narrower": ("head_dim = 104, v = 24", "", (128, 32)),
    "176, split operands": ("head_dim = 176", "", (192, 192)),
}


def spec_of(dims: str, clauses: str) -> AttentionSpec:
    return load_spec(f"attn 1\nattention wide {{\n  {dims}\n  {clauses}\n  mask = kv_idx <= q_pos\n}}\n")


@pytest.mark.parametrize("name", CASES)
def test_columns(name: str) -> None:
    dims, clauses, columns = CASES[name]
    memory = plan_backward(spec_of(dims, clauses)).plans[0].memory
    assert (memory.q_columns, memory.do_columns) == columns


@pytest.mark.parametrize("name", [n for n, (*_, columns) in CASES.items() if max(columns) % 64 == 0])
def test_head_dims(name: str) -> None:
    spec = spec_of(*CASES[name][:2])
    verify(kernels(spec), call(spec, Shape(1, 2, 1, 70, 131)))


def test_ragged() -> None:
    """Rows of other sequences and of none are NaN; so would be what a box brings of the next head."""
    spec = spec_of("head_dim = 104", "layout = varlen")
    Gradients(spec).verify(Call(spec, [(5, 9), (0, 7), (68, 130)], tail=3))
