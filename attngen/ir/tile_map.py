"""TileTest: what is known of a mask over a whole tile, before any of its pairs is looked at.

A tile map says of every tile of a kernel whether some pair of it is kept (it is visited) and whether all are (it needs
no mask). Most tiles are decided by this test, in a few instructions; the others pair by pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attngen.ir.base import Node
from attngen.ir.expr import Expr, atoms_of, params_of
from attngen.ir.types import Type

#: Names of params that stand for what a load of a tile gives, before its number; no spec can write them.
LEAST, MOST, KNOWN = FOUND = "%least_", "%most_", "%known_"


class IndexRange(Node):
    """Indices of one axis that the pairs of a tile read, both ends included."""

    first: Expr
    last: Expr


class LoadRange(Node):
    """The least and largest element that the pairs of a tile read of a captured tensor.

    Elements lie in the box of `axes`, clamped into the tensor as every index of a kernel is. Expressions that read the
    result find it in params `%least_<number>`, `%most_<number>` and `%known_<number>` (bool: the box is small enough
    that it was looked through, and holds no NaN).
    """

    number: int
    tensor: str
    type: Type
    axes: tuple[IndexRange, ...]

    @property
    def ends(self) -> list[Expr]:
        """First and last index of each axis, one after the other."""
        return [e for axis in self.axes for e in (axis.first, axis.last)]


class TileTest(Node):
    """Over a tile of rows q_lo..q_hi and keys kv_lo..kv_hi: `every` pair is kept for sure; `some` pair may be.

    Expressions read the ends of the tile, `b`, `h`, `h_kv`, sizes, params, and what `loads` found, in order: the axes
    of one may read an earlier one. `every` implies `some`. `near` is less than `some` and takes no load: where it does
    not hold, no pair is kept.
    """

    near: Expr
    loads: tuple[LoadRange, ...]
    every: Expr
    some: Expr


def inner_loads(test: TileTest, *, by_rows: bool) -> tuple[LoadRange, ...]:
    """Loads that are the same in all tiles of a column of the map: no end of an outer tile has a part in them, by way
    of an earlier load neither. `by_rows`: outer tiles are query tiles.
    """
    outer = {"q_lo", "q_hi"} if by_rows else {"kv_lo", "kv_hi"}
    found: list[LoadRange] = []
    known: set[str] = set()
    for load in test.loads:
        read = {p for e in load.ends for p in params_of(e) if p.startswith(FOUND)}
        if read <= known and not any(atoms_of(e) & outer for e in load.ends):
            found.append(load)
            known |= {f"{kind}{load.number}" for kind in FOUND}
    return tuple(found)


class TileMap(Node):
    """Two bits for each tile of a kernel: `some` pair is kept, `every` pair is; made on the GPU before the kernel runs.

    A word (int32) holds 32 tiles. A forward has a row of words for each row tile, whose bits are its KV tiles; a
    backward one for each KV tile, whose bits are query tiles. Rows stand (batch, heads, outer tile), batch and heads
    only where the mask reads them; in ragged layouts (heads, outer tiles of all sequences), a row as long as that of
    the longest sequence there may be. First the words of `some`, then as many of `every`. A backward whose additions
    take turns has a third part: the bits of `some` again, a row for each query tile, KV tiles in the order in which
    they add.
    """

    test: TileTest
    per_batch: bool
    per_head: bool


def map_words(entry: Mapping[str, Any], plan: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    """int32 words of the map of one call. `entry`: what ATTN_META says under `map`, with `packed` of varlen, of a
    backward with `by_keys` and `turns`; `plan`: its tile_m and tile_n; `sizes`: extents by axis name.
    """
    tile_m, tile_n = int(plan["tile_m"]), int(plan["tile_n"])
    m_blocks, n_blocks = -(-sizes["seqlen_q"] // tile_m), -(-sizes["seqlen_kv"] // tile_n)
    maps = (sizes["batch"] if entry["per_batch"] else 1) * (sizes["heads_q"] if entry["per_head"] else 1)
    q_tiles, kv_tiles = m_blocks, n_blocks
    if entry.get("packed"):  # sequences follow one another; each begins a tile, and so does what lies behind the last
        maps, more = sizes["heads_q"] if entry["per_head"] else 1, sizes["batch"] + 1
        q_tiles, kv_tiles = sizes["seqlen_q"] // tile_m + more, sizes["seqlen_kv"] // tile_n + more
    by_rows, by_keys = q_tiles * -(-n_blocks // 32), kv_tiles * -(-m_blocks // 32)
    if not entry.get("by_keys"):
        return maps * 2 * by_rows
    return maps * (2 * by_keys + (by_rows if entry["turns"] else 0))
