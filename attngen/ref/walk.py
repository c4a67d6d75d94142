"""The order in which a group of rows visits KV tiles, as `ir.plan` defines it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Tile(NamedTuple):
    """KV tile `n_block`, and whether its elements are tested."""

    n_block: int
    masked: bool


def tiles_of(bounds: Sequence[tuple[int, ...]], tile_n: int) -> Iterator[Tile]:
    """KV tiles from the last to the first.

    `bounds`: (lower_min, lower_max, upper_min, upper_max) of each clause for these rows. Where no tile is live, tile 0
    runs masked, so that every row block has its first tile. One rule covers both walks: with one clause, the tiles
    right and left of its full range are the masked ones.
    """
    live = [(low // tile_n, -(-up // tile_n)) for low, _, _, up in bounds if low < up]
    full = [(-(-low // tile_n), up // tile_n) for _, low, up, _ in bounds]
    tiles = sorted({n for start, stop in live for n in range(start, stop)}, reverse=True)
    if not tiles:
        yield Tile(0, True)
    for n in tiles:
        yield Tile(n, not any(start <= n < stop for start, stop in full))


def mapped(kept: torch.Tensor, tile_m: int, tile_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(some pair is kept, every pair is kept) of each tile, (…, m_blocks, n_blocks), of `kept` (…, rows, keys).

    A tile with keys past the end is never kept whole; rows past the end do not count.
    """
    import torch

    *front, rows, keys = kept.shape
    m_blocks, n_blocks = -(-rows // tile_m), -(-keys // tile_n)
    tiles = []
    for past_row, past_key in ((False, False), (True, False)):
        whole = torch.full((*front, m_blocks * tile_m, n_blocks * tile_n), past_key, dtype=torch.bool)
        whole[..., rows:, :keys] = past_row
        whole[..., :rows, :keys] = kept
        tiles.append(whole.view(*front, m_blocks, tile_m, n_blocks, tile_n).transpose(-2, -3).flatten(-2))
    return tiles[0].any(-1), tiles[1].all(-1)


def mapped_tiles(kept: torch.Tensor, tile_n: int) -> Iterator[Tile]:
    """KV tiles from the last to the first that a map names for rows `kept` (rows, keys); for none, the one past the
    last key, masked: a map may leave out of the element test what all tiles that it names have in common.
    """
    some, every = (x[0].tolist() for x in mapped(kept, kept.shape[0], tile_n))
    if not any(some):
        yield Tile(len(some), True)
    for n in range(len(some) - 1, -1, -1):
        if some[n]:
            yield Tile(n, not every[n])
