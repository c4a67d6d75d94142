"""Executes a KernelPlan tile by tile, as the kernel walks it, in float64: loop bounds and mask phases without a GPU.

Same tiles (keys and rows past the end read as zeros), same walk (`ir.plan`), masks only in masked tiles, online softmax
in base 2 with the plan's rescale policy, one (masked) KV tile for a row block that no key reaches. What a kernel
would get wrong comes out wrong here: an unmasked tile that holds a dropped key counts it, and an unguarded unmasked
tile of -inf scores gives NaN. Rounding is not imitated.
Sources: FlashAttention-2, section 3.1; FlashAttention-4's conditional rescaling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attngen.ir.expr import Atom, atoms_of, tensors_of
from attngen.ir.plan import KernelPlan, MaskPlan, PlanSet, Rescale
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.ref.binding import Binding, bind
from attngen.ref.dense import epilogue
from attngen.ref.evaluate import Tensor
from attngen.ref.tables import with_tables
from attngen.ref.walk import Tile, mapped_tiles, tiles_of

LOG2_E = 1.4426950408889634
WARPGROUP_ROWS = 64


class Visit(NamedTuple):
    """One tile of scores that rows q_lo..q_hi of these batch elements and heads computed."""

    batch: range
    heads: range
    q_lo: int
    q_hi: int
    tile: Tile


@dataclass(frozen=True, slots=True)
class Trace:
    """Every tile that ran, in the order of its rows, with the plan's tile_n."""

    tile_n: int
    visits: list[Visit] = field(default_factory=list)


def run(
    plan: PlanSet | KernelPlan,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Trace]:
    """Run the plan (of a set, the one that serves these lengths) on q (B, Sq, Hq, D), k and v (B, Skv, Hkv, D[v]).

    Returns o (B, Sq, Hq, Dv) and lse (B, Hq, Sq), both float64, and the tiles that ran. No key, no launch: then O is
    the epilogue of 0 and LSE is -inf or the sink. Where rescale is `never` the kernel computes no LSE; this one then is
    what the same walk gives a softmax.
    Raises: ValueError for a spec that no plan serves (branches, segments); E0650 to E0652.
    """
    if spec.branches or spec.segments or spec.v_view_start is not None:
        raise ValueError(f"no plan serves `{spec.name}`: run ref.dense or ref.blockwise")
    if isinstance(plan, PlanSet):
        plan = plan.plans[plan.index(q.shape[1], k.shape[1])]
    return _Execution(plan, bind(spec, q, k, v, params, tensors, scale)).all()


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that walk the keys together, in all batch elements and heads that have the same bounds."""

    batch: range
    heads: range
    rows: range


@dataclass(frozen=True, slots=True)
class _State:
    """Row state (B, H, rows, 1) and o (B, H, rows, Dv); the reference is in log2 units."""

    reference: Tensor
    total: Tensor
    o: Tensor


class _Execution:
    def __init__(self, plan: KernelPlan, bound: Binding) -> None:
        self.plan, self.bound = plan, with_tables(bound, plan.mask.form)
        self.part = bound.sets[0].parts[0]
        self.seqlen_kv = self.part.k.shape[1]
        self.trace = Trace(plan.compute.tile_n)

    def all(self) -> tuple[Tensor, Tensor, Trace]:
        b, sq, hq, _ = self.bound.sizes
        o = self.bound.q.new_zeros(b, hq, sq, self.bound.spec.head_dim_v)
        lse = o.new_zeros(b, hq, sq)
        for g in self.groups():
            at = (
                slice(g.batch.start, g.batch.stop),
                slice(g.heads.start, g.heads.stop),
                slice(g.rows.start, g.rows.stop),
            )
            o[at], lse[at] = self.group(g)
        return o.transpose(1, 2), lse, self.trace

    def groups(self) -> Iterator[_Group]:
        """Batch elements and heads one by one only where the tile bounds depend on them."""
        b, sq, hq, _ = self.bound.sizes
        step = WARPGROUP_ROWS if self.plan.mask.ranges_per_warpgroup else self.plan.compute.tile_m
        step //= self.plan.schedule.pack  # as many queries, each of all heads of a group
        exprs = [e for t in self.plan.mask.form.bounds for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max)]
        if self.plan.mask.walk == "map":
            exprs = [self.bound.spec.mask]
        apart = any(tensors_of(e) or atoms_of(e) & {"b", "h", "h_kv"} for e in exprs)
        batches = [range(i, i + 1) for i in range(b)] if apart else [range(b)]
        heads = [range(i, i + 1) for i in range(hq)] if apart else [range(hq)]
        for batch in batches:
            for h in heads:
                for q_lo in range(0, sq, step):
                    yield _Group(batch, h, range(q_lo, min(q_lo + step, sq)))

    def group(self, g: _Group) -> tuple[Tensor, Tensor]:
        """o (B, H, rows, Dv) and lse (B, H, rows) of one group."""
        padded = -(-len(g.rows) // WARPGROUP_ROWS) * WARPGROUP_ROWS
        source = self.bound.q[g.batch.start : g.batch.stop, g.rows.start : g.rows.stop, g.heads.start : g.heads.stop]
        q = source.new_zeros(len(g.batch), len(g.heads), padded, source.shape[-1])
        q[:, :, : len(g.rows)] = source.transpose(1, 2)
        state = _State(
            reference=q.new_full((*q.shape[:3], 1), -torch.inf),
            total=q.new_zeros(*q.shape[:3], 1),
            o=q.new_zeros(*q.shape[:3], self.part.v.shape[-1]),
        )
        for tile in self.tiles(g):
            self.trace.visits.append(Visit(g.batch, g.heads, g.rows.start, g.rows.stop - 1, tile))
            state = self.step(state, q, g, tile)
        return self.finish(state, g)

    def tiles(self, g: _Group) -> Iterator[Tile]:
        if not self.seqlen_kv or not len(g.batch) or not len(g.heads):
            return iter(())
        if self.plan.mask.walk == "map":
            kept = self.bound.value(self.bound.spec.mask, self.env(g, g.rows, range(self.seqlen_kv)))
            pairs = kept.expand(*kept.shape[:2], len(g.rows), self.seqlen_kv)
            return mapped_tiles(pairs[0, 0], self.plan.compute.tile_n)
        env = self.env(g, range(g.rows.start, g.rows.start))
        env |= {n: env["seqlen_q"].new_tensor(at) for n, at in (("q_lo", g.rows.start), ("q_hi", g.rows.stop - 1))}
        bounds = [
            tuple(
                int(self.bound.bound(e, env).flatten()[0]) for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max)
            )
            for t in self.plan.mask.form.bounds
        ]
        return tiles_of(bounds, self.plan.compute.tile_n)

    def env(self, g: _Group, rows: range, keys: range | None = None) -> dict[str, Tensor]:
        """Atoms and params of a group, laid out (B, H, rows, keys)."""
        device = self.bound.q.device

        def positions(r: range) -> Tensor:
            return torch.arange(r.start, r.stop, device=device)

        env = self.bound.env(
            self.seqlen_kv, positions(rows), None if keys is None else positions(keys), positions(g.batch)
        )
        here = slice(g.heads.start, g.heads.stop)
        return {**env, "h": env["h"][:, here], "h_kv": env["h_kv"][:, here]}

    def keys(self, x: Tensor, g: _Group, start: int) -> Tensor:
        """A tile of K or V for each query head, zeros past the end: (B, H, tile_n, D)."""
        stop = max(min(start + self.plan.compute.tile_n, self.seqlen_kv), start)
        group = self.bound.sizes[2] // self.bound.sizes[3]
        heads = [h // group for h in g.heads]
        out = x.new_zeros(len(g.batch), len(g.heads), self.plan.compute.tile_n, x.shape[-1])
        out[:, :, : stop - start] = x[g.batch.start : g.batch.stop, start:stop][:, :, heads].transpose(1, 2)
        return out

    def step(self, state: _State, q: Tensor, g: _Group, tile: Tile) -> _State:
        """One KV tile: S = Q K^T, score, mask, online softmax, O += P V."""
        n = self.plan.compute.tile_n
        start = tile.n_block * n
        s = (q @ self.keys(self.part.k, g, start).transpose(-1, -2)) * self.bound.scale
        env = self.env(g, range(g.rows.start, g.rows.start + q.shape[2]), range(start, start + n))
        # rows and keys past the end have no meaning: a kernel clamps what it reads for them and drops the result
        exists = (env["q_idx"] < g.rows.stop) & (env["kv_idx"] < self.seqlen_kv)
        keep = kept(self.bound, self.plan.mask, env, exists) if tile.masked else exists
        if not isinstance(self.part.score, Atom):
            s = torch.broadcast_to(self.bound.value(self.part.score, {**env, "s": s}, active=keep), s.shape)
        s = s * LOG2_E
        if tile.masked:
            s = torch.where(keep, s, torch.full_like(s, -torch.inf))
        return self.softmax(state, s, self.keys(self.part.v, g, start))

    def softmax(self, state: _State, s: Tensor, v: Tensor) -> _State:
        """Online softmax: the reference of a row moves where a score outgrows it by more than the plan's `growth`, and
        always to `headroom` above what the row's scores have reached. (A kernel raises rows of a warp together.)
        """
        c, most = self.plan.compute, s.amax(-1, keepdim=True)
        grown = (state.reference == -torch.inf) | (most - state.reference > c.growth)
        top = torch.where(grown, most + c.headroom, state.reference)
        zero = torch.zeros_like(top)
        if c.rescale is Rescale.BOUNDED:
            top = torch.full_like(most, c.reference)
        reference = torch.where(top == -torch.inf, zero, top)
        # a row without a reference has nothing to rescale
        shrink = torch.where(state.reference == -torch.inf, zero, (state.reference - reference).exp2())
        p = (s - reference).exp2()
        total = state.total * shrink + p.sum(-1, keepdim=True)
        if self.plan.compute.rescale is Rescale.NEVER:
            return _State(top, total, state.o + self.weights(s / LOG2_E) @ v)
        return _State(top, total, state.o * shrink + p @ v)

    def weights(self, z: Tensor) -> Tensor:
        """Weights that no other key moves: 0 where z is -inf."""
        return z.sigmoid() if self.bound.spec.normalizer is Normalizer.SIGMOID else z.clamp_min(0.0)

    def finish(self, state: _State, g: _Group) -> tuple[Tensor, Tensor]:
        """Sink, division, LSE and epilogue of the rows that exist."""
        reference, total, o = (x[:, :, : len(g.rows)] for x in (state.reference, state.total, state.o))
        env = self.env(g, g.rows)
        sink = self.bound.sets[0].sink
        if sink is not None:
            z = torch.broadcast_to(self.bound.value(sink, env), total.shape) * LOG2_E
            top = torch.maximum(reference, z)
            safe = torch.where(top == -torch.inf, torch.zeros_like(top), top)
            shrink = (reference - safe).exp2()
            reference, total, o = top, total * shrink + (z - safe).exp2(), o * shrink
        empty = total == 0
        safe_total = torch.where(empty, torch.ones_like(total), total)
        lse = torch.where(empty, torch.full_like(total, -torch.inf), (reference + safe_total.log2()) / LOG2_E)
        o = o if self.plan.compute.rescale is Rescale.NEVER else o / safe_total
        return epilogue(self.bound, o, env, lse.squeeze(-1)), lse.squeeze(-1)


def kept(bound: Binding, mask: MaskPlan, env: Mapping[str, Tensor], exists: Tensor) -> Tensor:
    """The element test of masked tiles: per-row limits of each clause, or the mask expression."""
    if mask.test == "elements":
        return exists & bound.value(mask.form.mask, env, active=exists)
    keep = torch.zeros_like(exists)
    for c in mask.form.clauses:
        inside = exists
        if c.rows is not None:
            inside = inside & bound.bound(c.rows, env)
        if c.lower is not None:
            inside = inside & (env["kv_idx"] >= bound.bound(c.lower, env))
        if c.upper is not None:
            inside = inside & (env["kv_idx"] < bound.bound(c.upper, env))
        keep = keep | inside
    return keep
