"""A handle of tables, maps or lists in calls of another attention: it is filled again, where it gave the first one's.

Of tensors that were made under `torch.inference_mode`, which have no version, such calls failed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.emit.module import emit
from attngen.jit.device import DeviceState
from attngen.jit.tables import Tables, workspaces_of
from attngen.search import plan
from attngen.syntax import load_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
CPU = DeviceState(-1, 132)
TEXT = """attn 1
attention packed {{
  head_dim = 64
  tensor doc: i32[batch, seqlen_kv]{}
  mask = {}
}}
"""
SAME, OTHER = "doc[b, q_pos] == doc[b, kv_idx]", "not (doc[b, q_pos] == doc[b, kv_idx])"
LISTED = "attn 1\nattention listed {{\n  head_dim = 64\n  block_sparse {{ q = 1, kv = {}, lists = given }}\n}}\n"


def builds(masks: tuple[str, ...], declared: str, doc: torch.Tensor) -> list[int]:
    """Whether each of two calls after one another fills one handle, for each mask in turn."""
    kept, found = Tables(), []
    for mask in masks:
        spec = load_spec(TEXT.format(declared, mask))
        meta = emit(plan(spec)).meta
        (space,) = workspaces_of(spec, meta, meta)
        for _ in range(2):
            found.append(space.of(CPU, (1, 70, 2, 64), (1, 70, 2, 64), (doc,), kept)[1])
    return found


@pytest.mark.parametrize(
    ("declared", "other"),
    [(" sorted", "doc[b, q_pos] <= doc[b, kv_idx]"), ("\n  block_sparse { q = 64, kv = 64 }", OTHER)],
)
def test_another_mask_over_the_same_documents(declared: str, other: str) -> None:
    """Of one mask, filled once; of another, again: by it the first one's tables or map would say what to skip."""
    doc = torch.zeros(1, 70, dtype=torch.int32)
    assert builds((SAME, other, SAME), declared, doc) == [1, 0] * 3


def test_another_attention_of_more_tensors() -> None:
    """Tensors were compared one by one before anything said that there are as many."""
    kept = Tables()
    doc = torch.zeros(1, 70, dtype=torch.int32)
    for count in (1, 2):
        more = "".join(f"\n  tensor x{i}: f32[heads_q]" for i in range(count))
        spec = load_spec(TEXT.format(f" sorted{more}", SAME))
        meta = emit(plan(spec)).meta
        (space,) = workspaces_of(spec, meta, meta)
        bound = (doc, *(torch.zeros(2) for _ in range(count)))
        assert space.of(CPU, (1, 70, 2, 64), (1, 70, 2, 64), bound, kept)[1] == 1


def test_other_blocks_of_the_same_lists() -> None:
    """Numbers of single keys, then of blocks of two."""
    one, two = (attngen.build(LISTED.format(kv)) for kv in (1, 2))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64, generator=g).bfloat16() for n in (2, 12, 12))
    lists = torch.tensor([[[[0, 5, 3], [2, -1, 1]]]], dtype=torch.int32)
    kept: Any = one.tables()
    one(q, k, v, blocks=lists, tables=kept)
    assert torch.equal(two(q, k, v, blocks=lists, tables=kept), two(q, k, v, blocks=lists))


def test_tensors_of_inference_mode() -> None:
    """Torch counts no changes of theirs: each call fills the handle again."""
    with torch.inference_mode():
        doc = torch.zeros(1, 70, dtype=torch.int32)
        assert builds((SAME,), " sorted", doc) == [1, 1]
        attn = attngen.build(LISTED.format(1))
        q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for n in (2, 12, 12))
        lists, kept = torch.tensor([[[[0, 5, 3], [2, -1, 1]]]], dtype=torch.int32), attn.tables()
        for last in (3, 7):
            lists[..., 0, 2] = last
            assert torch.equal(attn(q, k, v, blocks=lists, tables=kept), attn(q, k, v, blocks=lists))
