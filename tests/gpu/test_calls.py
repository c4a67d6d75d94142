"""How calls behave on the GPU: strides, streams, graphs, torch.compile, autocast, large tensors, determinism."""

from __future__ import annotations

import pytest
import torch
from builders import CAUSAL, spec
from harness import built, inputs, poisoned, verify

import attngen
from attngen.ref.compare import assert_close


@pytest.fixture(scope="module")
def causal():
    return spec(CAUSAL, d=128)


def test_strided_views(causal):
    """Packed qkv, sliced heads, expanded batch and heads, a padded head_dim: nothing is copied, all is right."""
    b, n, h, d = 2, 333, 4, 128
    packed = torch.randn(b, n, 3, h, d, device="cuda").bfloat16()
    verify(causal, *packed.unbind(2))
    wide = torch.full((b, n, 2 * h, d + 24), float("nan"), device="cuda").bfloat16()
    wide[:, :, ::2, :d] = torch.randn(b, n, h, d, device="cuda").bfloat16()
    q = wide[:, :, ::2, :d]
    k, v = (torch.randn(1, n, 1, d, device="cuda").bfloat16().expand(b, n, 2, d) for _ in range(2))
    verify(causal, q, k, v)
    one = torch.randn(b, 1, h, d, device="cuda").bfloat16().expand(b, n, h, d)
    verify(causal, one, *inputs(causal, b, n, n, h, h)[1:])
    swapped = torch.randn(n, b, h, d, device="cuda").bfloat16().transpose(0, 1)
    verify(causal, swapped, *inputs(causal, b, n, n, h, h)[1:])


def test_size_one_axes_with_odd_strides(causal):
    q, k, v = inputs(causal, 1, 200, 200, 1, 1)
    odd = [x.as_strided(x.shape, (3, x.stride(1), 5, 1)) for x in (q, k, v)]
    verify(causal, *odd)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda q: q.transpose(-1, -2).contiguous().transpose(-1, -2), "contiguous"),
        (lambda q: torch.empty(*q.shape[:3], 132, device="cuda", dtype=q.dtype)[..., :128], "8"),
        (lambda q: torch.empty(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape), "16"),
    ],
)
def test_strides_that_tma_cannot_take(causal, make, words):
    q, k, v = inputs(causal, 2, 100, 100, 2, 2)
    with pytest.raises(attngen.AttnError) as failure:
        built(causal)(make(q), k, v)
    assert words in str(failure.value) and "`q`" in str(failure.value)


def test_two_streams_at_once(causal):
    """Launches in flight together do not share a tile counter."""
    attn = built(causal)
    streams = [torch.cuda.Stream() for _ in range(4)]
    q, k, v = inputs(causal, 4, 1000, 1000, 16, 16)
    wanted = attn(q, k, v)
    torch.cuda.synchronize()
    outs = []
    for _ in range(25):
        for s in streams:
            with torch.cuda.stream(s):
                outs.append(attn(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in outs)


def test_equal_bits_from_run_to_run(causal):
    attn = built(causal)
    q, k, v = inputs(causal, 2, 2500, 2500, 4, 4)
    first = attn(q, k, v, return_lse=True)
    for _ in range(30):
        again = attn(q, k, v, return_lse=True)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_cuda_graph(causal):
    attn = built(causal)
    q, k, v = inputs(causal, 2, 500, 500, 4, 4)
    out, lse = poisoned(q, 128, (2, 4, 500))
    attn(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn(q, k, v, out=out, lse=lse)
    for seed in range(3):
        fresh = inputs(causal, 2, 500, 500, 4, 4, seed=seed)
        for dst, src in zip((q, k, v), fresh, strict=True):
            dst.copy_(src)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_close(out, causal, q, k, v, lse=lse)


def test_two_graphs_replayed_together(causal):
    attn = built(causal)
    q, k, v = inputs(causal, 4, 1000, 1000, 16, 16)
    wanted = attn(q, k, v)
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(attn(q, k, v))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(o, wanted) for o in outs)


def test_torch_compile_fullgraph(causal):
    attn = built(causal)

    @torch.compile(fullgraph=True)
    def layer(q, k, v):
        o, lse = attn(q * 1.0, k, v, return_lse=True)
        return o + 1, lse

    for n in (300, 400):
        q, k, v = inputs(causal, 2, n, n, 4, 2)
        with torch.no_grad():
            o, lse = layer(q, k, v)
        wanted, rows = attn(q, k, v, return_lse=True)
        assert torch.allclose(o.float(), wanted.float() + 1, atol=2e-2) and torch.equal(lse, rows)


def test_autocast(causal):
    attn = built(causal)
    q, k, v = (x.float() for x in inputs(causal, 1, 200, 200, 2, 2))
    with torch.autocast("cuda", torch.bfloat16):
        o = attn(q, k, v)
    assert o.dtype == torch.bfloat16
    with torch.autocast("cuda", torch.float16):
        assert attn(q, k, v).dtype == torch.float16


def test_twin_dtype(causal):
    attn = built(causal)
    q, k, v = (x.half() for x in inputs(causal, 1, 200, 300, 2, 2))
    o, lse = attn(q, k, v, return_lse=True)
    assert_close(o, causal.replace(dtype="fp16"), q, k, v, lse=lse)


def test_more_than_2_31_elements(causal):
    """q and o pass 2**31 elements: offsets are 64-bit."""
    n, h = 140_000, 128
    attn = built(spec(d=128))
    q = torch.randn(1, n, h, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 70, 1, 128, device="cuda").bfloat16() for _ in range(2))
    assert q.numel() > 2**31
    o, lse = attn(q, k, v, return_lse=True)
    for rows in (slice(0, 300), slice(n - 300, n)):
        part = spec(d=128)
        assert_close(o[:, rows, -4:], part, q[:, rows, -4:], k, v, lse=lse[:, -4:, rows])


def test_many_heads_and_batches(causal):
    q, k, v = inputs(causal, 70, 40, 50, 64, 8)
    verify(causal, q, k, v)


def test_no_hidden_copies(causal):
    attn = built(causal)
    q, k, v = inputs(causal, 2, 4096, 4096, 16, 16)
    attn(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = attn(q, k, v, return_lse=True)
    torch.cuda.synchronize()
    made = o.numel() * 2 + lse.numel() * 4
    assert torch.cuda.max_memory_allocated() - before <= made + 4096


def test_nan_is_found_when_asked_for(causal):
    q, k, v = inputs(causal, 1, 100, 100, 2, 2)
    k[0, 5, 1, 7] = float("nan")
    with pytest.raises(attngen.AttnError, match="NaN"):
        built(causal)(q, k, v, check=True)


def test_non_default_stream_orders_with_its_neighbours(causal):
    attn = built(causal)
    stream = torch.cuda.Stream()
    q, k, v = inputs(causal, 2, 800, 800, 8, 8)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        fresh = (q * 2).contiguous()
        o = attn(fresh, k, v)
        doubled = o * 2
    stream.synchronize()
    assert torch.equal(doubled, attn(q * 2, k, v) * 2)
