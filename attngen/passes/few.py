"""few: which plan serves a call whose row tiles are few, of its file's or of a kernel beside it, by counting rounds.

By length alone a plan is chosen as if row tiles were many. Where they are not, a last round that is nearly empty, or a
longest tile that ends after all others, costs more than any tile gains: 8 heads of 4096 rows are 176 tiles of 192 rows,
two rounds of 132 SMs, and 256 tiles of 128, two rounds of shorter ones. Where wide tiles leave SMs idle, tiles of one
warpgroup share their rows among more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attngen.ir.expr import Atom, Load, atoms_of, walk
from attngen.ir.plan import PACKS, KernelPlan, PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.passes.cost import kv_tile_cycles, row_tile_cycles
from attngen.passes.score_form import score_form
from attngen.targets import sm90

#: Rounds of the SMs from which the length alone decides: a last round costs at most a quarter there, half of it lost.
ROUNDS = 4
#: Rows of a middling tile: beside the keys that a row reaches, its tile walks those of so many rows.
TILE_ROWS = 128
#: A kernel that packs query heads is taken where it promises this share: the first such call compiles it. It gained
#: more than it promised at every length, and lost nowhere (docs/schedules.md).
PACKING_WORTH = 0.005
#: Another plan than the length's is taken where it promises this share of the time.
WORTH = 0.03
#: A kernel of small tiles is taken where it promises this share: estimates of 64 and of 128 rows were up to a tenth
#: apart from what was measured (docs/schedules.md), and the first such call compiles it.
SMALL_WORTH = 0.1
#: Keys of a small tile: 128 were measured, and a single warpgroup hides nothing of what a narrower tile repeats.
SMALL_TILES_N = range(80, 129)
#: The same where a mask is tested element by element: with 128 keys ptxas spills a few words at head dims 72 and 80.
SMALL_TESTED_N = range(80, 113)


class Pace(NamedTuple):
    """What a row tile of a plan takes: cycles of each KV tile, and beside them. `grows`: rows keep keys up to a
    diagonal, else all alike. `pack`: query heads that share it, each with tile_m / pack rows. `ctas`: those of a
    cluster, which take so many side by side.
    """

    tile_m: int
    tile_n: int
    kv_tile_cycles: int
    row_tile_cycles: int
    grows: bool
    pack: int = 1
    ctas: int = 1

    @property
    def stated(self) -> dict[str, object]:
        """As ATTN_META holds it: what is no default."""
        return {name: x for name, x in self._asdict().items() if x != self._field_defaults.get(name)}

    @property
    def rows(self) -> int:
        """Of the row tiles that are walked together."""
        return self.tile_m * self.ctas

    def row_tiles(self, heads: int, seqlen_q: int) -> int:
        """Row tiles (a cluster's are one) of a call with `heads` query heads in all batch elements."""
        return heads // self.pack * -(-seqlen_q * self.pack // self.rows)


class Sibling(NamedTuple):
    """A kernel of the same spec with other row tiles than this one's file holds, made when a call first gains by it."""

    #: Query heads of a KV head that share a row tile.
    pack: int
    #: Its one tile; None: as the search plans.
    tile: tuple[int, int] | None = None

    def of(self, spec: AttentionSpec) -> AttentionSpec:
        """What it is built from."""
        tile_m, tile_n = self.tile or (spec.schedule.tile_m, spec.schedule.tile_n)
        return spec.replace(schedule=spec.schedule.replace(tile_m=tile_m, tile_n=tile_n, pack_gqa=self.pack))


def _counts(spec: AttentionSpec, first: KernelPlan) -> bool:
    """Whether the host knows a call's row tiles and may choose: not of ragged batches, whose tiles it cannot count, nor
    where a map's memory is laid out for a plan, nor of clusters that the spec asks for.
    """
    return first.mask.map is None and not spec.layout.is_ragged and spec.schedule.cluster in (None, (1, 1))


def paces(plans: PlanSet) -> tuple[Pace, ...]:
    """The pace of each plan; none where the length must decide."""
    return tuple(pace_of(p) for p in plans.plans) if _counts(plans.spec, plans.plans[0]) else ()


def pace_of(p: KernelPlan) -> Pace:
    """The pace of a plan, by the cost model."""
    c = p.compute
    cycles_of = round(kv_tile_cycles(p)), round(row_tile_cycles(p))
    return Pace(c.tile_m, c.tile_n, *cycles_of, p.mask.grows, p.schedule.pack, p.launch.cluster[0])


def small_plan(spec: AttentionSpec, served: Sequence[KernelPlan], chosen: Sequence[KernelPlan]) -> KernelPlan | None:
    """Of the candidates that fit, the plan of one warpgroup for calls whose wide row tiles leave SMs idle; it is a
    kernel of its own, since turns and bounds of warpgroups are none of its business. None where the spec names a tile,
    nothing fits, or a plan of the file is one, and where tensors have an element for each pair of a row and a key,
    whose loads ptxas spills with one warpgroup's registers.
    """
    named = spec.schedule.tile_m or spec.schedule.tile_n
    if named or not _counts(spec, chosen[0]) or any(p.compute.warpgroups == 1 for p in chosen):
        return None
    if _reads_pairs(spec, chosen[0]):
        return None
    keys = SMALL_TESTED_N if chosen[0].mask.test == "elements" else SMALL_TILES_N
    fit = [p for p in served if p.compute.warpgroups == 1 and p.compute.tile_n in keys]
    return max(fit, key=lambda p: p.compute.tile_n, default=None)


def _reads_pairs(spec: AttentionSpec, p: KernelPlan) -> bool:
    """Whether elements are loaded that move with the row and the key, but those that a distance names."""
    read = [spec.mask] if p.mask.test == "elements" else []
    if not isinstance(spec.score, Atom):
        form = score_form(spec.score, "kv", spec)
        if any(s.by_row for s in form.streams):
            return True
        read += [t.value for t in form.terms]
    loads = [n for e in read for n in walk(e) if isinstance(n, Load)]
    return any("kv_idx" in atoms_of(n) and not atoms_of(n).isdisjoint(("q_idx", "q_pos")) for n in loads)


def length_of_plan(seqlen_q: int, seqlen_kv: int, keys: int) -> int:
    """The length that names a call's plan where a row reaches `keys`: it walks as a row of a shorter sequence does."""
    return min(max(seqlen_q, seqlen_kv), keys + TILE_ROWS)


def are_few(pace: Pace, heads: int, seqlen_q: int, workers: int) -> bool:
    """Whether a call of this many query heads (of all batch elements) has few row tiles for `workers` CTAs."""
    return pace.row_tiles(heads, seqlen_q) < ROUNDS * workers // pace.ctas


def cycles(pace: Pace, heads: int, seqlen_q: int, seqlen_kv: int, workers: int) -> float:
    """Estimated cycles of the launch, longest row tiles first.

    A CTA draws the ticket of its next tile as the last keys of one are asked for, so whoever ends first takes the
    longest that is left: a second round of the CTAs is taken in the reverse order of the first, and both together take
    what the last tile of the one and the first of the other do, or the longest tile alone. A round that is left over
    takes as long as its first tile. No schedule ends before an even share of all work.
    """
    count, workers = pace.row_tiles(heads, seqlen_q), max(workers // pace.ctas, 1)
    walked, queries = heads // pace.pack, pace.rows // pace.pack

    def of(tile: int) -> int:
        """Cycles of a row tile by its place in the order."""
        keys = seqlen_kv
        if pace.grows:
            keys += min((count - 1 - tile) // walked * queries + queries, seqlen_q) - seqlen_q
        return pace.row_tile_cycles + pace.kv_tile_cycles * max(1, -(-keys // pace.tile_n))

    starts = range(0, count, workers)
    end = sum(max(of(i), of(i + workers - 1) + of(i + workers)) for i in starts[: len(starts) // 2 * 2 : 2])
    end += of(starts[-1]) if len(starts) % 2 else 0
    return sm90.LAUNCH_CYCLES + max(count * (of(0) + of(count - 1)) / 2 / workers, end)


def pick(paces: Sequence[Pace], usual: int, heads: int, seqlen_q: int, seqlen_kv: int, workers: int) -> int:
    """The plan for a call; `usual` is the one that its length names, which many row tiles keep. Those that query heads
    share do not: lengths are split by what was measured apart, and the diagonal cuts fewer of their KV tiles.
    """
    if not paces or (paces[usual].pack == 1 and not are_few(paces[usual], heads, seqlen_q, workers)):
        return usual
    times = [cycles(p, heads, seqlen_q, seqlen_kv, workers) for p in paces]
    best = min(range(len(times)), key=lambda i: times[i])
    return best if times[best] < (1 - WORTH) * times[usual] else usual


class Beside(NamedTuple):
    """The siblings that a kernel file may have: of small tiles, `small` their pace, and of packed query heads."""

    small: Pace | None = None
    packs: bool = False

    def sibling(
        self, paces: Sequence[Pace], chosen: int, heads: int, group: int, seqlen_q: int, seqlen_kv: int, workers: int
    ) -> Sibling | None:
        """The sibling that ends before plan `chosen` of the file; None where none promises enough. `group`: query heads
        of a KV head.
        """
        if not paces:
            return None
        own, call = paces[chosen], (heads, seqlen_q, seqlen_kv, workers)
        packs = self.packs and own.pack == 1 and group > 1 and group in PACKS
        small = self._small(own.pack, *call[:2], workers)
        if small is None and not packs:
            return None
        usual = cycles(own, *call)
        time = _with(small, usual, *call)
        if packs:
            packed = min(cycles(p._replace(pack=group, ctas=1), *call) for p in paces)
            if _with(self._small(group, *call[:2], workers), packed, *call) < (1 - PACKING_WORTH) * time:
                return Sibling(group)  # which may have a sibling of small tiles
        return Sibling(own.pack, (small.tile_m, small.tile_n)) if small and time < usual else None

    def siblings(self, paces: Sequence[Pace], group: int) -> tuple[Sibling, ...]:
        """All that calls with `group` query heads a KV head may take; one that packs may have one of small tiles."""
        if not paces:
            return ()
        pack, small = paces[0].pack, self.small
        packed = [Sibling(group)] if self.packs and pack == 1 and group > 1 and group in PACKS else []
        return (*packed, *([Sibling(pack, (small.tile_m, small.tile_n))] if small else []))

    def _small(self, pack: int, heads: int, seqlen_q: int, workers: int) -> Pace | None:
        """The small tiles of `pack` heads, where no CTA takes two: so they were measured."""
        small = self.small and self.small._replace(pack=pack)
        return small if small and small.row_tiles(heads, seqlen_q) <= workers else None


def _with(small: Pace | None, time: float, heads: int, seqlen_q: int, seqlen_kv: int, workers: int) -> float:
    """Cycles of a call that takes `time` with wide tiles: with small ones where that is worth a kernel."""
    found = time if small is None else cycles(small, heads, seqlen_q, seqlen_kv, workers)
    return found if found < (1 - SMALL_WORTH) * time else time
