"""Branches and segments as calls: values and gradients against the dense meaning, refusals, torch.compile; `merge`."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit.several import SeveralAttention
from attngen.ref import dense

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
DIFF = """attn 1
attention diff {
  head_dim = 64, v = 32
  LAYOUT
  param least: float = 0.5
  tensor lam: f32[heads_q] grad
  tensor gate: f32[batch, seqlen_q, heads_q, head_dim_v] grad
  tensor fixed: f32[positions]
  mask     = kv_idx <= q_pos
  epilogue = o * sigmoid(gate[b, q_idx, h, d]) + fixed[q_pos]
  branch one {
    weight = 1.0
  }
  branch two {
    weight = -lam[h] - least
    mask   = q_pos - kv_idx < 5
  }
}
"""
CACHE = """attn 1
attention cache {
  head_dim = 64
  LAYOUT
  param window: int >= 1 = 20
  tensor sinks: f32[heads_q] grad
  mask  = kv_idx <= q_pos and q_idx > 0
  score = s * 1.5
  sink  = sinks[h]
  segment past {
    mask = q_idx > 0 and q_pos - kv_idx < window
  }
}
"""
NO_SINK = CACHE.replace("  sink  = sinks[h]\n", "").replace("  tensor sinks: f32[heads_q] grad\n", "")
PACKED = "layout = packed_qkv"


def random(*shape: int, dtype: Any = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def loss(o: Any, lse: Any) -> Any:
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    return (o.double() * weight).sum() + torch.where(lse.isfinite(), lse, 0.0).double().sin().sum()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def arguments(name: str) -> tuple[Any, Any, Any, dict[str, Any], dict[str, Any]]:
    """q, k, v, segments, named, in bshd."""
    if name == "diff":
        q, k = (tuple(random(2, n, h, 64) for _ in range(2)) for n, h in ((11, 4), (15, 2)))
        tensors = {"lam": random(4, dtype=torch.float32), "gate": random(2, 11, 4, 32, dtype=torch.float32)}
        return q, k, random(2, 15, 2, 32), {}, {**tensors, "fixed": torch.randn(15)}
    q, k, v = (random(2, n, h, 64) for n, h in ((11, 4), (15, 2), (15, 2)))
    sinks = {"sinks": random(4, dtype=torch.float32)} if name == "cache" else {}
    return q, k, v, {"past": (random(2, 26, 2, 64), random(2, 26, 2, 64))}, sinks


def each(f: Any, x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(each(f, y) for y in x)
    return {n: each(f, y) for n, y in x.items()} if isinstance(x, dict) else f(x)


def leaves(*given: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for x in given:
        each(found.append, x)
    return [x for x in found if x.requires_grad]


SPECS = {"diff": DIFF, "cache": CACHE, "no sink": NO_SINK}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", SPECS)
def test_values_and_gradients(name: str, layout: str) -> None:
    """Every q, k, v and tensor; row 0 keeps no key of the call's own, and outside of the window none at all."""
    attn = attngen.build(SPECS[name].replace("LAYOUT", f"layout = {layout}"))
    assert isinstance(attn, SeveralAttention)
    q, k, v, segments, named = arguments(name)
    swap = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else lambda x: x
    params = {"window": 3} if segments else {}
    more = {"segments": each(swap, segments)} if segments else {}
    o, lse = attn(*each(swap, (q, k, v)), **named, **params, **more, return_lse=True)
    assert o.is_contiguous() and o.dtype is BF16 and lse.dtype is torch.float32
    wide: dict[int, torch.Tensor] = {}

    def double(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in wide:
            wide[id(x)] = x.detach().double().requires_grad_(x.requires_grad)
        return wide[id(x)]

    exact = dense.attention(
        attn.spec, *each(double, (q, k, v)), params, each(double, named), segments=each(double, segments) or None
    )
    assert lse.shape == exact.lse.shape and torch.equal(lse.isinf(), exact.lse.isinf())
    assert (swap(o) - exact.o).abs().max() < 3e-2
    assert (torch.where(lse.isfinite(), lse - exact.lse, 0.0)).abs().max() < 1e-5
    if name == "no sink":
        assert lse.isinf().any() and not o.isnan().any()
    loss(swap(o), lse).backward()
    loss(exact.o, exact.lse).backward()
    for x in leaves(q, k, v, segments, named):
        e = wide[id(x)].grad
        assert x.grad is not None and x.grad.dtype is x.dtype and not x.grad.isnan().any()
        assert (x.grad - e).norm() < 1e-2 * e.norm()


@pytest.mark.parametrize("name", SPECS)
def test_largest_scores(name: str) -> None:
    """Over all keys; of branches one each. The sink is no key, and a row without keys has -inf."""
    text = SPECS[name].replace("LAYOUT", "output { max_logit = true }")
    attn, plain = attngen.build(text), attngen.build(SPECS[name].replace("LAYOUT", ""))
    q, k, v, segments, named = arguments(name)
    given = {**named, **({"window": 3, "segments": segments} if segments else {})}
    o, lse, top = attn(q, k, v, **given, return_lse=True, return_max_logit=True)
    again, only = attn(q, k, v, **given, return_max_logit=True)
    wide = each(lambda x: x.detach().double(), (q, k, v, named, segments))
    params = {"window": 3} if segments else {}
    exact = dense.attention(attn.spec, *wide[:3], params, wide[3], segments=wide[4] or None).max_logit
    assert exact is not None and top.shape == lse.shape == exact.shape and torch.equal(top, only)
    assert torch.equal(top.isinf(), exact.isinf()) and (name == "diff" or top.isinf().any())
    assert torch.where(top.isfinite(), top - exact, 0.0).abs().max() < 1e-5
    assert torch.equal(o, again) and torch.equal(o, plain(q, k, v, **given))
    with pytest.raises(AttnError, match="E0601"):
        plain(q, k, v, **given, return_max_logit=True)


def test_packed_segments() -> None:
    """One qkv for the call's own keys, one gradient; the segment's k and v beside it."""
    attn = attngen.build(CACHE.replace("LAYOUT", PACKED))
    plain = attngen.build(CACHE.replace("LAYOUT", "layout = bshd"))
    q, _, _, segments, named = arguments("cache")
    qkv = random(2, 11, 8, 64)
    got = attn(qkv, heads_q=4, segments=segments, **named)
    want = plain(*qkv.split((4, 2, 2), 2), segments=segments, **named)
    assert torch.equal(got, want) and q.shape == got.shape
    inputs = leaves(qkv, segments, named)
    for a, b in zip(*(torch.autograd.grad(o.double().sin().sum(), inputs) for o in (got, want)), strict=True):
        assert (a - b).abs().max() <= 0.01 * b.abs().max()


def test_a_view_of_k_in_branches() -> None:
    """V is columns of the first branch's k, whose gradient it joins."""
    text = DIFF.replace("LAYOUT", "v = k[8:40]").replace(", v = 32", "")
    attn, plain = attngen.build(text), attngen.build(DIFF.replace("LAYOUT", "layout = bshd"))
    q, k, _, _, named = arguments("diff")
    got, want = attn(q, k, **named), plain(q, k, k[0][..., 8:40], **named)
    assert torch.equal(got, want)
    inputs = leaves(q, k, named)
    for a, b in zip(*(torch.autograd.grad(o.double().sin().sum(), inputs) for o in (got, want)), strict=True):
        assert (a - b).abs().max() <= 0.01 * b.abs().max()


def test_dtypes_outputs_and_checks() -> None:
    attn = attngen.build(CACHE.replace("LAYOUT", "output { dtype = f32 }"))
    q, k, v, segments, named = each(lambda x: x.detach(), arguments("cache"))
    o, lse = attn(q, k, v, segments=segments, **named, return_lse=True, check=True)
    assert o.dtype is torch.float32
    half = each(lambda x: x.half(), (q, k, v))
    assert (attn(*half, segments=each(lambda x: x.half(), segments), **named) - o).abs().max() < 3e-2
    with torch.autocast("cpu", BF16):
        wide = each(lambda x: x.float(), (q, k, v))
        assert torch.equal(attn(*wide, segments=each(lambda x: x.float(), segments), **named), o)
    out, rows = torch.empty_like(o), torch.empty_like(lse)
    given = attn(q, k, v, segments=segments, **named, out=out, lse=rows, return_lse=True)
    assert given[0] is out and given[1] is rows and torch.equal(out, o) and torch.equal(rows, lse)
    with pytest.raises(AttnError, match="E0616"):
        attn(q, k, v, segments=segments, **named, out=out.bfloat16())
    with pytest.raises(AttnError, match="E0619"):
        attn(q.clone().requires_grad_(), k, v, segments=segments, **named, out=out)


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda a, q, k, v, s, n: a(q, k, v, **n), "E0604", "past"),
        (lambda a, q, k, v, s, n: a(q, k, v, segments={"past": k}, **n), "E0604", "(k, v)"),
        (lambda a, q, k, v, s, n: a(q, k[:, :, :1], v[:, :, :1], segments=s, **n), "E0607", "2 KV heads, k has 1"),
        (lambda a, q, k, v, s, n: a(q, k, v, segments={**s, "other": s["past"]}, **n), "E0601", "other"),
        (lambda a, q, k, v, s, n: a(q, k, v, segments=s), "E0602", "sinks"),
        (lambda a, q, k, v, s, n: a(q, k, v, segments=s, widow=3, **n), "E0601", "did you mean `window`"),
        (lambda a, q, k, v, s, n: a(q, k, v, segments=s, window=0, **n), "E0603", "in the part `past` of `cache`"),
        (
            lambda a, q, k, v, s, n: a(q, k, v, segments={"past": (s["past"][0], k)}, **n),
            "E0607",
            "in the part `past` of `cache`",
        ),
    ],
)
def test_segments_that_do_not_fit(call: Any, code: str, words: str) -> None:
    attn = attngen.build(CACHE.replace("LAYOUT", "layout = bshd"))
    with pytest.raises(AttnError) as fault:
        call(attn, *each(lambda x: x.detach(), arguments("cache")))
    assert fault.value.diagnostics[0].code == code and words in str(fault.value)


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        (lambda a, q, k, v, n: a(q[0], k, v, **n), "E0604", "a tuple of 2 as `q`"),
        (lambda a, q, k, v, n: a(q, k[:1], v, **n), "E0604", "found 1 of them"),
        (lambda a, q, k, v, n: a(q, k, v, segments={"past": k}, **n), "E0601", "it has none"),
        (lambda a, q, k, v, n: a(q, (k[0], k[1][:, :9]), v, **n), "E0607", "in the branch `two` of `diff`"),
        (lambda a, q, k, v, n: a((q[0], q[1][:, :9]), k, v, **n), "E0607", "`two` has q (2, 9, 4, 64)"),
        (lambda a, q, k, v, n: a(q, k, v, lam=n["lam"], gate=n["gate"]), "E0602", "fixed"),
        (lambda a, q, k, v, n: a(q, k, v, **{**n, "lam": n["lam"][:3]}), "E0607", "lam"),
        (lambda a, q, k, v, n: a(q, k, v, **{**n, "fixed": n["fixed"].requires_grad_()}), "E0611", "fixed"),
        (lambda a, q, k, v, n: a(q, k, v, **{**n, "fixed": n["fixed"][:9]}, check=True), "E0650", "fixed"),
    ],
)
def test_branches_that_do_not_fit(call: Any, code: str, words: str) -> None:
    attn = attngen.build(DIFF.replace("LAYOUT", "layout = bshd"))
    q, k, v, _, named = each(lambda x: x.detach(), arguments("diff"))
    with pytest.raises(AttnError) as fault:
        call(attn, q, k, v, named)
    assert fault.value.diagnostics[0].code == code and words in str(fault.value)


@pytest.mark.parametrize("name", ["diff", "cache"])
def test_under_torch_compile(name: str) -> None:
    attn = attngen.build(SPECS[name].replace("LAYOUT", "layout = bshd"))
    q, k, v, segments, named = arguments(name)
    more = {"segments": segments} if segments else {}
    compiled = torch.compile(lambda *x, **n: attn(*x, **n), backend="aot_eager", fullgraph=True)
    got, want = compiled(q, k, v, **more, **named), attn(q, k, v, **more, **named)
    assert torch.equal(got, want)
    inputs = leaves(q, k, v, segments, named)
    for a, b in zip(*(torch.autograd.grad(o.double().sin().sum(), inputs) for o in (got, want)), strict=True):
        assert torch.equal(a, b)


def test_what_it_is() -> None:
    attn = attngen.build(CACHE.replace("LAYOUT", "layout = bshd"), backward=True)
    assert list(attn.parts) == ["main", "past"] and [a.spec.name for a in attn.kernels] == ["cache_main", "cache_past"]
    again = pickle.loads(pickle.dumps(attn))
    assert isinstance(again, SeveralAttention) and again.spec == attn.spec and "main, past" in repr(attn)
    assert attn.explain().startswith("cache: 2 kernels")


# ---- merge -----------------------------------------------------------------------------------------------------------


def attended(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """(o, lse) of plain attention in bshd."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_merge_is_attention_over_all_keys(layout: str) -> None:
    q, k, v = (torch.randn(2, n, 3, 8, dtype=torch.float64) for n in (5, 9, 9))
    cuts = [attended(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 2), (2, 3), (3, 9))]
    want, want_lse = attended(q, k, v)
    if layout == "bhsd":
        cuts, want = [(o.transpose(1, 2), rows) for o, rows in cuts], want.transpose(1, 2)
    o, lse = attngen.merge(*cuts[0], *cuts[1], *cuts[2], layout=layout)
    assert (o - want).abs().max() < 1e-12 and (lse - want_lse).abs().max() < 1e-12
    half, _ = attngen.merge(*((x.to(BF16) if x.dim() == 4 else x) for pair in cuts for x in pair), layout=layout)
    assert half.dtype is BF16 and (half - want).abs().max() < 2e-2


def test_merge_gradients() -> None:
    """First and second derivatives, against differences."""
    parts = [torch.randn(1, 2, 2, 3, dtype=torch.float64), torch.randn(1, 2, 2, dtype=torch.float64)] * 2
    given = tuple(x.clone().requires_grad_() for x in parts)
    assert torch.autograd.gradcheck(lambda *x: attngen.merge(*x), given)
    assert torch.autograd.gradgradcheck(lambda *x: attngen.merge(*x), given)


def test_merge_without_keys() -> None:
    """A part without keys weighs nothing; where no part has any, O = 0, LSE = -inf, gradients 0: no NaN anywhere."""
    o1, o2 = torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 4)
    lse1, lse2 = torch.tensor([[[0.5, -math.inf, -math.inf]]]), torch.tensor([[[-math.inf, 0.25, -math.inf]]])
    given = [x.requires_grad_() for x in (o1, lse1, o2, lse2)]
    o, lse = attngen.merge(*given)
    assert torch.equal(o[0, :, 0], torch.stack((o1[0, 0, 0], o2[0, 1, 0], torch.zeros(4))))
    assert lse.tolist() == [[[0.5, 0.25, -math.inf]]]
    (o.square().sum() + torch.where(lse.isfinite(), lse, 0.0).exp().sum()).backward()
    assert not any(x.grad.isnan().any() for x in given)
    assert lse1.grad[0, 0, 1:].abs().sum() == 0 and o2.grad[0, 2].abs().sum() == 0


def test_merge_says_what_does_not_fit() -> None:
    o, lse = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)
    for bad, code in (
        ((o, lse, o), "E0607"), ((o, lse, o, lse.transpose(1, 2)), "E0607"), ((o, lse, o[:, :2], lse), "E0607")
    ):  # fmt: skip
        with pytest.raises((AttnError, TypeError), match=code if len(bad) == 4 else "lse2"):
            attngen.merge(*bad)
    with pytest.raises(AttnError, match="3 o and 2 lse"):
        attngen.merge(o, lse, o, lse, o)
    with pytest.raises(AttnError, match="E0503"):
        attngen.merge(o, lse, o, lse, layout="sbhd")
