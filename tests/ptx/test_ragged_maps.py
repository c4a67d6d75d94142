"""Tile maps in ragged layouts, executed by the checker: a part of the map for each sequence, forward and backward."""

from __future__ import annotations

import pytest
import torch
from ptxcheck.compile import compile_spec
from ragged_calls import Call, Gradients

from attngen.ir.spec import AttentionSpec
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl

SPECS = {
    "documents": """head_dim = 64
  tensor doc: i32[AXIS]
  mask = kv_idx <= q_pos and doc[AT max(q_pos, 0)] == doc[AT kv_idx]
  block_sparse { q = 64, kv = 64 }""",
    "tables too": """head_dim = 64
  tensor doc: i32[AXIS] sorted
  mask = kv_idx <= q_pos and doc[AT max(q_pos, 0)] == doc[AT kv_idx]
  block_sparse { q = 64, kv = 64 }""",
    "blocks": """head_dim = 64
  tensor sinks: f32[heads_q]
  mask = kv_idx <= q_pos + 20
  sink = sinks[h]
  block_sparse { q = 48, kv = 40, lists = given }""",
    "heads": """head_dim = 64
  tensor reach: i32[batch, heads_q]
  mask = (kv_idx * 7 + q_idx * 3) % 50 < reach[b, h] and abs(q_idx - kv_idx) < 90
  block_sparse { q = 64, kv = 64 }""",
}
#: Several tiles of either side, rows without keys, keys without rows, neither, and one row.
LENGTHS = [(5, 9), (0, 70), (150, 300), (33, 0), (0, 0), (1, 140)]


def spec_of(name: str, layout: str, more: str = "") -> AttentionSpec:
    axis, at = ("seqlen_kv", "") if layout == "varlen" else ("batch, seqlen_kv", "b, ")
    body = SPECS[name].replace("AXIS", axis).replace("AT ", at)
    return load_spec(f"attn 1\nattention mapped {{\n  {body}\n  layout = {layout}\n  {more}\n}}\n")


def call(spec: AttentionSpec, **more: object) -> Call:
    made = Call(spec, LENGTHS, tail=3, extent=(151, 301))
    if "reach" in made.tensors:
        made.tensors["reach"] = torch.randint(0, 50, (len(LENGTHS), 2), dtype=torch.int32)
        made.tensors["reach"][2, 1] = 0  # nothing of the longest one in a head
    return made


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("name", SPECS)
def test_forward(name: str, layout: str) -> None:
    spec = spec_of(name, layout)
    module, _ = compile_spec(spec)
    made = call(spec)
    made.verify(module, len(module.ATTN_META["plans"]) - 1)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize("name", SPECS)
def test_backward(name: str, layout: str) -> None:
    spec = spec_of(name, layout)
    Gradients(spec).verify(call(spec), workers=3)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_same_bits_in_turns(layout: str) -> None:
    """Turns are counted in the transposed map, which has a row for each query tile of each sequence."""
    spec = spec_of("heads", layout, "backward { deterministic = true }")
    backward, made = Gradients(spec), call(spec)
    first, second = (backward.verify(made, seeds=[seed], workers=4) for seed in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_fewer_blocks_than_the_longest_sequence_has() -> None:
    """No length is known on the host: rows and keys past the blocks that are given have the last one's, and nothing
    outside the tensor is read, by the map, the mask or the backward.
    """
    spec = spec_of("blocks", "varlen")
    whole, short = call(spec), call(spec)
    given = whole.tensors["blocks"][:, :, :2, :3]
    short.tensors["blocks"] = given.clone()
    rows, keys = (
        torch.arange(n).clamp(max=m - 1) for n, m in zip(whole.tensors["blocks"].shape[2:], (2, 3), strict=True)
    )
    whole.tensors["blocks"] = given[:, :, rows][..., keys].contiguous()
    short.expected, short.saved = whole.expected, whole.saved  # type: ignore[method-assign]
    module, _ = compile_spec(spec)
    short.verify(module, len(module.ATTN_META["plans"]) - 1)
    backward = Gradients(spec)
    for a, b in zip(backward.run(short, workers=3), backward.run(whole, workers=3), strict=True):
        assert torch.equal(a, b)
