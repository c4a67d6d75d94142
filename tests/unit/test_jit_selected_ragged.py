"""Lists of keys in ragged layouts: values and gradients of sequences against a map, NaN around them, and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit.lists import listed
from attngen.jit.selected import SelectedAttention
from attngen.jit.shapes import sizes_of
from attngen.passes.serves import why_not
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
#: Rows and keys of each sequence: none of either, and a list longer than the keys.
LENGTHS = [(3, 7), (0, 4), (19, 25), (6, 0), (0, 0), (9, 3), (1, 30)]
BODY = """attn 1
attention listed {
  head_dim = 64
  LAYOUT
  param window: int >= 1 = 30
  tensor bias: f32[KEYS] grad
  tensor row: f32[ROWS] grad
  tensor own: f32[batch, heads_q] grad
  tensor doc: i32[KEYS] sorted
  score    = s + bias[AT_KEY] * float(b + 1) + row[AT_ROW] * float(kv_idx)
  sink     = own[b, h]
  epilogue = o + row[AT_ROW]
  mask     = kv_idx <= q_pos and q_pos - kv_idx < window and doc[AT_KEY] + seqlen_kv + seqlen_q > batch
}
"""
SEEN = "  tensor seen: bool[batch, heads_kv, blocks_q, blocks_kv]\n"


def text(layout: str, q: int, kv: int, *, mapped: bool = False) -> str:
    packed = layout == "varlen"
    found = BODY.replace("LAYOUT", f"layout = {layout}")
    for name, axes, at in (("ROW", "seqlen_q", "q_idx"), ("KEY", "seqlen_kv", "kv_idx")):
        found = found.replace(f"{name}S]", f"{axes}]" if packed else f"batch, {axes}]")
        found = found.replace(f"AT_{name}", at if packed else f"b, {at}")
    if mapped:
        found = found.replace("> batch", f"> batch and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]")
        return found.replace("  score ", SEEN + "  score ")
    return found.replace("  score ", f"  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n  score ")


class Call:
    """Operands of one call, NaN where there is no sequence, its lists, and the same as a map."""

    def __init__(self, layout: str, q: int, kv: int, *, lead: tuple[int, int] = (7, 2), seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        rows, keys = ([n[i] for n in LENGTHS] for i in range(2))
        self.packed, batch = layout == "varlen", len(LENGTHS)
        shape = (sum(rows) + 3, sum(keys) + 2) if self.packed else (max(rows) + 2, max(keys) + 1)
        lead_axes = () if self.packed else (batch,)
        self.leaves = [torch.randn(*lead_axes, n, h, 64, generator=g).to(BF16)
                       for n, h in ((shape[0], 4), (shape[1], 2), (shape[1], 2))]  # fmt: skip
        counts = [torch.tensor(x).int() for x in (rows, keys)]
        if self.packed:
            made = [torch.cat((x.new_zeros(1), x.cumsum(0))).int() for x in counts]
            self.lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), made, strict=True))
        else:
            self.lengths = dict(zip(("seqused_q", "seqused_kv"), counts, strict=True))
        self.there = []
        for n, extent in zip(counts, shape, strict=True):
            self.there.append(torch.arange(extent) < (n.sum() if self.packed else n.view(-1, 1)))
        for x, which in zip(self.leaves, (0, 1, 1), strict=True):
            x[~self.there[which]] = math.nan
        named = [torch.randn(*lead_axes, shape[1], generator=g), torch.randn(*lead_axes, shape[0], generator=g)]
        self.leaves += [*named, torch.randn(batch, 4, generator=g)]
        self.doc = torch.zeros(*lead_axes, shape[1], dtype=torch.int32)
        most = (max(rows), max(keys)) if self.packed else shape
        blocks = [-(-n // size) for n, size in zip(most, (q, kv), strict=True)]
        count = (counts[1] + kv - 1) // kv  # blocks of keys of each sequence
        lists = torch.randint(-1, 12, (*lead, blocks[0], 7), generator=g)
        lists = torch.where(lists < count.view(-1, 1, 1, 1)[: lead[0]], lists, -1) if lead[0] > 1 else lists
        places = torch.where((lists < 0) | (lists >= blocks[1]), blocks[1], lists).expand(batch, 2, -1, -1)
        seen = torch.zeros(batch, 2, blocks[0], blocks[1] + 1, dtype=torch.bool).scatter_(-1, places, True)
        self.seen, self.lists = seen[..., : blocks[1]], lists.int()

    def tensors(self, leaves: list[Any]) -> dict[str, Any]:
        return {"bias": leaves[3], "row": leaves[4], "own": leaves[5], "doc": self.doc}


def agree(call: Call, spec: Any, found: tuple[Any, Any], leaves: list[Any]) -> None:
    """O, LSE and every gradient beside the dense meaning; 0 where there is no sequence."""
    wide = [x.detach().double().requires_grad_() for x in leaves]
    tensors = {**call.tensors(wide), "seen": call.seen}
    want, rows = ragged.attention(spec, *wide[:3], call.lengths, {"window": 25}, tensors, how=dense.attention)
    o, lse = found
    assert o.shape == want.shape and lse.shape == rows.shape and o.is_contiguous() and lse.is_contiguous()
    assert torch.equal(lse.isinf(), rows.isinf()) and (o - want).abs().max() < 3e-2
    finite = lse.isfinite()
    assert (lse - rows)[finite].abs().max() < 1e-5
    assert (o[~call.there[0]] == 0).all()
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    losses = [(x.double() * weight).sum() + y.double()[finite].sin().sum() for x, y in ((o, lse), (want, rows))]
    grads = [torch.autograd.grad(loss, x) for loss, x in zip(losses, (leaves, wide), strict=True)]
    for n, (got, exact) in enumerate(zip(*grads, strict=True)):
        assert got.shape == exact.shape and got.isfinite().all(), n
        assert (got - exact).norm() < 1e-2 * exact.norm(), n
        if n < 3:
            assert (got[~call.there[n > 0]] == 0).all()


@pytest.mark.parametrize("layout", ["varlen", "padded"])
@pytest.mark.parametrize(
    ("q", "kv", "lead"), [(1, 1, (7, 2)), (1, 4, (7, 1)), (4, 1, (7, 2)), (4, 1, (1, 1)), (128, 1, (7, 2))]
)
def test_values_and_gradients(layout: str, q: int, kv: int, lead: tuple[int, int]) -> None:
    """Captured tensors along rows, keys and sequences, by positions inside a sequence; lists of all sequences too."""
    call = Call(layout, q, kv, lead=lead)
    attn = attngen.build(text(layout, q, kv))
    assert isinstance(attn, SelectedAttention) and not why_not(attn.spec, "sm_90a")
    leaves = [x.requires_grad_() for x in call.leaves]
    found = attn(*leaves[:3], blocks=call.lists, window=25, **call.tensors(leaves), **call.lengths, return_lse=True)
    agree(call, load_spec(text(layout, q, kv, mapped=True)), found, leaves)


def test_lists_of_packed_rows() -> None:
    """A list for each row where it stands: the same numbers as a list for each row of each sequence."""
    call = Call("varlen", 1, 1)
    starts = call.lengths["cu_seqlens_q"].tolist()
    packed = torch.full((2, call.leaves[0].shape[0], 7), 1, dtype=torch.int32)
    for b, (m, _) in enumerate(LENGTHS):
        packed[:, starts[b] : starts[b] + m] = call.lists[b, :, :m]
    attn = attngen.build(text("varlen", 1, 1))
    given = call.tensors(call.leaves) | call.lengths
    want = attn(*call.leaves[:3], blocks=call.lists, **given)
    assert torch.equal(attn(*call.leaves[:3], blocks=packed, **given), want)
    one = packed[:1].clone()
    assert torch.equal(attn(*call.leaves[:3], blocks=one, **given),
                       attn(*call.leaves[:3], blocks=one.expand(2, -1, -1), **given))  # fmt: skip


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_a_handle_notices_other_lengths(layout: str) -> None:
    call = Call(layout, 4, 1)
    attn = attngen.build(text(layout, 4, 1))
    kept, given = attn.tables(), call.tensors(call.leaves)
    want = attn(*call.leaves[:3], blocks=call.lists, **given, **call.lengths)
    for _ in range(2):
        assert torch.equal(attn(*call.leaves[:3], blocks=call.lists, **given, **call.lengths, tables=kept), want)
    first = next(iter(call.lengths.values()))
    first[2:] -= 2
    other = attn(*call.leaves[:3], blocks=call.lists, **given, **call.lengths)
    assert not torch.equal(other, want)
    assert torch.equal(attn(*call.leaves[:3], blocks=call.lists, **given, **call.lengths, tables=kept), other)


@pytest.mark.parametrize("layout", ["varlen", "padded"])
def test_fewer_lists_than_blocks_of_rows(layout: str) -> None:
    """An error where the host sees the lengths, as here, or may look; elsewhere rows without a list see nothing."""
    call = Call(layout, 4, 1)
    attn = attngen.build(text(layout, 4, 1))
    given = call.tensors(call.leaves) | call.lengths
    short = call.lists[:, :, :2]
    what = "this call needs" if layout == "padded" else "lists for 2 blocks of rows, sequence 2 has 5"
    for more in ({}, {"check": True}):
        with pytest.raises(AttnError, match=what) as fault:
            attn(*call.leaves[:3], blocks=short, **given, **more)
        assert fault.value.code == "E0607"
    sizes = sizes_of(attn.spec, *call.leaves[:2], len(LENGTHS) if layout == "varlen" else None)
    filled = torch.cat((short, torch.full_like(call.lists[:, :, 2:], -1)), 2)
    a, b = (listed(attn.spec, x, sizes, call.lengths) for x in (short, filled))
    assert torch.equal(a.picked, b.picked) and torch.equal(a.index, b.index)


def test_no_sequence_at_all() -> None:
    call = Call("varlen", 4, 1)
    attn = attngen.build(text("varlen", 4, 1))
    leaves = [x.nan_to_num(0.0).requires_grad_() for x in call.leaves[:3]]
    none = torch.zeros(1, dtype=torch.int32)
    given = call.tensors(call.leaves) | {"own": torch.zeros(0, 4)}
    o, lse = attn(*leaves, blocks=call.lists[:0], **given, cu_seqlens_q=none, return_lse=True)
    assert (o == 0).all() and (lse == -math.inf).all()
    o.sum().backward()
    assert all((x.grad == 0).all() for x in leaves)


def test_what_check_says() -> None:
    """Numbers outside the sequence's own keys, and lengths that cannot be."""
    call = Call("varlen", 1, 1)
    attn = attngen.build(text("varlen", 1, 1))
    plain = [x.nan_to_num(0.0) for x in call.leaves]
    given = call.tensors(plain) | call.lengths
    once = call.lists.clone().sort(-1).values
    once[..., 1:][once[..., 1:] == once[..., :-1]] = -1
    attn(*plain[:3], blocks=once, **given, check=True)
    bad = once.clone()
    bad[2, 0, 4, 3] = 25
    with pytest.raises(AttnError, match="holds 25; there are blocks 0 to 24"):
        attn(*plain[:3], blocks=bad, **given, check=True)
    attn(*plain[:3], blocks=bad, **given)  # counts as none
    wrong = call.lengths["cu_seqlens_q"].flip(0)
    with pytest.raises(AttnError, match="E0623"):
        attn(*plain[:3], blocks=once, **{**given, "cu_seqlens_q": wrong}, check=True)
    with pytest.raises(AttnError, match=r"\(2 or 1, 41, n\)"):
        attn(*plain[:3], blocks=torch.zeros(2, 40, 7, dtype=torch.int32), **given)


@pytest.mark.parametrize("starts", [[0, 3, 2, 22, 28, 28, 37, 38], [-5, 3, 3, 22, 28, 28, 37, 9999], [7] * 8])
@pytest.mark.parametrize("q", [1, 4])
def test_broken_starts_reach_nothing_else(starts: list[int], q: int) -> None:
    """They are held within the tensors, as kernels hold them: nothing outside is read; others stay as they were."""
    call = Call("varlen", q, 1)
    attn = attngen.build(text("varlen", q, 1))
    plain = [x.nan_to_num(0.0).requires_grad_() for x in call.leaves]
    lists = torch.nn.functional.pad(call.lists, (0, 0, 0, 60), value=-1) if q > 1 else call.lists.expand(7, 2, -1, -1)
    lists = torch.nn.functional.pad(lists, (0, 0, 0, 60), value=-1)
    given = call.tensors(plain)
    broken = {**call.lengths, "cu_seqlens_q": torch.tensor(starts).int()}
    o = attn(*plain[:3], blocks=lists, **given, **broken)
    o.float().sum().backward()
    assert o.isfinite().all() and all(x.grad is not None and x.grad.isfinite().all() for x in plain)
    if starts[3:5] == [22, 28]:  # of the sequence without keys
        want = attn(*plain[:3], blocks=lists, **given, **call.lengths)
        assert torch.equal(o[22:28], want[22:28])


def test_under_torch_compile() -> None:
    call = Call("varlen", 4, 1)
    attn = attngen.build(text("varlen", 4, 1))
    given = call.tensors(call.leaves) | call.lengths
    compiled = torch.compile(lambda *x: attn(*x, blocks=call.lists, **given), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*call.leaves[:3]), attn(*call.leaves[:3], blocks=call.lists, **given))
