"""Ragged calls of generated forwards, executed by the checker: random lengths, neighbours and padding full of NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from ptxcheck.compile import compile_module
from ptxcheck.launch import check
from ptxcheck.report import Report

from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.scale import Scale
from attngen.ref import dense, ragged

Tensor = torch.Tensor
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

    def run(
        self, module: ModuleType, plan: int = 0, *, workers: int = 3, **options: Any
    ) -> tuple[Tensor, Tensor, Report]:
        """O and LSE, NaN where nothing was written, and the report."""
        q, k, v = self.qkv
        batch = len(next(iter(self.lengths.values()))) - self.varlen
        o = torch.full((*q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype)
        lse = torch.full((q.shape[1], q.shape[0]) if self.varlen else (q.shape[0], q.shape[2], q.shape[1]), NAN)
        counter = torch.zeros(1, dtype=torch.int32)
        order = torch.full((2 * (batch + self.varlen) + 1,), -1, dtype=torch.int32)
        tail = (*self.params.values(), *self.lengths.values(), *self.tensors.values())
        scale = Scale(self.spec)
        value = scale.default if scale.default == scale.default else scale.of((*self.params.values(),))
        names = ["q", "k", "v", "o", "lse", "tile_counter", "softmax_scale", "workers", "seq_order"]
        names += [*self.params, *self.lengths, *self.tensors]
        report = check(
            compile_module(module, plan), q, k, v, o, lse, counter, value, workers, order, *tail, names=names, **options
        )
        assert counter.item() == 0 or report.faults, f"the kernel leaves its tile counter at {counter.item()}"
        return o, lse, report

    def verify(self, module: ModuleType, plan: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
        """One call without a fault, whose results are the dense meaning's to within rounding."""
        o, lse, report = self.run(module, plan, **options)
        assert not report.faults, str(report)
        want_o, want_lse = self.expected()
        assert o.isfinite().all(), "O is not finite, or was not written"
        error = (o.double() - want_o).abs().max().item() if o.numel() else 0.0
        assert error < 2e-2 * max(1.0, want_o.abs().max().item()), f"O is off by {error}"
        same = torch.where(lse == want_lse, 0.0, lse - want_lse)
        assert not same.isnan().any() and same.abs().max() < 2e-3, f"LSE is off by {same.abs().max()}"
        return o, lse
