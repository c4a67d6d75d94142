"""Gradients of calls on the GPU: every example against float64, bits, graphs, checkpointing, torch.compile, memory.

Uninitialised memory is NaN in every test here (torch fills it in deterministic mode), outputs, gradients and workspaces
included: an element that nobody writes is seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders import CAUSAL, spec
from harness import EXAMPLES, built, inputs
from torch.utils.checkpoint import checkpoint

import attngen
from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec, BackwardHints
from attngen.ir.types import Layout
from attngen.ref import dense
from attngen.search_backward import plan_backward
from attngen.syntax import load_all

ORDERED = BackwardHints(deterministic=True)
#: batch, seqlen_q, seqlen_kv, heads_q, heads_kv
SHAPES = [(2, 200, 333, 4, 2), (1, 333, 200, 6, 1), (1, 700, 700, 2, 2), (1, 1, 129, 2, 1), (2, 129, 1, 2, 2)]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


pytestmark = pytest.mark.filterwarnings("ignore:.*E0622", "ignore:.*deterministic")


@pytest.fixture(scope="module")
def causal() -> AttentionSpec:
    return spec(CAUSAL, d=128, backward=ORDERED)


def learn(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


def loss_of(o: torch.Tensor, lse: torch.Tensor, narrow: torch.dtype | None = None) -> torch.Tensor:
    """Gradients of o and lse that differ everywhere; those of o are values of the dtype `narrow` (by default, of o)."""
    g = torch.Generator(device="cuda").manual_seed(9)
    do = torch.randn(o.shape, generator=g, device="cuda").to(narrow or o.dtype)
    dlse = torch.randn(lse.shape, generator=g, device="cuda")
    kept = torch.where(lse.isfinite(), lse, torch.zeros_like(lse))
    return (o * do.to(o.dtype)).sum(dtype=torch.float64) + (kept * dlse.to(kept.dtype)).sum(dtype=torch.float64)


def bshd(s: AttentionSpec, x: torch.Tensor) -> torch.Tensor:
    return x if s.layout is Layout.BSHD else x.transpose(1, 2)


def wanted(s: AttentionSpec, x: list[Any], params: Any, tensors: Any, *, exact: bool) -> dict[str, torch.Tensor]:
    """Gradients by autograd of the dense meaning, in float64 or as plain torch code in the inputs' dtype has them."""
    wide = [t.detach().double() if exact else t.detach() for t in x]
    wide = [t.requires_grad_() for t in wide]
    leaves = {
        n: (t.detach().double() if exact else t.detach().clone()).requires_grad_() if t.requires_grad else t
        for n, t in tensors.items()
    }
    evaluate = dense.attention if exact else dense.same_dtype
    r = evaluate(s, *(bshd(s, t) for t in wide), params, leaves)
    loss_of(bshd(s, r.o), r.lse, x[0].dtype).backward()
    found = {**dict(zip("qkv", wide, strict=True)), **{n: t for n, t in leaves.items() if t.requires_grad}}
    return {n: t.grad for n, t in found.items() if t.grad is not None}


def verify(s: AttentionSpec, x: list[Any], params: Any = None, tensors: Any = None) -> None:
    """Gradients of one call, by the error rule: at most twice the error of plain torch, and two 16-bit ulps.

    16-bit ulps for fp32 gradients of captured tensors too: rowsum(dO * O) takes the saved, rounded O, where plain torch
    differentiates a softmax that is not rounded yet, and sums over rows do not average that out.
    """
    params, tensors = params or {}, tensors or {}
    loss_of(*built(s)(*x, **params, **tensors, return_lse=True)).backward()
    exact, plain = (wanted(s, x, params, tensors, exact=e) for e in (True, False))
    got = {**dict(zip("qkv", x, strict=True)), **{n: t for n, t in tensors.items() if t.requires_grad}}
    for name, t in got.items():
        want = exact.get(name, torch.zeros_like(t, dtype=torch.float64))
        assert t.grad.shape == t.shape and t.grad.dtype is t.dtype
        error = float((t.grad.double() - want).abs().max())
        baseline = float((plain.get(name, want).double() - want).abs().max())
        allowed = 2 * baseline + 2 * torch.finfo(x[0].dtype).eps * float(want.abs().max())
        assert error <= allowed, f"{s.name} d{name}: error {error:.3e}, allowed {allowed:.3e} (torch {baseline:.3e})"


def served(s: AttentionSpec) -> None:
    """Skip where no backward kernel serves the spec yet, with its words."""
    try:
        built(s).compile(backward=True)
    except AttnError as reason:
        if reason.code not in ("E0402", "E0403"):
            raise
        pytest.skip(str(reason).splitlines()[0])


BLOCKS = [s for path in sorted(EXAMPLES.glob("*.attn")) for s in load_all(path)]


@pytest.mark.parametrize("s", BLOCKS, ids=lambda s: s.name)
def test_every_example(s: AttentionSpec) -> None:
    served(s)
    for seed, (b, sq, skv, hq, hkv) in enumerate(SHAPES):
        if s.name == "longformer" and sq > skv:
            continue  # it reads a flag of each query at its key's place
        shape = samples.Shape(b, hq, hkv, sq, skv)
        params = samples.params(s)
        tensors = samples.tensors(s, shape, device="cuda", seed=seed)
        for t in s.tensors:
            tensors[t.name].requires_grad_(t.grad)
        verify(s, learn(*inputs(s, b, sq, skv, hq, hkv, seed=seed)), params, tensors)


@pytest.mark.parametrize("d", [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_head_dims(d: tuple[int, int], dtype: str) -> None:
    s = spec(CAUSAL, d=d[0], dv=d[1], dtype=dtype)
    served(s)
    for shape in SHAPES:
        verify(s, learn(*inputs(s, *shape)))


@pytest.mark.parametrize("beyond", [0, 1])
def test_lengths_around_the_limit_of_a_plan(causal: AttentionSpec, beyond: int) -> None:
    """The longest call of the plan of short ones, and the shortest of the other's, in turns and without."""
    (limit,) = plan_backward(causal).limits
    for s in (causal, spec(CAUSAL, d=128)):
        verify(s, learn(*inputs(s, 1, limit + beyond, limit + beyond, 2, 1)))


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_groups_and_layouts(group: int, layout: str) -> None:
    s = spec(CAUSAL, d=64, layout=layout)
    for b, sq, skv in ((2, 150, 300), (1, 513, 257)):
        verify(s, learn(*inputs(s, b, sq, skv, 2 * group, 2)))


def test_strided_inputs(causal: AttentionSpec) -> None:
    """Slices of packed qkv, expanded keys, swapped axes: gradients arrive in the base tensors."""
    attn = built(causal)
    packed = torch.randn(2, 333, 8, 128, device="cuda").bfloat16().requires_grad_()
    loss_of(*attn(*packed.split([4, 2, 2], 2), return_lse=True)).backward()
    x = learn(*(t.contiguous() for t in packed.detach().split([4, 2, 2], 2)))
    loss_of(*attn(*x, return_lse=True)).backward()
    assert torch.equal(packed.grad, torch.cat([t.grad for t in x], 2))
    one = learn(x[1].detach()[:, :, :1])[0]
    loss_of(*attn(x[0], one.expand(-1, -1, 2, -1), x[2], return_lse=True)).backward()
    k = learn(one.detach().expand(-1, -1, 2, -1).contiguous())[0]
    loss_of(*attn(x[0], k, x[2], return_lse=True)).backward()
    assert torch.equal(one.grad, k.grad.sum(2, keepdim=True))
    swapped = learn(x[0].detach().transpose(1, 2).contiguous().transpose(1, 2))[0]
    attn(swapped, x[1], x[2]).sum().backward()
    assert swapped.grad.stride() == swapped.stride()


@pytest.mark.parametrize("offset", [-100.0, 100.0])
def test_large_lse(offset: float) -> None:
    s = spec(CAUSAL, d=64)
    q, k, v = inputs(s, 1, 500, 500, 2, 2)
    row = torch.full_like(k[:, :1], math.sqrt(abs(offset) / 8), dtype=torch.float32)
    q, k = q.float() * 0.1 + row, k.float() * 0.1 + math.copysign(1, offset) * row
    verify(s, learn(q.to(v.dtype), k.to(v.dtype), v))


@pytest.mark.parametrize(("sq", "skv"), [(0, 100), (100, 0), (0, 0)])
def test_zero_lengths(causal: AttentionSpec, sq: int, skv: int) -> None:
    x = learn(*inputs(causal, 2, sq, skv, 4, 2))
    loss_of(*built(causal)(*x, return_lse=True)).backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in x)


def test_only_what_is_wanted(causal: AttentionSpec) -> None:
    """The same bits, whichever other gradients are computed beside them."""
    attn = built(causal)
    whole = learn(*inputs(causal, 2, 300, 400, 4, 2))
    loss_of(*attn(*whole, return_lse=True)).backward()
    for names in ("q", "k", "v", "qk", "kv", "qv"):
        x = [t.detach().requires_grad_(n in names) for n, t in zip("qkv", whole, strict=True)]
        loss_of(*attn(*x, return_lse=True)).backward()
        for n, t, want in zip("qkv", x, whole, strict=True):
            assert (t.grad is not None) == (n in names) and (t.grad is None or torch.equal(t.grad, want.grad))


@pytest.mark.parametrize("rows", [1500, 1600])
def test_equal_bits_a_hundred_times_under_load(causal: AttentionSpec, rows: int) -> None:
    """Two streams at once, beside matrix products that take SMs away: plans of short and long calls."""
    attn = built(causal)
    x = learn(*inputs(causal, 2, rows, rows, 8, 2))
    do = torch.randn_like(x[0])
    want = torch.autograd.grad(attn(*x), x, do)
    load = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(50):
        got = []
        with torch.cuda.stream(streams[2]):
            load @ load
        for stream in streams[:2]:
            with torch.cuda.stream(stream):
                got.append(torch.autograd.grad(attn(*x), x, do))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for grads in got for a, b in zip(grads, want, strict=True))


def test_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)
    free, ordered = spec(CAUSAL, d=64), spec(CAUSAL, d=64, backward=ORDERED)
    x = learn(*inputs(free, 1, 300, 300, 2, 2))
    with pytest.raises(AttnError) as caught:
        built(free)(*x).sum().backward()
    assert caught.value.code == "E0622"
    built(ordered)(*x).sum().backward()
    built(free)(x[0].detach(), *x[1:]).sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(causal: AttentionSpec, reentrant: bool) -> None:
    attn = built(causal)
    x, y = (learn(*inputs(causal, 2, 500, 500, 4, 2)) for _ in range(2))
    loss_of(*attn(*x, return_lse=True)).backward()
    loss_of(*checkpoint(lambda *t: attn(*t, return_lse=True), *y, use_reentrant=reentrant)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(x, y, strict=True))


def test_cuda_graph_of_a_training_step(causal: AttentionSpec) -> None:
    attn = built(causal)
    x = learn(*inputs(causal, 2, 500, 500, 4, 2))
    do = torch.randn_like(x[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(attn(*x), x, do)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = attn(*x, return_lse=True)
        grads = torch.autograd.grad((o, lse), x, (do, torch.ones_like(lse)))
    for seed in range(3):
        with torch.no_grad():
            for t, new in zip(x, inputs(causal, 2, 500, 500, 4, 2, seed=seed + 5), strict=True):
                t.copy_(new)
        for g in grads:
            g.fill_(float("nan"))
        graph.replay()
        eager = attn(*x, return_lse=True)
        want = torch.autograd.grad(eager, x, (do, torch.ones_like(lse)))
        torch.cuda.synchronize()
        assert torch.equal(o, eager[0]) and all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


def test_a_graph_with_a_captured_gradient() -> None:
    """The host's part of it neither waits nor copies to the GPU."""
    s = attngen.build(EXAMPLES / "gpt_oss.attn").spec
    attn = built(s)
    x = learn(*inputs(s, 1, 300, 300, 8, 2))
    sinks = torch.randn(8, device="cuda", requires_grad=True)
    do = torch.randn_like(x[0])
    want = torch.autograd.grad(attn(*x, sinks=sinks), [*x[1:], sinks], do)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(attn(*x, sinks=sinks), [*x[1:], sinks], do)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_compiled_while_a_graph_is_captured() -> None:
    s = spec(CAUSAL, d=64, backward=ORDERED)
    attn = attngen.build(s)
    x = learn(*inputs(s, 1, 200, 200, 2, 2))
    with torch.no_grad():
        attn(*x)
    torch.cuda.synchronize()
    with pytest.raises(AttnError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        attn(*x)
    assert caught.value.code == "E0621"


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(causal: AttentionSpec, dynamic: bool) -> None:
    attn = built(causal)
    torch._dynamo.reset()

    def step(q: Any, k: Any, v: Any) -> Any:
        o, lse = attn(q * 1.0, k, v, return_lse=True)
        return (o * 0.5).float().sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for n in (300, 400, 517):
        x = learn(*inputs(causal, 2, n, n, 4, 2))
        y = learn(*x)
        compiled(*x).backward()
        step(*y).backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(x, y, strict=True)), n


def test_torch_compile_with_graphs(causal: AttentionSpec) -> None:
    attn = built(causal)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *t: attn(*t).float().sum(), fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        x = learn(*inputs(causal, 1, 300, 300, 2, 2, seed=seed))
        y = learn(*x)
        torch.compiler.cudagraph_mark_step_begin()
        compiled(*x).backward()
        attn(*y).float().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(x, y, strict=True))


def test_autocast_and_the_other_dtype(causal: AttentionSpec) -> None:
    x = learn(*(t.float() for t in inputs(causal, 1, 200, 200, 2, 2)))
    for dtype in (torch.bfloat16, torch.float16):
        for t in x:
            t.grad = None
        with torch.autocast("cuda", dtype):
            built(causal)(*x).float().pow(2).sum().backward()
        assert all(t.grad.dtype is torch.float32 and t.grad.isfinite().all() and t.grad.any() for t in x)


def test_accumulation_and_double_use(causal: AttentionSpec) -> None:
    attn = built(causal)
    x = learn(*inputs(causal, 1, 300, 300, 2, 2))
    o = attn(*x)
    do = torch.randn_like(o)
    first = torch.autograd.grad(o, x, do, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(o, x, do), strict=True))
    for _ in range(2):
        attn(*x).backward(do)
    assert all(torch.equal(t.grad, g + g) for t, g in zip(x, first, strict=True))


def test_peak_memory() -> None:
    """S 32K, d 128, 32 heads: inputs, results, gradients, one fp32 dQ and statistics of rows; nothing else, ever."""
    torch.use_deterministic_algorithms(False)
    s = spec(CAUSAL, d=128)
    attn = built(s)
    n, h = 32768, 32
    warm = learn(*inputs(s, 1, 256, 256, 2, 2))
    attn(*warm).sum().backward()
    x = learn(*inputs(s, 1, n, n, h, h))
    do = torch.randn_like(x[0])
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attn(*x).backward(do)
    torch.cuda.synchronize()
    whole = n * h * 128 * 2
    rows = n * h * 4
    assert torch.cuda.max_memory_allocated() - before <= 4 * whole + 2 * whole + 8 * rows + (8 << 20)
    assert torch.cuda.memory_allocated() - before <= 3 * whole + (8 << 20), "the workspace is gone"
