"""Gradients of captured tensors, summed up block by block in the shapes that the caller gave."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from attngen.ir.gradient import Contribution
from attngen.ref.binding import Binding
from attngen.ref.evaluate import Tensor


class Captured:
    """One accumulator for each wanted tensor, in the dtype of the call; extent-1 axes receive sums."""

    def __init__(self, bound: Binding, given: Mapping[str, Tensor], wanted: Collection[str]) -> None:
        self.bound, self.given = bound, given
        self.totals = {n: bound.q.new_zeros(given[n].shape) for n in given if n in wanted}

    def contribute(self, c: Contribution, values: Tensor, env: Mapping[str, Tensor], keep: Tensor | None) -> None:
        """Add `values` (B, H, rows, keys), zero on dropped pairs, to the elements that `c` names."""
        total = self.totals[c.tensor]
        if not total.numel():
            return
        if not c.indices:
            total += values.sum()
            return
        # anywhere inside where nothing is added: the score's own evaluation has checked every pair that matters
        places = [
            self.bound.value(index, env, active=keep).clamp(0, extent - 1)
            for index, extent in zip(c.indices, total.shape, strict=True)
        ]
        # one value for each different place: axes that no index moves along are summed first
        shape = sum(places, places[0].new_zeros((1,) * values.dim())).shape
        total.index_put_(tuple(p.expand(shape) for p in places), values.sum_to_size(shape), accumulate=True)

    def graph(self) -> tuple[dict[str, Tensor], Binding]:
        """Wanted tensors as leaves, and the call with them in place."""
        leaves = {n: self.given[n].detach().to(total.dtype).requires_grad_() for n, total in self.totals.items()}
        expanded = {n: leaves[n].expand(t.shape) if n in leaves else t for n, t in self.bound.tensors.items()}
        return leaves, replace(self.bound, tensors=expanded)

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add whole gradients; None is zero."""
        for n, g in gradients.items():
            if g is not None:
                self.totals[n] += g
