"""order: whether the KV tiles of a head are handed out first to last or last to first.

Handing out tile n before n' also lets it add first where additions to dQ take turns (page `backward`, "Determinism"),
so one choice decides two things: how well long and short walks pack, and how long they wait for one another. Both
orders are tried on a small call: KV tiles go one after the other to a few SMs, a step takes 1, and an addition that is
not waited for takes nothing. With measured lengths of a turn this finds the speed of both orders on a GPU within a few
percent (docs/performance.md).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attngen.ir import integers
from attngen.ir.backward import BackwardCompute
from attngen.ir.expr import atoms_of
from attngen.ir.forms import MaskForm
from attngen.ir.spec import AttentionSpec
from attngen.passes.facts import Q_HI, Q_LO

KvOrder = Literal["ascending", "descending"]
#: KV tiles of a head of the small call, which are its SMs, too; and how many heads it has.
TILES, HEADS = 16, 4
#: In steps: what comes before the first of a CTA, and from an addition to the next one of the same query tile.
START, TURN = 2.0, 0.6
#: Walks are uneven where the longest takes this much more than the mean.
UNEVEN = 1.5


@dataclass(frozen=True, slots=True)
class TileOrder:
    """See `BackwardSchedule`."""

    kv_order: KvOrder
    grouped: bool
    serpentine: bool


def plan_order(spec: AttentionSpec, form: MaskForm, c: BackwardCompute, deterministic: bool) -> TileOrder:
    """Decide on a small call with the defaults of the params.

    Where both orders are equal, or a bound reads what only a call knows: descending with turns, which a causal mask of
    any kind needs, and ascending without. Heads are grouped where walks differ in length, or may: the long walks of all
    come first. Not with turns, whose order has the long walks last, and gains nothing. Grouped walks that all end at
    the last query tile, in every head alike, are serpentine.
    """
    usual: KvOrder = "descending" if deterministic else "ascending"
    other: KvOrder = "ascending" if deterministic else "descending"
    walks = kv_walks(spec, form, c.tile_m, c.tile_n, deterministic)
    if walks is None:
        return TileOrder(usual, grouped=not deterministic, serpentine=False)
    times = {order: makespan(walks, order, deterministic) for order in (usual, other)}
    lengths = [len(walk) for walk in walks]
    grouped = not deterministic and max(lengths) > UNEVEN * sum(lengths) / TILES
    meet = len({walk[-1] for walk in walks if walk}) == 1 and not atoms_of(form.mask) & {"h", "h_kv"}
    return TileOrder(other if times[other] < 0.99 * times[usual] else usual, grouped, serpentine=grouped and meet)


def kv_walks(
    spec: AttentionSpec, form: MaskForm, tile_m: int, tile_n: int, deterministic: bool
) -> list[list[int]] | None:
    """Of each KV tile of a square head of `TILES` tiles, the query tiles of its walk; None: a call decides."""
    seen = tiles_seen(spec, form, tile_m, tile_n, TILES * tile_n, deterministic)
    if seen is None:
        return None
    walks: list[list[int]] = [[] for _ in range(TILES)]
    for m, ranges in enumerate(seen):
        for n in (n for first, end in ranges for n in range(first, end)):
            walks[n].append(m)
    return walks


def tiles_seen(
    spec: AttentionSpec, form: MaskForm, tile_m: int, tile_n: int, length: int, deterministic: bool
) -> list[list[tuple[int, int]]] | None:
    """Of each query tile of a square head, with the defaults of the params, the KV tiles that it walks: ranges [first,
    end) that ascend and do not meet. None: a bound reads what only a call knows.
    """
    starts = range(0, length, tile_m)
    atoms = dict.fromkeys(("b", "h", "h_kv"), 0) | dict.fromkeys(("batch", "heads_q", "heads_kv"), 1)
    params = {p.name: p.default for p in spec.params}
    ends = [min(s + tile_m, length) - 1 for s in starts]
    env = {**atoms, **params, "seqlen_q": length, "seqlen_kv": length, Q_LO.name: list(starts), Q_HI.name: ends}
    bounds = [(b.lower_min, b.upper_max) for b in form.bounds]
    if None in params.values() or not all(integers.takes(e) for pair in bounds for e in pair):
        return None
    clauses = [[integers.column(e, env, len(starts)) for e in pair] for pair in bounds]
    n_blocks = -(-length // tile_n)
    seen = []
    for m in range(len(starts)):
        ranges = sorted((low[m] // tile_n, min(-(-up[m] // tile_n), n_blocks)) for low, up in clauses)
        seen.append(_joined([r for r in ranges if r[0] < r[1]], deterministic))
    return seen


def _joined(ranges: list[tuple[int, int]], hull: bool) -> list[tuple[int, int]]:
    """Ascending ranges with those that meet as one; `hull`: all of them as one."""
    joined: list[tuple[int, int]] = []
    for first, end in ranges:
        if joined and (hull or first <= joined[-1][1]):
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return joined


def makespan(walks: Sequence[Sequence[int]], order: KvOrder, deterministic: bool) -> float:
    """Steps until the last CTA of `HEADS` heads with these walks is done, on as many SMs as a head has KV tiles."""
    tiles = range(len(walks)) if order == "ascending" else reversed(range(len(walks)))
    launched = list(tiles)
    free = [0.0] * len(walks)
    last = 0.0
    for _ in range(HEADS):
        added: dict[int, float] = {}  # when the next addition to a query tile may start
        for n in launched:
            now = heapq.heappop(free) + START
            for m in walks[n]:
                now += 1.0
                if deterministic:
                    now = max(now, added.get(m, 0.0))
                    added[m] = now + TURN
            heapq.heappush(free, now)
            last = max(last, now)
    return last
