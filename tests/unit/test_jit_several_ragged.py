"""Branches, segments and V as a view of K in ragged layouts: values and gradients of sequences, NaN around them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit.composed import ViewAttention
from attngen.jit.several import SeveralAttention
from attngen.ref import ragged

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
DIFF = """attn 1
attention diff {
  head_dim = 64, v = 32
  LAYOUT
  param least: float = 0.5
  tensor lam: f32[heads_q] grad
  tensor gate: f32[ROWS, heads_q, head_dim_v] grad
  tensor own: f32[batch, head_dim_v] grad
  tensor late: f32[ROWS] grad
  mask     = kv_idx <= q_pos
  epilogue = o / gate[AT, h, d] + own[b, d] * float(q_idx + 1)
  branch one {
    weight = 1.0
  }
  branch two {
    weight = -lam[h] / late[AT] - least
    mask   = q_pos - kv_idx < 5 + b
  }
}
"""
CACHE = """attn 1
attention cache {
  head_dim = 64
  LAYOUT
  param window: int >= 1 = 20
  tensor sinks: f32[batch, heads_q] grad
  mask  = kv_idx <= q_pos and q_idx > 0
  score = s * 1.5
  sink  = sinks[b, h]
  segment past {
    mask = q_idx > 0 and q_pos - kv_idx < window + b
  }
}
"""
NO_SINK = CACHE.replace("  sink  = sinks[b, h]\n", "").replace("  tensor sinks: f32[batch, heads_q] grad\n", "")
VIEW = """attn 1
attention view {
  head_dim = 64
  LAYOUT
  v = k[8:40]
  mask = kv_idx <= q_pos
}
"""
SIGMOID = """attn 1
attention soft {
  head_dim = 64
  LAYOUT
  normalizer = sigmoid
  mask = kv_idx <= q_pos
  segment past { }
}
"""
#: The segment reads tensors over the call's own keys; sequence 3 has none, 1 fewer than the segment: they read
#: none.
OVER_KEYS = """attn 1
attention over_keys {
  head_dim = 64
  LAYOUT
  tensor gain: f32[KEYS] grad
  tensor stamp: i32[KEYS] sorted
  mask  = kv_idx <= q_pos
  score = s + gain[AT_KEY]
  segment past {
    mask  = b != 1 and b != 3 and stamp[AT_KEY] <= q_idx + kv_idx
    score = s * 0.5 + gain[AT_KEY] * float(seqlen_kv)
  }
}
"""
SPECS = {
    "diff": DIFF, "cache": CACHE, "no sink": NO_SINK, "view": VIEW, "sigmoid": SIGMOID, "over keys": OVER_KEYS
}  # fmt: skip
#: Rows, keys and keys of the segment, of each sequence.
LENGTHS = [(3, 7, 2), (0, 4, 5), (9, 5, 0), (6, 0, 8), (2, 0, 0), (8, 8, 3)]
LAYOUTS = ["varlen", "padded"]


def text(name: str, layout: str) -> str:
    rows, at = ("seqlen_q", "q_idx") if layout == "varlen" else ("batch, seqlen_q", "b, q_idx")
    keys, key = ("seqlen_kv", "kv_idx") if layout == "varlen" else ("batch, seqlen_kv", "b, kv_idx")
    found = SPECS[name].replace("LAYOUT", f"layout = {layout}").replace("KEYS", keys).replace("AT_KEY", key)
    return found.replace("ROWS", rows).replace("AT", at)


class Call:
    """Operands in the layout, NaN in what belongs to no sequence, each a leaf."""

    def __init__(self, name: str, layout: str) -> None:
        torch.manual_seed(0)
        self.varlen, self.extents = layout == "varlen", (11, 10, 9)
        self.counts = [torch.tensor(x) for x in zip(*LENGTHS, strict=True)]
        starts = [torch.cat((torch.zeros(1), n.cumsum(0))).int() for n in self.counts]
        lengths = starts if self.varlen else [n.int() for n in self.counts]
        names = ("cu_seqlens_q", "cu_seqlens_kv") if self.varlen else ("seqused_q", "seqused_kv")
        self.lengths = dict(zip(names, lengths, strict=False))
        q, k = ([self.draw(i, h, 64) for _ in range(2 if name == "diff" else 1)] for i, h in ((0, 4), (1, 2)))
        self.qkv: list[Any] = [tuple(q), tuple(k)] if name == "diff" else [q[0], k[0]]
        if name != "view":
            self.qkv.append(self.draw(1, 2, 32 if name == "diff" else 64))
        self.params: dict[str, Any] = {"window": 3} if "cache" in name or name == "no sink" else {}
        self.named: dict[str, Any] = {}
        if name == "diff":
            self.named = {"lam": leaf(4), "own": leaf(6, 32), "gate": self.draw(0, 4, 32, kind=torch.float32, low=0.5)}
            self.named["late"] = self.draw(0, kind=torch.float32, low=0.5)
        if name == "cache":
            self.named = {"sinks": leaf(6, 4)}
        if name == "over keys":
            gain = self.draw(1, kind=torch.float32)
            self.named = {"gain": gain, "stamp": torch.arange(gain.shape[-1]).expand(gain.shape).int() // 2}
        self.segments: dict[str, Any] = {}
        if name in ("cache", "no sink", "sigmoid", "over keys"):
            self.segments = {"past": (self.draw(2, 2, 64), self.draw(2, 2, 64), lengths[2])}

    def draw(self, which: int, *rest: int, kind: Any = BF16, low: float | None = None) -> torch.Tensor:
        counts = self.counts[which]
        total = int(counts.sum())
        there = torch.arange(total + 3) < total if self.varlen else torch.arange(self.extents[which]) < counts[:, None]
        x = torch.randn(*there.shape, *rest)
        x = x if low is None else x.abs() + low
        return torch.where(there.view(*there.shape, *(1,) * len(rest)), x, math.nan).to(kind).requires_grad_()

    def leaves(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        each(found.append, [*self.qkv, self.segments, self.named])
        return [x for x in found if x.requires_grad]


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def each(f: Any, x: Any) -> Any:
    if isinstance(x, tuple | list):
        return tuple(each(f, y) for y in x)
    return {n: each(f, y) for n, y in x.items()} if isinstance(x, dict) else f(x)


def loss(o: Any, lse: Any, there: Any) -> Any:
    """NaN comes back for what belongs to no sequence."""
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    o_weight = torch.where(there[..., None, None], weight, math.nan)
    rows = torch.where(lse.isfinite(), lse, 0.0).double().sin()
    return (o.double() * o_weight).sum() + rows.sum()


def outside(o: torch.Tensor, call: Call) -> torch.Tensor:
    """Which rows are of a sequence, (total_q) or (batch, seqlen_q)."""
    counts = call.counts[0]
    if call.varlen:
        return torch.arange(o.shape[0]) < int(counts.sum())
    return torch.arange(o.shape[1]) < counts[:, None]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SPECS)
def test_values_and_gradients(name: str, layout: str) -> None:
    attn: Any = attngen.build(text(name, layout))
    assert isinstance(attn, ViewAttention if name == "view" else SeveralAttention)
    c = Call(name, layout)
    more = {"segments": c.segments} if c.segments else {}
    o, lse = attn(*c.qkv, **c.named, **c.params, **c.lengths, **more, return_lse=True)
    assert o.is_contiguous() and o.dtype is BF16 and lse.dtype is torch.float32
    wide: dict[int, torch.Tensor] = {}

    def double(x: torch.Tensor) -> torch.Tensor:
        return wide.setdefault(id(x), x.detach().double().requires_grad_()) if x.requires_grad else x

    q, k, v = (*each(double, c.qkv), None)[:3]
    want, rows = ragged.attention(
        attn.spec, q, k, v, c.lengths, c.params, each(double, c.named), segments=each(double, c.segments) or None
    )
    there = outside(o, c)
    assert lse.shape == rows.shape and torch.equal(lse.isinf(), rows.isinf()) and (o[~there] == 0).all()
    assert (o - want).abs().max() < 3e-2 + 5e-3 * want.abs().max()
    assert torch.where(lse.isfinite(), lse - rows, 0.0).abs().max() < 1e-5
    loss(o, lse, there).backward()
    (torch.where(there[..., None, None], want * torch.linspace(-1, 1, o.numel()).double().view(o.shape), 0).sum()
     + torch.where(rows.isfinite(), rows, 0.0).sin().sum()).backward()  # fmt: skip
    for x in c.leaves():
        exact = wide[id(x)].grad
        assert x.grad is not None and exact is not None and x.grad.dtype is x.dtype
        assert not x.grad.isnan().any() and (x.grad[x.isnan()] == 0).all()
        assert (x.grad - exact.nan_to_num(0)).norm() < 1e-2 * exact.nan_to_num(0).norm()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_of_a_segment(layout: str) -> None:
    """Padded ones may be left out: all its keys. Packed ones have starts of their own, as many as the call has."""
    attn: Any = attngen.build(text("no sink", layout))
    c = Call("no sink", layout)
    k, v, lengths = (x.detach().nan_to_num(0) for x in c.segments["past"])
    q, own, values = (x.detach().nan_to_num(0) for x in c.qkv)
    if layout == "padded":
        full = torch.full_like(lengths, k.shape[1])
        a, b = (attn(q, own, values, **c.lengths, segments={"past": x}) for x in ((k, v), (k, v, full)))
        assert torch.equal(a, b)
    else:
        with pytest.raises(AttnError, match=r"has no \(k, v, cu_seqlens\)") as fault:
            attn(q, own, values, **c.lengths, segments={"past": (k, v)})
        assert fault.value.code == "E0604"
    with pytest.raises(AttnError, match="in the part `past`") as fault:
        attn(q, own, values, **c.lengths, segments={"past": (k, v, lengths[:-1])})
    assert fault.value.code == "E0607"


def test_a_segment_of_another_layout_has_no_lengths() -> None:
    attn: Any = attngen.build(SPECS["no sink"].replace("LAYOUT", ""))
    q, k = torch.zeros(1, 8, 4, 64, dtype=BF16), torch.zeros(1, 8, 2, 64, dtype=BF16)
    with pytest.raises(AttnError, match="E0604"):
        attn(q, k, k, segments={"past": (k, k, torch.tensor([8]).int())})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_check_looks_at_sequences_alone(layout: str) -> None:
    attn: Any = attngen.build(text("diff", layout))
    c = Call("diff", layout)
    named = each(lambda x: x.detach(), c.named)
    attn(*each(lambda x: x.detach(), c.qkv), **named, **c.lengths, check=True)
    body = text("diff", layout).replace("float(q_idx + 1)", "few[q_idx]")
    short: Any = attngen.build(body.replace("  mask     =", "  tensor few: f32[n]\n  mask     =", 1))
    ok, bad = torch.randn(9), torch.randn(8)
    short(*each(lambda x: x.detach(), c.qkv), **named, **c.lengths, few=ok, check=True)
    with pytest.raises(AttnError, match="E0650"):
        short(*each(lambda x: x.detach(), c.qkv), **named, **c.lengths, few=bad, check=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["diff", "cache"])
def test_under_torch_compile(name: str, layout: str) -> None:
    attn: Any = attngen.build(text(name, layout))
    c = Call(name, layout)
    more = {"segments": c.segments} if c.segments else {}
    compiled = torch.compile(lambda *x, **n: attn(*x, **n), backend="aot_eager", fullgraph=True)
    got, want = (f(*c.qkv, **more, **c.named, **c.lengths) for f in (compiled, attn))
    assert torch.equal(got, want)
    for a, b in zip(*(torch.autograd.grad(o.double().sin().sum(), c.leaves()) for o in (got, want)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_largest_scores(layout: str) -> None:
    attn: Any = attngen.build(text("cache", layout).replace("  mask  =", "  output { max_logit = true }\n  mask  =", 1))
    c = Call("cache", layout)
    with torch.no_grad():
        o, lse, top = attn(*c.qkv, **c.named, **c.lengths, segments=c.segments, return_lse=True, return_max_logit=True)
    assert top.shape == lse.shape and not top.isnan().any() and (top[lse.isinf()] == -math.inf).all()
    plain: Any = attngen.build(text("cache", layout))
    assert torch.equal(o, plain(*c.qkv, **c.named, **c.lengths, segments=c.segments))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_the_call_in_a_segment(layout: str) -> None:
    """A tensor over the call's own keys is read in a segment by the sequence's part; checks see an index past it, which
    is held there. A handle keeps where it is.
    """
    attn: Any = attngen.build(text("over keys", layout))
    c = Call("over keys", layout)
    qkv, segments, named = (each(lambda x: x.detach().nan_to_num(0), x) for x in (c.qkv, c.segments, c.named))
    want = attn(*qkv, **named, **c.lengths, segments=segments, check=True)
    if attn._keep:
        kept = attn.tables()
        for _ in range(2):
            assert torch.equal(attn(*qkv, **named, **c.lengths, segments=segments, tables=kept), want)
    far = text("over keys", layout).replace("* float(seqlen_kv)", "+ gain[AT]".replace("AT", KEY[layout]))
    outside: Any = attngen.build(far)
    o = outside(*qkv, **named, **c.lengths, segments=segments)
    assert o.isfinite().all()
    with pytest.raises(AttnError, match="E0650"):
        outside(*qkv, **named, **c.lengths, segments=segments, check=True)
    first = slice(0, 3) if layout == "varlen" else (0, slice(0, 3))
    last = {**named, "gain": named["gain"].clone()}
    last["gain"][(slice(7, None),) if layout == "varlen" else (slice(1, None),)] = 99.0  # others' elements
    assert torch.equal(outside(*qkv, **last, **c.lengths, segments=segments)[first], o[first])


#: An index that is past the own keys of every sequence.
KEY = {"varlen": "kv_idx + 10", "padded": "b, kv_idx + 10"}


def test_names_of_the_kernel_over_a_segment() -> None:
    """A spec's own tensor may not have the name of what such a kernel reads."""
    taken = text("over keys", "varlen").replace("gain", "call_keys")
    with pytest.warns(UserWarning, match="`call_keys`, which the kernel over segment `past` has of its own"):
        attngen.build(taken)
