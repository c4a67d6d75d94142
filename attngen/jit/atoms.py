"""Values of a call's atoms as torch tensors, for what follows the kernels; nothing waits for the GPU.

Axes are those of a block of pairs, (batch, heads_q, seqlen_q, seqlen_kv). Packed sequences have an axis of all rows, or
of all keys, in place of their own: there `b`, lengths and positions differ along it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngen.ir.expr import Expr, Load, Param, rewrite
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout, Type
from attngen.jit.shapes import Sizes
from attngen.passes.placed import indices_in_memory

Tensor = torch.Tensor
#: Axes that hold rows or keys of sequences, and params that say where one sequence's begin and how many there are.
_PARTS = {"seqlen_q": ("%first_q", "%count_q"), "seqlen_kv": ("%first_kv", "%count_kv")}
_WHERE = {
    dim: (Param(type=Type.INT, name=first), Param(type=Type.INT, name=count)) for dim, (first, count) in _PARTS.items()
}
#: What a row's sequence, or its place there, says in `sequence_environment`.
OF_SEQUENCE = ("b", "q_idx", "q_pos", "seqlen_q", "seqlen_kv", *(n for names in _PARTS.values() for n in names))


def environment(
    sizes: Sizes, params: Mapping[str, Any], device: Any, start: int = 0, end: int | None = None
) -> dict[str, Tensor]:
    """Atoms over the block (batch, heads_q, rows start..end, seqlen_kv), each along its own axis, and params.

    Scalars are filled, not copied to the device: a copy would wait, and a CUDA graph does not capture it.
    """

    def along(axis: int, values: Tensor) -> Tensor:
        return values.view(*(-1 if i == axis else 1 for i in range(4)))

    h = torch.arange(sizes["heads_q"], device=device)
    q_idx = torch.arange(start, sizes["seqlen_q"] if end is None else end, device=device)
    env = {
        "b": along(0, torch.arange(sizes["batch"], device=device)),
        "h": along(1, h),
        "h_kv": along(1, h // max(1, sizes["heads_q"] // max(1, sizes["heads_kv"]))),
        "q_idx": along(2, q_idx),
        "q_pos": along(2, q_idx + (sizes["seqlen_kv"] - sizes["seqlen_q"])),
        "kv_idx": along(3, torch.arange(sizes["seqlen_kv"], device=device)),
    }
    for name in ("seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "batch"):
        env[name] = torch.full((), sizes[name], device=device)
    for name, value in params.items():
        kind = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)
        env[name] = torch.full((), value, dtype=kind, device=device)
    return env


def sequence_environment(
    spec: AttentionSpec, sizes: Sizes, params: Mapping[str, Any], tensors: Mapping[str, Tensor], *, by_keys: bool
) -> dict[str, Tensor]:
    """The atoms of rows, or of keys where `by_keys`, of a ragged layout, each of its own sequence; and params.

    The block is (1, heads_q, total_q, 1) or (1, heads_q, 1, total_kv) in varlen, with a batch axis in padded. Lengths
    are held within the tensors, as a kernel holds them. What belongs to no sequence counts as the last one's.
    """
    device = tensors[spec.lengths[0].name].device
    env = environment(sizes, params, device)
    extents = [extents_of(spec, sizes, x, tensors[t.name]) for x, t in zip(_PARTS, spec.lengths, strict=True)]
    firsts, counts = [x for x, _ in extents], [n for _, n in extents]
    axis = 3 if by_keys else 2

    def along(x: Tensor, axis: int) -> Tensor:
        return x.view(*(-1 if i == axis else 1 for i in range(4)))

    if spec.layout is Layout.VARLEN:
        place = torch.arange(sizes["seqlen_kv" if by_keys else "seqlen_q"], device=device)
        ends = firsts[by_keys] + counts[by_keys]
        b = torch.searchsorted(ends, place, right=True).clamp_(max=max(sizes["batch"] - 1, 0))
        first_q, first_kv, count_q, count_kv = (along(x[b], axis) for x in (*firsts, *counts))
        own = along(place, axis) - (first_kv if by_keys else first_q)
        env["b"] = along(b, axis)
        env["kv_idx" if by_keys else "q_idx"] = own
    else:
        first_q, first_kv, count_q, count_kv = (along(x, 0) for x in (*firsts, *counts))
    for (first, count), values in zip(_PARTS.values(), ((first_q, count_q), (first_kv, count_kv)), strict=True):
        env[first], env[count] = values
    env["seqlen_q"], env["seqlen_kv"] = count_q, count_kv
    env["q_pos"] = env["q_idx"] + (count_kv - count_q)
    return env


def extents_of(spec: AttentionSpec, sizes: Sizes, axis: str, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Where each sequence begins along an axis of the tensors, and how many rows or keys it has: int64 (batch,)."""
    held = lengths.detach().long().clamp(0, sizes[axis])
    if spec.layout is not Layout.VARLEN:
        return torch.zeros_like(held), held
    return held[:-1], (held[1:] - held[:-1]).clamp_(min=0)


def loads_in_memory(spec: AttentionSpec, e: Expr) -> Expr:
    """`e` with indices of packed axes as they stand in memory; itself where sequences are no parts of an axis."""

    def moved(x: Expr) -> Expr:
        return x.replace(indices=_moved(spec, x.tensor, x.indices)) if isinstance(x, Load) else x

    return rewrite(e, moved) if spec.layout.is_ragged else e


def in_memory(spec: AttentionSpec, tensor: str, indices: Sequence[Expr]) -> tuple[Expr, ...]:
    """The same of the indices of one element."""
    if not spec.layout.is_ragged:
        return tuple(indices)
    return _moved(spec, tensor, [loads_in_memory(spec, i) for i in indices])


def _moved(spec: AttentionSpec, tensor: str, indices: Sequence[Expr]) -> tuple[Expr, ...]:
    """Indices inside a sequence, clamped to it, moved to where it begins."""
    return indices_in_memory(indices, spec.tensor(tensor).dims, _WHERE)
