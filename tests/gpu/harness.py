"""Runs a spec's kernel on the GPU and compares it with the float64 dense meaning by the error rule of ref.compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import tensors_for

import attngen
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout
from attngen.jit.kernel import Attention
from attngen.ref.compare import assert_close

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
_built: dict[AttentionSpec, Attention] = {}


def built(spec: AttentionSpec) -> Attention:
    """One Attention for each spec of the session, which keeps to the plans of its file: its siblings have tests of
    their own (`test_packed_calls`, `test_small_calls`).
    """
    if spec not in _built:
        _built[spec] = attngen.build(spec).alone()
    return _built[spec]


def inputs(
    spec: AttentionSpec, b: int, sq: int, skv: int, hq: int, hkv: int, seed: int = 0
) -> tuple[torch.Tensor, ...]:
    """Random q, k, v on the GPU, contiguous in the spec's layout."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    dtype = DTYPES[spec.dtype]

    def make(heads: int, length: int, d: int) -> torch.Tensor:
        shape = (b, length, heads, d) if spec.layout is Layout.BSHD else (b, heads, length, d)
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.float32).to(dtype)

    return make(hq, sq, spec.head_dim_qk), make(hkv, skv, spec.head_dim_qk), make(hkv, skv, spec.head_dim_v)


def poisoned(q: torch.Tensor, d: int, lse_shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN outputs, so that an element nobody writes is seen."""
    out = torch.full((*q.shape[:3], d), float("nan"), dtype=q.dtype, device=q.device)
    return out, torch.full(lse_shape, float("nan"), device=q.device)


def bshd(spec: AttentionSpec, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x if spec.layout is Layout.BSHD else x.transpose(1, 2) for x in tensors]


def verify(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, seed: int = 0, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel into poisoned outputs and compare O and LSE. Returns them."""
    attn = built(spec)
    wide_q, wide_k, wide_v = bshd(spec, q, k, v)
    b, sq, hq, _ = wide_q.shape
    skv = wide_k.shape[1]
    tensors = {n: t.cuda() for n, t in tensors_for(spec, b, sq, skv, hq, seed=seed).items()}
    out, lse = poisoned(q, spec.head_dim_v, (b, hq, sq))
    o, rows = attn(q, k, v, out=out, lse=lse, return_lse=True, **named, **tensors)
    torch.cuda.synchronize()
    assert o is out and rows is lse
    (wide_o,) = bshd(spec, o)
    assert_close(wide_o, spec, wide_q, wide_k, wide_v, lse=rows, params=named, tensors=tensors)
    return o, rows


@contextmanager
def no_waits() -> Iterator[None]:
    """What runs inside fails if it waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replayed(call: Callable[[], torch.Tensor], want: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """`call` captured in a CUDA graph, and what a replay of it fills, which is `want` the first time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)
    return graph, out
