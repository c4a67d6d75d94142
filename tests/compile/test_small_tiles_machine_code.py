"""Kernels of small tiles as sm_90a machine code: no spill, no serialised WGMMA, whatever a spec asks for."""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_module, load_text

from attngen.emit.module import emit
from attngen.passes.few import Sibling
from attngen.search import plan
from attngen.syntax import load_spec
from attngen.verify import machine

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools: pip install 'attngen[dev]'"),
]
CAUSAL = "mask = kv_idx <= q_pos"
CLAUSES = {
    "causal": CAUSAL,
    "window": "param window: int >= 1 = 128\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window",
    "union": "param window: int >= 1 = 128\n  mask = kv_idx <= q_pos and (q_pos - kv_idx < window or kv_idx < 4)",
    "elements": "tensor flag: bool[batch, seqlen_kv]\n  mask = flag[b, kv_idx] or (q_idx + kv_idx) % 3 == 0",
    "stream": "tensor slopes: f32[heads_q]\n  tensor decay: f32[batch, heads_q, seqlen_kv]\n  param cap: float = 30.0\n"
    "  score = cap * tanh((s - decay[b, h, kv_idx] - slopes[h] * (q_pos - kv_idx)) / cap)\n  " + CAUSAL,
    "distance": "tensor tab: f32[heads_q, 64]\n  score = s + tab[h, clamp(q_pos - kv_idx, 0, 63)]\n  " + CAUSAL,
    "sink and epilogue": "tensor sinks: f32[heads_q]\n  tensor gate: f32[batch, seqlen_q, heads_q, head_dim_v]\n"
    f"  sink = sinks[h]\n  epilogue = o * sigmoid(gate[b, q_idx, h, d])\n  {CAUSAL}",
}
GRID = [
    ("causal", 64, 64), ("causal", 256, 256), ("window", 128, 128), ("window", 192, 128), ("union", 128, 128),
    ("union", 256, 256), ("elements", 72, 72), ("elements", 128, 128), ("stream", 64, 64), ("stream", 128, 128),
    ("distance", 128, 128), ("sink and epilogue", 128, 128),
]  # fmt: skip


@pytest.mark.parametrize(("clause", "d", "dv"), GRID, ids=lambda v: str(v))
def test_small_tiles_compile_clean(clause: str, d: int, dv: int) -> None:
    found = plan(load_spec(f"attn 1\nattention small {{\n  head_dim = {d}, v = {dv}\n  {CLAUSES[clause]}\n}}\n"))
    assert found.small is not None
    c = found.small.compute
    source = emit(plan(Sibling(1, (c.tile_m, c.tile_n)).of(found.spec)))
    code = compile_module(load_text(source.text, found.spec.name)).machine_code
    assert code.serialized == () and code.spill_bytes == code.stack_bytes == 0, f"{code.spill_bytes} bytes of spills"
    assert code.registers <= found.small.launch.launch_registers
    assert code.opcodes["USETMAXREG"] >= 2 and code.opcodes["UTMALDG"] >= 3 and code.opcodes["UTMASTG"] >= 1
    assert code.opcodes["HGMMA"] >= c.head_dim_qk_padded // 16 + c.tile_n // 16
