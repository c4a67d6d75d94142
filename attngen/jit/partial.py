"""dK and dV of grouped query heads: over how many query heads one CTA sums, and the sum of the rest.

A CTA that walks over all query heads of a KV head leaves nothing to add up. But CTAs with long and short walks drift
apart, each at another query head: Q, dO and the fp32 sums of dQ of all of them are in use at a time, more than L2
holds, and additions to dQ go to DRAM. With few query heads a CTA it writes dK and dV of those only, and the sum over
the rest is one more pass over tensors that are small beside dQ (measured in docs/performance.md).
"""

from __future__ import annotations

from typing import Any

import torch

#: Query heads that a CTA walks over, at most: two keep what is in use within L2 and halve the tensors to add up.
HEADS_PER_CTA = 2


def heads_of_sums(heads_q: int, heads_kv: int) -> int:
    """Heads of the dK and dV that a launch writes: `heads_kv`, or a multiple of it for `add_up`."""
    group = heads_q // heads_kv
    per_cta = next(n for n in range(min(HEADS_PER_CTA, group), 0, -1) if group % n == 0)
    return heads_q // per_cta


def buffer_like(x: Any, heads: int, axis: int) -> Any:
    """Memory for a dK or dV of `heads` heads; `x` is the gradient's own, with its heads at `axis`."""
    shape = list(x.shape)
    shape[axis] = heads
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def add_up(partial: Any, out: Any, axis: int) -> None:
    """Write to `out` the sums over those heads of `partial` that share a KV head: fp32 sums, rounded once, in order."""
    torch.sum(partial.unflatten(axis, (out.shape[axis], -1)), axis + 1, out=out)
