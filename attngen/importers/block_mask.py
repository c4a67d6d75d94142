"""BlockMask: its function, with its block lists where they say less than the function does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attngen.importers.imported import refused

#: Pairs up to which a BlockMask's lists are compared with its function, pair by pair.
_COMPARED = 1 << 24
Mod = Callable[..., Any]


def function(mask: Any) -> tuple[Mod, dict[str, int]]:
    """A mask_mod that keeps just what a BlockMask keeps, and the lengths that it was made for."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise refused("block_mask", f"is a {type(mask).__name__}", "pass what create_block_mask returned")
    mod: Mod | None = mask.mask_mod
    if mod is None or getattr(mod, "__name__", "") == "_sliced_mask_mod_error":
        raise refused("block_mask", "has lost its mask_mod", "import it before it is sliced, or give mask_mod")
    seqlen_q, seqlen_kv = mask.seq_lengths
    sizes = {"seqlen_q": int(seqlen_q), "seqlen_kv": int(seqlen_kv)}
    return (mod if _redundant(mask, mod) else _listed(mask, mod)), sizes


def sizes(mask: Any) -> tuple[int, int]:
    """Rows and keys of one block."""
    q, kv = mask.BLOCK_SIZE
    return int(q), int(kv)


def _maps(mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(partial, full): bool (B, H, row blocks, column blocks), true for a block that is listed."""
    blocks = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])

    def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        out = torch.zeros((*counts.shape, blocks + 1), dtype=torch.int32, device=indices.device)
        out.scatter_(-1, torch.where(used, indices, blocks).long(), 1)
        return out[..., :blocks].bool()

    full = mask.full_kv_num_blocks
    return listed(mask.kv_num_blocks, mask.kv_indices), None if full is None else listed(full, mask.full_kv_indices)


def _redundant(mask: Any, mod: Mod) -> bool:
    """Whether the function alone keeps the same pairs. Too large to compare counts as no."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = mask.kv_num_blocks.shape[:2]
    seqlen_q, seqlen_kv = mask.seq_lengths
    if batch * heads * seqlen_q * seqlen_kv > _COMPARED:
        return False
    device = mask.kv_num_blocks.device.type
    kept = create_mask(mod, batch, heads, seqlen_q, seqlen_kv, device=device)
    rows, columns = mask.BLOCK_SIZE

    def pairs(blocks: torch.Tensor) -> torch.Tensor:
        wide = blocks.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)
        return wide[..., :seqlen_q, :seqlen_kv]

    partial, full = _maps(mask)
    listed = kept & pairs(partial)
    return torch.equal(kept, listed if full is None else listed | pairs(full))


def _listed(mask: Any, mod: Mod) -> Mod:
    """The lists as captured tensors: a full block is kept whole, a partial one where the function holds."""
    partial_blocks, full_blocks = _maps(mask)
    rows, columns = mask.BLOCK_SIZE
    by_batch, by_head = (n > 1 for n in partial_blocks.shape[:2])

    def block_lists(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = (b if by_batch else 0, h if by_head else 0, q_idx // rows, kv_idx // columns)
        kept = partial_blocks[at] & mod(b, h, q_idx, kv_idx)
        return kept if full_blocks is None else full_blocks[at] | kept

    return block_lists
