"""Lists of keys, and segments, in ragged layouts on the GPU: values, gradients, captured tensors, no wait, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import no_waits, replayed

import attngen
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

Tensor = torch.Tensor
BF16 = torch.bfloat16
#: Rows, keys and keys of a segment, of each sequence.
LENGTHS = [(300, 300, 120), (0, 17, 5), (1, 260, 0), (129, 64, 64), (77, 0, 30), (0, 0, 0), (200, 513, 400)]
BODY = """attn 1
attention one {
  head_dim = 64
  layout = LAYOUT
  tensor bias: f32[KEYS] grad
  tensor sinks: f32[batch, heads_q] grad
  score = s + bias[AT]
  sink  = sinks[b, h]
  mask  = kv_idx <= q_pos SEEN
  backward { deterministic = DETERMINISTIC }
MORE}
"""
SEGMENT = "  segment past {\n    mask = b != 1 and b != 4 and kv_idx < 64\n    score = s + bias[AT]\n  }\n"
LAYOUTS = ["varlen", "padded"]


def text(layout: str, more: str, *, seen: str = "", deterministic: bool = False) -> str:
    keys, at = ("seqlen_kv", "kv_idx") if layout == "varlen" else ("batch, seqlen_kv", "b, kv_idx")
    found = BODY.replace("LAYOUT", layout).replace("DETERMINISTIC", str(deterministic).lower())
    return found.replace("MORE", more).replace("SEEN", seen).replace("KEYS", keys).replace("AT", at)


class Batch:
    """Operands of one call on the GPU, NaN in what belongs to no sequence."""

    def __init__(self, layout: str) -> None:
        self.g = torch.Generator(device="cuda").manual_seed(11)
        self.packed = layout == "varlen"
        self.counts = [torch.tensor(n, device="cuda") for n in zip(*LENGTHS, strict=True)]
        starts = [torch.cat((n.new_zeros(1), n.cumsum(0))).int() for n in self.counts]
        given = starts if self.packed else [n.int() for n in self.counts]
        names = ("cu_seqlens_q", "cu_seqlens_kv") if self.packed else ("seqused_q", "seqused_kv")
        self.lengths, self.past = dict(zip(names, given, strict=False)), given[2]
        self.there = []
        for n in self.counts:
            extent = int(n.sum()) + 3 if self.packed else int(n.max()) + 1
            self.there.append(torch.arange(extent, device="cuda") < (n.sum() if self.packed else n.view(-1, 1)))
        self.leaves = [self.draw(i, h, 64) for i, h in ((0, 4), (1, 2), (1, 2))]
        self.named = {"bias": self.draw(1, kind=torch.float32), "sinks": self.draw(None, len(LENGTHS), 4)}
        self.segment = [self.draw(2, 2, 64) for _ in range(2)]

    def draw(self, which: int | None, *rest: int, kind: torch.dtype = BF16) -> Tensor:
        if which is None:
            return torch.randn(rest, generator=self.g, device="cuda").requires_grad_()
        there = self.there[which]
        x = torch.randn((*there.shape, *rest), generator=self.g, device="cuda").to(kind)
        return torch.where(there.view(*there.shape, *(1,) * len(rest)), x, math.nan).requires_grad_()


def loss(o: Tensor, lse: Tensor) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(9)
    do = torch.randn(o.shape, generator=g, device="cuda").to(BF16).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=g, device="cuda").to(lse.dtype)
    there = lse.isfinite()
    return (o * do).sum(dtype=torch.float64) + (lse[there] * dlse[there]).sum(dtype=torch.float64)


def agree(results: Any, leaves: list[Tensor], meaning: Callable[[Any, list[Tensor]], Any]) -> None:
    """O and every gradient by the error rule: twice what torch errs in the same dtype, and two ulps."""
    o, lse = results
    found = [o, *torch.autograd.grad(loss(o, lse), leaves)]
    wide = []
    for dtype, function in ((torch.float64, dense.attention), (BF16, dense.same_dtype)):
        kinds = [dtype if x.dtype is BF16 else torch.promote_types(dtype, torch.float32) for x in leaves]
        cast = [x.detach().to(kind).requires_grad_() for x, kind in zip(leaves, kinds, strict=True)]
        out = meaning(function, cast)
        assert dtype is BF16 or torch.equal(lse.isinf(), out[1].isinf())
        wide.append([out[0], *torch.autograd.grad(loss(*out), cast)])
    for n, (got, exact, plain) in enumerate(zip(found, *wide, strict=True)):
        ulp = torch.finfo(BF16).eps * float(exact.abs().max())
        allowed = 2 * float((plain.double() - exact).abs().max()) + 2 * ulp
        assert got.isfinite().all() and float((got.double() - exact).abs().max()) <= allowed, n
    for x, got in zip(leaves, found[1:], strict=True):
        assert (got[x.isnan()] == 0).all()


def lists_of_call(batch: Batch, q: int, kv: int) -> tuple[Tensor, Tensor]:
    """Lists of the blocks that a row of blocks sees, and the same as a map."""
    rows, keys = (x.shape[-1] for x in batch.there[:2])
    if batch.packed:
        rows, keys = int(batch.counts[0].max()), int(batch.counts[1].max())
    count = -(-keys // kv)
    lists = torch.randint(-1, count, (len(LENGTHS), 2, -(-rows // q), 90), generator=batch.g, device="cuda")
    places = torch.where(lists < 0, count, lists)
    seen = torch.zeros(*lists.shape[:3], count + 1, dtype=torch.bool, device="cuda").scatter_(-1, places, True)
    return lists.int(), seen[..., :count]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("q", "kv", "deterministic"), [(1, 16, False), (4, 1, True), (128, 1, False)])
def test_lists(layout: str, q: int, kv: int, deterministic: bool) -> None:
    clause = f"  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n"
    attn = attngen.build(text(layout, clause, deterministic=deterministic))
    batch = Batch(layout)
    lists, seen = lists_of_call(batch, q, kv)
    read = f" and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]"
    mapped = load_spec(text(layout, "  tensor seen: bool[batch, heads_kv, rows, keys]\n", seen=read))
    leaves = [*batch.leaves, *batch.named.values()]

    def meaning(how: Any, x: list[Tensor]) -> Any:
        tensors = {"bias": x[3], "sinks": x[4], "seen": seen}
        return ragged.attention(mapped, *x[:3], batch.lengths, {}, tensors, how=how)

    agree(attn(*batch.leaves, blocks=lists, **batch.named, **batch.lengths, return_lse=True), leaves, meaning)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_segments(layout: str, deterministic: bool) -> None:
    """Gradients of both sets of keys, and of a tensor over the call's own keys that the segment reads."""
    attn = attngen.build(text(layout, SEGMENT, deterministic=deterministic))
    batch = Batch(layout)
    leaves = [*batch.leaves, *batch.named.values(), *batch.segment]

    def meaning(how: Any, x: list[Tensor]) -> Any:
        segments = {"past": (x[5], x[6], batch.past)}
        return ragged.attention(
            attn.spec, *x[:3], batch.lengths, {}, {"bias": x[3], "sinks": x[4]}, how=how, segments=segments
        )

    segments = {"past": (*batch.segment, batch.past)}
    found = attn(*batch.leaves, segments=segments, **batch.named, **batch.lengths, return_lse=True)
    agree(found, leaves, meaning)
    with torch.no_grad():  # by kernels that add to each other's O
        o, lse = attn(*batch.leaves, segments=segments, **batch.named, **batch.lengths, return_lse=True)
    assert (o - found[0]).abs().max() <= 2 * torch.finfo(o.dtype).eps * found[0].abs().max()
    assert torch.equal(lse.isinf(), found[1].isinf())
    assert (lse - found[1]).masked_fill(lse.isinf(), 0.0).abs().max() < 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["lists", "segments"])
def test_no_wait_and_graphs(layout: str, kind: str) -> None:
    """No call waits for the lengths; a CUDA graph replays it, with other lengths too."""
    batch = Batch(layout)
    operands = [x.detach() for x in batch.leaves]
    named = {n: x.detach() for n, x in batch.named.items()}
    if kind == "lists":
        attn = attngen.build(text(layout, "  block_sparse { q = 4, kv = 1, lists = given }\n"))
        more: dict[str, Any] = {"blocks": lists_of_call(batch, 4, 1)[0]}
    else:
        attn = attngen.build(text(layout, SEGMENT))
        more = {"segments": {"past": (*(x.detach() for x in batch.segment), batch.past)}}

    def call() -> Tensor:
        found: Tensor = attn(*operands, **named, **batch.lengths, **more)
        return found

    want = call()
    with no_waits():
        again = call()
    assert torch.equal(again, want)
    graph, out = replayed(call, want)
    first = next(iter(batch.lengths.values()))
    first[-1:] -= 50  # fewer rows of the last sequence
    other = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, other) and not torch.equal(other, want)
