"""Rows that are wider in shared memory than their head dim: what lies past it is neither summed nor stored."""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_spec
from ragged_calls import Call
from test_gallery import verify

from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.search import plan
from attngen.syntax import load_spec
from attngen.verify import machine

pytestmark = pytest.mark.dsl
SHAPES = [Shape(1, 2, 1, 131, 131), Shape(1, 1, 1, 60, 203)]
CAUSAL = "mask = kv_idx <= q_pos"
#: Head dims, further clauses; columns of a row of Q and K, of V and O.
CASES = {
    "8": ("head_dim = 8", "schedule { tile = 64 x 64 }", (16, 16)),
    "40": ("head_dim = 40", "dtype = fp16\n  schedule { tile = 192 x 96 }", (64, 64)),
    "72": ("head_dim = 72", "schedule { tile = 192 x 96 }", (96, 96)),
    "80": ("head_dim = 80", "layout = bhsd", (96, 96)),
    "96": ("head_dim = 96", "", (96, 96)),
    "104": ("head_dim = 104", "schedule { tile = 192 x 96 }", (128, 128)),
    "112": ("head_dim = 112", "schedule { tile = 128 x 64, cluster = 2 x 1 }", (128, 128)),
    "160": ("head_dim = 160", "", (160, 160)),
    "224": ("head_dim = 224", "", (224, 224)),
    "248, O in Q": ("head_dim = 248", "schedule { tile = 128 x 64 }", (256, 256)),
    "v narrower": ("head_dim = 104, v = 24", "", (128, 32)),
    "q narrower": ("head_dim = 24, v = 104", "", (32, 128)),
    "fp32 O": ("head_dim = 72", "output { dtype = f32 }", (96, 96)),
}


def spec_of(name: str, dims: str, clauses: str) -> AttentionSpec:
    return load_spec(f"attn 1\nattention {name} {{\n  {dims}\n  {clauses}\n  {CAUSAL}\n}}\n")


@pytest.mark.parametrize("name", CASES)
def test_head_dims(name: str) -> None:
    dims, clauses, columns = CASES[name]
    spec = spec_of("wide", dims, clauses)
    memory = plan(spec).plans[0].memory
    assert (memory.columns_qk, memory.columns_v) == columns
    module, _ = compile_spec(spec)
    for seed, shape in enumerate(SHAPES):
        verify(spec, module, 0, shape, seed)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_ragged(layout: str) -> None:
    """Rows of other sequences and of none are NaN; so would be what a box brings of the next head."""
    spec = spec_of("wide", "head_dim = 104", f"layout = {layout}\n  schedule {{ tile = 128 x 64 }}")
    module, _ = compile_spec(spec)
    Call(spec, [(131, 131), (0, 9), (60, 203)], tail=3, extent=(140, 210)).verify(module, 0)


@pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools: pip install 'attngen[dev]'")
@pytest.mark.parametrize(("name", "boxes"), [("72", 3), ("104", 2)])
def test_a_row_takes_few_boxes(name: str, boxes: int) -> None:
    """One store of O a box; P V has as many columns as V."""
    dims, clauses, _ = CASES[name]
    _, code = compile_spec(spec_of("wide", dims, clauses))
    assert code.machine_code.opcodes["UTMASTG"] == boxes
    assert f"m64n{name}k16" in code.ptx and not code.machine_code.spill_bytes
