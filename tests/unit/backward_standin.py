"""A stand-in for generated backward files in the tests of jit: the module API, the contract of the entry point, no GPU.

`source` is a file whose `compile_backward` compiles a tiny real kernel; `Kernel` is an entry point in Python that
computes every output densely in float64 and fills what it is told not to write with nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jit_standin as standin
import pytest
import torch

from attngen.ir.gradient import Contribution, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import launch, variants
from attngen.jit.atoms import environment
from attngen.jit.cache import Entry, KernelCache
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.jit.load import Loaded
from attngen.jit.shapes import sizes_of
from attngen.passes.gradient import gradient_form
from attngen.ref import blockwise
from attngen.ref.evaluate import evaluate
from attngen.source import KernelSource, body_sha256

TILE_M, WORKSPACE = 16, 24


def source(
    spec: AttentionSpec,
    captured: tuple[str, ...] | None = None,
    *,
    plans: int = 1,
    limits: tuple[int, ...] = (),
    step_cycles: tuple[int, ...] = (),
    body: str = "",
    deterministic: bool = False,
) -> KernelSource:
    """The stand-in's backward file with the gradients of `captured`, by default all that the spec declares."""
    rows = [{"tensor": c.tensor, "kind": c.kind.value} for c in contributions(spec, captured)]
    meta: dict[str, Any] = {
        "kernel_id": f"{spec.name}_bwd_sm_90a_{hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:8]}",
        "direction": "backward",
        "plans": [],
        "backward": {
            "deterministic": deterministic,
            "plans": [
                {"name": f"plan_{i}", "tile_m": TILE_M * (i + 1), "tile_n": 64, "workspace_per_tile": WORKSPACE + i}
                for i in range(plans)
            ],
            "limits": list(limits),
            "step_cycles": list(step_cycles),
            "gradients": rows,
        },
        "body_sha256": "0" * 64,
    }
    text = _TEMPLATE.replace("@BODY@", body)
    meta["body_sha256"] = body_sha256(text.replace("@META@", repr(meta)))
    text = text.replace("@META@", repr(meta))
    return KernelSource(text, meta["kernel_id"], hashlib.sha256(text.encode()).hexdigest())


def contributions(spec: AttentionSpec, captured: Collection[str] | None) -> list[Contribution]:
    """Those of `captured` (None: all), in the order in which a file has them."""
    return [c for c in gradient_form(spec).contributions if captured is None or c.tensor in captured]


class Kernel:
    """A compiled backward function of the `wanted` gradients.

    `calls` keeps the arguments of each launch, `outputs` only the addresses of its dq, dk and dv.
    """

    def __init__(
        self, spec: AttentionSpec, wanted: tuple[str, ...], refuse: dict[int, Exception] | None = None
    ) -> None:
        self.spec, self.wanted = spec, wanted
        self.calls: list[tuple[Any, ...]] = []
        self.outputs: list[int] = []
        self.keep = True
        self.refuse = refuse or {}

    def __call__(self, *arguments: Any) -> None:
        self.calls += [arguments] if self.keep else []
        self.outputs = [x.data_ptr() for x in arguments[7:10]]
        if failure := self.refuse.get(len(self.calls)):
            raise failure
        q, k, v, o, do, lse, dlse, dq, dk, dv, workspace, scale, _, *rest = arguments
        spec, count = self.spec, len(self.spec.params)
        named = dict(zip([p.name for p in spec.params], rest[:count], strict=False))
        tensors = dict(zip([t.name for t in spec.tensors], rest[count:], strict=False))
        extra = rest[count + len(spec.tensors) :]
        workspace.fill_(float("nan"))
        env = environment(sizes_of(spec, q, k), named, q.device)
        group = env["h"].numel() // (int(env["h_kv"].max()) + 1)
        q_, k_, v_, o_, do_ = (
            (x if spec.layout is Layout.BHSD else x.transpose(1, 2)).double() for x in (q, k, v, o, do)
        )
        k_, v_ = (x.repeat_interleave(group, 1) for x in (k_, v_))
        form = gradient_form(spec)
        s = scale * q_ @ k_.transpose(-1, -2)
        env["s"] = s
        keep = torch.broadcast_to(evaluate(spec.mask, env, tensors, clamp=True), s.shape)
        z = torch.broadcast_to(evaluate(form.score, env, tensors, clamp=True), s.shape)
        p = torch.where(keep & lse.isfinite()[..., None], (z - lse.double()[..., None]).exp(), 0.0)
        delta = ((do_ * o_).sum(-1) - dlse).unsqueeze(-1)
        dz = p * (do_ @ v_.transpose(-1, -2) - delta)
        ds = dz * evaluate(form.slope, env, tensors, clamp=True) * scale
        self._write(dq, "q", ds @ k_)
        self._write(dk, "k", ds.transpose(-1, -2) @ q_)
        self._write(dv, "v", p.transpose(-1, -2) @ do_)
        for c, buffer in zip(contributions(spec, self.wanted), extra, strict=True):
            if c.kind is GradientKind.SINK:
                sink = torch.broadcast_to(evaluate(spec.sink, env, tensors, clamp=True), delta.shape)
                buffer.copy_((-(sink - lse.double()[..., None]).exp() * delta).squeeze(-1))
                continue
            pairs = dz * evaluate(c.coefficient, env, tensors, clamp=True)
            if c.kind is GradientKind.COLUMN:
                buffer.copy_(pairs.sum(2))
            elif c.kind is GradientKind.ROW:
                buffer.add_(pairs.sum(3))
            else:
                self._reduce(c, buffer, pairs, env, tensors)

    def _write(self, out: Any, name: str, value: Any) -> None:
        """Sums over the query heads that share a head of `out`, as a kernel writes them."""
        if name in self.wanted:
            heads_first = self.spec.layout is Layout.BHSD
            value = value.unflatten(1, (out.shape[1 if heads_first else 2], -1)).sum(2)
            out.copy_(value if heads_first else value.transpose(1, 2))

    def _reduce(self, c: Any, buffer: Any, pairs: Any, env: Any, tensors: Any) -> None:
        """Element by element into the buffer, wherever its strides put an element, as atomic additions do."""
        places = sum(
            evaluate(e, env, tensors, clamp=True).clamp(0, n - 1) * stride
            for e, n, stride in zip(c.indices, buffer.shape, buffer.stride(), strict=True)
        )
        flat = buffer.as_strided((buffer.untyped_storage().nbytes() // 4,), (1,))
        flat.index_put_((torch.broadcast_to(places, pairs.shape),), pairs.float(), accumulate=True)


class Kernels:
    """Stands for `load` in jit.variants: makes a Kernel for each wanted set and remembers it."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.made: list[Kernel] = []

    def __call__(self, source: KernelSource, target: str, cache: KernelCache, *, wanted: Any, progress: Any) -> Loaded:
        count = len(source.meta["backward"]["plans"])
        functions = tuple(Kernel(self.spec, wanted) for _ in range(count))
        self.made += functions
        return Loaded(functions, Entry(Path(), Path(), ()), 0.0)


def forward(spec: AttentionSpec) -> Any:
    """An entry point of a forward kernel, in Python."""

    def function(
        q: Any, k: Any, v: Any, out: Any, lse: Any, counter: Any, scale: float, workers: int, *tail: Any
    ) -> None:
        count = len(spec.params)
        params = dict(zip([p.name for p in spec.params], tail[:count], strict=True))
        tensors = dict(zip([t.name for t in spec.tensors], tail[count:], strict=True))
        swap = spec.layout is Layout.BHSD
        q, k, v = (x.transpose(1, 2) if swap else x for x in (q, k, v))
        o, rows = blockwise.attention(spec, q, k, v, params, tensors, scale)
        out.copy_(o.transpose(1, 2) if swap else o), lse.copy_(rows)

    return function


def attached(
    spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **keywords: Any
) -> tuple[Attention, Kernels]:
    """An Attention whose launches on CPU tensors, forward and backward, go to Python functions."""
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    kernels = Kernels(spec)
    monkeypatch.setattr(variants, "load", kernels)
    made = Attention(
        spec,
        standin.source(standin.plain()),
        "sm_90a",
        KernelCache(tmp_path),
        backward=lambda captured: source(spec, captured, **keywords),
    )
    made.launcher.functions = (forward(spec),)
    made.launcher.ready[-1] = (DeviceState(-1, 132), 132)
    return made, kernels


_TEMPLATE = '''"""Stand-in backward."""
ATTN_META = @META@

import cutlass
import cutlass.cute as cute
import cuda.bindings.driver as cuda
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

PLANS = tuple(p["name"] for p in ATTN_META["backward"]["plans"])
@BODY@


@cute.kernel
def touch(do: cute.Tensor, dq: cute.Tensor, write: cutlass.Constexpr):
    column, _, _ = cute.arch.thread_idx()
    row, h, b = cute.arch.block_idx()
    if cutlass.const_expr(write):
        dq[b, row, h, column] = do[b, row, h, column]


def make_launch(write):
    @cute.jit
    def run(
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor,
        dlse: cute.Tensor, dq: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, workspace: cute.Tensor,
        scale: Float32, workers: Int32, stream: cuda.CUstream,
    ):
        touch(do, dq, write).launch(grid=[q.shape[1], q.shape[2], q.shape[0]], block=[64, 1, 1], stream=stream)

    return run


def compile_backward(index=0, options="", wanted=("q", "k", "v")):
    batch, heads_q, heads_kv = cute.sym_int(), cute.sym_int(), cute.sym_int()
    seqlen_q, seqlen_kv, elements = cute.sym_int(), cute.sym_int(), cute.sym_int()

    def tma(*shape):
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
        return make_fake_tensor(BFloat16, shape, strides, assumed_align=16)

    def plain(*shape):
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    q, k = (batch, seqlen_q, heads_q, 64), (batch, seqlen_kv, heads_kv, 64)
    rows = (batch, heads_q, seqlen_q)
    return cute.compile(
        make_launch("q" in wanted), tma(*q), tma(*k), tma(*k), tma(*q), tma(*q), plain(*rows), plain(*rows), tma(*q),
        tma(*k), tma(*k), plain(elements), Float32(1.0), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}",
    )
'''
