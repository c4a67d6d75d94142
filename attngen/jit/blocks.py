"""Block lists as others keep them, to the dense map of blocks that a spec with given blocks takes."""

from __future__ import annotations

import torch

from attngen.diag.diagnostic import AttnError, error


def block_map(counts: torch.Tensor, indices: torch.Tensor, blocks_kv: int, *, check: bool = False) -> torch.Tensor:
    """The `blocks` of a call from lists: bool (batch or 1, heads or 1, blocks_q, blocks_kv), true for listed blocks.

    `counts` int (batch or 1, heads or 1, blocks_q): how many KV blocks a row of blocks keeps; `indices` int, with one
    more axis: their numbers first, then anything. `blocks_kv`: KV blocks of a row, ceil(seqlen_kv / kv).
    FlexAttention's BlockMask and FlashAttention-4 keep such lists twice, for partial and for full blocks: the map of a
    call is the `|` of both.

    Plain torch operations on the lists' device, nothing waits for it. Numbers outside are dropped, doubled ones count
    once, order does not matter; `check=True` makes each of these an error (and waits).
    Raises: E0604 what is no int tensor or no count, E0607 shapes, E0626 under `check`.
    """
    for name, x in (("counts", counts), ("indices", indices)):
        if not isinstance(x, torch.Tensor) or x.is_floating_point() or x.dtype is torch.bool:
            what = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise error("E0604", f"`{name}` must be a tensor of ints, found {what}", helps=("pass int32 or int64",))
    if indices.ndim != counts.ndim + 1 or indices.shape[:-1] != counts.shape:
        raise error(
            "E0607",
            f"`indices` has shape {tuple(indices.shape)}, `counts` {tuple(counts.shape)}",
            notes=("indices has one axis more: the numbers of a row's blocks",),
            helps=("pass counts (batch, heads, blocks_q) and indices (batch, heads, blocks_q, n)",),
        )
    if not isinstance(blocks_kv, int) or blocks_kv < 0:
        raise error(
            "E0604",
            f"`blocks_kv` must be a number of blocks, found {blocks_kv!r}",
            helps=("pass ceil(seqlen_kv / kv), an int: -(-seqlen_kv // 128) of blocks of 128 keys",),
        )
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    inside = listed & (indices >= 0) & (indices < blocks_kv)
    if check:
        _check(counts, indices, listed, blocks_kv)
    found = torch.zeros((*counts.shape, blocks_kv + 1), dtype=torch.bool, device=indices.device)
    found.scatter_(-1, torch.where(inside, indices, blocks_kv).long(), True)
    return found[..., :blocks_kv]


def _check(counts: torch.Tensor, indices: torch.Tensor, listed: torch.Tensor, blocks_kv: int) -> None:
    most = indices.shape[-1]
    bad = (counts < 0) | (counts > most)
    if bool(bad.any()):
        raise _fault("counts", counts, bad, f"outside 0..{most}, the length of a list")
    bad = listed & ((indices < 0) | (indices >= blocks_kv))
    if bool(bad.any()):
        raise _fault("indices", indices, bad, f"outside 0..{blocks_kv - 1}, the KV blocks of a row")
    if most < 2:
        return
    step = indices[..., 1:] - indices[..., :-1]
    for wrong, what in ((step == 0, "a block that the one before it names, too"), (step < 0, "not in rising order")):
        bad = torch.zeros_like(listed)
        bad[..., 1:] = listed[..., 1:] & wrong
        if bool(bad.any()):
            raise _fault("indices", indices, bad, what)


def _fault(name: str, x: torch.Tensor, bad: torch.Tensor, what: str) -> AttnError:
    at = tuple(int(i) for i in bad.nonzero()[0])
    return error(
        "E0626",
        f"`{name}` holds {int(x[at])} at {at}: {what}",
        notes=(f"{int(bad.sum())} of {x.numel()} are wrong in this way",),
        helps=("make the lists again; numbers outside are dropped and doubled ones count once without `check`",),
    )
