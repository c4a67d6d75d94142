"""Tables of a mask in calls: the workspace that a launch gets, the handle that keeps it, what compiles when."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from attngen.diag.diagnostic import AttnError
from attngen.emit.backward import emit_backward
from attngen.emit.module import emit
from attngen.jit import kernel, launch, variants
from attngen.jit.cache import Entry, KernelCache
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.jit.load import Loaded
from attngen.jit.selected import SelectedAttention
from attngen.jit.tables import Tables
from attngen.passes.parts import kernel_spec
from attngen.ref import dense
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

SPEC = load_spec("""attn 1
attention packed {
  head_dim = 64
  param window: int = 64
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = doc[b, q_pos] == doc[b, kv_idx] and q_pos - kv_idx < window
}
""")


class Calls:
    """Stands for `load` and for the functions that it loads; keeps the arguments of every launch."""

    def __init__(self) -> None:
        self.loaded = 0
        self.made: list[tuple[Any, ...]] = []

    def __call__(self, source: Any, *_: Any, **__: Any) -> Loaded:
        self.loaded += 1
        return Loaded((self.launch,) * len(source.meta["plans"]), Entry(Path(), Path(), ()), 0.0)

    def launch(self, *arguments: Any) -> None:
        self.made.append(arguments)

    @property
    def last(self) -> tuple[Any, ...]:
        """Window, doc, tables, build_tables of the last launch."""
        return self.made[-1][-4:]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    made = Calls()
    monkeypatch.setattr(kernel, "load", made)
    monkeypatch.setattr(variants, "load", made)
    return made


def attached(tmp_path: Path, spec: Any = SPEC) -> Attention:
    attn = Attention(
        spec, emit(plan(spec)), "sm_90a", KernelCache(tmp_path), backward=lambda _: emit_backward(plan_backward(spec))
    )
    attn.compile()
    attn.launcher.ready[-1] = (DeviceState(-1, 132), 132)
    return attn


def inputs(sq: int = 70, skv: int = 70, b: int = 2) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(b, n, 2, 64).bfloat16() for n in (sq, skv, skv))
    return q, k, v, (torch.arange(skv, dtype=torch.int32) // 20).expand(b, skv)


def test_every_launch_gets_a_workspace(calls: Calls, tmp_path: Path) -> None:
    attn = attached(tmp_path)
    q, k, v, doc = inputs()
    attn(q, k, v, doc=doc, window=9)
    window, given, tables, build = calls.last
    assert (window, build) == (9, 1) and given is doc
    assert tables.dtype is torch.int32 and tables.shape == (2 * 2 * 70,) and len(attn.source.meta["tables"]) == 2


def test_a_handle_is_filled_once(calls: Calls, tmp_path: Path) -> None:
    """Same memory, params and lengths: kept. Anything else: filled again."""
    attn = attached(tmp_path)
    q, k, v, doc = inputs()
    doc = doc.contiguous()
    kept = attn.tables()
    seen = []
    for change in (None, None, "window", "version", None, "memory", "lengths", None):
        window = 64 if change != "window" else 3
        if change == "version":
            doc[0, 0] = -1
        if change == "memory":
            doc = doc.clone()
        if change == "lengths":
            q = q[:, :50]
        attn(q, k, v, doc=doc, window=window, tables=kept)
        seen.append(calls.last[-1])
    # after `window` another window comes: filled twice
    assert seen == [1, 0, 1, 1, 0, 1, 1, 0]
    kept.clear()
    attn(q, k, v, doc=doc, tables=kept)
    assert calls.last[-1] == 1


def test_a_handle_serves_the_backward(calls: Calls, tmp_path: Path) -> None:
    attn = attached(tmp_path)
    q, k, v, doc = inputs()
    q.requires_grad_()
    kept = attn.tables()
    attn(q, k, v, doc=doc, tables=kept).sum().backward()
    front, back = calls.made
    assert front[-1] == 1 and back[-1] == 0 and front[-2] is back[-2]
    attn(q, k, v, doc=doc).sum().backward()
    front, back = calls.made[-2:]
    assert front[-1] == back[-1] == 1 and front[-2] is not kept._kept["tables"]


def test_launches_of_a_thread_share_what_they_fill(calls: Calls, tmp_path: Path) -> None:
    """Memory that a launch's first kernel fills for its main one: of this thread alone, whose launches run in order."""
    attn = attached(tmp_path)
    q, k, v, doc = inputs()
    attn(q, k, v, doc=doc)
    attn(q, k, v, doc=doc)
    other = Thread(target=attn, args=(q, k, v), kwargs={"doc": doc})
    other.start()
    other.join()
    first, second, third = (made[-2] for made in calls.made)
    assert first is second and first is not third and all(made[-1] == 1 for made in calls.made)


BLOCKS = load_spec("""attn 1
attention blocks {
  head_dim = 64
  mask = kv_idx <= q_pos
  block_sparse { q = 64, kv = 64, lists = given }
}
""")


def test_a_handle_keeps_tile_maps(calls: Calls, tmp_path: Path) -> None:
    """One of the forward and one of the backward, whose tiles are others; changed lists make both again."""
    attn = attached(tmp_path, BLOCKS)
    q, k, v, _ = inputs(300, 300)
    q.requires_grad_()
    blocks = torch.ones(2, 2, 5, 5, dtype=torch.bool)
    kept, seen = attn.tables(), []
    for change in (False, False, True, False):
        if change:
            blocks[0, 0, 0, 0] = False
        attn(q, k, v, blocks=blocks, tables=kept).sum().backward()
        seen.append([c[-1] for c in calls.made[-2:]])
    assert seen == [[1, 1], [0, 0], [1, 1], [0, 0]]
    front, back = (c[-2] for c in calls.made[-2:])
    assert front is calls.made[-4][-2] and back is calls.made[-3][-2] and front is not back
    attn(q, k, v, blocks=blocks)
    assert calls.made[-1][-1] == 1 and calls.made[-1][-2] is not front
    attn(q, k, v[:, :, :1].expand(v.shape), blocks=blocks)  # a map does not depend on values
    assert calls.made[-1][-2].numel() == front.numel()


BANDS = load_spec("""attn 1
attention bands {
  head_dim = 64
  mask = (q_pos - kv_idx) % 5 == 0
  block_sparse { q = 64, kv = 64 }
}
""")


@pytest.mark.parametrize("grad", [False, True])
def test_a_map_of_a_mask_that_captures_nothing(calls: Calls, tmp_path: Path, grad: bool) -> None:
    """No argument is bound, and the map's two are passed all the same: such calls unpacked a tail that was empty."""
    attn = attached(tmp_path, BANDS)
    q, k, v, _ = inputs(300, 300)
    o = attn(q.requires_grad_(grad), k, v)
    if grad:
        o.sum().backward()
    assert len(calls.made) == 1 + grad
    assert all(c[-1] == 1 and c[-2].dtype is torch.int32 for c in calls.made)
    kept = attn.tables()
    for _ in range(2):
        attn(q.detach(), k, v, tables=kept)
    assert [c[-1] for c in calls.made[-2:]] == [1, 0]


def test_a_captured_call_never_fills_a_handle(calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attn = attached(tmp_path)
    q, k, v, doc = inputs()
    kept = attn.tables()
    attn(q, k, v, doc=doc)
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    attn(q, k, v, doc=doc, tables=kept)
    attn(q, k, v, doc=doc, tables=kept)
    assert [c[-1] for c in calls.made[-2:]] == [1, 1]


def test_bad_handles(calls: Calls, tmp_path: Path) -> None:
    attn = attached(tmp_path)
    q, k, v, doc = inputs()
    with pytest.raises(AttnError, match="E0604") as found:
        attn(q, k, v, doc=doc, tables=doc)
    assert "attn.tables()" in str(found.value)
    plain = attached(tmp_path, load_spec("attn 1\nattention plain {\n  head_dim = 64\n}\n"))
    with pytest.raises(AttnError, match="E0601"):
        plain.tables()
    with pytest.raises(AttnError, match="E0601"):
        plain(q, k, v, tables=Tables())


def test_a_tensor_of_that_name_keeps_it(calls: Calls, tmp_path: Path) -> None:
    spec = load_spec("""attn 1
attention packed {
  head_dim = 64
  tensor tables: i32[batch, seqlen_kv] sorted
  mask = tables[b, q_pos] == tables[b, kv_idx]
}
""")
    attn = attached(tmp_path, spec)
    q, k, v, doc = inputs()
    attn(q, k, v, tables=doc)
    assert calls.last[1] is doc and calls.last[-1] == 1
    with pytest.raises(AttnError, match="E0601"):
        attn.tables()


def test_nothing_compiles_again(calls: Calls, tmp_path: Path) -> None:
    """Lengths, batches, documents and windows change; one forward and one backward file are loaded."""
    attn = attached(tmp_path)
    for n, (sq, skv, b) in enumerate(((70, 70, 2), (33, 190, 1), (1024, 1500, 1), (1, 5, 3))):
        q, k, v, doc = inputs(sq, skv, b)
        q.requires_grad_()
        attn(q, k, v, doc=doc // (n + 1), window=n + 1).sum().backward()
    assert calls.loaded == 2 and len(calls.made) == 8


RAGGED = """attn 1
attention packed {
  head_dim = 64
  layout = varlen
  mask = kv_idx <= q_pos
  CLAUSE
}
"""


@pytest.mark.parametrize("clause", ["", "block_sparse { q = 64, kv = 64, lists = given }",
                                    "block_sparse { q = 1, kv = 4, lists = given }"])  # fmt: skip
def test_nothing_compiles_again_in_ragged_layouts(clause: str, calls: Calls, tmp_path: Path) -> None:
    """Sequences, their number, their lengths, maps of blocks and lists of keys change."""
    spec = load_spec(RAGGED.replace("CLAUSE", clause))
    inner = attached(tmp_path, kernel_spec(spec))
    attn: Any = SelectedAttention(spec, inner, (load_spec, ("",))) if "q = 1," in clause else inner
    for n, lengths in enumerate(([70], [3, 0, 200], [1500, 1], [9] * 20)):
        q, k, v = (torch.randn(sum(lengths), 2, 64).bfloat16().requires_grad_() for _ in range(3))
        named: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, *lengths]).cumsum(0).int()}
        if clause:
            blocks = torch.ones(len(lengths), 1, max(lengths), 3 + n, dtype=torch.int32)
            named["blocks"] = blocks if "q = 1," in clause else (blocks > 0)[:, :, : n + 24].expand(-1, 2, -1, -1)
        attn(q, k, v, **named).sum().backward()
    assert calls.loaded == 2 and len(calls.made) == 8


def test_on_cpu_tensors(tmp_path: Path) -> None:
    """The reference takes a handle and needs none; torch.compile does not see it."""
    attn = Attention(SPEC, emit(plan(SPEC)), "sm_90a", KernelCache(tmp_path))
    q, k, v, doc = inputs()
    kept = attn.tables()
    wanted = dense.attention(SPEC, q, k, v, {}, {"doc": doc}).o
    found = attn(q, k, v, doc=doc, tables=kept)
    assert (found.double() - wanted).abs().max() < 2e-2
    again = torch.compile(attn, backend="eager", fullgraph=True)(q, k, v, doc=doc, tables=kept)
    assert torch.equal(found, again)


def test_broken_promises_are_found_on_request(tmp_path: Path) -> None:
    attn = Attention(SPEC, emit(plan(SPEC)), "sm_90a", KernelCache(tmp_path))
    q, k, v, doc = inputs()
    doc = doc.clone()
    doc[1, 30] = 0
    with pytest.raises(AttnError, match="E0614"):
        attn(q, k, v, doc=doc, check=True)
    assert attn(q, k, v, doc=doc).isfinite().all()
