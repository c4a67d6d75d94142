"""The backward of a ragged layout: its extents, and the reference sequence by sequence, which reads the lengths."""

from __future__ import annotations

from typing import Any

import torch

from attngen.ir.types import Layout
from attngen.jit import captured
from attngen.jit.backward import Backward, Given
from attngen.jit.shapes import sizes_of


class RaggedBackward(Backward):
    """Gradients of calls whose sequences have lengths of their own."""

    @property
    def _varlen(self) -> bool:
        return self.spec.layout is Layout.VARLEN

    def _sizes(self, q: Any, k: Any, tensors: tuple[Any, ...]) -> dict[str, int]:
        return sizes_of(self.spec, q, k, tensors[0].shape[0] - 1 if self._varlen else None)

    def _tiles(self, sizes: dict[str, int], extent: str, tile: int) -> int:
        if not self._varlen:
            return super()._tiles(sizes, extent, tile)
        # each sequence begins a tile of its own, and so does what lies behind the last one
        return sizes[extent] // tile + sizes["batch"] + 1

    def _longest(self, sizes: dict[str, int]) -> int:
        longest = super()._longest(sizes)
        return -(-longest // max(sizes["batch"], 1)) if self._varlen else longest

    def _reference(self, names: frozenset[str], given: Given) -> Any:
        """`names` by the blockwise reference, in the layout of the call; waits for the lengths."""
        from attngen.ref.ragged import attention_backward

        by_name = dict(zip(self._binder.tensor_names, given.tensors, strict=True))
        lengths = {t.name: by_name.pop(t.name) for t in self.spec.lengths}
        do = torch.zeros_like(given.o) if given.do is None else given.do
        read = (given.q, given.k, given.v, given.o, given.lse, do, given.dlse, lengths, self._named(given.params))
        with captured.autograd_allowed():
            return attention_backward(self.spec, *read, by_name, given.scale, names)
