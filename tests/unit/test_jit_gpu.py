"""The callable on a Hopper GPU: results, refusals, streams, graphs, torch.compile. Cost: `attngen bench --host`."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_jit_call import BAD

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.jit.kernel import Attention
from attngen.ref import blockwise

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
FULL = "attn 1\n\nattention plain {\n  head_dim = 64\n}\n"
RICH = """attn 1

attention rich {
  head_dim = 64
  param window: int >= 1 = 64
  param gain: float = 1.0
  param flip: bool = false
  tensor bias: f32[batch, heads_q]
  score = s * gain + bias[b, h]
  mask  = (kv_idx <= q_pos and q_pos - kv_idx < window) or flip
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Attention:
    return attngen.build(FULL, cache_dir=folder)


@pytest.fixture(scope="module")
def rich(folder: Path) -> Attention:
    return attngen.build(RICH, cache_dir=folder)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def qkv(
    b: int = 2, sq: int = 70, hq: int = 4, skv: int = 150, hkv: int = 2, device: Any = "cuda", seed: int = 0
) -> Any:
    g = torch.Generator().manual_seed(seed)
    shapes = ((sq, hq), (skv, hkv), (skv, hkv))
    return tuple(torch.randn(b, s, h, 64, generator=g).bfloat16().to(device) for s, h in shapes)


def agrees(attn: Attention, got: Any, q: Any, k: Any, v: Any, scale: float | None = None, **named: Any) -> bool:
    """Against the float reference, within bf16."""
    params = {p.name: named.get(p.name, p.default) for p in attn.spec.params}
    tensors = {t.name: named[t.name] for t in attn.spec.tensors}
    want, _ = blockwise.attention(attn.spec, q.float(), k.float(), v.float(), params, tensors, scale)
    return bool((got.float() - want.float()).abs().max() < 3e-2)


def test_results_and_the_cache(plain: Attention, folder: Path) -> None:
    q, k, v = qkv()
    o, lse = plain(q, k, v, return_lse=True)
    assert agrees(plain, o, q, k, v) and lse.shape == (2, 4, 70)
    assert plain.path is not None and plain.path.is_relative_to(folder)
    again = attngen.build(FULL, cache_dir=folder)
    assert torch.equal(again(q, k, v), o)
    assert torch.equal(pickle.loads(pickle.dumps(plain))(q, k, v), o)
    out = torch.empty_like(o)
    assert plain(q, k, v, out=out) is out and torch.equal(out, o)
    assert agrees(plain, plain(q, k, v, scale=0.3), q, k, v, scale=0.3)


def test_params_and_tensors(rich: Attention) -> None:
    q, k, v = qkv()
    bias = torch.randn(2, 4, device="cuda")
    for named in ({}, {"window": 7}, {"gain": 0.5, "window": 1}, {"flip": True}):
        assert agrees(rich, rich(q, k, v, bias=bias, **named), q, k, v, bias=bias, **named), named
    wide = bias[:1].expand(2, 4)
    assert torch.equal(rich(q, k, v, bias=bias[:1]), rich(q, k, v, bias=wide))


@pytest.mark.parametrize("case", [c for c in BAD if c not in ("not a tensor", "none")])
def test_the_real_entry_point_refuses_what_it_must(plain: Attention, case: str) -> None:
    """Python checks nothing on this path: whatever the entry point lets through would compute nonsense."""
    change, code, words = BAD[case]
    device = "cpu" if case == "device" else "cuda"
    args = [x.to("cuda") for x in change(*qkv(sq=16, skv=24))] if device == "cuda" else list(qkv(sq=16, skv=24))
    if case in ("odd stride", "head_dim stride", "alignment"):  # .to() tidies strides: make them on the GPU
        args = list(change(*qkv(sq=16, skv=24)))
        args[0] = {
            "odd stride": lambda q: torch.randn(2, 16, 4, 65, device="cuda").bfloat16()[..., :64],
            "head_dim stride": lambda q: q.cuda().transpose(1, 3).contiguous().transpose(1, 3),
            "alignment": lambda q: torch.zeros(q.numel() + 1, dtype=q.dtype, device="cuda")[1:].view(q.shape),
        }[case](args[0])
    if case == "device":
        args[1] = args[1].cpu()
        words = "`k` is on cpu"
    with pytest.raises(AttnError) as caught:
        plain(*args)
    assert caught.value.code == code and words in str(caught.value), str(caught.value)


def test_strides(plain: Attention) -> None:
    q, k, v = qkv()
    want = plain(q, k, v)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(plain(*swapped), want)
    padded = [torch.nn.functional.pad(x, (0, 8))[..., :64] for x in (q, k, v)]
    assert torch.equal(plain(*padded), want)
    one = [x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v)]
    assert torch.equal(plain(q, *one), plain(q, *(x.contiguous() for x in one)))
    q1, k1, v1 = qkv(b=1, sq=1)
    odd = q1.as_strided(q1.shape, (3, 5, 64, 1))
    assert torch.equal(plain(odd, k1, v1), plain(q1, k1, v1))


@pytest.mark.parametrize("empty", [{"sq": 0}, {"b": 0}, {"skv": 0}, {"hq": 0}])
def test_empty_shapes(plain: Attention, empty: dict[str, int]) -> None:
    o, lse = plain(*qkv(**empty), return_lse=True)
    assert not o.float().any() and bool((lse == -torch.inf).all())


def test_two_streams_at_once(plain: Attention) -> None:
    """Two launches in flight have a tile counter each."""
    inputs = [qkv(sq=2048, skv=2048, seed=s) for s in range(2)]
    want = [plain(*x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                got.append(plain(*x))
        torch.cuda.synchronize()
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_threads(plain: Attention) -> None:
    inputs = [qkv(seed=s) for s in range(4)]
    want = [plain(*x) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                got = plain(*inputs[i])
            torch.cuda.current_stream().synchronize()
            if not torch.equal(got, want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_cuda_graph(plain: Attention) -> None:
    q, k, v = qkv(sq=512, skv=512)
    plain(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = plain(q, k, v, return_lse=True)
        o2 = plain(o, k, v)
    for seed in range(3):
        for x, new in zip((q, k, v), qkv(sq=512, skv=512, seed=seed + 1), strict=True):
            x.copy_(new)
        graph.replay()
        eager, eager_lse = plain(q, k, v, return_lse=True)
        assert torch.equal(o, eager) and torch.equal(lse, eager_lse) and torch.equal(o2, plain(eager, k, v))


def test_a_graph_beside_eager_calls(plain: Attention) -> None:
    """A replay on another stream must not share its counter with eager launches."""
    q, k, v = qkv(sq=2048, skv=2048)
    want = plain(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = plain(q, k, v)
    side = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(side):
            graph.replay()
        eager = plain(q, k, v)
        torch.cuda.synchronize()
        assert torch.equal(o, want) and torch.equal(eager, want)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(rich: Attention, mode: str) -> None:
    torch._dynamo.reset()

    def layer(q: Any, k: Any, v: Any, bias: Any, window: int) -> Any:
        return rich(q * 2, k, v, bias=bias, window=window) + 1

    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(4):
        q, k, v = qkv(seed=seed)
        bias = torch.randn(2, 4, device="cuda")
        got = compiled(q, k, v, bias, 9)
        assert (got.float() - layer(q, k, v, bias, 9).float()).abs().max() < 2e-2


def test_torch_compile_any_length(plain: Attention) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: plain(*x), fullgraph=True, dynamic=True)
    for sq, skv in ((1, 1), (63, 64), (300, 1000), (65, 4097)):
        x = qkv(sq=sq, skv=skv)
        assert torch.equal(compiled(*x), plain(*x))


def test_autocast_and_the_other_dtype(plain: Attention) -> None:
    q, k, v = (x.float() for x in qkv())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert plain(q, k, v).dtype is torch.bfloat16
    with torch.autocast("cuda", dtype=torch.float16):
        half = plain(q, k, v)
    assert half.dtype is torch.float16 and torch.equal(half, plain(q.half(), k.half(), v.half()))
    assert agrees(plain, half, q, k, v)


def test_transforms_are_refused(plain: Attention) -> None:
    q, k, v = qkv()
    with pytest.raises(AttnError) as caught:
        torch.vmap(plain)(q[None], k[None], v[None])
    assert caught.value.code == "E0612"


def test_copies_and_modules(plain: Attention) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = plain

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return self.attn(q, k, v)

    x = qkv()
    assert torch.equal(copy.deepcopy(Layer())(*x), plain(*x))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_gpu(plain: Attention) -> None:
    want = plain(*qkv())
    got = plain(*qkv(device="cuda:1"))
    assert got.device.index == 1 and torch.equal(got.cpu(), want.cpu())
    assert torch.cuda.current_device() == 0
    q, k, v = qkv()
    with pytest.raises(AttnError) as caught:
        plain(q, k.to("cuda:1"), v)
    assert caught.value.code == "E0605"
