"""One qkv, and V as columns of K: values, gradients in one tensor, refusals; CPU tensors and a stand-in kernel."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import backward_standin as standin
import jit_standin
import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.ir.types import Layout
from attngen.jit.composed import PackedAttention, ViewAttention, front
from attngen.ref import dense

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
PACKED = """attn 1
attention packed {
  head_dim = 64
  layout = packed_qkv
  param window: int >= 1 = 9
  tensor sinks: f32[heads_q] grad
  mask = kv_idx <= q_pos and q_pos - kv_idx < window
  sink = sinks[h]
}
"""
VIEW = """attn 1
attention latent {
  head_dim = 64
  v = k[16:48]
  mask = kv_idx <= q_pos
}
"""


@pytest.fixture(scope="module")
def packed() -> Any:
    return attngen.build(PACKED)


@pytest.fixture(scope="module")
def latent() -> Any:
    return attngen.build(VIEW)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()


def loss(o: Any, lse: Any) -> Any:
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    return (o.double() * weight).sum() + lse.double().sin().sum()


@pytest.mark.parametrize("grouped", [False, True])
def test_packed_is_the_call_on_its_parts(packed: Any, grouped: bool) -> None:
    """Both shapes: o, lse and one gradient, against float64 autograd of the dense meaning."""
    assert isinstance(packed, PackedAttention)
    qkv = random(2, 13, 8, 64) if grouped else random(2, 13, 3, 4, 64)
    keywords = {"heads_q": 4} if grouped else {}
    sinks = torch.randn(4).requires_grad_()
    o, lse = packed(qkv, window=7, sinks=sinks, return_lse=True, **keywords)
    assert o.shape == (2, 13, 4, 64) and o.is_contiguous() and lse.shape == (2, 4, 13)
    loss(o, lse).backward()
    wide, wide_sinks = (x.detach().double().requires_grad_() for x in (qkv, sinks))
    parts = wide.split((4, 2, 2), 2) if grouped else wide.unbind(2)
    exact = dense.attention(packed.inner.spec, *parts, {"window": 7}, {"sinks": wide_sinks})
    loss(exact.o, exact.lse).backward()
    assert (o - exact.o).abs().max() < 2e-2
    for x, e in ((qkv, wide), (sinks, wide_sinks)):
        assert x.grad.shape == x.shape and (x.grad - e.grad).norm() < 1e-2 * e.grad.norm()


def test_packed_in_other_dtypes_and_without_gradients(packed: Any) -> None:
    qkv = random(1, 9, 3, 2, 64).detach()
    sinks = torch.zeros(2)
    o = packed(qkv, sinks=sinks)
    half = packed(qkv.half(), sinks=sinks)
    assert half.dtype == torch.float16 and (o - half).abs().max() < 3e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(qkv.float(), sinks=sinks), o)
    out, lse = torch.empty_like(o), torch.empty(1, 2, 9)
    given, rows = packed(qkv, sinks=sinks, out=out, lse=lse, return_lse=True)
    assert given is out and rows is lse and torch.equal(out, o)


@pytest.mark.parametrize(
    ("make", "keywords", "code", "words"),
    [
        (lambda: [1], {}, "E0604", "qkv"),
        (lambda: torch.zeros(2, 9, 6, 64), {}, "E0607", "heads_q="),
        (lambda: torch.zeros(2, 9, 7, 64), {"heads_q": 4}, "E0608", "4 query heads"),
        (lambda: torch.zeros(2, 9, 6, 64), {"heads_q": 6}, "E0608", "6 query heads"),
        (lambda: torch.zeros(2, 9, 4, 2, 64), {}, "E0607", "(2, 9, 4, 2, 64)"),
        (lambda: torch.zeros(2, 9, 3, 2, 64), {"heads_q": 3}, "E0607", "heads_q is 3"),
        (lambda: torch.zeros(2, 9, 3 * 64), {}, "E0607", "unflatten"),
        (lambda: torch.zeros(2, 9, 3, 2, 32, dtype=BF16), {}, "E0607", "head dimension 32"),
        (lambda: torch.zeros(2, 9, 3, 2, 64), {}, "E0606", "float32"),
    ],
)
def test_packed_says_what_is_wrong(packed: Any, make: Any, keywords: Any, code: str, words: str) -> None:
    with pytest.raises(AttnError) as fault:
        packed(make(), sinks=torch.zeros(2), **keywords)
    assert fault.value.diagnostics[0].code == code and words in str(fault.value)


@pytest.mark.parametrize("heads", [(), (4, 2, 2)])
def test_the_kernel_writes_into_one_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, heads: tuple[int, ...]
) -> None:
    """dq, dk and dv are slices of what becomes `.grad`: no copy."""
    inner, kernels = standin.attached(jit_standin.plain(), monkeypatch, tmp_path)
    inner.launcher.ready[-1] = (inner.launcher.ready[-1][0], 1)  # SMs: dK and dV do not come in parts
    attn = front(jit_standin.plain(layout=Layout.PACKED_QKV), inner, (tuple, ()))
    qkv = random(2, 24, 8, 64) if heads else random(2, 24, 3, 4, 64)
    o, lse = attn(qkv, heads_q=4, return_lse=True)
    loss(o, lse).backward()
    dq, dk, dv = kernels.made[0].outputs
    assert qkv.grad.is_contiguous() and qkv.grad.shape == qkv.shape
    step = 2 * 64 * 4
    assert (dq, dk, dv) == (qkv.grad.data_ptr(), dq + step, dq + step + (step // 2 if heads else step))
    wide = qkv.detach().double().requires_grad_()
    exact = dense.attention(inner.spec, *(wide.split(heads, 2) if heads else wide.unbind(2)))
    loss(exact.o, exact.lse).backward()
    assert (qkv.grad - wide.grad).norm() < 1e-2 * wide.grad.norm()


def test_a_view_of_k(latent: Any) -> None:
    assert isinstance(latent, ViewAttention)
    q, k = random(2, 11, 4, 64), random(2, 15, 2, 64, seed=1)
    o, lse = latent(q, k, return_lse=True)
    assert o.shape == (2, 11, 4, 32)
    loss(o, lse).backward()
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    exact = dense.attention(latent.spec, *wide, None)
    loss(exact.o, exact.lse).backward()
    assert (o - exact.o).abs().max() < 2e-2
    for x, e in zip((q, k), wide, strict=True):
        assert (x.grad - e.grad).norm() < 1e-2 * e.grad.norm()
    assert torch.equal(latent(q.detach(), k.detach()), o)
    with pytest.raises(AttnError, match="has 64") as fault:
        latent(q, k[..., :32])
    assert fault.value.diagnostics[0].code == "E0607"


def test_create_graph_keeps_gradients_whole(packed: Any, latent: Any) -> None:
    """With create_graph=True the gradients are the same, and a second derivative is refused."""
    qkv, q, k = random(1, 9, 3, 2, 64), random(1, 9, 2, 64), random(1, 9, 2, 64, seed=1)
    for attn, given, keywords in ((packed, (qkv,), {"sinks": torch.zeros(2)}), (latent, (q, k), {})):
        first = torch.autograd.grad(attn(*given, **keywords).double().square().sum(), given)
        again = torch.autograd.grad(attn(*given, **keywords).double().square().sum(), given, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        with pytest.raises(AttnError, match="E0620"):
            again[-1].sum().backward()


def test_under_torch_compile(packed: Any, latent: Any) -> None:
    qkv, sinks = random(1, 9, 3, 2, 64), torch.zeros(2)
    q, k = random(1, 9, 2, 64), random(1, 9, 2, 64, seed=1)
    for attn, given, keywords in ((packed, (qkv,), {"sinks": sinks}), (latent, (q, k), {})):
        compiled = torch.compile(lambda *x, a=attn, n=keywords: a(*x, **n), backend="aot_eager", fullgraph=True)
        o, eager = compiled(*given), attn(*given, **keywords)
        assert torch.equal(o, eager)
        got, want = (torch.autograd.grad(x.double().square().sum(), given) for x in (o, eager))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_it_is(packed: Any) -> None:
    again = pickle.loads(pickle.dumps(packed))
    assert isinstance(again, PackedAttention) and again.spec == packed.spec
    assert copy.deepcopy(packed) is packed and "packed" in repr(packed)
    assert packed.inner.spec.layout is Layout.BSHD and packed.plans and "slices of one qkv" in packed.explain()
    assert attngen.compile(PACKED).meta["layout"] == "bshd"


@pytest.mark.parametrize(
    ("clauses", "words"),
    [
        ("head_dim = 64, v = 32\n  layout = packed_qkv", "layout = bshd"),
        ("head_dim = 64\n  v = k[0:64]\n  layout = packed_qkv", "pass q and k"),
        ("head_dim = 64\n  v = k[4:36]", "multiple of 8"),
        ("head_dim = 576\n  v = k[0:512]", "examples/mla.attn"),
    ],
)
def test_what_no_kernel_serves_is_refused_with_a_mend(clauses: str, words: str) -> None:
    with pytest.raises(AttnError, match="E0402") as fault:
        attngen.compile(f"attn 1\nattention x {{\n  {clauses}\n}}\n")
    assert words in str(fault.value)
