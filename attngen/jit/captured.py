"""Gradients of captured tensors from what a backward kernel writes: one fp32 buffer for each entry of its `gradients`.

| kind      | buffer                             | then                                                          |
|-----------|------------------------------------|---------------------------------------------------------------|
| `sink`    | (batch, heads_q, seqlen_q)          | through the sink's expression, by autograd                    |
| `column`  | (batch, heads_q, seqlen_kv), zeroed | added up where the index expressions point                    |
| `row`     | (batch, heads_q, seqlen_q), zeroed  | the same                                                      |
| `output`  | as O, dtype of the tensor            | added up where the index expressions point, the column's too  |
| `output_row` | (batch, heads_q, seqlen_q)        | as `row`                                                      |
| `element` | the tensor's own extents, zeroed    | is the gradient: broadcast axes have stride 0 for the kernel  |

Packed sequences have no batch axis: (heads_q, total_q), (heads_q, total_kv). What a row or key of no sequence holds is
0 (`jit.atoms` says which sequence each belongs to, on the GPU).

Memory O(batch heads seqlen) for those of rows and columns. Everything is summed in fp32 and rounded once, to the
tensor's dtype. The result is deterministic where the buffers are: torch scatters by sorting; indices that are plain
atoms take sums alone. Nothing waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from attngen.ir.expr import Atom, Expr, Load
from attngen.ir.gradient import OF_ROWS, Contribution, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.atoms import environment, in_memory, loads_in_memory, sequence_environment
from attngen.jit.named import broadcast
from attngen.jit.shapes import Sizes
from attngen.passes.epilogue import whole_form

_F32 = torch.float32
Tensor = torch.Tensor
#: Axes of (batch, heads_q, seqlen_q, seqlen_kv) by the atom that runs along them.
_AXES = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}
#: The same of an element of O.
_COLUMNS = {"b": 0, "h": 1, "q_idx": 2, "d": 3}
#: What a kernel file says of one buffer: "tensor", "kind".
Row = Mapping[str, Any]


def buffers(
    spec: AttentionSpec, rows: Sequence[Row], tensors: Mapping[str, Tensor], sizes: Sizes
) -> tuple[list[Tensor], list[Tensor]]:
    """(what `gradients` takes, what the kernel takes), one tensor a row.

    `tensors` are the caller's own, axes of extent 1 not expanded.
    """
    made, given = [], []
    for row in rows:
        decl, own = spec.tensor(row["tensor"]), tensors[row["tensor"]]
        whole = row["kind"] in OF_ROWS and not spec.layout.is_ragged  # of ragged rows those of no sequence stay 0
        make = torch.empty if whole else torch.zeros
        kind = own.dtype if row["kind"] == GradientKind.OUTPUT else _F32
        made.append(make(extents(spec, row, sizes) or tuple(own.shape), dtype=kind, device=own.device))
        given.append(broadcast(made[-1], decl, sizes) if row["kind"] == GradientKind.ELEMENT else made[-1])
    return made, given


def extents(spec: AttentionSpec, row: Row, sizes: Sizes) -> tuple[int, ...] | None:
    """Shape of a buffer; None for `element`, which has the tensor's."""
    if row["kind"] == GradientKind.ELEMENT:
        return None
    if row["kind"] == GradientKind.OUTPUT:
        rows = (sizes["heads_q"], sizes["seqlen_q"])
        if spec.layout is Layout.VARLEN:
            return *rows[::-1], spec.head_dim_v
        return sizes["batch"], *(rows if spec.layout is Layout.BHSD else rows[::-1]), spec.head_dim_v
    last = "seqlen_kv" if row["kind"] == GradientKind.COLUMN else "seqlen_q"
    batch = () if spec.layout is Layout.VARLEN else (sizes["batch"],)
    return *batch, sizes["heads_q"], sizes[last]


def gradients(
    spec: AttentionSpec,
    rows: Sequence[Row],
    made: Sequence[Tensor],
    wanted: Sequence[str],
    params: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    sizes: Sizes,
) -> dict[str, Tensor]:
    """The gradient of each wanted tensor, in its shape and dtype; zeros for one that no row names."""
    total: dict[str, Tensor] = {}
    reads: dict[tuple[str, str], Iterator[Contribution]] = {}
    for row, buffer in zip(rows, made, strict=True):
        name, kind = row["tensor"], row["kind"]
        if kind != GradientKind.ELEMENT:
            if (name, kind) not in reads:
                reads[name, kind] = iter([c for c in _contributions(spec) if (c.tensor, c.kind) == (name, kind)])
            buffer = _pulled_back(spec, next(reads[name, kind]), buffer, params, tensors, sizes)
        total[name] = total[name] + buffer if name in total else buffer
    return {
        name: total[name].to(tensors[name].dtype)
        if name in total
        else torch.zeros(tensors[name].shape, dtype=tensors[name].dtype, device=tensors[name].device)
        for name in wanted
    }


@lru_cache(maxsize=64)
def _contributions(spec: AttentionSpec) -> tuple[Contribution, ...]:
    return whole_form(spec).contributions


def _pulled_back(
    spec: AttentionSpec,
    read: Contribution,
    buffer: Tensor,
    params: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    sizes: Sizes,
) -> Tensor:
    """The buffer taken through the sink, or through one read's indices, to the caller's extents (fp32)."""
    own = tensors[read.tensor]
    if not own.numel() or not buffer.numel() or not sizes["batch"]:
        return torch.zeros(own.shape, dtype=_F32, device=own.device)
    if spec.layout is Layout.VARLEN:
        buffer = buffer.unsqueeze(0)
    if read.kind is GradientKind.OUTPUT:
        pairs, axes = (buffer if spec.layout is Layout.BHSD else buffer.transpose(1, 2)), _COLUMNS
    else:
        pairs, axes = buffer.unsqueeze(2 if read.kind is GradientKind.COLUMN else 3), _AXES
    if spec.layout is Layout.VARLEN:
        axes = {n: a for n, a in axes.items() if n != "b"}  # no axis holds sequences
    indices: tuple[Expr, ...] | None = read.indices
    if read.kind is GradientKind.SINK:
        indices = spec.sink.indices if isinstance(spec.sink, Load) else None
    found = None if indices is None else _along_axes(indices, pairs, own, sizes, axes)
    if found is not None:
        return found
    if spec.layout.is_ragged:
        env = sequence_environment(spec, sizes, params, tensors, by_keys=read.kind is GradientKind.COLUMN)
    else:
        env = environment(sizes, params, buffer.device)
    env["d"] = torch.arange(spec.head_dim_v, device=buffer.device).view(1, 1, 1, -1)
    wide = {t.name: broadcast(tensors[t.name].detach(), t, sizes) for t in spec.tensors}
    if indices is None:
        return _through_sink(spec, read.tensor, pairs, env, wide, own, sizes)
    return _scattered(in_memory(spec, read.tensor, indices), pairs.to(_F32), own, env, wide)


def _along_axes(
    indices: Sequence[Expr], pairs: Tensor, own: Tensor, sizes: Sizes, axes: Mapping[str, int]
) -> Tensor | None:
    """`pairs` summed to the axes that the indices name, in their order, where each is an atom: bias[b, h, kv_idx].

    None for anything else, among it a tensor that is longer than the axis it is indexed by.
    """
    at = [(e, n) for e, n in zip(indices, own.shape, strict=True) if n > 1]
    names = [e.name if isinstance(e, Atom) else "" for e, _ in at]
    if "h_kv" in names and "h" not in names:
        b, _, rows, keys = pairs.shape
        pairs = pairs.view(b, sizes["heads_kv"], -1, rows, keys).sum(2)
        names[names.index("h_kv")] = "h"
    if len({*names}) < len(names) or any(
        n not in axes or pairs.shape[axes[n]] != m for n, (_, m) in zip(names, at, strict=True)
    ):
        return None
    kept = [axes[n] for n in names]
    summed = [a for a in range(4) if a not in kept]
    pairs = pairs.sum(summed, dtype=_F32) if summed else pairs
    return pairs.permute([sorted(kept).index(a) for a in kept]).reshape(own.shape)


def _through_sink(
    spec: AttentionSpec,
    name: str,
    rows: Tensor,
    env: dict[str, Tensor],
    wide: dict[str, Tensor],
    own: Tensor,
    sizes: Sizes,
) -> Tensor:
    """d sink / d tensor, contracted with `rows` (batch, heads_q, seqlen_q, 1)."""
    from attngen.ref.evaluate import evaluate

    assert spec.sink is not None
    with autograd_allowed():
        leaf = own.detach().to(_F32).requires_grad_()
        wide[name] = broadcast(leaf, spec.tensor(name), sizes)
        value = evaluate(loads_in_memory(spec, spec.sink), env, wide, dtype=_F32, clamp=True)
        (found,) = torch.autograd.grad(torch.broadcast_to(value, rows.shape), leaf, rows)
    return found


def _scattered(
    indices: Sequence[Expr], pairs: Tensor, own: Tensor, env: dict[str, Tensor], wide: dict[str, Tensor]
) -> Tensor:
    """`pairs` (batch, heads_q, seqlen_q or 1, seqlen_kv or 1) added up where the indices point.

    Indices are clamped into their tensor, as in a kernel: where they were outside, the mask drops the pair, and `pairs`
    holds 0.
    """
    from attngen.ref.evaluate import evaluate

    zero = torch.zeros((), dtype=torch.int64, device=pairs.device)
    index = [
        zero if extent == 1 else evaluate(e, env, wide, clamp=True).clamp(0, extent - 1)
        for e, extent in zip(indices, own.shape, strict=True)
    ]
    still = [a for a in range(4) if all(i.dim() == 0 or i.shape[a] == 1 for i in index)]
    pairs = pairs.sum(still, keepdim=True) if still else pairs
    found = torch.zeros(own.shape, dtype=_F32, device=pairs.device)
    return found.index_put_(tuple(i.expand(pairs.shape) for i in index), pairs, accumulate=True)


@contextmanager
def autograd_allowed() -> Iterator[None]:
    """Gradients as in plain eager code: inside an operator's body too, where torch leaves autograd out, and whatever
    autocast is on.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() & torch._C._after_autograd_keyset
    with (
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autocast("cpu", enabled=False),
    ):
        yield
