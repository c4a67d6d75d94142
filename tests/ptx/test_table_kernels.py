"""Masks over sorted tensors, in the checker: the kernel that fills their tables, and those that read them."""

from __future__ import annotations

import pytest
import torch
from backward_calls import call, kernels
from backward_calls import verify as verify_backward
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call, check
from test_gallery import verify

from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
CAUSAL = """
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]"""
BOTH_WAYS = """
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = doc[b, q_pos] == doc[b, kv_idx]"""
#: Values per head and row, not sorted; a sum that leaves 32 bits.
TIMES = """
  tensor when_kv: i32[batch, seqlen_kv] sorted
  tensor when_q: i32[batch, heads_q, seqlen_q]
  param span: int = 2147483647
  mask = when_kv[b, kv_idx] <= when_q[b, h, q_idx] and when_q[b, h, q_idx] - when_kv[b, kv_idx] < span"""
UNION = """
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = doc[b, q_pos] != doc[b, kv_idx] or kv_idx < 3"""
#: Nothing is sorted: bounds of tiles come from extremes of rows. Rows that see all, others that start late.
UNSORTED = """
  tensor start: i32[batch, heads_q, seqlen_q]
  tensor marks: bool[batch, seqlen_q]
  mask = kv_idx >= start[b, h, q_idx] and kv_idx <= q_pos or marks[b, q_idx]"""
#: Keys by KV head; conditionals over elements in no order; two clauses, extremes of a lower bound.
OTHERS = [
    """
  layout = bhsd
  tensor seen: i32[batch, heads_kv, seqlen_kv] sorted
  mask = seen[b, h_kv, kv_idx] <= q_pos""",
    """
  tensor ends: i32[batch, seqlen_q]
  tensor others: i32[seqlen_q]
  tensor flag: bool[heads_q, seqlen_q]
  mask = kv_idx < (ends[b, q_idx] if flag[h, q_idx] else others[q_idx] + 5)""",
    """
  tensor doc: i32[batch, seqlen_kv] sorted
  tensor late: i32[batch, seqlen_q]
  mask = doc[b, kv_idx] != doc[b, q_pos] and kv_idx >= late[b, q_idx]""",
]


def spec_of(body: str, name: str = "tabled", more: str = "") -> AttentionSpec:
    return load_spec(f"attn 1\nattention {name} {{\n  head_dim = 64{body}\n{more}}}\n")


@pytest.mark.parametrize("body", [CAUSAL, BOTH_WAYS, TIMES, UNION, UNSORTED])
def test_forward(body: str) -> None:
    spec = spec_of(body)
    module, _ = compile_spec(spec)
    for seed, shape in enumerate((Shape(2, 2, 1, 131, 131), Shape(1, 2, 2, 40, 203))):
        verify(spec, module, 0, shape, seed)


@pytest.mark.parametrize("body", OTHERS)
def test_other_expressions(body: str) -> None:
    spec = spec_of(body, more="  backward { deterministic = true }\n")
    verify(spec, compile_spec(spec)[0], 0, Shape(2, 2, 1, 70, 131), 1)
    verify_backward(kernels(spec), call(spec, Shape(1, 2, 1, 67, 67), seed=2))


@pytest.mark.parametrize("more", ["", "  backward { deterministic = true }\n"], ids=["", "deterministic"])
@pytest.mark.parametrize("body", [CAUSAL, TIMES, UNION, UNSORTED])
def test_backward(body: str, more: str) -> None:
    spec = spec_of(body, more=more)
    made = kernels(spec)
    for seed, shape in enumerate((Shape(2, 2, 1, 131, 131), Shape(1, 2, 2, 40, 203))):
        verify_backward(made, call(spec, shape, seed=seed), seeds=(seed,))


def test_tables_that_were_kept() -> None:
    """With build_tables = 0 nothing is filled, and what the workspace holds is used."""
    spec = spec_of(CAUSAL)
    module, code = compile_spec(spec)
    q, k, v = (torch.randn(1, 70, 1, 64).bfloat16() for _ in range(3))
    doc = (torch.arange(70, dtype=torch.int32) // 20)[None]
    wanted, lse, _ = attngen_call(module, 0, q, k, v, tensors=(doc,))
    kept = torch.arange(70, dtype=torch.int32) // 20 * 20
    o, counter = torch.empty_like(q), torch.zeros(1, dtype=torch.int32)
    check(code, q, k, v, o, torch.empty_like(lse), counter, 0.125, 3, torch.zeros_like(doc), kept, 0)
    assert torch.equal(o, wanted)


def test_a_broken_promise_hangs_nothing() -> None:
    """Values may be anything then; no access is astray, and the call ends."""
    spec = spec_of(BOTH_WAYS)
    module, _ = compile_spec(spec)
    q, k, v = (torch.randn(1, 150, 1, 64).bfloat16() for _ in range(3))
    doc = torch.randint(-5, 5, (1, 150), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    o, _, report = attngen_call(module, 0, q, k, v, tensors=(doc,))
    assert not report.faults and o.isfinite().all()
