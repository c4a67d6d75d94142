"""Lists of blocks of keys, made ready for a gather, and a handle that keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import pad

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import launch
from attngen.jit.row_blocks import RowBlocks, row_blocks
from attngen.jit.shapes import Sizes
from attngen.jit.tables import Tables, version_of
from attngen.passes.placed import PLACES
from attngen.passes.selected import SEQUENCE, START

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Listed:
    """Lists of N blocks of rows, as a gather reads them, `batch` int64 (N, 1, 1) and `index` int64 (N, keys,
    heads_kv), and as the kernel behind it does, `picked` int32 (N, heads_kv, keys).

    Of a ragged call, `blocks` are its blocks of rows, and `places` what the kernel's tensors say of them. What is
    gathered of a block whose sequence has no keys is none of the sequence's, NaN say, and a weight of 0 may meet it:
    `batch` and `index` have one block more, and `empty` (N,) is the block itself where nothing may be read, else that
    one. To fill those by it writes what stays in the cache; by a mask, all that was gathered would be read once more.
    """

    batch: Tensor
    index: Tensor
    picked: Tensor
    blocks: RowBlocks | None = None
    places: Mapping[str, Tensor] = field(default_factory=dict)
    empty: Tensor | None = None

    #: Of kept lists, which rows of a contiguous K without its last axis they are, int64 (N * keys * heads_kv,).
    flat: Tensor | None = None

    def kept(self, seqlen_kv: int) -> Listed:
        """To be gathered from many times."""
        heads = torch.arange(self.index.shape[2], device=self.index.device)
        return replace(self, flat=((self.batch * seqlen_kv + self.index) * self.index.shape[2] + heads).flatten())


def listed(spec: AttentionSpec, lists: Tensor, sizes: Sizes, lengths: Mapping[str, Any]) -> Listed:
    """The keys of a call's lists; `lengths` of a ragged one, by name."""
    assert spec.block_sparse is not None
    size, rows = spec.block_sparse.kv, spec.block_sparse.q
    b, skv, hkv = sizes["batch"], sizes["seqlen_kv"], sizes["heads_kv"]
    lists = lists if skv else lists[..., :0]
    if spec.layout.is_ragged:
        blocks = row_blocks(spec, sizes, lengths, rows)
        by_block = of_blocks(lists, blocks)
        entry = blocks.sequence if spec.layout is Layout.PADDED else torch.zeros_like(blocks.sequence)
        keys_of, first = blocks.keys.view(-1, 1, 1), blocks.first_key.view(-1, 1, 1)
        keys = selected_keys(by_block, size, keys_of).expand(-1, hkv, -1)
        last, first = (keys_of - 1).clamp_(min=0), first.clamp(max=max(skv - 1, 0))
        index = (keys.minimum(last) + first).clamp_(max=max(skv - 1, 0))
        empty = torch.arange(blocks.count, device=lists.device)
        empty = torch.where(blocks.keys > 0, blocks.count, empty)
        more = min(blocks.count, 1)  # without a block there is nothing to fill
        entry, index = pad(entry, (0, more)).view(-1, 1, 1), pad(_by_key(index), (0, 0, 0, 0, 0, more))
        return Listed(entry, index, keys.to(torch.int32).contiguous(), blocks, _places(blocks), empty)
    # (batch, blocks, heads_kv, keys): batch entries outermost
    keys = selected_keys(lists, size, skv).expand(b, hkv, -1, -1).transpose(1, 2).flatten(0, 1)
    entry = torch.arange(b, device=lists.device).repeat_interleave(lists.shape[2])
    return Listed(entry.view(-1, 1, 1), _by_key(keys.clamp(max=max(skv - 1, 0))), keys.to(torch.int32).contiguous())


def _places(blocks: RowBlocks) -> dict[str, Tensor]:
    (first_row, rows), (first_key, keys) = PLACES.values()
    found = {
        SEQUENCE: blocks.sequence, START: blocks.start, first_row: blocks.first_row, rows: blocks.rows,
        first_key: blocks.first_key, keys: blocks.keys,
    }  # fmt: skip
    return {n: x.to(torch.int32) for n, x in found.items()}


def _by_key(keys: Tensor) -> Tensor:
    """(N, heads_kv, keys) with heads last; contiguous, or what is gathered lies in memory as the index does."""
    return keys.transpose(1, 2).contiguous()


def of_blocks(lists: Tensor, blocks: RowBlocks) -> Tensor:
    """The list of each block of rows of a ragged call, (N, heads_kv or 1, n).

    Lists count inside a sequence, (batch or 1, heads_kv or 1, blocks_q, n); where there are fewer than a sequence has
    blocks of rows, those without one see nothing. Lists of packed rows are (heads_kv or 1, total_q, n).
    """
    if lists.ndim == 3:
        return lists.transpose(0, 1)
    there = lists.shape[2]
    if not there or not lists.shape[0]:
        return lists.new_full((blocks.count, lists.shape[1], lists.shape[3]), -1)
    entry = blocks.sequence.clamp(max=lists.shape[0] - 1)  # one of all sequences, or one of each
    found = lists[entry, :, blocks.number.clamp(max=there - 1)]
    return torch.where((blocks.number < there).view(-1, 1, 1), found, -1)


def selected_keys(lists: Tensor, size: int, seqlen_kv: int | Tensor) -> Tensor:
    """Keys of listed blocks of `size` keys, ascending, each once; seqlen_kv where a list holds nothing more.

    Shapes: lists (…, n) to (…, n * size); `seqlen_kv` one, or one a list (…, 1). Numbers outside the keys count as
    nothing. No wait for the GPU.
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

    It is used while the lists, and the lengths of a ragged call, are the same memory, unchanged as far as torch knows,
    and the extents, the layout and the blocks are the same; a call with others fills it again. Memory: 20 bytes for
    each listed key of each block of rows, beside `Tables`'.
    """

    __slots__ = ("_found", "_given", "_key", "tables")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what is kept: the next call fills it."""
        self.tables = Tables()
        self._key: Any = None
        self._given: tuple[Any, ...] = ()  # their memory is not given to others as long as the key names it
        self._found: Listed | None = None

    def listed(self, spec: AttentionSpec, lists: Tensor, sizes: Sizes, lengths: Mapping[str, Any]) -> Listed:
        """`listed`, or what is kept of it. A call that a CUDA graph captures fills nothing."""
        given = (lists, *lengths.values())
        call = (spec.layout, spec.block_sparse, *sizes.items())
        key = (*((x.data_ptr(), version_of(x), x.shape, x.stride(), x.dtype) for x in given), *call)
        if self._found is not None and self._key == key:
            return self._found
        found = listed(spec, lists, sizes, lengths)
        if not launch._capturing():
            found = found.kept(sizes["seqlen_kv"])
            self._key, self._given, self._found = key, given, found
        return found
