"""Calls of generated backwards in the checker: inputs, one run, and the error rule against float64 autograd."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import ModuleType
from typing import Any

import torch
from backward_plans import alone, scattered
from ptxcheck.compile import Code, compile_backward, load_text
from ptxcheck.launch import check, map_arguments, table_arguments
from ptxcheck.report import Report

from attngen import samples
from attngen.emit.backward import emit_backward
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.expr import atom
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout
from attngen.jit.scale import Scale
from attngen.passes.epilogue import rewrites_do
from attngen.ref import dense
from attngen.ref.backward import attention_backward
from attngen.ref.interp_backward import Result, Trace
from attngen.samples import Shape
from attngen.search_backward import plan_backward

Tensor = torch.Tensor
INPUTS = ("q", "k", "v", "o", "do", "lse", "dlse")
OUTPUTS = ("dq", "dk", "dv")
NAMES = (*INPUTS, *OUTPUTS, "workspace", "softmax_scale", "workers")
DTYPES = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.F32: torch.float32}


@dataclass(frozen=True)
class Kernels:
    """A compiled backward: its plans, its module, its code."""

    plans: BackwardPlanSet
    module: ModuleType
    code: Code
    wanted: str

    @cached_property
    def meta(self) -> dict[str, Any]:
        return self.module.ATTN_META["backward"]


@cache
def kernels(
    spec: AttentionSpec, wanted: str = "qkv", captured: tuple[str, ...] = (), tile: str = "", lines: bool = False
) -> Kernels:
    """The backward of `spec`, with the tile of long calls or the one of that name, compiled once a session."""
    plans = alone(plan_backward(spec, captured=captured), tile)
    module = load_text(emit_backward(plans).text, f"{spec.name}_bwd")
    return Kernels(plans, module, compile_backward(module, wanted, lines=lines), wanted)


@dataclass(frozen=True)
class Call:
    """Everything one call reads, in (batch, seqlen, heads, head_dim) whatever the layout of the spec is."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor
    params: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def expected(self, captured: Sequence[str]) -> dict[str, tuple[Tensor, float]]:
        """Gradient by name: exact, and how far it may be off: twice torch's error in the same dtype, and two ulps.

        Sums of captured tensors may err twice as much, too, as float64 does from the O and LSE that the call saves:
        they add up what the rounding of O leaves in D, which torch's softmax never has.
        """
        exact = self._autograd(dense.attention, torch.float64, captured)
        plain = self._autograd(dense.same_dtype, self.q.dtype, captured)
        wide = [x.double() for x in (self.q, self.k, self.v, self.o, self.lse, self.do, self.dlse)]
        tensors = {n: x.double() if n in captured else x for n, x in self.tensors.items()}
        saved = attention_backward(self.spec, *wide, self.params, tensors, wanted=captured).captured
        out = {}
        for name, e in exact.items():
            ulp = float(torch.finfo(self.q.dtype if name in OUTPUTS else torch.float32).eps * e.abs().max())
            errors = [float((x[name].double() - e).abs().max()) for x in (plain, saved) if name in x]
            out[name] = e, 2 * max(errors) + 2 * ulp
        return out

    def _autograd(self, meaning: Any, kind: torch.dtype, captured: Sequence[str]) -> dict[str, Tensor]:
        leaves = [x.detach().to(kind).requires_grad_() for x in (self.q, self.k, self.v)]
        wide = torch.float64 if kind is torch.float64 else torch.float32
        learned = {n: self.tensors[n].detach().to(wide).requires_grad_() for n in captured}
        out = meaning(self.spec, *leaves, self.params, {**self.tensors, **learned})
        finite = out.lse.masked_fill(out.lse == -math.inf, 0.0)
        loss = (out.o * self.do.to(out.o.dtype)).sum() + (finite * self.dlse.to(finite.dtype)).sum()
        names, inputs = [*OUTPUTS, *captured], [*leaves, *learned.values()]
        found = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else [None] * len(inputs)
        return {n: torch.zeros_like(x) if g is None else g for n, g, x in zip(names, found, inputs, strict=True)}


def call(
    spec: AttentionSpec, shape: Shape, *, params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None, seed: int = 0, dlse: bool = True,
) -> Call:  # fmt: skip
    """Random inputs; O is rounded and LSE fp32, as a forward saves them. Without `dlse` it is zeros of stride 0."""
    q, k, v = samples.qkv(spec, shape, seed=seed)
    given = {n: x for n, x in (params or {}).items() if n in {p.name for p in spec.params}}
    params, tensors = samples.params(spec, given), {**samples.tensors(spec, shape, seed=seed), **(tensors or {})}
    with torch.no_grad():
        out = dense.attention(spec.replace(epilogue=atom("o")), q, k, v, params, tensors)  # what a forward saves
    g = torch.Generator().manual_seed(seed + 100)
    kind = DTYPES[spec.out_dtype or spec.dtype]
    do = torch.randn(out.o.shape, generator=g).to(kind)
    grad_lse = torch.randn(out.lse.shape, generator=g) if dlse else torch.zeros(1, 1, 1).expand(out.lse.shape)
    return Call(spec, q, k, v, out.o.to(kind), do, out.lse.float(), grad_lse, params, tensors)


def run(
    made: Kernels,
    c: Call,
    *,
    seed: int = 0,
    sms: int = 4,
    workers: int = 132,
    outputs: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], Report]:
    """One call: dq, dk, dv and the buffers of captured gradients by position, NaN where nothing was written.

    `outputs`: memory for dq, dk and dv of bshd, filled with NaN.
    """
    bhsd = c.spec.layout is Layout.BHSD
    tile_m, words = (made.meta["plans"][0][n] for n in ("tile_m", "workspace_per_tile"))
    b, sq, hq, _ = c.q.shape
    parts = workers * made.meta["plans"][0].get("part_words", 0)
    workspace = torch.full((b * hq * -(-sq // tile_m) * words + parts,), math.nan)
    given = outputs is not None
    outputs = outputs or [torch.full(x.shape, math.nan, dtype=x.dtype) for x in (c.q, c.k, c.v)]
    extra = [buffer(entry, c) for entry in made.meta["gradients"]]
    if rewrites_do(c.spec):
        shape = (*c.do.shape[:1], *((c.do.shape[2], c.do.shape[1]) if bhsd else c.do.shape[1:3]), c.do.shape[3])
        extra.append(torch.full(shape, math.nan, dtype=c.q.dtype))
    tail = (*c.params.values(), *(expanded(c, n) for n in c.tensors))
    scale = Scale(c.spec)
    value = scale.default if scale.default == scale.default else scale.of(tail)
    tail += map_arguments(made.meta, 0, c.q, c.k, "bshd")
    tail += table_arguments(made.module, c.q, c.k, "bshd")
    big = [x.transpose(1, 2) if bhsd else x for x in (c.q, c.k, c.v, c.o, c.do, *outputs)]
    big = [x if (n < 5 or given) and not bhsd else x.contiguous() for n, x in enumerate(big)]
    report = check(
        made.code, *big[:5], c.lse, c.dlse, *big[5:], workspace, value, workers, *tail, *extra, seed=seed, sms=sms,
        names=[*NAMES, *(f"extra argument {n}" for n in range(len(tail) + len(extra)))], **options,
    )  # fmt: skip
    assert not report.faults
    back = [x.transpose(1, 2) if bhsd else x for x in big[5:]]
    entries = made.meta["gradients"]
    sums = {
        f"extra {n}": x.transpose(1, 2) if e["kind"] == "output" and not bhsd else once(x)
        for n, (e, x) in enumerate(zip(entries, extra, strict=False))
    }
    return {**dict(zip(OUTPUTS, back, strict=True)), **sums}, report


def once(x: Tensor) -> Tensor:
    """Each element of an expanded tensor once."""
    for axis, stride in enumerate(x.stride()):
        x = x.narrow(axis, 0, 1) if stride == 0 else x
    return x


def expanded(c: Call, name: str) -> Tensor:
    """A captured tensor in its declared dims, stride 0 where one element stands for all."""
    decl = c.spec.tensor(name)
    b, sq, hq, _ = c.q.shape
    known = {"batch": b, "heads_q": hq, "heads_kv": c.k.shape[2], "seqlen_q": sq, "seqlen_kv": c.k.shape[1]}
    x = c.tensors[name]
    return x.expand([d if isinstance(d, int) else known.get(d, n) for d, n in zip(decl.dims, x.shape, strict=True)])


def buffer(entry: Mapping[str, Any], c: Call) -> Tensor:
    """Where one captured gradient goes: NaN where the kernels write all of it, zeros where they add."""
    b, sq, hq, _ = c.q.shape
    if entry["kind"] == "element":
        x = expanded(c, entry["tensor"])
        return torch.zeros_like(c.tensors[entry["tensor"]], dtype=torch.float32).expand(x.shape)
    if entry["kind"] == "output":
        shape = (b, hq, sq, c.v.shape[3]) if c.spec.layout is Layout.BHSD else (b, sq, hq, c.v.shape[3])
        return torch.full(shape, math.nan, dtype=DTYPES[c.spec.tensor(entry["tensor"]).dtype])
    shape = (b, hq, c.k.shape[1] if entry["kind"] == "column" else sq)
    return torch.full(shape, math.nan if entry["kind"] in ("sink", "output_row") else 0.0)


def verify(made: Kernels, c: Call, *, seeds: Sequence[int] = (0,), sms: int = 4, **options: Any) -> dict[str, Tensor]:
    """Runs under several schedules: no fault, the error rule for what is wanted, nothing written elsewhere."""
    learned = tuple(dict.fromkeys(e["tensor"] for e in made.meta["gradients"]))
    expected = c.expected(learned)
    for seed in seeds:
        found, _ = run(made, c, seed=seed, sms=sms, **options)
        for name, letter in zip(OUTPUTS, "qkv", strict=True):
            if letter not in made.wanted:
                assert found[name].isnan().all(), f"{name} is not wanted, and is written"
                continue
            close(name, found[name], *expected[name])
        if learned:
            extra = tuple(x.double() for n, x in found.items() if n.startswith("extra"))
            assert not any(x.isnan().any() for x in extra)
            nothing = c.q.new_zeros(())
            got = scattered(
                made.plans, Result(nothing, nothing, nothing, extra, Trace(1, 1)), c.q, c.k, c.v, dict(c.params),
                dict(c.tensors),
            )  # fmt: skip
            for name in learned:
                close(name, got[name], *expected[name])
    return found


def close(name: str, got: Tensor, exact: Tensor, allowed: float) -> None:
    assert not got.isnan().any(), f"{name} has {int(got.isnan().sum())} NaN of {got.numel()}"
    error = float((got.double() - exact).abs().max())
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def strided(c: Call) -> Call:
    """The same call with rows of q, k, v, o, do inside wider rows, and lse and dlse in another order."""

    def wide(x: Tensor) -> Tensor:
        out = torch.full((*x.shape[:3], x.shape[3] + 16), math.nan, dtype=x.dtype)
        out[..., 8:-8] = x
        return out[..., 8:-8]

    def other(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    return replace(
        c, q=wide(c.q), k=wide(c.k), v=wide(c.v), o=wide(c.o), do=wide(c.do), lse=other(c.lse), dlse=other(c.dlse)
    )
