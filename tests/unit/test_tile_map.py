"""Walks by a tile map without a GPU: spelling, plans, plan execution against the dense meaning, golden counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.emit.backward import emit_backward
from attngen.emit.module import emit
from attngen.ir.plan import PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.tile_map import map_words
from attngen.jit import kernel, launch, variants
from attngen.jit.cache import Entry, KernelCache
from attngen.jit.device import DeviceState
from attngen.jit.load import Loaded
from attngen.passes.given_blocks import inside_blocks
from attngen.ref import dense, interp, interp_backward
from attngen.ref.binding import bind
from attngen.ref.walk import mapped
from attngen.search import plan
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec, print_expr, print_spec

BIGBIRD = """
  let row    = q_pos // 64
  let column = kv_idx // 64
  let last   = (seqlen_kv - 1) // 64
  mask = abs(row - column) <= 1 or column == 0 or column == last or row == 0 or row == last
  block_sparse { q = 64, kv = 64 }"""
GIVEN = "mask = kv_idx <= q_pos\n  block_sparse {{ q = {0}, kv = {0}, lists = given }}"
DOCUMENTS = """
  tensor doc: i32[batch, seqlen_kv]
  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]
  block_sparse { q = 128, kv = 128 }"""
NATTEN = "param w: int >= 1 = 16\n  mask = neighborhood_2d(w, w, 2)\n  block_sparse { q = 128, kv = 128 }"


def written(body: str, more: str = "") -> AttentionSpec:
    return load_spec(f'attn 1\ninclude "std.attn"\nattention a {{\n  head_dim = 64\n  {body}\n  {more}\n}}\n')


def listed(spec: AttentionSpec, b: int, h: int, sq: int, skv: int, seed: int = 0) -> torch.Tensor:
    counts = spec.block_counts(sq, skv)
    g = torch.Generator().manual_seed(seed)
    return torch.rand(b, h, counts["blocks_q"], counts["blocks_kv"], generator=g) < 0.4


# ---- spelling --------------------------------------------------------------------------------------------------------


def test_given_blocks_are_a_tensor() -> None:
    spec = written(GIVEN.format(48))
    assert print_expr(spec.mask) == "kv_idx <= q_pos and blocks[b, h, q_idx // 48, kv_idx // 48]"
    assert [(t.name, t.dims) for t in spec.tensors] == [("blocks", ("batch", "heads_q", "blocks_q", "blocks_kv"))]
    assert load_spec(print_spec(spec)) == spec
    assert print_expr(written("block_sparse { q = 8, kv = 8, lists = given }").mask).startswith("blocks[")


def test_own_blocks_stay() -> None:
    own = "tensor blocks: bool[rows, columns]\n  mask = blocks[q_idx // 64, kv_idx // 64]\n"
    spec = written(own + "  block_sparse { q = 64, kv = 64, lists = given }")
    assert print_expr(spec.mask) == "blocks[q_idx // 64, kv_idx // 64]" and len(spec.tensors) == 1


@pytest.mark.parametrize(
    ("more", "code"), [("param blocks: int = 3", "E0204"), ("tensor blocks: bool[rows, columns]", "E0208")]
)
def test_a_name_that_is_taken(more: str, code: str) -> None:
    with pytest.raises(AttnError) as caught:
        written(GIVEN.format(48), more)
    assert caught.value.code == code


def test_branches_share_the_blocks() -> None:
    branches = "branch one { mask = kv_idx > 3 }\n  branch two { weight = -1.0 }"
    spec = written("block_sparse { q = 8, kv = 8, lists = given }", branches)
    assert all("blocks[" in print_expr(x.mask) for x in spec.branches)


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_tiles_go_inside_blocks() -> None:
    """Then the element test does not read the blocks: limits decide, as for a causal mask."""
    for p in plan(written(GIVEN.format(128))).plans:
        assert (128 % p.compute.tile_m, 128 % p.compute.tile_n) == (0, 0)
        assert (p.mask.walk, p.mask.test) == ("map", "limits") and p.mask.map is not None
        assert p.mask.map.per_batch and p.mask.map.per_head
    cut = plan(written(GIVEN.format(48))).plans[0]
    assert cut.mask.test == "elements"


def test_the_rest_of_a_mask() -> None:
    spec = written(GIVEN.format(128))
    rest = inside_blocks(spec, 128, 64)
    assert rest is not None and print_expr(rest) == "kv_idx <= q_pos"
    assert inside_blocks(spec, 192, 64) is None
    assert inside_blocks(written(BIGBIRD), 64, 64) is None
    mixed = "tensor blocks: bool[rows, columns]\n  mask = kv_idx < 9 or blocks[q_idx // 64, kv_idx // 64]\n"
    assert inside_blocks(written(mixed + "  block_sparse { q = 64, kv = 64, lists = given }"), 64, 64) is None


def test_other_plans_know_nothing_of_maps() -> None:
    """What is hashed of a plan without a map holds no trace of one, so ids of other kernels stay."""
    with_map, without = plan(written(BIGBIRD)).plans[0], plan(written("mask = kv_idx <= q_pos")).plans[0]
    assert "map" in with_map.mask.model_dump() and "map" not in without.mask.model_dump()
    both: PlanSet = plan(written(BIGBIRD))
    assert PlanSet.model_validate_json(both.model_dump_json()) == both


def test_words() -> None:
    """Two bits a tile, a third where turns are counted; rows are whole words."""
    sizes = {"batch": 2, "heads_q": 3, "seqlen_q": 1000, "seqlen_kv": 5000}
    tile = {"tile_m": 128, "tile_n": 100}  # 8 x 50 tiles
    assert map_words({"per_batch": False, "per_head": False}, tile, sizes) == 2 * 8 * 2
    assert map_words({"per_batch": True, "per_head": True}, tile, sizes) == 6 * 2 * 8 * 2
    turns = {"per_batch": True, "per_head": False, "by_keys": True, "turns": True}
    assert map_words(turns, tile, sizes) == 2 * (2 * 50 * 1 + 8 * 2)
    assert map_words({**turns, "turns": False}, tile, sizes) == 2 * 2 * 50


# ---- execution -------------------------------------------------------------------------------------------------------


def agree(spec: AttentionSpec, sq: int, skv: int, tensors: dict[str, torch.Tensor], b: int = 1, h: int = 2) -> None:
    """Forward and backward by their plans, deterministic or not, and the dense meaning."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(b, n, x, 64, generator=g).double() for n, x in ((sq, h), (skv, 1), (skv, 1)))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ref = dense.attention(spec, *leaves, tensors=tensors)
    do = torch.randn(ref.o.shape, generator=g).double()
    wanted = torch.autograd.grad(ref.o, leaves, do)
    q, k, v, o, lse = (x.detach() for x in (*leaves, ref.o, ref.lse))
    plans = plan(spec)
    for p in (*plans.plans, *plans.others[:: max(1, len(plans.others) // 2)]):
        found, rows, _ = interp.run(p, spec, q, k, v, tensors=tensors)
        torch.testing.assert_close(found, o, atol=1e-10, rtol=0)
        torch.testing.assert_close(rows, lse, atol=1e-10, rtol=0)
    for deterministic in (False, True):
        ordered = spec.replace(backward=spec.backward.replace(deterministic=deterministic))
        got = interp_backward.run(plan_backward(ordered), q, k, v, o, lse, do, tensors=tensors)
        for mine, other in zip((got.dq, got.dk, got.dv), wanted, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-10, rtol=0)


def test_bigbird() -> None:
    agree(written(BIGBIRD), 300, 300, {})


@pytest.mark.parametrize("block", [48, 64, 128])
def test_given(block: int) -> None:
    spec = written(GIVEN.format(block))
    agree(spec, 230, 290, {"blocks": listed(spec, 1, 2, 230, 290)})


def test_given_nothing() -> None:
    """Rows without a block: O = 0, LSE = -inf, no gradient."""
    spec = written(GIVEN.format(128))
    agree(spec, 200, 200, {"blocks": torch.zeros(1, 2, 2, 2, dtype=torch.bool)})
    some = listed(spec, 1, 2, 260, 260)
    some[:, 0, 1] = False
    agree(spec, 260, 260, {"blocks": some})


def test_blocks_of_all_heads() -> None:
    """Extent 1 stands for all, on every axis."""
    spec = written(GIVEN.format(64))
    agree(spec, 150, 150, {"blocks": listed(spec, 1, 1, 150, 150)}, b=2)


def test_documents_in_no_order() -> None:
    doc = torch.tensor([0, 2, 1, 0]).repeat_interleave(70)[None].to(torch.int32)
    agree(written(DOCUMENTS), 280, 280, {"doc": doc})


@pytest.mark.parametrize(("body", "length", "pairs"), [(BIGBIRD, 1024, 409600), (NATTEN, 256, 6400)])
def test_golden_counts(body: str, length: int, pairs: int) -> None:
    """BigBird without random blocks, and NATTEN's 5 x 5 on 16 x 16; tiles of 64 fit BigBird's blocks."""
    spec = written(body)
    zero = torch.zeros(1, length, 1, 64)
    bound = bind(spec, zero, zero, zero)
    kept = bound.value(spec.mask, bound.env(length, torch.arange(length), torch.arange(length)))[0, 0]
    some, every = mapped(kept, 64, 64)
    assert int(kept.sum()) == pairs
    assert not bool((every & ~some).any()) and int(every.sum()) == (100 if body == BIGBIRD else 0)


# ---- lists -----------------------------------------------------------------------------------------------------------


def test_block_map() -> None:
    counts = torch.tensor([[[2, 0, 3]]])
    indices = torch.tensor([[[[0, 3, 9, 9], [1, 1, 1, 1], [2, 0, 7, 1]]]], dtype=torch.int32)
    found = attngen.block_map(counts, indices, 4)
    assert found.tolist() == [[[[True, False, False, True], [False] * 4, [True, False, True, False]]]]


@pytest.mark.parametrize(
    ("counts", "indices", "what"),
    [
        ([3], [[0, 1]], "outside 0..2"),
        ([-1], [[0, 1]], "outside 0..2"),
        ([2], [[0, 4]], "outside 0..3"),
        ([2], [[2, 1]], "rising"),
        ([2], [[1, 1]], "the one before"),
    ],
)
def test_block_map_checks(counts: list[int], indices: list[list[int]], what: str) -> None:
    lists = torch.tensor([[counts]]), torch.tensor([[indices]])
    assert attngen.block_map(*lists, 4).shape == (1, 1, 1, 4)
    with pytest.raises(AttnError, match=what) as caught:
        attngen.block_map(*lists, 4, check=True)
    assert caught.value.code == "E0626"


def test_block_map_is_traced() -> None:
    lists = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0], [0, 1]]]])
    compiled = torch.compile(lambda c, i: attngen.block_map(c, i, 3), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*lists), attngen.block_map(*lists, 3))


def test_blocks_of_a_wrong_shape() -> None:
    """CPU calls and `check=True` say which axis has how many blocks."""
    attn = attngen.build(written(GIVEN.format(64)))
    q = torch.randn(1, 200, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(AttnError, match="blocks_kv") as caught:
        attn(q, q, q, blocks=torch.ones(1, 2, 4, 3, dtype=torch.bool))
    assert caught.value.code == "E0607"
    assert attn(q, q, q, blocks=torch.ones(1, 1, 1, 1, dtype=torch.bool)).shape == q.shape


# ---- calls -----------------------------------------------------------------------------------------------------------


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


def test_calls_bring_memory_and_compile_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other lists, other lengths: the same two functions. The map lies behind the captured tensors."""
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    calls = Calls()
    monkeypatch.setattr(kernel, "load", calls)
    monkeypatch.setattr(variants, "load", calls)
    spec = written(GIVEN.format(128), "backward { deterministic = true }")
    attn = kernel.Attention(
        spec, emit(plan(spec)), "sm_90a", KernelCache(tmp_path), backward=lambda _: emit_backward(plan_backward(spec))
    )
    attn.compile()
    attn.launcher.ready[-1] = (DeviceState(-1, 132), 132)
    for n in (256, 640, 100):
        q = torch.randn(2, n, 2, 64).bfloat16().requires_grad_()
        blocks = listed(spec, 2, 2, n, n, seed=n)
        attn(q, q, q, blocks=blocks).sum().backward()
        front, back = calls.made[-2:]
        tiles = -(-n // 128)
        assert front[8] is blocks and back[13] is blocks
        assert front[9].dtype is torch.int32 and front[9].numel() == 4 * 2 * tiles
        assert back[14].numel() == 4 * 3 * tiles
    assert (calls.loaded, len(calls.made)) == (2, 6)


def test_explain_says_what_a_map_takes() -> None:
    text = attngen.explain(written(DOCUMENTS, "backward { deterministic = true }"))
    assert "tile map   2 bits a tile, of each batch element:" in text
    assert "tile map   3 bits a tile, of each batch element:" in text
    assert "least and largest element that it reads of doc, else pair by pair" in text


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_maps_of_ragged_layouts(layout: str) -> None:
    """A row of words for each outer tile of every sequence, as long as the longest there may be; heads on top."""
    spec = written(DOCUMENTS.replace("batch, ", "").replace("doc[b, ", "doc["), f"layout = {layout}")
    entry = emit(plan(spec)).meta["map"]
    assert entry == {"per_batch": True, "per_head": False, **({"packed": True} if layout == "varlen" else {})}
    tile, sizes = {"tile_m": 64, "tile_n": 128}, {"batch": 3, "heads_q": 4, "seqlen_q": 1000, "seqlen_kv": 9000}
    rows = 1000 // 64 + 3 + 1 if layout == "varlen" else 3 * 16
    assert map_words(entry, tile, sizes) == 2 * rows * 3
    keys = 9000 // 128 + 3 + 1 if layout == "varlen" else 3 * 71
    backward = {**entry, "per_head": True, "by_keys": True, "turns": True}
    assert map_words(backward, tile, sizes) == 4 * (2 * keys * 1 + rows * 3)
