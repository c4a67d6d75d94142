"""Ragged backwards executed by the checker: every gradient written, nobody else's touched, NaN around the sequences."""

from __future__ import annotations

import pytest
import torch
from ragged_calls import Call, Gradients

from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl

SPECS = {
    "causal": "head_dim = 64\n  mask = kv_idx <= q_pos",
    "window and sink": """head_dim = 64, v = 72
  param window: int >= 1 = 40
  tensor sinks: f32[heads_q]
  mask = kv_idx <= q_pos and q_pos - kv_idx < window
  sink = sinks[h]""",
    "score": """head_dim = 64
  tensor gain: f32[batch]
  tensor bias: f32[heads_q, seqlen_kv]
  score = s * gain[b] + bias[h, kv_idx]
  mask = kv_idx <= q_pos or kv_idx < 3""",
    "clusters": "head_dim = 256\n  mask = kv_idx <= q_pos",
    "gated": """head_dim = 64, v = 72
  tensor gate: f32[seqlen_q, heads_q]
  mask = kv_idx <= q_pos
  epilogue = o * sigmoid(gate[q_idx, h]) + float(seqlen_kv)
  output { dtype = f32 }""",
    "sigmoid": """head_dim = 64
  normalizer = sigmoid
  score = s - log(float(max(seqlen_kv, 1)))
  mask = kv_idx <= q_pos""",
    "documents": """head_dim = 64
  tensor doc: i32[seqlen_kv] sorted
  mask = kv_idx <= q_pos and doc[max(q_pos, 0)] == doc[kv_idx]""",
    "relu": "head_dim = 64\n  normalizer = relu\n  mask = kv_idx <= q_pos",
}
#: Tensors that learn: sums by row and key, of a sequence and of all, element by element; a sink; through the epilogue.
LEARNED = {
    "sink": """head_dim = 64
  tensor sinks: f32[heads_q] grad
  tensor own: f32[batch, heads_q] grad
  mask = kv_idx <= q_pos
  sink = sinks[h] * own[b, h]""",
    "bias": """head_dim = 64
  tensor bias: f32[heads_q, seqlen_kv] grad
  tensor gain: f32[batch] grad
  tensor by_row: f32[seqlen_q] grad
  score = s * gain[b] + bias[h, kv_idx] + by_row[q_idx]
  mask = kv_idx <= q_pos""",
    "distance": """head_dim = 64
  tensor table: f32[heads_q, 64] grad
  tensor kind: i32[seqlen_kv]
  tensor of_kind: f32[8] grad
  score = s + table[h, clamp(q_pos - kv_idx, 0, 63)] + of_kind[kind[kv_idx] % 8]
  mask = kv_idx <= q_pos""",
    "gate": """head_dim = 64
  tensor gate: bf16[seqlen_q, heads_q, head_dim_v] grad
  tensor weight: f32[seqlen_q, heads_q] grad
  tensor column: f32[batch, head_dim_v] grad
  mask = kv_idx <= q_pos
  epilogue = o * sigmoid(gate[q_idx, h, d]) * weight[q_idx, h] + column[b, d]""",
    "outer": """head_dim = 64
  tensor left: f32[seqlen_q, 2] grad
  tensor pair: f32[seqlen_q, 40] grad
  score = s + left[q_idx, kv_idx % 2] * pair[q_idx, min(kv_idx, 39)]""",
}
#: More rows than keys and fewer, no rows, no keys, neither; past a tile's end.
LENGTHS = [(5, 9), (0, 7), (130, 40), (33, 0), (0, 0), (1, 200)]


def made(name: str, layout: str, deterministic: bool = False) -> Gradients:
    clause = "\n  backward { deterministic = true }" if deterministic else ""
    return Gradients(load_spec(f"attn 1\nattention ragged {{\n  {SPECS[name]}\n  layout = {layout}{clause}\n}}\n"))


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("name", SPECS)
def test_values(name: str, layout: str) -> None:
    backward = made(name, layout)
    lengths = LENGTHS if name != "clusters" else LENGTHS[:4]
    backward.verify(Call(backward.spec, lengths, tail=3, extent=(131, 201)), workers=3)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("name", LEARNED)
def test_captured_tensors(name: str, layout: str) -> None:
    """What is of no sequence gains nothing, and no sequence adds to another's part."""
    body = LEARNED[name] if layout == "varlen" else LEARNED[name].replace("[seqlen", "[batch, seqlen")
    if layout == "padded":
        for read in ("by_row[", "kind[kv", "gate[q", "weight[q", "left[q", "pair[q"):
            body = body.replace(read, read.replace("[", "[b, "))
        body = body.replace("bias: f32[heads_q,", "bias: f32[batch, heads_q,").replace("bias[h", "bias[b, h")
    spec = load_spec(f"attn 1\nattention ragged {{\n  {body}\n  layout = {layout}\n}}\n")
    backward = Gradients(spec, captured=tuple(t.name for t in spec.tensors if t.grad))
    backward.verify(Call(spec, [(5, 9), (0, 7), (68, 40), (33, 0), (0, 0), (1, 130)], tail=3, extent=(70, 131)))


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("name", ["score", "clusters"])
def test_same_bits_in_turns(name: str, layout: str) -> None:
    backward = made(name, layout, deterministic=True)
    call = Call(backward.spec, [(70, 135), (0, 3), (66, 131)], (2, 1), extent=(70, 135))
    first, second = (backward.verify(call, seeds=[seed], workers=4) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parts_of_grouped_heads() -> None:
    """dK and dV with a head for each query head, added up by the caller."""
    backward = made("causal", "varlen")
    backward.verify(Call(backward.spec, [(40, 70), (3, 3)], (4, 2)), parts=2)


def test_many_sequences() -> None:
    backward = made("causal", "varlen")
    g = torch.Generator().manual_seed(3)
    lengths = [(int(m), int(n)) for m, n in torch.randint(0, 3, (36, 2), generator=g)]
    backward.verify(Call(backward.spec, lengths, (1, 1)), workers=4)


@pytest.mark.parametrize("broken", [[0, 90, 30, 999], [-5, 2**31 - 1, -(2**31), 7]])
def test_broken_starts_reach_nothing_else(broken: list[int]) -> None:
    """Without `check=True`: no stray access, no hang. Sequences that overlap add to the same rows."""
    backward = made("causal", "varlen")
    call = Call(backward.spec, [(40, 40), (50, 50), (10, 10)])
    saved = call.saved()
    for name in call.lengths:
        call.lengths[name] = torch.tensor(broken, dtype=torch.int32)
    call.saved = lambda: saved  # type: ignore[method-assign]
    report = backward.report(call, collect=10**6, workers=1)
    assert {f.kind for f in report.faults} <= {"race"}, str(report)
