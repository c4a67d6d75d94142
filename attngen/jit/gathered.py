"""A call on lists of keys as the call of the kernel behind it: K and V gathered, rows in blocks; see `passes.selected`.

Plain torch operations, differentiable; nothing waits for the GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.lists import Listed, ListTables, listed
from attngen.jit.modes import learns
from attngen.jit.named import TORCH_DTYPE, broadcast
from attngen.jit.row_blocks import RowBlocks, into_blocks, out_of_blocks
from attngen.jit.shapes import Sizes, sizes_of
from attngen.passes.selected import BLOCKS, SELECTED, own_params, packs_heads

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Gathered:
    """A call of the kernel behind a call on lists, all in bshd, and the way back to its q's `shape`, with `heads` of q
    and of K; a block has `rows`, and query heads of a KV head are rows too where `packed`. `named`: all that a kernel
    over listed keys may take.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    named: dict[str, Any]
    shape: tuple[int, ...]
    heads: tuple[int, int]
    rows: int
    packed: bool
    blocks: RowBlocks | None
    #: Memory of O of the call, and the same as the kernel writes it, where it can and no gradient is asked for.
    whole: Tensor | None = None
    out: Tensor | None = None

    def o(self, o: Tensor) -> Tensor:
        """O of the call, shaped as its q, from that of the kernel."""
        if self.whole is not None:
            return self.whole
        hq, hkv = self.heads
        n, _, _, d = o.shape
        if self.packed:
            o = o.view(n, self.rows, hq // max(hkv, 1), hkv, d).transpose(2, 3)
        if self.blocks is not None:
            return out_of_blocks(o.reshape(n * self.rows, hq, d), self.blocks, 0.0).view(*self.shape[:-1], d)
        b, sq = self.shape[:2]
        return o.reshape(b, -(-sq // self.rows) * self.rows, hq, d)[:, :sq]

    def lse(self, lse: Tensor) -> Tensor:
        """LSE of the call (batch, heads_q, seqlen_q), or (heads_q, total_q), from that of the kernel."""
        hq, hkv = self.heads
        n = lse.shape[0]
        if self.packed:  # (n, heads_kv, rows * group) to (n, rows, heads_q)
            by_row = lse.view(n, hkv, self.rows, hq // max(hkv, 1)).permute(0, 2, 1, 3).reshape(n, self.rows, hq)
        else:
            by_row = lse.transpose(1, 2)
        if self.blocks is not None:
            whole = out_of_blocks(by_row.reshape(n * self.rows, hq), self.blocks, -math.inf)
            return whole.view(*self.shape[:-2], hq).transpose(-1, -2)
        b, sq = self.shape[:2]
        return by_row.reshape(b, -(-sq // self.rows) * self.rows, hq)[:, :sq].transpose(1, 2)


def gathered(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    named: dict[str, Any],
    kept: ListTables | None = None,
    *,
    into: bool = False,
) -> Gathered:
    """The call of `selected_spec(spec)` that a call is, `spec` in layout bshd or a ragged one.

    `named`: params, captured tensors and lengths; `kept`: the caller's handle; `into`: whoever asks has the kernel
    write O into `out` of what is returned, where that is memory.
    """
    sparse = spec.block_sparse
    assert sparse is not None
    lengths = {t.name: named[t.name] for t in spec.lengths}
    sequences = lengths["cu_seqlens_q"].shape[0] - 1 if spec.layout is Layout.VARLEN else None
    sizes = sizes_of(spec, q, k, sequences)
    keys = listed(spec, lists, sizes, lengths) if kept is None else kept.listed(spec, lists, sizes, lengths)
    hq, hkv = sizes["heads_q"], sizes["heads_kv"]
    group, rows, packed = hq // max(hkv, 1), sparse.q, packs_heads(spec)
    ks, vs = (_gather(x, keys, spec.backward.deterministic) for x in (k, v))
    shape = tuple(q.shape)
    view = whole = out = None
    if keys.blocks is None and not learns(q, k, v, *(x for x in named.values() if isinstance(x, Tensor))):
        view = _view_of_blocks(q, rows, hkv, group, packed)
        if into and view is not None:
            dtype = q.dtype if spec.out_dtype is None else TORCH_DTYPE[spec.out_dtype]
            whole = torch.empty((*shape[:-1], spec.head_dim_v), dtype=dtype, device=q.device)
            out = _view_of_blocks(whole, rows, hkv, group, packed)
    q = view if view is not None else _in_blocks(q, keys.blocks, rows)
    if packed and view is None:
        n, _, _, d = q.shape
        q = q.reshape(n, rows, hkv, group, d).transpose(2, 3).reshape(n, rows * group, hkv, d)
    decls = {t.name: t for t in spec.tensors if t.name != BLOCKS}
    own = {n: broadcast(x, decls[n], sizes) if n in decls else x for n, x in named.items() if n not in lengths}
    own |= {**_sizes(spec, sizes, group), **keys.places, SELECTED: keys.picked}
    return Gathered(q, ks, vs, own, shape, (hq, hkv), rows, packed, keys.blocks, whole, out)


def _view_of_blocks(x: Tensor, rows: int, heads: int, group: int, packed: bool) -> Tensor | None:
    """x (batch, seqlen, heads * group, D) as (blocks, rows, heads * group, D), or where query heads of a KV head are
    rows too, (blocks, rows * group, heads, D); None where that is no view, or the last block is not whole.
    """
    (b, sq, hq, d), (of_batch, of_row, of_head, of_column) = x.shape, x.stride()
    if not x.numel() or sq % rows or (b > 1 and of_batch != sq * of_row):
        return None
    if not packed or group == 1:
        return x.as_strided((b * sq // rows, rows, hq, d), (rows * of_row, of_row, of_head, of_column))
    if rows > 1 and of_row != group * of_head:
        return None
    return x.as_strided((b * sq // rows, rows * group, heads, d), (rows * of_row, of_head, group * of_head, of_column))


def _in_blocks(q: Tensor, blocks: RowBlocks | None, rows: int) -> Tensor:
    """The rows of q (blocks, rows, heads_q, D), 0 where a block is filled up."""
    if blocks is not None:
        return into_blocks(q.reshape(-1, *q.shape[-2:]), blocks).view(blocks.count, rows, *q.shape[-2:])
    b, sq, *rest = q.shape
    missing = -sq % rows
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, missing)) if missing else q
    return q.reshape(b * (sq + missing) // rows, rows, *rest)


def _sizes(spec: AttentionSpec, sizes: Sizes, group: int) -> dict[str, int]:
    """What the kernel's params say of the call."""
    assert spec.block_sparse is not None
    sq, skv, group = sizes["seqlen_q"], sizes["seqlen_kv"], max(group, 1)
    blocks = max(-(-sq // spec.block_sparse.q), 1)
    counts = (sizes["batch"], group) if spec.layout.is_ragged else (blocks, sq, skv, group)
    return dict(zip(own_params(spec), counts, strict=True))


def _gather(x: Tensor, keys: Listed, deterministic: bool) -> Tensor:
    """x (batch, seqlen, heads, D), or packed, at the listed keys: (N, keys, heads, D)."""
    if not learns(x):
        return _filled(_taken(x, keys), keys.empty)
    x = x.unsqueeze(0) if x.ndim == 3 else x
    found: Tensor = _Gather.apply(x, keys.batch, keys.index, keys.empty, deterministic)  # type: ignore[no-untyped-call]
    return found


def _taken(x: Tensor, keys: Listed) -> Tensor:
    """The same of all blocks that `keys` lists, without a gradient; of kept lists in one operation."""
    if keys.flat is not None and x.is_contiguous():
        return x.view(-1, x.shape[-1]).index_select(0, keys.flat).view(*keys.index.shape, x.shape[-1])
    x = x.unsqueeze(0) if x.ndim == 3 else x
    return x[keys.batch, keys.index, torch.arange(x.shape[2], device=x.device)]


def _filled(found: Tensor, empty: Tensor | None) -> Tensor:
    """0 in blocks of no keys."""
    return found if empty is None else found.index_fill_(0, empty, 0)[: empty.shape[0]]


class _Gather(torch.autograd.Function):
    """Rows by index, 0 in blocks of no keys; the gradient adds them up in fp32 and rounds once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, batch: Tensor, index: Tensor, empty: Tensor | None, deterministic: bool) -> Tensor:
        ctx.save_for_backward(batch, index)
        ctx.x = x.shape, x.dtype, deterministic
        return _filled(x[batch, index, torch.arange(x.shape[2], device=x.device)], empty)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        batch, index = (x[: grad.shape[0]] for x in ctx.saved_tensors)
        shape, dtype, deterministic = ctx.x
        total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=grad.device)
        heads = torch.arange(shape[2], device=grad.device)
        if deterministic or torch.are_deterministic_algorithms_enabled():
            total.index_put_((batch, index, heads), grad.to(total.dtype), accumulate=True)  # sorts first
        else:
            flat = ((batch * shape[1] + index) * shape[2] + heads).flatten()
            total.view(-1, shape[3]).index_add_(0, flat, grad.reshape(-1, shape[3]).to(total.dtype))
        return total.to(dtype), None, None, None, None
