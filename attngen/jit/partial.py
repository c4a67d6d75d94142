"""dK and dV of grouped query heads where KV tiles are few: the sum over the query heads of a KV head, in parts.

A CTA walks over all query heads of a KV head and leaves nothing to add up, as long as there is a KV tile for every SM.
A short call has fewer. Then a CTA takes part of the query heads and writes dK and dV of those only; the sum of the
parts is one more pass over tensors that are small beside dQ.
"""

from __future__ import annotations

from typing import Any

import torch


def heads_of_sums(kv_tiles: int, heads_q: int, heads_kv: int, workers: int) -> int:
    """Heads of the dK and dV that a launch writes: `heads_kv`, or a multiple of it for `add_up`.

    `kv_tiles`: of one head, over the batch; `workers`: KV tiles that are worked on at a time. The fewest parts that
    give each of those a tile, or as many as there are query heads.
    """
    group = heads_q // heads_kv
    parts = next((n for n in range(1, group) if group % n == 0 and kv_tiles * heads_kv * n >= workers), group)
    return heads_kv * parts


def buffer_like(x: Any, heads: int, axis: int) -> Any:
    """Memory for a dK or dV of `heads` heads; `x` is the gradient's own, with its heads at `axis`."""
    shape = list(x.shape)
    shape[axis] = heads
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def add_up(partial: Any, out: Any, axis: int) -> None:
    """Write to `out` the sums over those heads of `partial` that share a KV head: fp32 sums, rounded once, in order."""
    torch.sum(partial.unflatten(axis, (out.shape[axis], -1)), axis + 1, out=out)
