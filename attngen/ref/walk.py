"""The order in which a group of rows visits KV tiles, as `ir.plan` defines it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


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
