"""Where the rows of a ragged call stand in blocks of rows that are of one sequence each; nothing waits for the lengths.

Sequence s begins block `first[s] // q + s` in varlen, where `first` is its first packed row: no two sequences share a
block, and a number that falls between two of them is a block without rows. Of single rows each is a block, where it
stands. In padded each has the blocks of its extent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.atoms import extents_of
from attngen.jit.modes import learns
from attngen.jit.shapes import Sizes

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """N blocks of a call's rows. Shapes: int64 (N,) but for the rows' own.

    `sequence`, `number`: whose it is, and which of its blocks; `start`: its first row there; `rows`, `keys`: how many
    the sequence has, 0 of a block without rows; `first_row`, `first_key`: where it begins along the packed axes.
    `place` (rows of q,): where a row stands among the N * q rows of the blocks, `there` whether it is of a sequence;
    `row` (N * q,): the row of q that stands at a place, `full` whether one does.
    """

    sequence: Tensor
    number: Tensor
    start: Tensor
    rows: Tensor
    keys: Tensor
    first_row: Tensor
    first_key: Tensor
    place: Tensor
    there: Tensor
    row: Tensor
    full: Tensor

    @property
    def count(self) -> int:
        """N."""
        return self.sequence.shape[0]


def row_blocks(spec: AttentionSpec, sizes: Sizes, lengths: Mapping[str, Any], q: int) -> RowBlocks:
    """The blocks of `q` rows of a call of these extents; lengths are held within them."""
    (first_q, count_q), (first_kv, count_kv) = (
        extents_of(spec, sizes, axis, lengths[t.name])
        for axis, t in zip(("seqlen_q", "seqlen_kv"), spec.lengths, strict=True)
    )
    batch, total, device = sizes["batch"], sizes["seqlen_q"], first_q.device
    if not batch:
        return _no_sequence(total, device)
    places = torch.arange(total if spec.layout is Layout.VARLEN else batch * total, device=device)
    if spec.layout is Layout.VARLEN:
        before = torch.arange(batch, device=device) if q > 1 else 0
        first_block = first_q // q + before
        numbers = torch.arange(total // q + (batch if q > 1 else 0), device=device)
        sequence = (torch.searchsorted(first_block, numbers, right=True) - 1).clamp_(min=0)
        of_row = torch.searchsorted(first_q + count_q, places, right=True).clamp_(max=batch - 1)
        row_in = places - first_q[of_row]
    else:
        each = -(-total // q)
        first_block = torch.arange(batch, device=device) * each
        numbers = torch.arange(batch * each, device=device)
        sequence, of_row = numbers // max(each, 1), places // max(total, 1)
        row_in = places - of_row * total
        first_q = torch.arange(batch, device=device) * total
    number = numbers - first_block[sequence]
    start = number * q
    rows = torch.where((start >= 0) & (start < count_q[sequence]), count_q[sequence], 0)
    there = (row_in >= 0) & (row_in < count_q[of_row])
    place = torch.where(there, first_block[of_row] * q + row_in, 0)
    own = start.unsqueeze(1) + torch.arange(q, device=device)
    full = own < rows.unsqueeze(1)
    row = torch.where(full, first_q[sequence].unsqueeze(1) + own, 0)
    return RowBlocks(
        sequence=sequence,
        number=number.clamp(min=0),
        start=start,
        rows=rows,
        keys=torch.where(rows > 0, count_kv[sequence], 0),
        first_row=first_q[sequence],
        first_key=first_kv[sequence],
        place=place,
        there=there,
        row=row.flatten(),
        full=full.flatten(),
    )


def _no_sequence(total: int, device: Any) -> RowBlocks:
    none, rows = (torch.zeros(n, dtype=torch.int64, device=device) for n in (0, total))
    return RowBlocks(*(none,) * 7, place=rows, there=rows.bool(), row=none, full=none.bool())


def into_blocks(x: Tensor, blocks: RowBlocks) -> Tensor:
    """Rows x (rows of q, …) as the blocks hold them, (N * q, …); 0 where none stands."""
    if not learns(x):
        return _taken(x, blocks.row, blocks.full, 0.0)
    moved: Tensor = _Moved.apply(x, blocks.row, blocks.full, blocks.place, blocks.there, 0.0)  # type: ignore[no-untyped-call]
    return moved


def out_of_blocks(x: Tensor, blocks: RowBlocks, fill: float) -> Tensor:
    """The way back; `fill` in rows of no sequence."""
    if not learns(x):
        return _taken(x, blocks.place, blocks.there, fill)
    moved: Tensor = _Moved.apply(x, blocks.place, blocks.there, blocks.row, blocks.full, fill)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    """Rows taken by `index` where `known`, `fill` elsewhere; each is taken once, so that gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, known: Tensor, back: Tensor, back_known: Tensor, fill: float
    ) -> Tensor:
        ctx.save_for_backward(back, back_known)
        return _taken(x, index, known, fill)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        index, known = ctx.saved_tensors
        return _taken(grad, index, known, 0.0), None, None, None, None, None


def _taken(x: Tensor, index: Tensor, known: Tensor, fill: float) -> Tensor:
    if not x.shape[0]:
        return x.new_full((index.shape[0], *x.shape[1:]), fill)
    return x.index_select(0, index).masked_fill_(~known.view(-1, *(1,) * (x.ndim - 1)), fill)
