"""The mask of a spec as its kernel sees it: tiles skipped, full and partial, kept elements, order of the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attngen.draw.canvas import Canvas
from attngen.draw.tiles import Tiling, environment, tiling
from attngen.samples import Shape

if TYPE_CHECKING:
    from attngen.ir.plan import KernelPlan
    from attngen.ir.spec import AttentionSpec

#: Skipped, full and partial tiles, kept elements of partial tiles; told apart in grey as well.
COLORS = {"skipped": "#eceff1", "full": "#2a9d8f", "partial": "#fbe3b3", "kept": "#e08e1b"}
_INK, _SOFT, _ARROW = "#212529", "#6c757d", "#264653"
_AREA, _LEFT, _TOP = 620.0, 74.0, 106.0
#: Arrows of the loop are drawn up to this many row tiles.
_ARROW_ROWS = 40


def draw_mask(
    spec: AttentionSpec,
    plan: KernelPlan,
    shape: Shape,
    *,
    params: Mapping[str, Any],
    tensors: Mapping[str, Any],
    batch: int = 0,
    head: int = 0,
) -> Canvas:
    """Draw one (batch, head) of `spec` under `plan`: rows downward, keys to the right."""
    loop = tiling(plan, shape, batch=batch, head=head, params=params, tensors=tensors)
    kept = _kept(spec, shape, batch, head, params, tensors)
    unit = _AREA / max(shape.seqlen_q, shape.seqlen_kv)
    width, height = max(unit * shape.seqlen_kv, 60.0), max(unit * shape.seqlen_q, 24.0)
    unit_x, unit_y = width / shape.seqlen_kv, height / shape.seqlen_q
    canvas = Canvas(max(_LEFT + width + 40, 560), _TOP + height + 96, f"mask of {spec.name}")
    canvas.rect(0, 0, canvas.width, canvas.height, "#ffffff")
    _headline(canvas, spec, plan, shape, batch, head)
    _tiles(canvas, loop, shape, unit_x, unit_y)
    canvas.rects(_kept_boxes(loop, kept, shape, unit_x, unit_y), COLORS["kept"])
    _grid(canvas, loop, shape, unit_x, unit_y)
    _arrows(canvas, loop, shape, unit_x, unit_y)
    _ticks(canvas, loop, shape, unit_x, unit_y)
    _legend(canvas, loop, float(kept.float().mean()), _TOP + height + 34)
    return canvas


def _kept(
    spec: AttentionSpec, shape: Shape, batch: int, head: int, params: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Any:
    import torch

    from attngen.ref.evaluate import evaluate

    rows, keys = torch.arange(shape.seqlen_q)[:, None], torch.arange(shape.seqlen_kv)[None, :]
    env = environment(shape, batch, head, params)
    env |= {"q_idx": rows, "kv_idx": keys, "q_pos": rows + (shape.seqlen_kv - shape.seqlen_q)}
    found = torch.as_tensor(evaluate(spec.mask, env, dict(tensors))).bool()
    return found.expand(shape.seqlen_q, shape.seqlen_kv)


def _headline(canvas: Canvas, spec: AttentionSpec, plan: KernelPlan, shape: Shape, batch: int, head: int) -> None:
    from attngen.syntax import print_expr

    words = print_expr(spec.mask)
    canvas.text(_LEFT, 26, spec.name, size=17, bold=True)
    canvas.text(_LEFT, 45, f"mask = {words if len(words) < 88 else words[:85] + '…'}", size=11.5, color=_SOFT)
    where = f", batch {batch}, head {head}" if shape.batch * shape.heads_q > 1 else ""
    size = f"seqlen_q {shape.seqlen_q}, seqlen_kv {shape.seqlen_kv}"
    tile = f"tiles of {plan.compute.tile_m} x {plan.compute.tile_n}"
    groups = ", 64 rows a warpgroup" if plan.mask.ranges_per_warpgroup else ""
    canvas.text(_LEFT, 62, f"{size}, {tile}{groups}{where}", size=11.5, color=_SOFT)


def _tiles(canvas: Canvas, loop: Tiling, shape: Shape, unit_x: float, unit_y: float) -> None:
    canvas.rect(_LEFT, _TOP, shape.seqlen_kv * unit_x, shape.seqlen_q * unit_y, COLORS["skipped"])
    for masked, color in ((False, COLORS["full"]), (True, COLORS["partial"])):
        boxes = []
        for row in loop.rows:
            for s in (s for s in row.segments if s.masked is masked):
                left, right = s.last * loop.tile_n, min((s.first + 1) * loop.tile_n, shape.seqlen_kv)
                boxes.append(
                    (
                        _LEFT + left * unit_x,
                        _TOP + row.start * unit_y,
                        (right - left) * unit_x,
                        (row.stop - row.start) * unit_y,
                    )
                )
        canvas.rects(boxes, color)


def _kept_boxes(
    loop: Tiling, kept: Any, shape: Shape, unit_x: float, unit_y: float
) -> list[tuple[float, float, float, float]]:
    """Kept elements of partial tiles, as runs; rows thinner than half a pixel are sampled."""
    boxes = []
    step = max(1, int(0.5 / unit_y))
    inset = 0.12 if min(unit_x, unit_y) >= 5 else 0.0
    for tile in loop.rows:
        spans = [
            (s.last * loop.tile_n, min((s.first + 1) * loop.tile_n, shape.seqlen_kv)) for s in tile.segments if s.masked
        ]
        for row in range(tile.start, tile.stop, step):
            tall = min(step, tile.stop - row)
            for left, right in spans:
                for a, b in _runs(kept[row, left:right].tolist()):
                    for x0, x1 in ((c, c + 1) for c in range(a, b)) if inset else ((a, b),):
                        boxes.append(
                            (
                                _LEFT + (left + x0 + inset) * unit_x, _TOP + (row + inset) * unit_y,
                                (x1 - x0 - 2 * inset) * unit_x, (tall - 2 * inset) * unit_y,
                            )
                        )  # fmt: skip
    return boxes


def _runs(row: list[bool]) -> list[tuple[int, int]]:
    runs, start = [], None
    for i, on in enumerate([*row, False]):
        if on and start is None:
            start = i
        elif not on and start is not None:
            runs.append((start, i))
            start = None
    return runs


def _grid(canvas: Canvas, loop: Tiling, shape: Shape, unit_x: float, unit_y: float) -> None:
    right, bottom = _LEFT + shape.seqlen_kv * unit_x, _TOP + shape.seqlen_q * unit_y
    thin = 1.2 if min(loop.tile_n * unit_x, loop.tile_m * unit_y) > 8 else 0.4
    for n in range(1, loop.n_blocks):
        x = _LEFT + n * loop.tile_n * unit_x
        canvas.line(x, _TOP, x, bottom, "#ffffff", thin)
    for row in loop.rows[1:]:
        y = _TOP + row.start * unit_y
        canvas.line(_LEFT, y, right, y, "#ffffff", thin)


def _arrows(canvas: Canvas, loop: Tiling, shape: Shape, unit_x: float, unit_y: float) -> None:
    """One arrow a segment, from its first tile to its last, numbered in the order of the loop."""
    if len(loop.rows) > _ARROW_ROWS:
        return
    for row in loop.rows:
        y = _TOP + (row.start + row.stop) / 2 * unit_y
        for number, s in enumerate(row.segments, 1):
            x1 = _LEFT + (min((s.first + 1) * loop.tile_n, shape.seqlen_kv)) * unit_x
            x2 = _LEFT + s.last * loop.tile_n * unit_x
            pad = min(5.0, (x1 - x2) / 8)
            color = _ARROW if s.masked else "#ffffff"
            head = min(6.0, (x1 - x2) / 3, (row.stop - row.start) * unit_y / 2)
            canvas.arrow(x1 - pad, y, x2 + pad, y, color, 1.6, head)
            if len(row.segments) > 1 and (row.stop - row.start) * unit_y >= 24 and x1 - x2 >= 14:
                canvas.text((x1 + x2) / 2, y - 4, str(number), size=9, color=color, anchor="middle")


def _ticks(canvas: Canvas, loop: Tiling, shape: Shape, unit_x: float, unit_y: float) -> None:
    middle = _LEFT + shape.seqlen_kv * unit_x / 2
    canvas.text(middle, _TOP - 20, "kv_idx", size=11, color=_SOFT, anchor="middle")
    canvas.text(_LEFT - 66, _TOP + 10, "q_idx", size=11, color=_SOFT)
    every = max(1, -(-loop.n_blocks // 8))
    keys = [n * loop.tile_n for n in range(0, loop.n_blocks, every)]
    if (shape.seqlen_kv - keys[-1]) * unit_x >= 30:
        keys.append(shape.seqlen_kv)
    for key in keys:
        canvas.text(_LEFT + key * unit_x, _TOP - 5, str(key), size=9.5, color=_INK, anchor="middle")
    every = max(1, -(-len(loop.rows) // 12))
    for row in loop.rows[::every]:
        canvas.text(_LEFT - 6, _TOP + row.start * unit_y + 9, str(row.start), size=9.5, color=_INK, anchor="end")


def _legend(canvas: Canvas, loop: Tiling, share: float, y: float) -> None:
    count = loop.count()
    total = max(1, sum(count.values()))
    words = {
        "skipped": "skipped", "full": "full: no mask in the loop", "partial": "partial: masked",
    }  # fmt: skip
    x = _LEFT
    for key, label in words.items():
        canvas.rect(x, y - 10, 13, 13, COLORS[key], stroke="#adb5bd", line=0.6)
        if key == "partial":
            canvas.rect(x + 3, y - 7, 7, 7, COLORS["kept"])
        text = f"{label}, {count[key]} ({100 * count[key] / total:.0f} %)"
        canvas.text(x + 18, y, text, size=11)
        x += 36 + 5.5 * len(text)
    visited = (count["full"] + count["partial"]) / total
    arrows = "; arrows: order of the loop" if len(loop.rows) <= _ARROW_ROWS else ""
    canvas.text(
        _LEFT,
        y + 22,
        f"kept elements {100 * share:.1f} %, visited tiles {100 * visited:.1f} %{arrows}",
        size=11,
        color=_SOFT,
    )
