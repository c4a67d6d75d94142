"""Ragged calls of generated forwards, executed by the checker: random lengths, neighbours and padding full of NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from backward_plans import alone
from ptxcheck.compile import compile_backward, compile_module, load_text
from ptxcheck.launch import check
from ptxcheck.report import Report

from attngen import samples
from attngen.emit.backward import emit_backward
from attngen.ir.expr import atom
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import words
from attngen.ir.tile_map import map_words
from attngen.ir.types import Layout, Normalizer
from attngen.jit import captured as jit_captured
from attngen.jit.scale import Scale
from attngen.jit.shapes import sizes_of
from attngen.passes.epilogue import rewrites_do
from attngen.ref import blockwise, dense, ragged
from attngen.search_backward import plan_backward

Tensor = torch.Tensor
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}
NAN = math.nan


def starts(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Call:
    """Inputs of one ragged call. `lengths`: (rows, keys) of each sequence; `tail`: rows and keys of no sequence.

    What belongs to no sequence is NaN: it must reach no result. In padded, `extent` is (Sq, Skv).
    """

    def __init__(
        self, spec: AttentionSpec, lengths: Sequence[tuple[int, int]], heads: tuple[int, int] = (2, 1), *,
        tail: int = 0, extent: tuple[int, int] = (0, 0), seed: int = 0, given: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.varlen = spec, spec.layout is Layout.VARLEN
        rows, keys = [m for m, _ in lengths], [n for _, n in lengths]
        hq, hkv = heads
        if self.varlen:
            sq, skv = sum(rows) + tail, sum(keys) + tail
            self.lengths = {"cu_seqlens_q": starts(rows), "cu_seqlens_kv": starts(keys)}
        else:
            sq, skv = extent
            self.lengths = {"seqused_q": torch.tensor(rows).int(), "seqused_kv": torch.tensor(keys).int()}
        shape = samples.Shape(1 if self.varlen else len(lengths), hq, hkv, sq, skv)
        q, k, v = samples.qkv(spec, shape, seed=seed)
        self.qkv = [x[0] if self.varlen else x for x in (q, k, v)]
        self.params = samples.params(spec, given)
        shape = samples.Shape(len(lengths), hq, hkv, sq, skv)
        self.tensors = samples.tensors(spec, shape, seed=seed)
        kept = ragged.sequences(spec, self.qkv[0], self.qkv[1], self.lengths)
        for x, part in zip(self.qkv, ("rows", "keys", "keys"), strict=True):
            lost = torch.ones(x.shape[: 1 if self.varlen else 2], dtype=torch.bool)
            for s in kept:
                lost[(getattr(s, part),) if self.varlen else (s.b, getattr(s, part))] = False
            x[lost] = NAN

    def expected(self) -> tuple[Tensor, Tensor]:
        """The dense meaning."""
        wide = [x.double() for x in self.qkv]
        return ragged.attention(self.spec, *wide, self.lengths, self.params, self.tensors, how=dense.attention)

    def row_tiles(self, tile_m: int) -> int:
        """Query tiles of a head that a workspace holds."""
        q = self.qkv[0]
        if self.varlen:
            return q.shape[0] // tile_m + len(self.lengths["cu_seqlens_q"])
        return q.shape[0] * -(-q.shape[1] // tile_m)

    def saved(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """O and LSE as a forward saves them, and the gradients that come back; those of no sequence are NaN."""
        q, spec = self.qkv[0], self.spec.replace(epilogue=atom("o"))
        kind = q.dtype if spec.out_dtype is None else DTYPES[spec.out_dtype.value]
        wide = [x.double() for x in self.qkv]
        o, lse = ragged.attention(spec, *wide, self.lengths, self.params, self.tensors, how=dense.attention)
        g = torch.Generator().manual_seed(7)
        do, dlse = torch.randn(o.shape, generator=g).to(kind), torch.randn(lse.shape, generator=g)
        if spec.normalizer is not Normalizer.SOFTMAX:
            dlse = torch.zeros_like(dlse)  # its LSE is a twin's
        o, do = o.to(kind), do.clone()
        lost = q.isnan().any(-1).any(-1)
        do[lost] = o[lost] = NAN
        return o, lse.float(), do, torch.where((lost if self.varlen else lost[:, None]).expand(lse.shape), NAN, dlse)

    def autograd(self, kind: torch.dtype, captured: Sequence[str] = ()) -> list[Tensor]:
        """dq, dk, dv and `captured` by autograd of the dense meaning, or of torch code in the operands' dtype."""
        _, _, do, dlse = self.saved()
        leaves = [x.detach().to(kind).requires_grad_() for x in self.qkv]
        how = dense.attention if kind is torch.float64 else dense.same_dtype
        wide = torch.float64 if kind is torch.float64 else torch.float32
        learned = {n: self.tensors[n].detach().to(wide).requires_grad_() for n in captured}
        tensors = {**self.tensors, **learned}
        out, lse = ragged.attention(self.spec, *leaves, self.lengths, self.params, tensors, how=how)
        there, leaves = lse != -math.inf, [*leaves, *learned.values()]
        loss = (out * do.nan_to_num(0.0).to(out.dtype)).sum() + (lse[there] * dlse[there].nan_to_num(0.0)).sum()
        if not loss.requires_grad:
            return [torch.zeros_like(x) for x in leaves]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    def run(
        self, module: ModuleType, plan: int = 0, *, workers: int = 3, **options: Any
    ) -> tuple[Tensor, Tensor, Report]:
        """O and LSE, NaN where nothing was written, and the report."""
        names, arguments = self.arguments(workers, module.ATTN_META, plan)
        self.arguments_by_name = dict(zip(names, arguments, strict=True))
        report = check(compile_module(module, plan), *arguments, names=names, **options)
        o, lse, counter = arguments[3:6]
        assert counter.item() == 0 or report.faults, f"the kernel leaves its tile counter at {counter.item()}"
        return o, lse, report

    def arguments(self, workers: int, meta: Mapping[str, Any], plan: int = 0) -> tuple[list[str], list[Any]]:
        """What a compiled forward takes, and their names; O and LSE, at 3 and 4, and what it gives last, hold NaN."""
        q, k, v = self.qkv
        batch = len(next(iter(self.lengths.values()))) - self.varlen
        o = torch.full((*q.shape[:-1], v.shape[-1]), NAN, dtype=DTYPES[meta["out_dtype"]])
        lse = torch.full((q.shape[1], q.shape[0]) if self.varlen else (q.shape[0], q.shape[2], q.shape[1]), NAN)
        counter = torch.zeros(1, dtype=torch.int32)
        order = torch.full((2 * (batch + self.varlen) + 1,), -1, dtype=torch.int32)
        scale = Scale(self.spec)
        value = scale.default if scale.default == scale.default else scale.of((*self.params.values(),))
        names = ["q", "k", "v", "o", "lse", "tile_counter", "softmax_scale", "workers", "seq_order"]
        further = {"o_pre": torch.full_like(o, NAN), "saves_o": 1, "max_logit": torch.full_like(lse, NAN)}
        further = {n: further[n] for n in meta.get("further", ())}
        tail = {**self.params, **self.lengths, **self.tensors, **self.tables(meta, plan), **further}
        return [*names, *tail], [q, k, v, o, lse, counter, value, workers, order, *tail.values()]

    def sizes(self) -> dict[str, int]:
        """Extents of the call."""
        batch = len(next(iter(self.lengths.values()))) - self.varlen
        return sizes_of(self.spec, self.qkv[0], self.qkv[1], batch if self.varlen else None)

    def tables(self, meta: Mapping[str, Any], plan: int = 0) -> dict[str, Any]:
        """Workspaces of the mask's tile map and tables, poisoned, each with 1: they are to be filled."""
        found: dict[str, Any] = {}
        own = meta.get("backward", meta)
        if "map" in own:
            count = map_words(own["map"], own["plans"][plan], self.sizes())
            found |= {"tile_map": torch.full((count,), -1, dtype=torch.int32), "build_map": 1}
        if rows := meta.get("tables"):
            found["tables"] = torch.full((words(rows, self.sizes()),), -(2**31), dtype=torch.int32)
            found["build_tables"] = 1
        return found

    def verify(self, module: ModuleType, plan: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
        """One call without a fault, whose results are the dense meaning's to within rounding."""
        o, lse, report = self.run(module, plan, **options)
        assert not report.faults, str(report)
        want_o, want_lse = self.expected()
        assert o.isfinite().all(), "O is not finite, or was not written"
        error = (o.double() - want_o).abs().max().item() if o.numel() else 0.0
        assert error < 2e-2 * max(1.0, want_o.abs().max().item()), f"O is off by {error}"
        if self.spec.normalizer is Normalizer.SOFTMAX:
            same = torch.where(lse == want_lse, 0.0, lse - want_lse)
            assert not same.isnan().any() and same.abs().max() < 2e-3, f"LSE is off by {same.abs().max()}"
        self.verify_further()
        return o, lse

    def verify_further(self) -> None:
        """O before the epilogue, where a sequence has rows, and the largest scores, of the call that ran."""
        wide, further = [x.double() for x in self.qkv], self.arguments_by_name
        if "o_pre" in further:
            plain = self.spec.replace(epilogue=atom("o"))
            want, _ = ragged.attention(plain, *wide, self.lengths, self.params, self.tensors, how=dense.attention)
            got, there = further["o_pre"].double(), ~self.qkv[0].isnan().any(-1).any(-1)
            error = (got - want)[there].abs().max().item() if there.any() else 0.0
            assert error < 2e-2 * max(1.0, want.abs().max().item()), f"O before the epilogue is off by {error}"
        if "max_logit" in further:

            def largest(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
                return v.new_zeros((*q.shape[:3], v.shape[3])), blockwise.largest(spec, q, k, v, *rest)

            _, want = ragged.attention(self.spec, *wide, self.lengths, self.params, self.tensors, how=largest)
            off = torch.where(further["max_logit"] == want, 0.0, further["max_logit"] - want)
            assert not off.isnan().any() and off.abs().max() < 2e-3, f"a largest score is off by {off.abs().max()}"


class Gradients:
    """A compiled backward of a ragged spec, and calls of it."""

    def __init__(self, spec: AttentionSpec, tile: str = "", captured: tuple[str, ...] = ()) -> None:
        self.captured = captured
        plans = alone(plan_backward(spec, captured=captured), tile)
        self.spec, self.plans = spec, plans
        self.module = load_text(emit_backward(plans).text, f"{spec.name}_bwd")
        self.code = compile_backward(self.module)

    def verify(self, call: Call, *, seeds: Sequence[int] = (0,), workers: int = 132, parts: int = 1) -> list[Tensor]:
        """dq, dk, dv without a fault, by the error rule: twice torch's error in the same dtype, and two ulps."""
        exact, plain = (call.autograd(kind, self.captured) for kind in (torch.float64, torch.bfloat16))
        names = ("dq", "dk", "dv", *self.captured)
        saved = self._from_saved(call) if self.captured else {}
        for seed in seeds:
            found = self.run(call, seed, workers, parts)
            for name, got, want, other in zip(names, found, exact, plain, strict=True):
                assert got.isfinite().all(), f"{name} is not finite, or was not written"
                error = float((got.double() - want).abs().max()) if got.numel() else 0.0
                errors = [float((x.double() - want).abs().max()) for x in (other, *saved.get(name, ()))]
                allowed = 2 * max(errors) + 2 * 2**-8 * float(want.abs().max())
                assert error <= allowed, f"{name} is off by {error:.3e}, allowed {allowed:.3e}"
                assert (got[want == 0] == 0).all() or not (want == 0).any()
        return found

    def run(self, call: Call, seed: int = 0, workers: int = 132, parts: int = 1) -> list[Tensor]:
        """One call, outputs full of NaN before it."""
        report = self.report(call, seed=seed, workers=workers, parts=parts)
        assert not report.faults, str(report)
        dq, *sums = self.outputs
        dkv = [x.unflatten(-2, (-1, parts)).sum(-2).to(x.dtype) if parts > 1 else x for x in sums]
        tensors = {**call.lengths, **call.tensors}
        found = jit_captured.gradients(
            self.spec, self.rows, self.made, self.captured, call.params, tensors, call.sizes()
        )
        return [dq, *dkv, *(found[n] for n in self.captured)]

    def _from_saved(self, call: Call) -> dict[str, list[Tensor]]:
        """What float64 makes of captured tensors from the rounded O and the LSE that a call saves."""
        o, lse, do, dlse = (x.double() for x in call.saved())
        wide = [x.double() for x in call.qkv]
        tensors = {n: x.double() if n in self.captured else x for n, x in call.tensors.items()}
        found = ragged.attention_backward(
            self.spec, *wide, o, lse, do, dlse, call.lengths, call.params, tensors, wanted=self.captured
        )
        return {n: [x] for n, x in found.captured.items()}

    def report(self, call: Call, *, workers: int = 132, parts: int = 1, **options: Any) -> Report:
        """What the checker says of one call; its results are `outputs`."""
        q, k, v = call.qkv
        plan = self.module.ATTN_META["backward"]["plans"][0]
        tiles = call.row_tiles(plan["tile_m"])
        workspace = torch.full((q.shape[-2] * tiles * plan["workspace_per_tile"],), NAN)
        o, lse, do, dlse = call.saved()
        self.rows, sizes = self.module.ATTN_META["backward"]["gradients"], call.sizes()
        self.made, given = jit_captured.buffers(self.spec, self.rows, {**call.lengths, **call.tensors}, sizes)
        if rewrites_do(self.spec):
            given.append(torch.full(o.shape, NAN, dtype=q.dtype))
        shapes = [q.shape, *((*x.shape[:-2], parts * x.shape[-2], x.shape[-1]) for x in (k, v))]
        self.outputs = [torch.full(s, NAN, dtype=q.dtype) for s in shapes]
        tail = (*call.params.values(), *call.lengths.values(), *call.tensors.values())
        scale = Scale(self.spec)
        value = scale.default if scale.default == scale.default else scale.of((*call.params.values(),))
        tables = call.tables(self.module.ATTN_META)
        names = ["q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv", "workspace", "softmax_scale", "workers"]
        names += [*call.params, *call.lengths, *call.tensors, *tables, *(f"buffer {n}" for n in range(len(given)))]
        last = (*tail, *tables.values(), *given)
        return check(
            self.code, q, k, v, o, do, lse, dlse, *self.outputs, workspace, value, workers, *last, names=names,
            **options,
        )  # fmt: skip
