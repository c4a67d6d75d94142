"""choose: which of the backward plans that fit serve which lengths, by steps and what a step costs.

A tall step costs its barriers and its latency once for more rows. But a walk takes whole steps: where it is short, what
its first and its last one hold of masked rows, or of none, is a large share of them, and lower steps waste less.
"""

from __future__ import annotations

from collections.abc import Sequence

from attngen.ir.backward import BackwardPlan
from attngen.ir.base import Node
from attngen.ir.forms import MaskForm
from attngen.ir.spec import AttentionSpec
from attngen.passes.backward.cost import WALK_CYCLES
from attngen.passes.backward.order import tiles_seen
from attngen.passes.choose import LENGTHS as ALL_LENGTHS
from attngen.passes.choose import WORTH, fewest
from attngen.targets import measured

#: Lengths at which plans are compared, and those halfway: where walks are short, some tokens more are a step more of
#: one plan and none of another. Shorter calls take what the kernels around the main one take.
LENGTHS = tuple(sorted({m for n in ALL_LENGTHS for m in (n, n * 3 // 2) if 512 <= m <= ALL_LENGTHS[-1]}))
#: What another plan must save on average where plans were measured: half a per cent at the longest lengths, of calls
#: that take tens of ms and that training repeats. A model is not as sharp.
MEASURED_WORTH = 0.001


def choose(
    spec: AttentionSpec, form: MaskForm, served: list[BackwardPlan], deterministic: bool
) -> tuple[tuple[BackwardPlan, ...], tuple[int, ...]]:
    """At most MAX_PLANS plans and the lengths up to which each serves, all of one kernel class (`skeleton`).

    Ranked by what was measured where some candidates were, then only those compete. One plan, the cheapest pair's,
    where a call decides how long walks are. Operands are split, for twice the fp32 sums into dQ, only where nothing
    else fits.
    """
    whole = [p for p in served if not p.compute.splits_operands] or served[:1]
    usual = min(whole, key=lambda p: p.cost.cycles / (p.compute.tile_m * p.compute.tile_n))
    alike = [p for p in whole if skeleton(p) == skeleton(usual)]
    lengths, worth = measured_lengths(usual), MEASURED_WORTH
    known = {i: row for i, p in enumerate(alike) if not deterministic and (row := rates(p))}
    if not known:
        lengths, worth = LENGTHS, WORTH
        known = {i: row for i, p in enumerate(alike) if (row := _times(spec, form, p, deterministic))}
    if not known:
        return (usual,), ()
    best = [min(column) for column in zip(*known.values(), strict=True)]
    relative = {i: [t / b for t, b in zip(row, best, strict=True)] for i, row in known.items()}
    plans, limits = fewest(relative, lengths, worth)
    return tuple(alike[i] for i in plans), limits


def of_one_wave(rows: int, tile_m: Sequence[int], cycles: Sequence[int]) -> int:
    """Which plan serves a call whose KV tiles are no more than SMs: it ends with the longest walk, of `rows`, not with
    the mean one. `tile_m` and `cycles` of a step: of each plan.
    """
    times = [-(-rows // m) * step for m, step in zip(tile_m, cycles, strict=True)]
    return times.index(min(times))


def skeleton(p: BackwardPlan) -> tuple[Node | bool | int | str, ...]:
    """What a kernel's text fixes for all its plans: who owns which product, the order of KV tiles and of a walk's
    steps, when dQ becomes zero, shared walks, stages of dS and P, and the mask.
    """
    c, s, m = p.compute, p.schedule, p.memory
    walk = (s.kv_order, s.serpentine, s.zeroes_ahead, s.shares_walks)
    return (c.splits_operands, c.has_score, *walk, m.ds_stages, m.p_stages, m.p_bytes, p.mask)


def rates(p: BackwardPlan) -> Sequence[float] | None:
    """Seconds a FLOP at each of `measured_lengths`, where this tile was measured in full attention."""
    c, m = p.compute, p.mask
    if c.has_score or m.walk == "map" or not m.form.is_full:
        return None
    return measured.seconds_per_flop(c.head_dim_qk, c.head_dim_v, "full", p.name, direction="backward")


def measured_lengths(p: BackwardPlan) -> tuple[int, ...]:
    """Lengths at which tiles of these head dims were measured in full attention."""
    return measured.lengths(p.compute.head_dim_qk, p.compute.head_dim_v, "full", direction="backward")


def _times(spec: AttentionSpec, form: MaskForm, p: BackwardPlan, deterministic: bool) -> list[float] | None:
    """Cycles of one square head at each of `LENGTHS`; None: a call decides."""
    if p.mask.walk == "map":
        return None
    times: list[float] = []
    c = p.compute
    for length in LENGTHS:
        seen = tiles_seen(spec, form, c.tile_m, c.tile_n, length, deterministic)
        if seen is None:
            return None
        steps = sum(end - first for ranges in seen for first, end in ranges)
        times.append(steps * p.cost.cycles + -(-length // c.tile_n) * WALK_CYCLES)
    return times
