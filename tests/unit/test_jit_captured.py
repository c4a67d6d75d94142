"""Captured gradients end to end over a stand-in kernel: buffers of every kind, through the host, against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import backward_standin as standin
import pytest
import torch
import torch.utils._pytree
from builders import HKV, QP, B, H, K, Q, S, X, f, load
from torch.utils._python_dispatch import TorchDispatchMode

from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import DType, Layout
from attngen.jit.shapes import sizes_of
from attngen.ref import dense

F32, BF16 = DType.F32, DType.BF16
CAUSAL = K <= QP


def _t(name: str, *dims: str | int, dtype: DType = F32, grad: bool = True) -> TensorDecl:
    return TensorDecl(name=name, dtype=dtype, dims=dims, grad=grad)


def _at(name: str, *indices: Any, dtype: DType = F32) -> X:
    return load(name, *indices, dtype=dtype)


LEARNED = _at("x", H)
#: name: (declarations, score, sink, the kind of `x`)
CASES: dict[str, tuple[tuple[TensorDecl, ...], X, X | None, str]] = {
    "slopes": ((_t("x", "heads_q"),), S - LEARNED * f("float", QP - K) * 0.1, None, "column"),
    "temperature": ((_t("x", "heads_kv"),), S * f("exp", _at("x", HKV)), None, "column"),
    "one number": ((_t("x", 1),), S * _at("x", 0), None, "column"),
    "column bias": ((_t("x", "batch", "heads_q", "seqlen_kv"),), S + _at("x", B, H, K), None, "column"),
    "column bias, bf16": ((_t("x", "seqlen_kv", "batch", dtype=BF16),), S + _at("x", K, B, dtype=BF16), None, "column"),
    "repeated indices": ((_t("x", 4),), S + _at("x", K % 4), None, "column"),
    "gathered": (
        (_t("x", 5), _t("kind", "batch", "seqlen_kv", dtype=DType.I32, grad=False)),
        S + _at("x", _at("kind", B, K, dtype=DType.I32)),
        None,
        "column",
    ),
    "row bias": ((_t("x", "batch", "seqlen_q"),), S * _at("x", B, Q), None, "row"),
    "row by position": ((_t("x", 64),), f("tanh", S * _at("x", QP)), None, "row"),
    "bias": ((_t("x", "batch", "heads_q", "seqlen_q", "seqlen_kv"),), S + _at("x", B, H, Q, K), None, "element"),
    "table": ((_t("x", 8, "heads_q"),), S + _at("x", f("min", QP - K, 7), H), None, "element"),
    "sinks": ((_t("x", "heads_q"),), S, LEARNED, "sink"),
    "sinks of rows": ((_t("x", "batch", "heads_q", "seqlen_q"),), S, f("softplus", _at("x", B, H, Q)) * 2.0, "sink"),
    "sinks of groups, fp16": ((_t("x", "heads_kv", dtype=DType.FP16),), S, _at("x", HKV, dtype=DType.FP16), "sink"),
    "two reads of a column": ((_t("x", 70),), S + _at("x", K) * _at("x", K // 2), None, "column"),
    "two kinds": ((_t("x", 70),), S + _at("x", K) + _at("x", Q), None, "column row"),
    "score and sink": ((_t("x", "heads_q"),), S * LEARNED, LEARNED * 0.5, "column sink"),
}


def make(tensors: tuple[TensorDecl, ...], score: X, sink: X | None, **changes: Any) -> AttentionSpec:
    import jit_standin

    mask = changes.pop("mask", CAUSAL)
    return jit_standin.plain(
        64, tensors=tensors, score=score.e, mask=mask.e, sink=None if sink is None else sink.e, **changes
    )


def inputs(spec: AttentionSpec, b: int = 2, sq: int = 20, skv: int = 33, hq: int = 4, hkv: int = 2) -> Any:
    g = torch.Generator().manual_seed(1)
    known = {"batch": b, "heads_q": hq, "heads_kv": hkv, "seqlen_q": sq, "seqlen_kv": skv}
    dtypes = {F32: torch.float32, BF16: torch.bfloat16, DType.FP16: torch.float16}
    tensors = {}
    for t in spec.tensors:
        shape = [known.get(d, 0) if isinstance(d, str) else d for d in t.dims]
        if t.dtype is DType.I32:
            tensors[t.name] = torch.randint(0, 5, shape, generator=g, dtype=torch.int32)
        else:
            tensors[t.name] = torch.randn(shape, generator=g).to(dtypes[t.dtype]).requires_grad_(t.grad)
    shapes = ((b, sq, hq, 64), (b, skv, hkv, 64), (b, skv, hkv, 64))
    qkv = [torch.randn(s, generator=g).bfloat16() for s in shapes]
    if spec.layout is Layout.BHSD:
        qkv = [x.transpose(1, 2) for x in qkv]
    return [x.requires_grad_() for x in qkv], tensors


def losses(o: Any, lse: Any) -> Any:
    """Something that gives o and lse different gradients everywhere."""
    weight = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    kept = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))
    return (o.double() * weight).sum() + kept.double().sin().sum()


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 2e-2) -> bool:
    """Within a bf16 rounding or two of the whole. The stand-in's o and lse are rounded, its arithmetic is float64."""
    scale = float(want.abs().max()) or 1.0
    return bool((got.double() - want).abs().max() <= tolerance * scale) and not bool(got.isnan().any())


def exact(spec: AttentionSpec, qkv: Any, tensors: Any) -> dict[str, torch.Tensor]:
    """Gradients of `losses` by float64 autograd of the dense meaning."""
    wide = [x.detach().double().requires_grad_() for x in qkv]
    leaves = {n: x.detach().double().requires_grad_() if x.requires_grad else x for n, x in tensors.items()}
    bshd = [x.transpose(1, 2) for x in wide] if spec.layout is Layout.BHSD else wide
    r = dense.attention(spec, *bshd, {}, leaves)
    losses(r.o.transpose(1, 2) if spec.layout is Layout.BHSD else r.o, r.lse).backward()
    found = dict(zip("qkv", (x.grad for x in wide), strict=True))
    return {**found, **{n: x.grad for n, x in leaves.items() if x.requires_grad}}


def agree(spec: AttentionSpec, qkv: Any, tensors: Any) -> None:
    """The gradients that the tensors hold are those of float64."""
    want = exact(spec, qkv, tensors)
    got = {**dict(zip("qkv", qkv, strict=True)), **{n: x for n, x in tensors.items() if x.requires_grad}}
    for name, x in got.items():
        assert x.grad.dtype is x.dtype and x.grad.shape == x.shape, name
        assert close(x.grad, want[name]), (name, (x.grad.double() - want[name]).abs().max(), want[name].abs().max())


@pytest.mark.parametrize("case", CASES)
def test_every_kind(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors, score, sink, kinds = CASES[case]
    spec = make(tensors, score, sink)
    attn, kernels = standin.attached(spec, monkeypatch, tmp_path)
    assert {r["kind"] for r in attn.backward.source.meta["backward"]["gradients"]} == set(kinds.split())
    qkv, captured = inputs(spec)
    losses(*attn(*qkv, **captured, return_lse=True)).backward()
    agree(spec, qkv, captured)
    assert len(kernels.made) == 1 and len(kernels.made[0].calls) == 1


@pytest.mark.parametrize("case", ["bias", "column bias", "row bias", "sinks of rows", "table"])
def test_broadcast_axes_are_summed(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever axes are given with extent 1: the gradient has the caller's extents."""
    tensors, score, sink, _ = CASES[case]
    spec = make(tensors, score, sink)
    attn, _ = standin.attached(spec, monkeypatch, tmp_path)
    rank = len(tensors[0].dims)
    for kept in range(rank + 1):
        qkv, captured = inputs(spec)
        x = captured["x"].detach()
        for axis in range(rank):
            if axis != kept:
                x = x.narrow(axis, 0, 1)
        captured["x"] = x.clone().requires_grad_()
        losses(*attn(*qkv, **captured, return_lse=True)).backward()
        agree(spec, qkv, captured)


def test_rows_that_keep_nothing_and_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors, score, sink, _ = CASES["slopes"]
    spec = make(tensors, score, sink, layout=Layout.BHSD, mask=(K <= QP) & (Q > 3))
    attn, _ = standin.attached(spec, monkeypatch, tmp_path)
    qkv, captured = inputs(spec, sq=40, skv=33)
    losses(*attn(*qkv, **captured, return_lse=True)).backward()
    agree(spec, qkv, captured)
    assert not qkv[0].grad[:, :, :7].any()


def test_indices_outside_where_the_mask_drops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = make((_t("x", "seqlen_kv"),), S + _at("x", K - 2), None, mask=CAUSAL & (K >= 2))
    attn, _ = standin.attached(spec, monkeypatch, tmp_path)
    qkv, captured = inputs(spec)
    losses(*attn(*qkv, **captured, return_lse=True)).backward()
    agree(spec, qkv, captured)
    assert captured["x"].grad[0].abs() > 0 and not captured["x"].grad[-2:].any()


def test_a_tensor_that_no_derivative_reaches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Read in a mask only: zeros, and where nothing else is wanted, no launch."""
    spec = make((_t("x", "seqlen_kv"),), S, None, mask=CAUSAL & (_at("x", K) > 0.0))
    attn, kernels = standin.attached(spec, monkeypatch, tmp_path)
    qkv, captured = inputs(spec)
    (o := attn(*(x.detach() for x in qkv), **captured)).sum().backward()
    assert o.requires_grad and captured["x"].grad.shape == (33,) and not captured["x"].grad.any()
    assert not kernels.made
    attn(*qkv, **captured).sum().backward()
    assert not captured["x"].grad.any() and qkv[0].grad.any() and len(kernels.made) == 1


def test_frozen_tensors_have_no_buffer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two learned tensors one is frozen: the other's gradient is right, and the file knows it alone."""
    x, y = _at("x", B, H, Q, K), _at("y", B, H, K)
    whole = ("batch", "heads_q", "seqlen_q", "seqlen_kv")
    spec = make((_t("x", *whole), _t("y", "batch", "heads_q", "seqlen_kv")), S + x * y, None)
    attn, kernels = standin.attached(spec, monkeypatch, tmp_path)
    for frozen, learned in (("x", "y"), ("y", "x")):
        qkv, captured = inputs(spec)
        captured[frozen].requires_grad_(False)
        losses(*attn(*qkv, **captured, return_lse=True)).backward()
        agree(spec, qkv, captured)
        (buffer,) = kernels.made[-1].calls[0][15:]
        assert buffer.dtype is torch.float32 and buffer.shape == captured[learned].shape
    assert len({attn.backward.source_of(names).text for names in ((), ("x",), ("y",), ("x", "y"))}) == 4


@pytest.mark.parametrize("case", ["repeated indices", "gathered", "column bias", "temperature", "sinks"])
def test_equal_bits(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tensors, score, sink, _ = CASES[case]
    spec = make(tensors, score, sink)
    attn, _ = standin.attached(spec, monkeypatch, tmp_path)
    seen = []
    for _ in range(5):
        qkv, captured = inputs(spec)
        losses(*attn(*qkv, **captured, return_lse=True)).backward()
        seen.append(captured["x"].grad)
    assert all(torch.equal(seen[0], x) for x in seen)


class _Log(TorchDispatchMode):
    """Operators that wait for a GPU or copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name()
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        crosses = any(x.device.type == "cpu" for x in given) and any(x.device.type == "cuda" for x in made)
        if crosses or "_local_scalar_dense" in name or "nonzero" in name:
            self.found.append(name)
        return out


@pytest.mark.parametrize("case", ["slopes", "temperature", "one number", "column bias, bf16", "row bias", "bias"])
def test_nothing_waits_for_the_gpu(case: str) -> None:
    """On tensors that claim to be on a GPU: no copy to it, no value read back, as a CUDA graph demands."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from attngen.jit import captured as module

    tensors, score, sink, _ = CASES[case]
    spec = make(tensors, score, sink)
    rows = standin.source(spec).meta["backward"]["gradients"]
    qkv, given = inputs(spec)
    sizes = sizes_of(spec, qkv[0], qkv[1])
    with FakeTensorMode(), torch.no_grad():
        fake = {n: torch.empty(x.shape, dtype=x.dtype, device="cuda") for n, x in given.items()}
        made, _ = module.buffers(spec, rows, fake, sizes)
        with _Log() as log:
            found = module.gradients(spec, rows, made, ("x",), {}, fake, sizes)
    assert found["x"].shape == given["x"].shape and found["x"].dtype is given["x"].dtype
    assert found["x"].device.type == "cuda" and not log.found
