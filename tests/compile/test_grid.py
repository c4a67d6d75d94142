"""Clauses x head dims as sm_90a machine code: no spill, no serialised WGMMA, whatever a spec asks for.

The examples cover the common pairs (test_machine_code.py); this grid covers what they do not.
"""

from __future__ import annotations

import pytest
from ptxcheck.compile import compile_module, load_text

from attngen.emit.module import emit
from attngen.ir.expr import Atom, Load
from attngen.ir.functions import apply
from attngen.ir.plan import PlanSet
from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import DType, Type
from attngen.search import plan
from attngen.syntax import load_spec
from attngen.verify import machine

pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools: pip install 'attngen[dev]'"),
]

CAUSAL = "mask = kv_idx <= q_pos"
CLAUSES = {
    "full": "",
    "causal": CAUSAL,
    "window": "param window: int >= 1 = 128\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window",
    "union": "param window: int >= 1 = 128\n  mask = kv_idx <= q_pos and (q_pos - kv_idx < window or kv_idx < 4)",
    "elements": "tensor flag: bool[batch, seqlen_kv]\n  mask = flag[b, kv_idx] or (q_idx + kv_idx) % 3 == 0",
    "score": "tensor slopes: f32[heads_q]\n  tensor bias: bf16[batch, heads_q, seqlen_q, seqlen_kv]\n"
    "  param cap: float = 30.0\n"
    "  score = cap * tanh((s + bias[b, h, q_idx, kv_idx] - slopes[h] * (q_pos - kv_idx)) / cap)\n  " + CAUSAL,
    "sink": f"tensor sinks: f32[heads_q]\n  sink = sinks[h]\n  {CAUSAL}",
    "bhsd": f"layout = bhsd\n  dtype = fp16\n  {CAUSAL}",
    "epilogue": "tensor gate: f32[batch, seqlen_q, heads_q, head_dim_v]\n"
    f"  epilogue = o * sigmoid(gate[b, q_idx, h, d])\n  {CAUSAL}",
    "one": "tensor one: f32[1]\n  param on: bool = true\n  score = s * one[0] if on else s",
    "bools": "tensor f: bool[seqlen_kv]\n"
    "  mask = (f[kv_idx] if q_idx % 2 == 0 else true) and (true if kv_idx < 5 else false)",
    "table": "tensor tab: i32[64]\n"
    "  score = s + tab[min(abs(q_idx - kv_idx), 63)] * float((q_idx // 3) % 5) + float(int(s / 7.0))",
    "scalars": "param w: float = 2.0\n  param n: int = 3\n"
    "  score = s * exp(w) * log(float(seqlen_kv)) + min(w, 1.0) * float(max(n, 5)) * (w if w > 1.0 else 2.0)",
    "literals": "score = s * log(2.0) + exp(0.5) + floor(1.5) + min(1.0, 2.0) + abs(-2.0) + (1.0 if 1 < 2 else 0.0)",
    "functions": "score = sigmoid(s) + softplus(s) + sqrt(abs(s)) + log2(1.0 + s * s) + floor(s) + clamp(s, -1.0, 1.0)",
    "nothing": "mask = false",
    "lists": "layout = varlen\n  tensor bias: f32[heads_q, seqlen_kv]\n  score = s + bias[h, kv_idx]\n"
    f"  block_sparse {{ q = 1, kv = 64, lists = given }}\n  {CAUSAL}",
}  # fmt: skip
GRID = [
    ("full", 64, 64), ("full", 256, 256), ("full", 192, 128), ("full", 64, 256), ("causal", 72, 72),
    ("causal", 256, 256),
    ("window", 128, 128), ("window", 192, 128), ("union", 64, 64), ("union", 128, 128), ("union", 192, 128),
    ("union", 256, 256), ("elements", 64, 64), ("elements", 72, 72), ("elements", 128, 128), ("score", 64, 64),
    ("score", 72, 72), ("score", 128, 128), ("score", 256, 256), ("sink", 192, 128), ("bhsd", 128, 128),
    ("epilogue", 128, 128), ("epilogue", 256, 256), ("one", 128, 128), ("bools", 64, 64), ("table", 64, 64),
    ("scalars", 128, 128), ("literals", 64, 64), ("functions", 128, 128), ("nothing", 64, 64),
    ("lists", 128, 128),
]  # fmt: skip


def check(plans: PlanSet, index: int) -> None:
    code = compile_module(load_text(emit(plans).text, plans.spec.name), index).machine_code
    p = plans.plans[index]
    assert code.serialized == ()
    # O before the epilogue is kept for a gradient: at head dim 256 a few words beside the epilogue, outside the loop
    budget = 32 if not isinstance(plans.spec.epilogue, Atom) and p.compute.head_dim_v == 256 else 0
    assert code.spill_bytes <= budget >= code.stack_bytes, f"{p.name}: {code.spill_bytes} bytes of spills"
    assert code.registers <= p.launch.launch_registers
    assert code.opcodes["USETMAXREG"] >= 2 and code.opcodes["UTMALDG"] >= 3 and code.opcodes["UTMASTG"] >= 1
    assert code.opcodes["HGMMA"] >= p.compute.head_dim_qk_padded // 16 + p.compute.tile_n // 16


@pytest.mark.parametrize(("clause", "d", "dv"), GRID, ids=lambda v: str(v))
def test_compiles_clean(clause: str, d: int, dv: int) -> None:
    """The plan of the longest lengths, the one that most time is spent in."""
    spec = load_spec(f"attn 1\nattention {clause} {{\n  head_dim = {d}, v = {dv}\n  {CLAUSES[clause]}\n}}\n")
    plans = plan(spec)
    check(plans, len(plans.plans) - 1)


def test_a_tensor_without_axes() -> None:
    """The language has none; a spec built from the IR may."""
    lone = TensorDecl(name="lone", dtype=DType.F32, dims=())
    spec: AttentionSpec = load_spec("attn 1\nattention lone {\n  head_dim = 64\n}\n")
    value = Load(type=Type.FLOAT, tensor="lone", dtype=DType.F32, indices=())
    plans = plan(spec.replace(tensors=(lone,), score=apply("mul", spec.score, value)))
    check(plans, 0)


def test_the_grid_reaches_every_clause() -> None:
    assert {clause for clause, *_ in GRID} == set(CLAUSES)
    assert {(d, dv) for _, d, dv in GRID} >= {(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)}
