"""Kept pairs of examples, counted independently of attngen, in every execution.

With q = 0 every score is 0, so that exp(LSE) of a row is the number of keys it keeps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ways import ways

from attngen.ir.spec import AttentionSpec
from attngen.ref import dense
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DOCUMENTS = torch.tensor([1, 127, 128, 200, 300, 244])
DOC = torch.repeat_interleave(torch.arange(6, dtype=torch.int32), DOCUMENTS)[None]
START = torch.repeat_interleave(DOCUMENTS.cumsum(0) - DOCUMENTS, DOCUMENTS).int()[None]
GLOBAL = torch.zeros(1, 1000, dtype=torch.bool)
GLOBAL[0, [0, 1, 2, 500]] = True


def ancestors(parents: list[int]) -> torch.Tensor:
    found = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            found[i] |= found[parent]
    return found


def i32(*x: int) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.int32)


def big_bird_blocks() -> torch.Tensor:
    """The same blocks as the formula's, as a caller gives them."""
    row, column = torch.arange(16)[:, None], torch.arange(16)[None, :]
    ends = (row == 0) | (row == 15) | (column == 0) | (column == 15)
    return ((row - column).abs() <= 1) | ends


#: (file, block, batch, seqlen_q, seqlen_kv, params and tensors, pairs)
COUNTS: list[tuple[str, str, int, int, int, dict[str, Any], int]] = [
    ("causal", "causal", 1, 1000, 1000, {}, 500500),
    ("causal", "causal", 1, 300, 1000, {}, 255150),
    ("causal", "causal", 1, 1000, 300, {}, 45150),
    ("mistral", "mistral", 1, 1000, 1000, {"window": 128}, 119872),
    ("mistral", "mistral", 1, 1000, 1000, {"window": 129}, 120744),
    ("modernbert", "modernbert_local", 1, 1000, 1000, {"half": 64}, 124840),
    ("llama4", "llama4_local", 1, 1000, 1000, {"chunk": 256}, 125716),
    ("prefix_lm", "prefix_lm", 1, 1000, 1000, {"prefix": i32(257)}, 533396),
    ("packing", "packing_ids", 1, 1000, 1000, {"doc": DOC}, 111525),
    ("packing", "packing", 1, 1000, 1000, {"start": START}, 111525),
    ("block_causal", "block_causal", 1, 1000, 1000, {"block": 32}, 515904),
    ("bd3lm", "bd3lm", 1, 512, 512, {"half": 256, "size": 16}, 69632),
    ("longformer", "longformer", 1, 1000, 1000, {"half": 64, "is_global": GLOBAL}, 132180),
    ("bigbird", "bigbird", 1, 1024, 1024, {}, 409600),
    ("bigbird", "bigbird_lists", 1, 1024, 1024, {"blocks": big_bird_blocks()[None, None]}, 409600),
    ("left_padding", "left_padding", 1, 1000, 1000, {"pad": i32(100)}, 405450),
    # an image of 14 x 14 tokens, four windows of it
    ("swin", "swin_shifted", 4, 49, 49, {"across": 2, "down": 2, "table": torch.zeros(13, 13, 1)}, 5476),
    # a cell sees 7 of an axis, whatever its place
    ("natten", "natten", 1, 56 * 56, 56 * 56, {}, (56 * 7) ** 2),
    ("natten", "dinat", 1, 15 * 16, 15 * 16, {"height": 15, "width": 16, "dilation": 2}, 15 * 7 * 16 * 7),
    ("tree", "tree_verify", 1, 7, 107, {"ancestors": ancestors([-1, 0, 0, 1, 1, 2, 5])}, 718),
    ("ring", "ring_step", 1, 100, 100, {"q_offset": 100, "kv_offset": 50}, sum(min(100, 51 + i) for i in range(100))),
    ("ring", "ring_step", 1, 100, 100, {"q_offset": 0, "kv_offset": 100}, 0),
    # rows 0 to 9 see all there is; from row 13 on, ten keys and four more
    ("streaming", "streaming", 1, 100, 100, {"keys": 10, "sinks": 4}, 55 + (11 + 12 + 13) + 14 * 87),
    ("decode", "decode", 3, 1, 64, {"lengths": i32(0, 5, 64)}, 69),
    ("decode", "decode_local", 3, 1, 64, {"lengths": i32(0, 5, 64), "keys": 8}, 13),
]  # fmt: skip


def split(spec: AttentionSpec, given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {t.name: given[t.name] for t in spec.tensors}
    return {n: x for n, x in given.items() if n not in tensors}, tensors


@pytest.mark.parametrize("row", COUNTS, ids=lambda r: f"{r[1]}-{r[3]}x{r[4]}-{r[6]}")
def test_kept_pairs(row: tuple[str, str, int, int, int, dict[str, Any], int]) -> None:
    file, name, batch, rows, keys, given, pairs = row
    spec = load_spec(EXAMPLES / f"{file}.attn", name=name)
    spec = spec.replace(head_dim_qk=16, head_dim_v=16)
    params, tensors = split(spec, given)
    q, k = (torch.zeros(batch, n, 1, 16, dtype=torch.float64) for n in (rows, keys))
    v = torch.ones_like(k)
    kept = dense.attention(spec, q, k, v, params, tensors).lse.exp().round()
    assert int(kept.sum()) == pairs
    for way in ways(spec, q, k, v, params, tensors):
        assert torch.equal(way.lse.exp().round(), kept), way.name
        assert torch.equal(way.o.round(), (kept > 0).double()[..., None].transpose(1, 2).expand_as(way.o)), way.name


def test_the_number_of_each_variant_is_here() -> None:
    """Counts known beforehand; what no example says is counted in the tests of the library."""
    assert {r[6] for r in COUNTS} >= {
        500500, 255150, 45150, 119872, 120744, 124840, 125716, 533396, 111525, 515904, 69632, 132180, 409600, 5476, 718,
        405450,
    }  # fmt: skip
