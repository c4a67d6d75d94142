"""Attention on CPU tensors and as a torch operator: torch.compile, FakeTensor, opcheck, autocast, pickling."""

from __future__ import annotations

import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import jit_standin as standin
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import notice
from attngen.jit.cache import KernelCache
from attngen.jit.kernel import Attention
from attngen.jit.notice import AttngenNotice

BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")


def attention(spec: AttentionSpec, tmp_path: Path, **keywords: Any) -> Attention:
    return Attention(spec, standin.source(spec), "sm_90a", KernelCache(tmp_path), **keywords)


def qkv(b: int = 2, sq: int = 33, hq: int = 4, skv: int = 48, hkv: int = 2, d: int = 64, dtype: Any = BF16) -> Any:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(b, s, h, d, generator=g).to(dtype) for s, h in ((sq, hq), (skv, hkv), (skv, hkv)))


def expected(q: Any, k: Any, v: Any, bias: Any = None, window: int = 64, gain: float = 1.0, flip: bool = False) -> Any:
    """`standin.rich` in float64, written out."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * gain
    if bias is not None:
        s = s + bias.double()[:, :, None, None]
    q_pos = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    kv_idx = torch.arange(k.shape[2])
    keep = (kv_idx <= q_pos) & (q_pos - kv_idx < window)
    s = s if flip else s.masked_fill(~keep, -math.inf)
    return (s.softmax(-1) @ v).transpose(1, 2), s.logsumexp(-1)


def close(o: Any, want: Any) -> bool:
    return bool((o.double() - want).abs().max() < 2e-2)


def test_cpu_tensors_run_the_reference_and_say_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "_said", set())
    attn = attention(standin.rich(), tmp_path)
    q, k, v = qkv()
    bias = torch.randn(2, 4)
    with pytest.warns(AttngenNotice, match="runs the blockwise reference"):
        o, lse = attn(q, k, v, bias=bias, window=7, return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attn(q, k, v, bias=bias)
    want_o, want_lse = expected(q, k, v, bias, 7)
    assert close(o, want_o) and (lse - want_lse).abs().max() < 2e-2
    assert o.dtype is BF16 and lse.dtype is torch.float32 and attn.path is None


def test_cpu_layout_out_and_scale(tmp_path: Path) -> None:
    q, k, v = qkv()
    want, _ = expected(q, k, v, flip=True)
    attn = attention(standin.plain(layout=Layout.BHSD), tmp_path)
    args = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.empty(2, 4, 33, 64, dtype=BF16)
    assert attn(*args, out=out) is out and close(out.transpose(1, 2), want)
    sharp, _ = expected(q, k, v, gain=2.0, flip=True)
    assert close(attn(*args, scale=2 / 8).transpose(1, 2), sharp)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_fullgraph(tmp_path: Path, dynamic: bool) -> None:
    attn = attention(standin.rich(), tmp_path)

    def layer(q: Any, k: Any, v: Any, bias: Any, window: int, gain: float) -> Any:
        o, lse = attn(q * 1, k, v, bias=bias, window=window, gain=gain, return_lse=True)
        return o + 1, lse.exp()

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for sq, window, gain in ((33, 7, 1.0), (20, 9, 0.5), (18, 30, 2.0)):
        q, k, v = qkv(sq=sq)
        bias = torch.randn(2, 4)
        with torch.no_grad():
            o, lse = compiled(q, k, v, bias, window, gain)
        want_o, want_lse = expected(q, k, v, bias, window, gain)
        assert close(o - 1, want_o) and (lse.log() - want_lse).abs().max() < 2e-2


def test_torch_compile_with_given_outputs(tmp_path: Path) -> None:
    attn = attention(standin.plain(), tmp_path)
    torch._dynamo.reset()
    q, k, v = qkv()
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 33)

    def step(q: Any, k: Any, v: Any, out: Any, lse: Any) -> Any:
        attn(q, k, v, out=out, lse=lse)
        return out * 2

    with torch.no_grad():
        doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, out, lse)
    want_o, want_lse = expected(q, k, v, flip=True)
    assert close(out, want_o) and close(doubled / 2, want_o) and (lse - want_lse).abs().max() < 2e-2


def test_torch_compile_with_inductor(tmp_path: Path) -> None:
    """Inductor reorders layouts freely; the operator's inputs keep theirs."""
    attn = attention(standin.plain(layout=Layout.BHSD), tmp_path)
    torch._dynamo.reset()

    def layer(x: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (x * 1.5).split([4, 2, 2], 2))
        return attn(q, k, v).transpose(1, 2)

    x = torch.cat(qkv(sq=48), 2)
    with torch.no_grad():
        got = torch.compile(layer, fullgraph=True)(x)
        assert got.stride() == layer(x).stride()
    want, _ = expected(*(x * 1.5).split([4, 2, 2], 2), flip=True)
    assert close(got, want)


def test_compiled_code_builds_the_other_dtype(tmp_path: Path) -> None:
    attn = attention(standin.plain(), tmp_path, rebuild=lambda spec: attention(spec, tmp_path))
    torch._dynamo.reset()
    q, k, v = qkv(dtype=torch.float16)
    with torch.no_grad():
        o = torch.compile(lambda *x: attn(*x), fullgraph=True, backend="aot_eager")(q, k, v)
    assert o.dtype is torch.float16 and close(o, expected(q, k, v, flip=True)[0])


def test_torch_compile_under_autocast(tmp_path: Path) -> None:
    attn = attention(standin.plain(), tmp_path)
    torch._dynamo.reset()
    q, k, v = qkv(dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        eager = attn(q, k, v)
        compiled = torch.compile(lambda *x: attn(*x), fullgraph=True, backend="aot_eager")(q, k, v)
    assert eager.dtype is compiled.dtype is BF16 and torch.equal(eager, compiled)


def test_bad_arguments_under_torch_compile(tmp_path: Path) -> None:
    attn = attention(standin.rich(tensor=False), tmp_path)
    torch._dynamo.reset()
    q, k, v = qkv()
    with torch.no_grad(), pytest.raises(AttnError, match=r"`window` is 0, outside"):
        torch.compile(lambda *x: attn(*x, window=0), fullgraph=True, backend="aot_eager")(q, k, v)


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export(tmp_path: Path, strict: bool) -> None:
    attn = attention(standin.rich(), tmp_path)

    class Layer(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, bias: Any) -> Any:
            return attn(q, k, v, bias=bias, window=9)

    torch._dynamo.reset()
    q, k, v = qkv()
    bias = torch.randn(2, 4)
    with torch.no_grad():
        exported = torch.export.export(Layer(), (q, k, v, bias), strict=strict)
    assert [str(n.target) for n in exported.graph.nodes if "attngen" in str(n.target)] == ["attngen.forward.default"]
    assert close(exported.module()(q, k, v, bias), expected(q, k, v, bias, 9)[0])


@pytest.mark.parametrize("layout", [Layout.BSHD, Layout.BHSD])
def test_fake_tensors_have_the_shapes_and_strides_of_real_ones(tmp_path: Path, layout: Layout) -> None:
    attn = attention(standin.rich(layout=layout), tmp_path)
    q, k, v = (x if layout is Layout.BSHD else x.transpose(1, 2) for x in qkv())
    bias = torch.randn(2, 4)
    real = attn(q, k, v, bias=bias, return_lse=True)
    with FakeTensorMode() as mode:
        fake = attn(*(mode.from_tensor(x) for x in (q, k, v)), bias=mode.from_tensor(bias), return_lse=True)
    meta = attn(*(x.to("meta") for x in (q, k, v)), bias=bias.to("meta"), return_lse=True)
    for r, f, m in zip(real, fake, meta, strict=True):
        assert (
            r.shape == f.shape == m.shape and r.stride() == f.stride() == m.stride() and r.dtype is f.dtype is m.dtype
        )


def test_opcheck(tmp_path: Path) -> None:
    attn = attention(standin.rich(), tmp_path)
    q, k, v = qkv()
    bias = torch.randn(2, 4)
    args = (attn.handle, q, k, v, [bias], [7, 0], [1.5], None)
    torch.library.opcheck(torch.ops.attngen.forward.default, args)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 33)
    torch.library.opcheck(torch.ops.attngen.forward_out.default, (*args, out, lse))


def test_given_outputs_count_as_mutated(tmp_path: Path) -> None:
    """Autograd must notice when a saved tensor is written over."""
    attn = attention(standin.plain(), tmp_path)
    q, k, v = qkv()
    out = torch.zeros_like(q)
    before = out._version
    attn(q, k, v, out=out)
    assert out._version > before


def test_tensor_subclasses_go_through_the_operator(tmp_path: Path) -> None:
    class Tagged(torch.Tensor):
        pass

    attn = attention(standin.plain(), tmp_path)
    q, k, v = qkv()
    got = attn(q.as_subclass(Tagged), k, v)
    assert close(got.as_subclass(torch.Tensor), expected(q, k, v, flip=True)[0])
    parameter = torch.nn.Parameter(q, requires_grad=False)
    assert close(attn(parameter, k, v), expected(q, k, v, flip=True)[0])


def test_check_finds_nan_and_broken_promises(tmp_path: Path) -> None:
    attn = attention(standin.rich(), tmp_path)
    q, k, v = qkv()
    bias = torch.zeros(2, 4)
    attn(q, k, v, bias=bias, check=True)
    for name in ("q", "k", "v", "bias"):
        given = {"q": q.clone(), "k": k.clone(), "v": v.clone(), "bias": bias.clone()}
        given[name][1, 3 if name == "bias" else 5] = math.nan
        with pytest.raises(AttnError, match=f"`{name}` holds") as caught:
            attn(**given, check=True)
        assert caught.value.code == "E0613"
    spec = standin.rich()
    promised = attention(spec.replace(tensors=(standin.BIAS.replace(sorted=True),)), tmp_path)
    promised(q, k, v, bias=torch.tensor([[0.0, 1, 1, 2]] * 2), check=True)
    with pytest.raises(AttnError, match=r"decreases at \(1, 2\)") as caught:
        promised(q, k, v, bias=torch.tensor([[0.0, 1, 1, 2], [0, 3, 1, 2]]), check=True)
    assert caught.value.code == "E0614"


def test_check_finds_indices_out_of_range(tmp_path: Path) -> None:
    from attngen.ir.expr import Load, atom
    from attngen.ir.functions import apply
    from attngen.ir.spec import TensorDecl
    from attngen.ir.types import DType, Type

    table = TensorDecl(name="table", dtype=DType.F32, dims=("n",))
    distance = apply("sub", atom("q_pos"), atom("kv_idx"))
    read = Load(type=Type.FLOAT, tensor="table", dtype=DType.F32, indices=(distance,))
    causal = apply("le", atom("kv_idx"), atom("q_pos"))
    spec = standin.plain(tensors=(table,), score=apply("add", atom("s"), read), mask=causal)
    attn = attention(spec, tmp_path)
    q, k, v = qkv(sq=48)
    attn(q, k, v, table=torch.zeros(48), check=True)  # negative distances are masked
    with pytest.raises(AttnError, match="table") as caught:
        attn(q, k, v, table=torch.zeros(47), check=True)
    assert caught.value.code == "E0650"


def _remake(text: str, root: str) -> Attention:
    return attention(AttentionSpec.model_validate_json(text), Path(root))


def test_pickle_by_spec(tmp_path: Path) -> None:
    spec = standin.rich(tensor=False)
    attn = attention(spec, tmp_path, recipe=(_remake, (spec.model_dump_json(), str(tmp_path))))
    again = pickle.loads(pickle.dumps(attn))
    assert again.spec == spec and again.handle == attn.handle
    with pytest.raises(TypeError, match="pickle its spec"):
        pickle.dumps(attention(spec, tmp_path))


def test_other_devices_are_refused(tmp_path: Path) -> None:
    class Elsewhere:
        type = "xpu"

    attn = attention(standin.plain(), tmp_path)
    q, k, v = qkv()
    with pytest.raises(AttnError, match="runs on cuda"):
        attn.run(_On(q, Elsewhere()), k, v, False, None, None, None, False, {})


class _On:
    """A tensor that claims to be on another device."""

    def __init__(self, x: Any, device: Any) -> None:
        self.device, self._x = device, x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._x, name)
