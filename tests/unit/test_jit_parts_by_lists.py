"""Lists of single keys, or for single rows, in specs of several kernels: of each branch, of a call's own keys."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from test_jit_several import each, leaves, loss

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit.several import SeveralAttention
from attngen.passes.parts import parts
from attngen.passes.serves import why_not
from attngen.ref import dense, ragged
from attngen.syntax import load_spec

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
HEAD = "attn 1\nattention both {\n  head_dim = 64\n  LAYOUT\n  mask = kv_idx <= q_posSEEN\n"
SEGMENT = HEAD + "  tensor sinks: f32[heads_q] grad\n  sink = sinks[h]\n  segment past {\n    mask = q_idx > 1\n  }\n"
BRANCHES = HEAD + (
    "  tensor lam: f32[heads_q] grad\n  branch one { }\n"
    "  branch two {\n    weight = -lam[h]\n    mask = kv_idx <= q_pos and q_pos - kv_idx < 9SEEN\n  }\n"
)
TEXTS = {"segment": SEGMENT, "branches": BRANCHES}


def by_lists(name: str, q: int, kv: int, layout: str = "bshd", more: str = "") -> Any:
    text = TEXTS[name].replace("LAYOUT", f"layout = {layout}").replace("SEEN", "")
    return attngen.build(f"{text}{more}  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n}}\n")


def by_map(name: str, q: int, kv: int, layout: str = "bshd", more: str = "") -> Any:
    read = f" and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]"
    text = TEXTS[name].replace("LAYOUT", f"layout = {layout}\n  tensor seen: bool[batch, heads_kv, rows, keys]")
    return load_spec(f"{text.replace('SEEN', read)}{more}}}\n")


def lists_and_map(batch: int, rows: int, keys: int, q: int, kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = -(-keys // kv)
    lists = torch.randint(-1, count + 2, (batch, 2, -(-rows // q), 7), dtype=torch.int32)
    places = torch.where((lists < 0) | (lists >= count), count, lists).long()
    seen = torch.zeros(*lists.shape[:3], count + 1, dtype=torch.bool).scatter_(-1, places, True)[..., :count]
    return lists, seen


def random(*shape: int, dtype: Any = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def arguments(name: str) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """q, k, v, segments, named."""
    several = name == "branches"
    q, k = (tuple(random(2, n, h, 64) for _ in range(1 + several)) for n, h in ((21, 4), (30, 2)))
    named = {"lam" if several else "sinks": random(4, dtype=torch.float32)}
    segments = {} if several else {"past": (random(2, 13, 2, 64), random(2, 13, 2, 64))}
    return (q, k, random(2, 30, 2, 64), {}, named) if several else (q[0], k[0], random(2, 30, 2, 64), segments, named)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(("q", "kv", "layout"), [(4, 1, "bshd"), (1, 4, "bhsd")])
def test_values_and_gradients(name: str, q: int, kv: int, layout: str) -> None:
    """Against a map of the same lists; a part keeps its sorted lists by a handle."""
    attn, spec = by_lists(name, q, kv, layout), by_map(name, q, kv, layout)
    assert isinstance(attn, SeveralAttention) and not attn.chain.parts
    query, key, value, segments, named = arguments(name)
    lists, seen = lists_and_map(2, 21, 30, q, kv)
    swap = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    more = {"segments": each(swap, segments)} if segments else {}

    def call(**kept: Any) -> Any:
        return attn(*each(swap, (query, key, value)), blocks=lists, **named, **more, **kept, return_lse=True)

    o, lse = call()
    wide: dict[int, torch.Tensor] = {}

    def double(x: torch.Tensor) -> torch.Tensor:
        return wide.setdefault(id(x), x.detach().double().requires_grad_())

    tensors = {**each(double, named), "seen": seen}
    exact = dense.attention(
        spec, *each(double, (query, key, value)), {}, tensors, segments=each(double, segments) or None
    )
    assert torch.equal(lse.isinf(), exact.lse.isinf()) and (swap(o) - exact.o).abs().max() < 3e-2
    assert torch.where(lse.isinf(), 0.0, lse - exact.lse).abs().max() < 1e-5
    loss(swap(o), lse).backward()
    loss(exact.o, exact.lse).backward()
    for x in leaves(query, key, value, segments, named):
        e = wide[id(x)].grad
        assert x.grad is not None and (x.grad - e).norm() < 1e-2 * e.norm()
    kept = attn.tables()
    for _ in range(2):
        again, rows = call(tables=kept)
        assert torch.equal(again, o) and torch.equal(rows, lse)
    assert list(kept.parts) == (["one", "two"] if name == "branches" else ["main"])
    assert all(x._found is not None for x in kept.parts.values())


@pytest.mark.parametrize("name", TEXTS)
def test_sequences(name: str) -> None:
    """Packed ones, lists inside each."""
    attn, spec = by_lists(name, 4, 1, "varlen"), by_map(name, 4, 1, "varlen")
    starts, keys, past = (torch.tensor(x).int() for x in ([0, 9, 9, 21], [0, 12, 20, 30], [0, 3, 3, 13]))
    query, key, value, segments, named = (each(lambda x: x.detach(), x) for x in arguments(name))
    query, key, value = (each(lambda x: x[0], x) for x in (query, key, value))
    lists, seen = lists_and_map(3, 12, 12, 4, 1)
    more = {"segments": {n: (a[0], b[0], past) for n, (a, b) in segments.items()}} if segments else {}
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_kv": keys}
    o, lse = attn(query, key, value, blocks=lists, **named, **lengths, **more, return_lse=True)
    wide = each(lambda x: x.double() if x.is_floating_point() else x, (query, key, value, more))
    exact, rows = ragged.attention(
        spec, *wide[:3], lengths, {}, {**named, "seen": seen}, how=dense.attention, **wide[3]
    )
    assert torch.equal(lse.isinf(), rows.isinf()) and (o - exact).abs().max() < 3e-2
    assert torch.where(lse.isinf(), 0.0, lse - rows).abs().max() < 1e-5


def test_largest_scores() -> None:
    """Of all keys of a row, listed ones and a segment's."""
    more = "  output { max_logit = true }\n"
    attn, spec = by_lists("segment", 4, 1, more=more), by_map("segment", 4, 1, more=more)
    query, key, value, segments, named = (each(lambda x: x.detach(), x) for x in arguments("segment"))
    lists, seen = lists_and_map(2, 21, 30, 4, 1)
    _, top = attn(query, key, value, blocks=lists, segments=segments, **named, return_max_logit=True)
    exact = dense.attention(spec, query, key, value, {}, {**named, "seen": seen}, segments=segments).max_logit
    assert torch.equal(top.isinf(), exact.isinf())
    assert torch.where(top.isinf(), 0.0, top - exact).abs().max() < 1e-4


def test_what_it_is() -> None:
    attn = by_lists("segment", 4, 1)
    assert [p.listed is not None for p in parts(attn.spec)] == [True, False]
    assert not why_not(attn.spec, "sm_90a") and len(attn.kernels) == 2
    text = attn.explain()
    assert "2 kernels, put together in torch: main, past" in text and "K and V are gathered by `blocks`" in text
    query, key, value, segments, named = (each(lambda x: x.detach(), x) for x in arguments("segment"))
    lists = lists_and_map(2, 21, 30, 4, 1)[0]
    call = {"blocks": lists, "segments": segments, **named}
    again = pickle.loads(pickle.dumps(attn))
    assert torch.equal(again(query, key, value, **call), attn(query, key, value, **call))
    one = pickle.loads(pickle.dumps(attn.parts["main"]))
    assert one(query, key, value, blocks=lists, **named).shape == query.shape
    with pytest.raises(AttnError, match="E0604") as fault:
        attn(query, key, value, segments=segments, **named)
    assert "in the part `main`" in str(fault.value) or "blocks" in str(fault.value)
