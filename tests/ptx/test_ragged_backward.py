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
