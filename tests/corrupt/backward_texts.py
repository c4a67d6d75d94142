"""Texts of backwards that corruption starts from, one for each kind of plan, and what each has to say."""

from __future__ import annotations

from functools import cache

from attngen.emit.backward import emit_backward
from attngen.ir.backward import BackwardPlanSet
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec
from attngen.verify.backward_source import source_faults

CAUSAL = "mask = kv_idx <= q_pos"
SPECS = {
    "plain": f"head_dim = 128\n  {CAUSAL}",
    "even": "head_dim = 128",
    "turns": f"head_dim = 64\n  {CAUSAL}\n  backward {{ deterministic = true }}",
    "wide": f"head_dim = 256\n  {CAUSAL}",
    "wide_turns": "head_dim = 256\n  score = 30.0 * tanh(s / 30.0)\n  backward { deterministic = true }",
    "captured": "head_dim = 64, v = 40\n  dtype = fp16\n  tensor z: f32[heads_q] grad\n  tensor x: f32[heads_q] grad\n"
    "  tensor r: f32[seqlen_q] grad\n  tensor t: f32[9] grad\n  sink = z[h]\n"
    "  score = s * x[h] + r[q_idx] + t[min(abs(q_idx - kv_idx), 8)]",
}  # fmt: skip


@cache
def emitted(name: str) -> tuple[str, BackwardPlanSet]:
    spec = load_spec(f"attn 1\nattention {name} {{\n  {SPECS[name]}\n}}\n")
    plans = plan_backward(spec, captured=[t.name for t in spec.tensors])
    return emit_backward(plans).text, plans


M = "AttentionBackward"


def assert_named(broken: tuple[str, str, str, str]) -> None:
    """The fault is among what the verifier of sources says of the text with one place of it changed."""
    spec, old, new, fault = broken
    text, plans = emitted(spec)
    assert text.count(old) == 1, f"the corruption names text that stands {text.count(old)} times"
    found = source_faults(text.replace(old, new), plans)
    assert any(fault in f for f in found), found
