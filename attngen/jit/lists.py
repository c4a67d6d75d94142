"""Lists of blocks of keys, made ready for a gather, and a handle that keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attngen.ir.spec import AttentionSpec
from attngen.jit import launch
from attngen.jit.shapes import Sizes
from attngen.jit.tables import Tables

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Listed:
    """Lists as a gather reads them, `index` int64 (batch, blocks, keys, heads_kv), and as the kernel behind it does,
    `picked` int32 (batch * blocks, heads_kv, keys).
    """

    index: Tensor
    picked: Tensor


def listed(spec: AttentionSpec, lists: Tensor, sizes: Sizes) -> Listed:
    """The keys of a call's lists."""
    assert spec.block_sparse is not None
    b, skv, hkv = sizes["batch"], sizes["seqlen_kv"], sizes["heads_kv"]
    keys = selected_keys(lists if skv else lists[..., :0], spec.block_sparse.kv, skv).expand(b, hkv, -1, -1)
    by_block = keys.transpose(1, 2)  # (batch, blocks, heads_kv, keys)
    # contiguous, or what is gathered lies in memory as the index does
    index = by_block.transpose(2, 3).clamp(max=max(skv - 1, 0)).contiguous()
    return Listed(index, by_block.flatten(0, 1).to(torch.int32).contiguous())


def selected_keys(lists: Tensor, size: int, seqlen_kv: int) -> Tensor:
    """Keys of listed blocks of `size` keys, ascending, each once; seqlen_kv where a list holds nothing more.

    Shapes: lists (…, n) to (…, n * size). Numbers outside the keys count as nothing. No wait for the GPU.
    """
    keys = lists.long()
    if size > 1:
        inside = (keys >= 0).unsqueeze(-1)
        keys = torch.where(inside, keys.unsqueeze(-1) * size + torch.arange(size, device=lists.device), -1).flatten(-2)
    keys = torch.where((keys < 0) | (keys >= seqlen_kv), seqlen_kv, keys).sort(-1).values
    again = keys[..., 1:] == keys[..., :-1]
    keys = torch.cat((keys[..., :1], torch.where(again, seqlen_kv, keys[..., 1:])), -1)
    return keys.sort(-1).values


def lists_of(kept: Tensor) -> Tensor:
    """Lists of the blocks that a bool map (…, blocks_kv) keeps, int32, filled up with -1."""
    order = kept.int().sort(dim=-1, descending=True, stable=True).indices
    return torch.where(kept.gather(-1, order), order, -1).int()


class ListTables:
    """Lists made ready, and tables of the mask over them, kept between calls: `kept = attn.tables()`, then
    `attn(q, k, v, blocks=lists, tables=kept)` in every layer that shares its lists.

    It is used while the lists are the same memory, unchanged as far as torch knows, and the extents are the same; a
    call with others fills it again. Memory: 12 bytes for each listed key of each block of rows, beside `Tables`'.
    """

    __slots__ = ("_found", "_key", "_lists", "tables")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what is kept: the next call fills it."""
        self.tables = Tables()
        self._key: Any = None
        self._lists: Tensor | None = None  # its memory is not given to others as long as the key names it
        self._found: Listed | None = None

    def listed(self, spec: AttentionSpec, lists: Tensor, sizes: Sizes) -> Listed:
        """`listed`, or what is kept of it. A call that a CUDA graph captures fills nothing."""
        key = (lists.data_ptr(), lists._version, lists.shape, lists.stride(), lists.dtype, *sizes.items())
        if self._found is not None and self._key == key:
            return self._found
        found = listed(spec, lists, sizes)
        if not launch._capturing():
            self._key, self._lists, self._found = key, lists, found
        return found
