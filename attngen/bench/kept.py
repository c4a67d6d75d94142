"""How much of a cell a mask keeps: pairs, and tiles of a kernel that hold a kept pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from attngen.bench.cells import Cell

if TYPE_CHECKING:
    from torch import Tensor

#: Scores that are looked at together.
_AT_ONCE = 1 << 25


class Kept(NamedTuple):
    """Averages over batch and heads (the first few where the mask reads them)."""

    #: Kept (row, key) pairs of a head.
    pairs: float
    #: Share of all tiles in which some pair is kept.
    tile_share: float


def kept(cell: Cell, params: Mapping[str, Any], tensors: Mapping[str, Any], tile: tuple[int, int] = (1, 1)) -> Kept:
    """Count by evaluating the mask at every pair. `tile`: rows and keys of a tile, counted from row and key 0."""
    import torch

    from attngen.ir.expr import atoms_of, tensors_of
    from attngen.ref.evaluate import evaluate

    mask, device = cell.spec.mask, "cuda" if torch.cuda.is_available() else "cpu"
    read = atoms_of(mask)
    batches = range(min(cell.batch, 8)) if "b" in read or tensors_of(mask) else range(1)
    heads = range(min(cell.heads_q, 8)) if read & {"h", "h_kv"} else range(1)
    scalars = {k: torch.tensor(v, device=device) for k, v in params.items()}
    columns = torch.arange(cell.seqlen_kv, device=device)[None, :]
    step = max(1, _AT_ONCE // max(1, cell.seqlen_kv) // tile[0]) * tile[0]
    pairs = tiles = 0
    for b in batches:
        for h in heads:
            for start in range(0, cell.seqlen_q, step):
                rows = torch.arange(start, min(start + step, cell.seqlen_q), device=device)[:, None]
                fixed = {
                    "b": b, "h": h, "h_kv": h * cell.heads_kv // cell.heads_q, "seqlen_q": cell.seqlen_q,
                    "seqlen_kv": cell.seqlen_kv, "heads_q": cell.heads_q, "heads_kv": cell.heads_kv,
                    "batch": cell.batch,
                }  # fmt: skip
                env = {n: torch.tensor(x, device=device) for n, x in fixed.items()} | scalars
                env |= {"q_idx": rows, "kv_idx": columns, "q_pos": rows + (cell.seqlen_kv - cell.seqlen_q)}
                found = torch.as_tensor(evaluate(mask, env, dict(tensors))).bool()
                found = found.expand(rows.shape[0], cell.seqlen_kv)
                pairs += int(found.sum())
                tiles += int(_blocks(found, *tile).sum())
    seen = len(batches) * len(heads)
    all_tiles = -(-cell.seqlen_q // tile[0]) * -(-cell.seqlen_kv // tile[1])
    return Kept(pairs / seen, tiles / seen / max(1, all_tiles))


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Whether any element of each block is true."""
    import torch

    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.view(-1, rows, padded.shape[1] // columns, columns).any(3).any(1)
