"""`attn.tables()` where several kernels serve a spec, and where a front gathers lists of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit import lists
from attngen.jit.lists import ListTables
from attngen.jit.tables import PartTables, TableLauncher, Tables

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
BRANCHES = """attn 1
attention two {
  head_dim = 64
  LAYOUT
  tensor doc: i32[batch, seqlen_kv] sorted
  branch packed {
    weight = 1.0
    mask = doc[b, kv_idx] == doc[b, max(q_pos, 0)]
  }
  branch near {
    weight = -0.5
    mask = q_pos - kv_idx < 9
  }
}
"""
LISTS = """attn 1
attention listed {
  head_dim = 64
  mask = kv_idx <= q_pos
  block_sparse { q = 4, kv = 1, lists = given }
}
"""


@pytest.mark.parametrize("layout", ["bshd", "padded"])
def test_a_handle_for_each_part_that_keeps_one(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's launches meet its own handle in every call, and parts without tables meet none."""
    attn: Any = attngen.build(BRANCHES.replace("LAYOUT", f"layout = {layout}"))
    kept = attn.tables()
    assert isinstance(kept, PartTables) and list(kept.parts) == ["packed"]
    seen: list[Any] = []
    part = attn.parts["packed"]
    assert isinstance(part.launcher, TableLauncher)
    reference = part.launcher.reference
    monkeypatch.setattr(
        part.launcher,
        "reference",
        lambda q, k, v, tail, *rest: seen.append(tail[-1]) or reference(q, k, v, tail, *rest),
    )
    q, k = torch.randn(2, 11, 4, 64).bfloat16(), torch.randn(2, 15, 2, 64).bfloat16()
    doc = (torch.arange(15, dtype=torch.int32) // 4).expand(2, 15)
    named = {"doc": doc} if layout == "bshd" else {"doc": doc, "seqused_kv": torch.tensor([15, 8]).int()}
    with_handle = [attn((q, q), (k, k), k, tables=kept, **named) for _ in range(2)]
    without = attn((q, q), (k, k), k, **named)
    assert torch.equal(with_handle[0], without) and torch.equal(with_handle[1], without)
    assert seen[0] is seen[1] is kept.parts["packed"] and seen[2] is None
    one, two = kept.parts["packed"], attn.tables()
    kept.clear()
    assert kept.parts["packed"] is one and two.parts["packed"] is not one
    for bad in (Tables(), 3, PartTables({"near": Tables()})):
        with pytest.raises(AttnError, match="`tables` must be what") as fault:
            attn((q, q), (k, k), k, tables=bad, **named)
        assert fault.value.code == "E0604"


def test_parts_without_tables() -> None:
    attn: Any = attngen.build(BRANCHES.replace("LAYOUT", "").replace("doc[b, kv_idx] == doc[b, max(q_pos, 0)]", "true"))
    with pytest.raises(AttnError, match="no tables or tile maps to keep"):
        attn.tables()
    q = torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(AttnError, match="E0601"):
        attn((q, q), (q, q), q, doc=torch.zeros(1, 3, dtype=torch.int32), tables=PartTables({}))


def test_a_name_of_the_callers() -> None:
    """A param called `tables` is a param."""
    text = BRANCHES.replace("LAYOUT", "param tables: int = 9").replace("kv_idx < 9", "kv_idx < tables")
    attn: Any = attngen.build(text)
    q = torch.randn(1, 30, 2, 64).bfloat16()
    doc = torch.zeros(1, 30, dtype=torch.int32)
    few, many = (attn((q, q), (q, q), q, doc=doc, tables=n) for n in (3, 30))
    assert not torch.equal(few, many)
    with pytest.raises(AttnError, match="no tables or tile maps to keep"):
        attn.tables()


def test_sorted_lists_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once for the same lists and extents, again when either changes; gradients and results are the same."""
    attn: Any = attngen.build(LISTS)
    kept, count = attn.tables(), list[int]()
    assert isinstance(kept, ListTables) and attn.inner.keeps_tables
    made = lists.listed

    def counted(*given: Any) -> Any:
        count.append(1)
        return made(*given)

    monkeypatch.setattr(lists, "listed", counted)
    q, k = (torch.randn(2, 12, n, 64).bfloat16().requires_grad_() for n in (4, 2))
    blocks = torch.randint(-1, 12, (2, 2, 3, 5), dtype=torch.int32)

    def call(**more: Any) -> tuple[torch.Tensor, ...]:
        o = attn(q, k, k, blocks=blocks, **more)
        return o, *torch.autograd.grad(o.float().sin().sum(), (q, k))

    want = call()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(call(tables=kept), want, strict=True))
    assert len(count) == 1
    blocks[0, 0, 0, 0] = 0 if int(blocks[0, 0, 0, 0]) != 0 else 1
    changed = call(tables=kept)
    assert len(count) == 2 and all(torch.equal(a, b) for a, b in zip(changed, call(), strict=True))
    attn(q[:, :9], k[:, :9], k[:, :9], blocks=blocks, tables=kept)
    assert len(count) == 3
    kept.clear()
    call(tables=kept)
    assert len(count) == 4
    with pytest.raises(AttnError, match="E0604"):
        call(tables=Tables())
