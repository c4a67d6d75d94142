"""Which KV tiles a backward hands out, in which order, and which query tiles each walks over, as `ir.backward` says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from attngen.ir.backward import BackwardPlan, BackwardPlanSet, BackwardSchedule
from attngen.ir.expr import Atom
from attngen.ref.binding import Binding
from attngen.ref.evaluate import Tensor
from attngen.ref.walk import mapped


class Step(NamedTuple):
    """Query tile `m_block` of a query head against KV tile `n_block`, and whether its pairs are tested."""

    batch: int
    head: int
    m_block: int
    n_block: int
    masked: bool


def launch_order(
    schedule: BackwardSchedule, n_blocks: int, heads_kv: int, batch: int, workers: int
) -> Iterator[tuple[int, int, int]]:
    """(batch element, KV head, n_block) of KV tiles in the order in which they are handed out to `workers` SMs."""
    heads = [(b, h_kv) for b in range(batch) for h_kv in range(heads_kv)]
    size = schedule.group_heads(len(heads), n_blocks, workers)
    order = range(n_blocks) if schedule.kv_order == "ascending" else range(n_blocks - 1, -1, -1)
    for start in range(0, len(heads), size):
        for n in order:
            for b, h_kv in heads[start : start + size]:
                yield b, h_kv, n


class Walk:
    """The steps of one call: of every KV tile, as the load warp finds them."""

    def __init__(self, plans: BackwardPlanSet, plan: BackwardPlan, bound: Binding) -> None:
        self.plans, self.plan, self.bound = plans, plan, bound
        self.tile_m, self.tile_n = plan.compute.tile_m, plan.compute.tile_n
        self.batch, self.seqlen_q, self.heads_q, self.heads_kv = bound.sizes
        self.seqlen_kv = bound.sets[0].parts[0].k.shape[1]
        self.m_blocks, self.n_blocks = -(-self.seqlen_q // self.tile_m), -(-self.seqlen_kv // self.tile_n)
        self._known: dict[tuple[int, int, int], list[tuple[bool, bool]]] = {}

    def kv_tiles(self, workers: int) -> Iterator[tuple[int, list[Step]]]:
        """KV head and steps of each KV tile, in the order of launch on `workers` SMs."""
        workers = max(workers // self.plan.compute.cluster, 1)  # CTAs, or clusters of them, that take KV tiles
        schedule, heads = self.plan.schedule, self.heads_kv * self.batch
        ctas, group = min(self.n_blocks * heads, workers), schedule.group_heads(heads, self.n_blocks, workers)
        for tile, (b, h_kv, n) in enumerate(launch_order(schedule, self.n_blocks, self.heads_kv, self.batch, workers)):
            even = schedule.wave(tile, group * self.n_blocks, ctas) % 2 == 0
            yield h_kv, self.steps_of(b, h_kv, n, descends=even)

    def steps_of(self, b: int, h_kv: int, n: int, descends: bool) -> list[Step]:
        """One KV tile: the query tiles of every query head of the KV head that see the tile. `descends`: serpentine."""
        group = self.heads_q // self.heads_kv
        heads = range(h_kv * group, (h_kv + 1) * group)
        steps = [s for h in heads for s in self.steps(b, h, n)] or [Step(b, heads[0], 0, n, True)]
        if self.plan.schedule.serpentine and group > 1:
            steps.sort(key=lambda s: -s.m_block if descends else s.m_block)  # stable: heads stay in their order
        return steps

    def steps(self, b: int, h: int, n: int) -> Iterator[Step]:
        for m in range(self.m_blocks):
            start, stop = self.live(b, h, m)[n]
            if start:
                whole = (m + 1) * self.tile_m <= self.seqlen_q
                yield Step(b, h, m, n, not (stop and (whole or isinstance(self.plans.gradient.score, Atom))))

    def live(self, b: int, h: int, m: int) -> list[tuple[bool, bool]]:
        """Of each KV tile, whether the walk takes it for these rows, and whether some clause keeps it whole.

        Where turns are counted, they are counted over all tiles from the first to the last that some clause touches.
        """
        if (b, h, m) in self._known:
            return self._known[b, h, m]
        if self.plan.mask.walk == "map":
            self._known[b, h, m] = self.mapped(b, h, m)
            return self._known[b, h, m]
        n = self.tile_n
        env = self.env(b, h, range(0))
        lo, hi = m * self.tile_m, min((m + 1) * self.tile_m, self.seqlen_q) - 1
        env |= {"q_lo": torch.tensor(lo), "q_hi": torch.tensor(hi)}
        touched, kept = [False] * self.n_blocks, [False] * self.n_blocks
        for t in self.plan.mask.form.bounds:
            low, low_max, up_min, up = (
                int(self.bound.bound(e, env).flatten()[0]) for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max)
            )
            for i in range(self.n_blocks):
                touched[i] |= low // n <= i < -(-up // n)
                kept[i] |= -(-low_max // n) <= i < up_min // n
        if self.plans.deterministic and any(touched):
            first, last = touched.index(True), self.n_blocks - touched[::-1].index(True)
            touched = [first <= i < last for i in range(self.n_blocks)]
        self._known[b, h, m] = list(zip(touched, kept, strict=True))
        return self._known[b, h, m]

    def mapped(self, b: int, h: int, m: int) -> list[tuple[bool, bool]]:
        """`live` of a walk by map."""
        rows = range(m * self.tile_m, min((m + 1) * self.tile_m, self.seqlen_q))
        kept = self.bound.value(self.bound.spec.mask, self.env(b, h, rows, range(self.seqlen_kv)))
        some, every = mapped(kept.expand(1, 1, len(rows), self.seqlen_kv)[0, 0], len(rows), self.tile_n)
        return list(zip(some[0].tolist(), every[0].tolist(), strict=True))

    def turn(self, s: Step) -> int | None:
        """How many KV tiles add to the step's dQ before it does; None: it does not add, for no query sees its tile."""
        touched = [t for t, _ in self.live(s.batch, s.head, s.m_block)]
        if not touched[s.n_block]:
            return None
        descends = self.plan.schedule.kv_order == "descending"
        return sum(touched[s.n_block + 1 :]) if descends else sum(touched[: s.n_block])

    def env(self, b: int, h: int, rows: range, keys: range | None = None) -> dict[str, Tensor]:
        """Atoms and params of one head, laid out (1, 1, rows, keys)."""
        env = self.bound.env(
            self.seqlen_kv,
            torch.arange(rows.start, rows.stop),
            None if keys is None else torch.arange(keys.start, keys.stop),
            torch.tensor([b]),
        )
        return {**env, "h": env["h"][:, h : h + 1], "h_kv": env["h_kv"][:, h : h + 1]}
