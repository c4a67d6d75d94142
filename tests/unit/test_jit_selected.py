"""Lists of keys: values and gradients against the dense meaning of a map, lists as callers have them, refusals."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.ir.plan import KernelPlan
from attngen.jit.gathered import gathered
from attngen.jit.lists import listed as listed_of
from attngen.jit.lists import selected_keys
from attngen.jit.selected import SelectedAttention
from attngen.jit.shapes import sizes_of
from attngen.passes.selected import selected_spec
from attngen.passes.serves import why_not
from attngen.ref import dense
from attngen.search import plan
from attngen.syntax import load_spec, print_expr, print_spec

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
RICH = """  head_dim = 64
  param window: int >= 1 = 30
  tensor bias: f32[batch, heads_q, seqlen_q, seqlen_kv] grad
  tensor sinks: f32[heads_q] grad
  tensor row: f32[batch, seqlen_q] grad
  score    = s + bias[b, h, q_idx, kv_idx] + row[b, q_idx]
  sink     = sinks[h]
  mask     = kv_idx <= q_pos and q_pos - kv_idx < windowMORE
"""
PLAIN = "  head_dim = 64\n  mask = kv_idx <= q_posMORE\n"
SEEN = "  tensor seen: bool[batch, heads_kv, blocks_q, blocks_kv]\n"


def listed(body: str, q: int, kv: int, more: str = "") -> str:
    clause = f"  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n"
    return "attn 1\nattention listed {\n" + body.replace("MORE", "") + clause + more + "}\n"


def mapped(body: str, q: int, kv: int) -> Any:
    """The same by a dense map."""
    read = f" and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]"
    return load_spec("attn 1\nattention mapped {\n" + SEEN + body.replace("MORE", read) + "}\n")


def map_of(lists: torch.Tensor, count: int) -> torch.Tensor:
    places = torch.where((lists < 0) | (lists >= count), count, lists).long()
    return torch.zeros(*lists.shape[:3], count + 1, dtype=torch.bool).scatter_(-1, places, True)[..., :count]


def random(*shape: int, dtype: Any = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("q", "kv", "heads_kv", "lead", "layout"),
    [
        (64, 1, 2, (2, 2), "bshd"), (8, 1, 2, (2, 1), "bshd"), (1, 1, 1, (1, 1), "bshd"), (1, 8, 2, (2, 2), "bhsd"),
        (16, 1, 4, (1, 4), "bhsd"),
    ],
)  # fmt: skip
def test_values_and_gradients(q: int, kv: int, heads_kv: int, lead: tuple[int, int], layout: str) -> None:
    """Blocks that do not divide the rows, lists in any order with numbers twice, outside, and -1; captured tensors by
    the positions of the call.
    """
    sq, skv = 37, 53
    attn = attngen.build(listed(RICH, q, kv, f"  layout = {layout}\n"))
    assert isinstance(attn, SelectedAttention)
    leaves = [random(2, n, h, 64) for n, h in ((sq, 4), (skv, heads_kv), (skv, heads_kv))]
    leaves += [random(2, 4, sq, skv, dtype=torch.float32), random(4, dtype=torch.float32)]
    leaves += [random(2, sq, dtype=torch.float32)]
    rows, count = -(-sq // q), -(-skv // kv)
    lists = torch.randint(-1, count + 2, (*lead, rows, 9), dtype=torch.int32)
    if rows > 1:
        lists[:, :, 0] = -1
    swap = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    given = {"bias": leaves[3], "sinks": leaves[4], "row": leaves[5]}
    o, lse = attn(*map(swap, leaves[:3]), blocks=lists, window=25, **given, return_lse=True)
    assert o.is_contiguous() and o.dtype is BF16
    o = swap(o)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    seen = map_of(lists, count).expand(2, heads_kv, rows, count)
    tensors = {"bias": wide[3], "sinks": wide[4], "row": wide[5], "seen": seen}
    exact = dense.attention(mapped(RICH, q, kv), *wide[:3], {"window": 25}, tensors)
    assert (o - exact.o).abs().max() < 2e-2 and (lse - exact.lse).abs().max() < 1e-5
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    ((o.double() * weight).sum() + lse.double().sin().sum()).backward()
    ((exact.o * weight).sum() + exact.lse.sin().sum()).backward()
    for x, e in zip(leaves, wide, strict=True):
        assert x.grad is not None and x.grad.shape == x.shape
        assert (x.grad - e.grad).norm() < 1e-2 * e.grad.norm()


@pytest.mark.parametrize(("q", "kv", "rows"), [(8, 1, 37), (8, 1, 40), (1, 8, 37)])
def test_max_logit(q: int, kv: int, rows: int) -> None:
    """The largest kept score of the listed keys, -inf where a row keeps none; with and without LSE."""
    attn: Any = attngen.build(listed(RICH, q, kv, "  output { max_logit = true }\n"))
    spec = mapped(RICH, q, kv).replace(max_logit=True)
    count = -(-53 // kv)
    lists = torch.randint(-1, count + 2, (2, 2, -(-rows // q), 9), dtype=torch.int32)
    lists[:, :, 0] = -1
    query, key, value = (torch.randn(2, n, h, 64).to(BF16) for n, h in ((rows, 4), (53, 2), (53, 2)))
    given = {"bias": torch.randn(2, 4, rows, 53), "sinks": torch.randn(4), "row": torch.randn(2, rows)}
    exact = dense.attention(spec, query, key, value, {}, {**given, "seen": map_of(lists, count)})
    o, lse, top = attn(query, key, value, blocks=lists, **given, return_lse=True, return_max_logit=True)
    assert torch.equal(top.isinf(), exact.max_logit.isinf()) and top.isinf().any() and top.dtype is torch.float32
    assert torch.where(top.isinf(), 0.0, top - exact.max_logit).abs().max() < 1e-4
    assert (o - exact.o).abs().max() < 2e-2 and (lse - exact.lse).abs().max() < 1e-5
    alone, again = attn(query, key, value, blocks=lists, **given, return_max_logit=True)
    assert torch.equal(again, top) and torch.equal(alone, o)
    assert torch.equal(attn(query, key, value, blocks=lists, **given), o)
    with pytest.raises(AttnError, match="return_max_logit"):
        attngen.build(listed(PLAIN, q, kv))(query, key, value, blocks=lists, return_max_logit=True)


def test_one_qkv() -> None:
    """Slices of one tensor, and one gradient of it; query heads as many as KV heads, and more."""
    attn: Any = attngen.build(listed(PLAIN, 8, 1, "  layout = packed_qkv\n"))
    three: Any = attngen.build(listed(PLAIN, 8, 1))
    lists = torch.randint(-1, 55, (2, 1, 7, 9))
    for shape, heads_q in (((2, 53, 3, 2, 64), None), ((2, 53, 8, 64), 4)):
        qkv = random(*shape)
        own = qkv.detach().clone().requires_grad_()
        o, lse = attn(qkv, heads_q=heads_q, blocks=lists, return_lse=True)
        parts = own.unbind(2) if heads_q is None else own.split((4, 2, 2), 2)
        want, rows = three(*parts, blocks=lists, return_lse=True)
        assert torch.equal(o, want) and torch.equal(lse, rows)
        loss = [(x.double() * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in (o, want)]
        (found,), (wanted,) = (torch.autograd.grad(x, y) for x, y in zip(loss, (qkv, own), strict=True))
        assert found.shape == qkv.shape and torch.equal(found, wanted)
    again = pickle.loads(pickle.dumps(attn))
    assert torch.equal(again(qkv, heads_q=4, blocks=lists), o) and "listed" in repr(again)


def test_rows_without_keys() -> None:
    attn = attngen.build(listed(PLAIN, 16, 1, "  backward { deterministic = true }\n"))
    q, k, v = (random(1, n, 2, 64) for n in (20, 30, 30))
    o, lse = attn(q, k, v, blocks=torch.tensor([[[[-1, 40], [3, -1]]]]), return_lse=True)
    assert o[0, :16].abs().sum() == 0 and lse[0, :, :16].max() == -torch.inf
    assert torch.allclose(o[0, 16:].float(), v[0, 3].float().expand(4, 2, 64))
    o.sum().backward()
    assert q.grad.abs().sum() == 0 or q.grad[0, :16].abs().sum() == 0
    assert v.grad[0, 3].abs().sum() > 0 and v.grad[0, :3].abs().sum() == 0 and not k.grad.isnan().any()


def test_selected_keys() -> None:
    lists = torch.tensor([[3, -1, 0, 3, 9]])
    assert selected_keys(lists, 1, 7).tolist() == [[0, 3, 7, 7, 7]]
    assert selected_keys(torch.tensor([[2, 0, 2]]), 3, 8).tolist() == [[0, 1, 2, 6, 7, 8, 8, 8, 8]]
    assert selected_keys(torch.tensor([[-2, -1]]), 4, 8).tolist() == [[8] * 8]


def test_the_kernel_reads_intervals() -> None:
    """Lists are sorted on the way in: a causal mask over them is exact limits by a table, and tiles are skipped."""
    spec = load_spec(listed(PLAIN, 64, 1))
    inner = selected_spec(spec)
    assert load_spec(print_spec(inner)) == inner and inner.block_sparse is None
    found = plan(spec)
    assert found.spec == inner and all(isinstance(p, KernelPlan) and p.compute.tile_m == 128 for p in found.plans)
    form = found.plans[0].mask.form
    assert form.is_exact and len(form.clauses) == 1 and form.clauses[0].residual is None
    few = selected_spec(load_spec(listed(RICH, 2, 1)))
    assert print_expr(few.sink) == "sinks[h_kv * call_group + q_idx % call_group]", "query heads are rows"


@pytest.mark.parametrize(("q", "kv"), [(64, 1), (1, 16)])
def test_explain_says_what_a_gather_takes(q: int, kv: int) -> None:
    """Its bytes are those of the tensors that a call makes."""
    spec = load_spec(listed(PLAIN, q, kv))
    text = attngen.explain(spec)
    lists = torch.tensor([[[[0, 1, 2]] * -(-64 // q)]])
    tensors = [torch.randn(1, 64, 2, 64).bfloat16() for _ in range(3)]
    call = gathered(spec, *tensors, lists, {})
    found = listed_of(spec, lists, sizes_of(spec, *tensors[:2]), {}).kept(64)
    count = 2 * lists.numel()  # KV heads
    moved = sum(x.numel() * x.element_size() for x in (call.k, call.v))
    kept = sum(x.numel() * x.element_size() for x in (found.index, found.picked, found.flat))
    assert f"gather    {moved // count} bytes a listed block" in text
    assert f"by a handle: {kept // count} bytes a listed block" in text
    assert text.startswith("listed: K and V are gathered by `blocks`") and "listed_selected for sm_90a" in text
    assert attngen.build(spec).explain().startswith(text.split("\n\n")[0])


@pytest.mark.parametrize(
    ("blocks", "code", "words"),
    [
        (None, "E0604", "blocks"),
        (torch.zeros(2, 2, 5, 3), "E0606", "int32 or int64"),
        (torch.zeros(2, 2, 5, 3, dtype=torch.bool), "E0606", "argsort"),
        (torch.zeros(2, 5, 3, dtype=torch.int32), "E0607", "3 axes"),
        (torch.zeros(2, 4, 5, 3, dtype=torch.int32), "E0607", "(2 or 1, 2 or 1, 5, n)"),
        (torch.zeros(2, 2, 4, 3, dtype=torch.int32), "E0607", "block of 8 rows"),
        (torch.full((1, 1, 5, 1), 53), "E0628", "holds 53; there are blocks 0 to 52"),
        (torch.full((1, 1, 5, 1), -2), "E0628", "holds -2"),
        (torch.full((1, 1, 5, 2), 4), "E0628", "holds 4 twice"),
    ],
)
def test_lists_that_are_refused(blocks: Any, code: str, words: str) -> None:
    attn = attngen.build(listed(PLAIN, 8, 1))
    q, k, v = (torch.randn(2, n, h, 64).to(BF16) for n, h in ((37, 4), (53, 2), (53, 2)))
    with pytest.raises(AttnError) as fault:
        attn(q, k, v, blocks=blocks, check=True)
    assert fault.value.diagnostics[0].code == code and words in str(fault.value)
    good = torch.full((1, 1, 5, 2), -1)
    assert attn(q, k, v, blocks=good, check=True).abs().sum() == 0
    with pytest.raises(AttnError, match="E0607"):
        attn(q, k[:1], v, blocks=good)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("  layout = paged\n", "in layout paged"),
        ("  layout = packed_qkv\n  v = k[0:64]\n", "packed_qkv with V as a view of K"),
        ("  v = k[0:64]\n", "with V as a view of K"),
    ],
)
def test_what_is_refused(more: str, words: str) -> None:
    assert any(words in d.message for d in why_not(load_spec(listed(PLAIN, 8, 1, more)), "sm_90a"))


def test_under_torch_compile_and_pickled() -> None:
    attn = attngen.build(listed(PLAIN, 8, 1))
    q, k, v = (random(2, n, h, 64) for n, h in ((37, 4), (53, 2), (53, 2)))
    lists = torch.randint(-1, 53, (2, 2, 5, 6))
    compiled = torch.compile(lambda *x: attn(*x, blocks=lists), backend="aot_eager", fullgraph=True)
    got, want = compiled(q, k, v), attn(q, k, v, blocks=lists)
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(o.double().sin().sum(), (q, k, v)) for o in (got, want)), strict=True):
        assert (a - b).abs().max() <= 0.01 * b.abs().max()
    again = pickle.loads(pickle.dumps(attn))
    assert torch.equal(again(q, k, v, blocks=lists), want) and "listed" in repr(again)
