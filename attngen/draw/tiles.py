"""What the KV loop does with a mask: which tiles are visited, in which order, masked or not (ir.plan's tile walk)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attngen.ir import integers
from attngen.ir.expr import Expr
from attngen.ir.forms import MaskForm
from attngen.ir.plan import KernelPlan
from attngen.ref.walk import Tile, mapped_tiles, tiles_of
from attngen.samples import Shape


@dataclass(frozen=True)
class Segment:
    """A run of KV tiles visited one after the other, from tile `first` down to tile `last` (inclusive)."""

    first: int
    last: int
    masked: bool


@dataclass(frozen=True)
class RowTile:
    """Rows [start, stop) of a tile and its loop segments in the order in which they run."""

    start: int
    stop: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Tiling:
    """The loop of one (batch, head): tile extents and every row tile."""

    tile_m: int
    tile_n: int
    n_blocks: int
    rows: tuple[RowTile, ...]

    def count(self) -> dict[str, int]:
        """Tiles skipped, unmasked and masked."""
        unmasked = sum(s.first - s.last + 1 for r in self.rows for s in r.segments if not s.masked)
        masked = sum(s.first - s.last + 1 for r in self.rows for s in r.segments if s.masked)
        return {"skipped": len(self.rows) * self.n_blocks - unmasked - masked, "full": unmasked, "partial": masked}


def sizes(shape: Shape, batch: int, head: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """Values of everything a bound may read, except rows and keys."""
    fixed = {
        "b": batch, "h": head, "h_kv": head * shape.heads_kv // shape.heads_q, "batch": shape.batch,
        "heads_q": shape.heads_q, "heads_kv": shape.heads_kv, "seqlen_q": shape.seqlen_q, "seqlen_kv": shape.seqlen_kv,
    }  # fmt: skip
    return {**fixed, **params}


def environment(shape: Shape, batch: int, head: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """`sizes` as torch tensors."""
    import torch

    return {k: torch.tensor(v) for k, v in sizes(shape, batch, head, params).items()}


def tiling(
    plan: KernelPlan,
    shape: Shape,
    *,
    batch: int = 0,
    head: int = 0,
    params: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> Tiling:
    """The loop of `plan` for one batch and head."""
    step = 64 if plan.mask.ranges_per_warpgroup else plan.compute.tile_m
    starts = range(0, shape.seqlen_q, step)
    tile_n, n_blocks = plan.compute.tile_n, -(-shape.seqlen_kv // plan.compute.tile_n)
    if plan.mask.map is not None:
        walks = _mapped(plan, starts, environment(shape, batch, head, params), tensors)
        return Tiling(step, tile_n, n_blocks, tuple(RowTile(s, min(s + step, shape.seqlen_q), w) for s, w in walks))
    ranges = _ranges(plan.mask.form, starts, step, shape, batch, head, params, tensors)
    rows = tuple(
        RowTile(start, min(start + step, shape.seqlen_q), _walk([r[i] for r in ranges], tile_n))
        for i, start in enumerate(starts)
    )
    return Tiling(step, tile_n, n_blocks, rows)


Bounds = tuple[int, int, int, int]


def _ranges(
    form: MaskForm,
    starts: range,
    step: int,
    shape: Shape,
    batch: int,
    head: int,
    params: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> list[list[Bounds]]:
    """(lower_min, lower_max, upper_min, upper_max) of every row tile, clause by clause.

    Bounds of ints alone, the usual ones, are evaluated without torch: importing it takes longer than all the rest.
    """
    bounds = [(b.lower_min, b.lower_max, b.upper_min, b.upper_max) for b in form.bounds]
    rows = {"q_lo": list(starts), "q_hi": [min(start + step, shape.seqlen_q) - 1 for start in starts]}
    if all(integers.takes(e) for clause in bounds for e in clause):
        env = sizes(shape, batch, head, params) | rows
        columns = [[integers.column(e, env, len(starts)) for e in clause] for clause in bounds]
    else:
        held = {**tensors, **_tables(form, shape, params, tensors)} if form.tables else tensors
        columns = _with_torch(bounds, rows, environment(shape, batch, head, params), held, len(starts))
    return [list(zip(*clause, strict=True)) for clause in columns]


def _tables(form: MaskForm, shape: Shape, params: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that bounds read, of all batch elements and heads."""
    import torch

    from attngen.ref.tables import table_values

    b, h, q_idx = (torch.arange(n) for n in (shape.batch, shape.heads_q, shape.seqlen_q))
    env = environment(shape, 0, 0, params) | {
        "b": b.view(-1, 1, 1, 1), "h": h.view(1, -1, 1, 1),
        "h_kv": (h * shape.heads_kv // shape.heads_q).view(1, -1, 1, 1), "q_idx": q_idx.view(1, 1, -1, 1),
        "q_pos": (q_idx + shape.seqlen_kv - shape.seqlen_q).view(1, 1, -1, 1),
    }  # fmt: skip
    return table_values(form.tables, env, tensors)


def _with_torch(
    bounds: list[tuple[Expr, Expr, Expr, Expr]],
    rows: Mapping[str, list[int]],
    env: Mapping[str, Any],
    tensors: Mapping[str, Any],
    length: int,
) -> list[list[list[int]]]:
    """Values of bounds that read captured tensors or floats, for every row tile."""
    import torch

    from attngen.ref.evaluate import evaluate

    full = {**env, **{n: torch.tensor(x, dtype=torch.int64) for n, x in rows.items()}}

    def column(e: Expr) -> list[int]:
        return [int(x) for x in torch.as_tensor(evaluate(e, full, dict(tensors))).expand(length).tolist()]

    return [[column(e) for e in clause] for clause in bounds]


def _walk(clauses: list[Bounds], tile_n: int) -> tuple[Segment, ...]:
    """The visits of one row tile, neighbours that are treated alike as one segment; none where no key is live."""
    if all(lower_min >= upper_max for lower_min, _, _, upper_max in clauses):
        return ()
    return _segments(tiles_of(clauses, tile_n))


def _mapped(
    plan: KernelPlan, starts: range, env: dict[str, Any], tensors: Mapping[str, Any]
) -> Iterator[tuple[int, tuple[Segment, ...]]]:
    """First row and visits of every row tile as a map of the call's own pairs has them: O(rows * keys)."""
    import torch

    from attngen.ref.evaluate import evaluate

    rows, keys = int(env["seqlen_q"]), int(env["seqlen_kv"])
    kv_idx = torch.arange(keys)
    for start in starts:
        q_idx = torch.arange(start, min(start + starts.step, rows)).unsqueeze(1)
        full = {**env, "q_idx": q_idx, "q_pos": q_idx + (keys - rows), "kv_idx": kv_idx}
        kept = torch.as_tensor(evaluate(plan.mask.form.mask, full, dict(tensors), clamp=True))
        kept = kept.expand(len(q_idx), keys)
        yield start, _segments(mapped_tiles(kept, plan.compute.tile_n)) if kept.any() else ()


def _segments(tiles: Iterable[Tile]) -> tuple[Segment, ...]:
    """Visits one after the other, neighbours that are treated alike as one segment."""
    segments: list[Segment] = []
    for n_block, masked in tiles:
        last = segments[-1] if segments else None
        if last is not None and last.masked == masked and last.last == n_block + 1:
            segments[-1] = Segment(last.first, n_block, masked)
        else:
            segments.append(Segment(n_block, n_block, masked))
    return tuple(segments)
