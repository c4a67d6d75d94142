"""few: which plan of a set serves a call whose row tiles are few, by counting how often they fill the SMs.

By length alone a plan is chosen as if row tiles were many. Where they are not, a last round that is nearly empty, or a
longest tile that ends after all others, costs more than any tile gains: 8 heads of 4096 rows are 176 tiles of 192 rows,
two rounds of 132 SMs, and 256 tiles of 128, two rounds of shorter ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attngen.ir.plan import PACKS, KernelPlan, PlanSet
from attngen.passes.cost import kv_tile_cycles, row_tile_cycles

#: Rounds of the SMs from which the length alone decides: a last round costs at most a quarter there, half of it lost.
ROUNDS = 4
#: Rows of a middling tile: beside the keys that a row reaches, its tile walks those of so many rows.
TILE_ROWS = 128
#: A kernel that packs query heads is taken where it promises this share: the first such call compiles it. It gained
#: more than it promised at every length, and lost nowhere (docs/schedules.md).
PACKING_WORTH = 0.005
#: Another plan than the length's is taken where it promises this share of the time.
WORTH = 0.03


class Pace(NamedTuple):
    """What a row tile of a plan takes: cycles of each KV tile, and beside them. `grows`: rows keep keys up to a
    diagonal, else all alike. `pack`: query heads that share it, each with tile_m / pack rows.
    """

    tile_m: int
    tile_n: int
    kv_tile: int
    row_tile: int
    grows: bool
    pack: int = 1

    def row_tiles(self, heads: int, seqlen_q: int) -> int:
        """Row tiles of a call with `heads` query heads in all batch elements."""
        return heads // self.pack * -(-seqlen_q * self.pack // self.tile_m)


def paces(plans: PlanSet) -> tuple[Pace, ...]:
    """The pace of each plan; none where the length must decide: a map (whose memory is laid out for a plan), or ragged
    batches (whose tiles the host cannot count), or clusters (that were asked for, and go by pairs).
    """
    first = plans.plans[0]
    if first.mask.map is not None or plans.spec.layout.is_ragged or first.launch.pairs_ctas:
        return ()
    return tuple(_pace(p) for p in plans.plans)


def _pace(p: KernelPlan) -> Pace:
    c = p.compute
    cycles_of = round(kv_tile_cycles(p)), round(row_tile_cycles(p))
    return Pace(c.tile_m, c.tile_n, *cycles_of, p.mask.grows, p.schedule.pack)


def are_few(pace: Pace, heads: int, seqlen_q: int, workers: int) -> bool:
    """Whether a call of this many query heads (of all batch elements) has few row tiles for `workers` CTAs."""
    return pace.row_tiles(heads, seqlen_q) < ROUNDS * workers


def cycles(pace: Pace, heads: int, seqlen_q: int, seqlen_kv: int, workers: int) -> float:
    """Estimated cycles of the launch, longest row tiles first.

    No schedule ends before an even share of all work, nor, for any k, before k + 1 tiles as long as the last of the
    first k * workers + 1: one CTA takes so many of those. Of equal tiles this is the number of rounds.
    """
    count = pace.row_tiles(heads, seqlen_q)
    longest = shortest = pace.row_tile + pace.kv_tile * -(-seqlen_kv // pace.tile_n)
    if pace.grows:
        first = min(pace.tile_m // pace.pack, seqlen_q) + seqlen_kv - seqlen_q  # keys of the first row tile
        shortest = pace.row_tile + pace.kv_tile * max(1, -(-first // pace.tile_n))
    less = (longest - shortest) / max(count - 1, 1)
    rounds = [(k + 1) * (longest - less * k * workers) for k in range(-(-count // workers))]
    return max(count * (longest + shortest) / 2 / workers, *rounds)


def pick(paces: Sequence[Pace], usual: int, heads: int, seqlen_q: int, seqlen_kv: int, workers: int) -> int:
    """The plan for a call; `usual` is the one that its length names, which many row tiles keep. Those that query heads
    share do not: lengths are split by what was measured apart, and the diagonal cuts fewer of their KV tiles.
    """
    if not paces or (paces[usual].pack == 1 and not are_few(paces[usual], heads, seqlen_q, workers)):
        return usual
    times = [cycles(p, heads, seqlen_q, seqlen_kv, workers) for p in paces]
    best = min(range(len(times)), key=lambda i: times[i])
    return best if times[best] < (1 - WORTH) * times[usual] else usual


def packs(
    paces: Sequence[Pace], chosen: int, heads: int, group: int, seqlen_q: int, seqlen_kv: int, workers: int
) -> bool:
    """Whether a kernel whose row tiles hold `group` query heads of a KV head ends before plan `chosen`."""
    if not paces or paces[chosen].pack > 1 or group not in PACKS or group == 1:
        return False
    apart = cycles(paces[chosen], heads, seqlen_q, seqlen_kv, workers)
    packed = min(cycles(p._replace(pack=group), heads, seqlen_q, seqlen_kv, workers) for p in paces)
    return packed < (1 - PACKING_WORTH) * apart
