"""Walks of emitted kernels, run as plain Python (`emitted`) on one call, and what must hold of them.

A tile here is (batch element, head, query tile, KV tile). A tile with a kept pair is computed once, one that is
computed without the mask has kept pairs only; all others may be computed under it, which drops them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import emitted
import numpy as np
import torch
from emitted import LANES, NOTHING, Launch, Sized

from attngen.ir.backward import BackwardPlan
from attngen.ir.forms import MaskForm
from attngen.ir.plan import KernelPlan
from attngen.ir.spec import AttentionSpec
from attngen.ref.binding import bind
from attngen.ref.tables import table_values
from attngen.samples import Shape

#: Whether the mask is looked at, of each time that a tile is computed.
Steps = dict[tuple[int, int, int, int], list[bool]]


@dataclass(frozen=True)
class Call:
    """One call: `keep`, (batch, heads_q, seqlen_q, seqlen_kv), and all that bounds read."""

    shape: Shape
    params: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    keep: Any
    tables: Mapping[str, Any]

    @staticmethod
    def of(
        spec: AttentionSpec, form: MaskForm, shape: Shape, params: Mapping[str, Any], tensors: Mapping[str, Any]
    ) -> Call:
        """A call of this shape; `form`: the plan's. Raises: AttnError E0650 where the mask indexes past a tensor."""
        q = torch.zeros(shape.batch, shape.seqlen_q, shape.heads_q, 1)
        k = torch.zeros(shape.batch, shape.seqlen_kv, shape.heads_kv, 1)
        bound = bind(spec.replace(head_dim_qk=1, head_dim_v=1), q, k, k, params, tensors)
        rows, keys = torch.arange(shape.seqlen_q), torch.arange(shape.seqlen_kv)
        keep = bound.value(spec.mask, bound.env(shape.seqlen_kv, rows, keys))
        keep = torch.broadcast_to(keep, (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_kv))
        tables = table_values(form.tables, bound.env(shape.seqlen_kv, rows), bound.tensors)
        return Call(shape, params, tensors, keep.numpy(), {n: x.numpy() for n, x in tables.items()})

    def tile_bits(self, tile_m: int, tile_n: int) -> tuple[Any, Any]:
        """(batch, heads, query tiles, KV tiles): some pair is kept; every pair is, and no key lies past the end."""
        b, h, rows, keys = self.keep.shape
        m, n = -(-rows // tile_m), -(-keys // tile_n)
        some, every = (np.full((b, h, m * tile_m, n * tile_n), past_end) for past_end in (False, True))
        some[:, :, :rows, :keys] = every[:, :, :rows, :keys] = self.keep
        every[:, :, :, keys:] = False
        some, every = (x.reshape(b, h, m, tile_m, n, tile_n) for x in (some, every))
        return some.any((3, 5)), every.all((3, 5))

    def check(self, steps: Steps, tile_m: int, tile_n: int) -> None:
        """What must hold of the tiles that were computed."""
        some, every = self.tile_bits(tile_m, tile_n)
        for tile in zip(*some.nonzero(), strict=True):
            assert len(steps.get(tile, ())) == 1, f"{tile} is computed {len(steps.get(tile, ()))} times"
        for (b, h, m, n), times in steps.items():
            past_end = m >= some.shape[2]
            assert all(times) or past_end or every[b, h, m, n], f"{b, h, m, n} is computed without its mask"


class Kernel:
    """The emitted text of one plan, ready to walk."""

    def __init__(self, plan: KernelPlan | BackwardPlan, text: str) -> None:
        self.plan, self.names = plan, emitted.load(text)
        self.meta = self.names["ATTN_META"]
        self.entry = self.meta.get("backward", self.meta)
        self.launched: dict[str, Launch] = {}

    def start(self, owner: Any, c: Call, big: list[Any], workers: int) -> Any:
        """Run the host entry; returns the problem that the main kernel sees."""
        self.launched = {name: Launch() for name in self.names["KERNELS"]}
        vars(owner).update(self.launched)
        owner.heads_last = owner.packed = lambda x: x
        owner.smem_layout = NOTHING
        owner.parts = lambda *_: (NOTHING, NOTHING)
        owner.tables_in = lambda *_: [c.tables[t["name"]] for t in self.meta["tables"]]
        tail = [*c.params.values(), *(x.numpy() for x in c.tensors.values())]
        tail += [self.map_of(c), 0] if "map" in self.entry else []
        tail += [NOTHING, 0] if "tables" in self.meta else []
        owner(*big, SimpleNamespace(iterator=0), 1.0, workers, *tail, NOTHING)
        return emitted.problem(self.names, owner, self.launched["kernel"])

    def map_of(self, c: Call) -> Any:
        """The words of the tile map, as a launch before the main kernel's makes them."""
        entry, compute = self.entry["map"], self.plan.compute
        some, every = c.tile_bits(compute.tile_m, compute.tile_n)
        merged = tuple(axis for axis, name in enumerate(("per_batch", "per_head")) if not entry[name])
        some, every = some.any(merged, keepdims=True), every.all(merged, keepdims=True)
        if not entry.get("by_keys"):
            return np.concatenate([_words(some[..., ::-1]), _words(every[..., ::-1])])
        by_keys = [_words(x.swapaxes(2, 3)) for x in (some, every)]
        if entry["turns"]:
            assert isinstance(self.plan, BackwardPlan)
            by_keys.append(_words(some[..., ::-1] if self.plan.schedule.kv_order == "descending" else some))
        return np.concatenate(by_keys)


def _words(bits: Any) -> Any:
    """Bits along the last axis, 32 to a word."""
    bits = np.concatenate([bits, np.zeros((*bits.shape[:-1], -bits.shape[-1] % 32), dtype=bool)], -1)
    return (bits.reshape(-1, 32) * (1 << LANES)).sum(-1)


# ---- forward ---------------------------------------------------------------------------------------------------------


def forward(k: Kernel, c: Call, workers: int = 3) -> None:
    """Every row tile: each warpgroup takes the KV tiles that are loaded, gives back all of them, computes its own."""
    s, plan, first = c.shape, k.plan, 7
    assert isinstance(plan, KernelPlan)
    pack = plan.schedule.pack
    rows = Sized((pack, s.seqlen_q) if pack > 1 else s.seqlen_q, 8, s.heads_q // pack, s.batch)
    kv = Sized(s.seqlen_kv, 8, s.heads_kv, s.batch)
    owner = k.names["AttentionForward"](k.names["PLANS"][0])
    p = k.start(owner, c, [rows, kv, kv, rows, NOTHING], workers)
    for name in ("row_columns", "finish_rows", "store_o", "store_max_logit", "score_held"):
        setattr(owner, name, NOTHING)
    rings = SimpleNamespace(k=NOTHING, v=NOTHING, q_full=NOTHING, q_empty=NOTHING)
    t = emitted.Module(tma_k="k", tma_v="v")
    steps: Steps = {}
    for tile in range(p.num_tiles):
        loaded: list[tuple[str, int, int]] = []
        owner.load_kv = lambda tma, ring, src, dst, n, i, to=loaded: to.append((tma, i, int(n)))
        place = m, h, b = owner.tile_coords(tile, p)
        drawn: list[int] = []
        owner.draw_ticket = lambda _p, counter, to=drawn: to.append(counter)
        end, _ = owner.load_tile(p, t, rings, NOTHING, place, first, 0)
        assert len(drawn) == 1, "a CTA draws one ticket for each tile that it takes"
        tiles = {i: n for tma, i, n in loaded if tma == "k"}
        assert sorted(tiles) == list(range(first, end)) and tiles == {i: n for tma, i, n in loaded if tma == "v"}
        for wg in range(owner.warpgroups):
            walked: list[tuple[int, int, bool]] = []
            owner.first_tile = owner.step = lambda w, r, i, n, masked, to=walked: to.append((i, int(n), bool(masked)))
            assert owner.attend(p, t, rings, wg, place, first, 0) == end
            for i, n, masked in walked:
                assert tiles[i] == n, "a warpgroup takes a tile for another one"
                for head in range(h * pack, (h + 1) * pack):
                    steps.setdefault((b, head, m * owner.warpgroups + wg, n), []).append(masked)
    c.check(steps, 64 // pack, plan.compute.tile_n)


# ---- backward --------------------------------------------------------------------------------------------------------


def backward(k: Kernel, c: Call, workers: int, parts: int = 1, seed: int = 0) -> list[int]:
    """Every KV tile, or each of the shares of its walk, by CTAs that take tickets in an order that `seed` draws.

    `parts`: heads of dK and dV for each KV head. Returns the shares that had no step.
    """
    s, plan, draw = c.shape, k.plan, random.Random(seed)
    assert isinstance(plan, BackwardPlan)
    q, kv, sums = (
        Sized(rows, 8, heads, s.batch)
        for rows, heads in ((s.seqlen_q, s.heads_q), (s.seqlen_kv, s.heads_kv), (s.seqlen_kv, s.heads_kv * parts))
    )
    owner = k.names["AttentionBackward"](k.names["PLANS"][0], frozenset("qkv"))
    p = k.start(owner, c, [q, kv, kv, q, q, NOTHING, NOTHING, q, sums, sums], workers)
    grid = k.launched["kernel"].grid[0]
    k.names["cute"].arch.grid_dim = lambda: (grid, 1, 1)
    ctas = grid // plan.compute.cluster
    takers = [draw.randrange(ctas) for _ in range(p.num_tiles)]
    steps: Steps = {}
    added: dict[int, list[tuple[int, int]]] = {}  # of a query tile among all: numbers of KV tiles, and which they are
    taken: list[int] = []
    idle: list[int] = []
    for number in range(ctas):
        tickets = iter([*(n for n, taker in enumerate(takers) if taker == number), p.num_tiles + number])
        told, walked, keys = _load(owner, p, tickets, idle)
        at = 0
        for (count, item), (n, h_kv, b) in zip(told, keys, strict=True):
            place, head, batch = owner.tile_coords(item, p)
            assert (n, h_kv, b) == (place, head // parts, batch)
            for m, h, of, masked in walked[at : at + count]:
                assert of == b and h // p.heads_per_cta == head
                steps.setdefault((b, h, m, n), []).append(bool(masked))
                added.setdefault((b * s.heads_q + h) * p.m_blocks + m, []).append((item, n))
            at += count
        assert at == len(walked)
        taken += [item for _, item in told]
    assert sorted(taken + idle) == list(range(p.num_tiles))
    c.check(steps, plan.compute.tile_m, plan.compute.tile_n)
    if k.entry["deterministic"]:
        for tile, adds in added.items():
            turns = [before for before, own in (owner.turn(p, tile, n) for _, n in sorted(adds)) if own]
            assert turns == list(range(len(turns))), "turns are not in the order of tickets"
    if plan.schedule.zeroes_ahead:
        _check_zeroes(k, owner, p, sorted(taken))
    return idle


def _load(owner: Any, p: Any, tickets: Any, idle: list[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """One CTA's load warp: (steps, number) of each KV tile that it tells, each step, keys that it loads."""
    told: list[tuple[int, int]] = []
    walked: list[tuple[int, int, int, int]] = []
    keys: list[tuple[int, int, int]] = []
    owner.next_tile = lambda *_: next(tickets)
    owner.tell = lambda t, rings, j, count, tile: told.append((int(count), tile))
    owner.zero_share = lambda p, item, lane: idle.append(item)
    owner.load_step = lambda p, t, rings, i, m, h, b, masked: walked.append((int(m), h, b, masked))
    owner.load_kv = lambda t, rings, j, n, h, b: keys.append((n, h, b))
    owner.load(p, NOTHING, NOTHING)
    assert told[-1][0] == 0 and all(count > 0 for count, _ in told[:-1]), "a walk of no steps is the end"
    return told[:-1], walked, keys


def _check_zeroes(k: Kernel, owner: Any, p: Any, taken: list[int]) -> None:
    """All of dQ is zeroed once: of the first heads by `prepare`, of any other by KV tiles whose numbers are lower."""
    cute, zeroed, last = k.names["cute"], [], {}
    counted: list[int] = []
    cute.make_layout, cute.make_tensor = NOTHING, lambda at, _: {(None, 0): at}
    cute.autovec_copy = lambda zeros, at: zeroed.append(int(at))
    cute.make_rmem_tensor = lambda *_: NOTHING
    cute.arch.atomic_add = lambda counter, *_, **__: counted.append(counter)
    owner.zeroed = lambda p, head_batch: head_batch
    numbers: dict[int, list[int]] = {}
    for item in taken:
        n, h, b = owner.tile_coords(item, p)
        head_batch = b * p.heads_dkv + h
        numbers.setdefault(head_batch, []).append(item)
        if head_batch + p.zero_lag < p.heads_dkv * p.batch:
            owner.zero_part(p, head_batch + p.zero_lag, n, 0)
            last[head_batch + p.zero_lag] = item
    tiles_of_head = p.heads_per_cta * p.m_blocks
    words = tiles_of_head * k.plan.compute.tile_m * k.names["HEAD_DIM_QK"]
    by_prepare = k.launched["prepare"].arguments[7] // tiles_of_head
    assert sorted(zeroed) == list(range(by_prepare * words, p.heads_dkv * p.batch * words, 128))
    later = range(by_prepare, p.heads_dkv * p.batch)
    assert sorted(counted) == sorted(x for x in later for _ in range(p.n_blocks))
    assert all(last[x] < min(numbers[x]) for x in later), "a head waits for a KV tile that is yet to come"
