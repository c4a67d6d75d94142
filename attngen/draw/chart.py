"""Grouped bars of a benchmark: one group a cell, one bar a kernel, whiskers from the slowest to the fastest round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.draw.canvas import Canvas

#: Colour of each kernel; others take the rest in order.
PALETTE = {
    "attngen": "#2a9d8f",
    "fa3": "#264653",
    "fa4": "#577590",
    "cudnn": "#8ab17d",
    "fa2": "#b5838d",
    "flex": "#e9c46a",
}
_SPARE = ("#f4a261", "#6d597a", "#adb5bd")


@dataclass(frozen=True)
class Group:
    """One cell: its label, (value, low, high) by kernel, and the ceiling of the run."""

    label: str
    bars: dict[str, tuple[float, float, float]]
    ceiling: float


def bars(groups: Sequence[Group], title: str, subtitle: str, unit: str = "TFLOP/s") -> Canvas:
    """Draw the groups from left to right."""
    names = list(dict.fromkeys(n for g in groups for n in g.bars))
    names.sort(key=lambda n: list(PALETTE).index(n) if n in PALETTE else len(PALETTE))
    spare = iter(_SPARE * 4)
    color = {n: PALETTE.get(n) or next(spare) for n in names}
    bar, gap, left, top, tall = 13.0, 22.0, 58.0, 84.0, 280.0
    group_width = bar * max(1, len(names)) + gap
    width = max(left + group_width * len(groups) + 24, 480)
    canvas = Canvas(width, top + tall + 122, title)
    canvas.rect(0, 0, canvas.width, canvas.height, "#ffffff")
    canvas.text(left, 26, title, size=16, bold=True)
    canvas.text(left, 44, subtitle, size=10.5, color="#6c757d")
    _legend(canvas, names, color, left, 64)
    peak = max([v[2] for g in groups for v in g.bars.values()] + [g.ceiling for g in groups] + [1.0])
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if peak / s <= 9 or s == 1000)
    for tick in range(0, int(peak) + step, step):
        y = top + tall * (1 - tick / (peak * 1.04))
        if y < top - 8:
            break
        canvas.line(left, y, width - 16, y, "#dee2e6", 0.8)
        canvas.text(left - 6, y + 4, str(tick), size=10, anchor="end")
    canvas.text(left - 44, top - 12, unit, size=10, color="#6c757d")
    for i, group in enumerate(groups):
        x0 = left + gap / 2 + i * group_width
        for j, name in enumerate(n for n in names if n in group.bars):
            value, low, high = (v / (peak * 1.04) * tall for v in group.bars[name])
            x = x0 + j * bar
            canvas.rect(x, top + tall - value, bar - 1.5, value, color[name])
            canvas.line(x + bar / 2 - 0.7, top + tall - high, x + bar / 2 - 0.7, top + tall - low, "#212529", 0.9)
        if group.ceiling:
            y = top + tall * (1 - group.ceiling / (peak * 1.04))
            canvas.line(x0 - 4, y, x0 + bar * len(names) + 4, y, "#c1121f", 1.1, dash=True)
        for row, words in enumerate(group.label.split()):
            canvas.text(x0 + bar * len(names) / 2, top + tall + 16 + 13 * row, words, size=9.5, anchor="middle")
    canvas.line(left, top + tall, width - 16, top + tall, "#495057", 1)
    return canvas


def _legend(canvas: Canvas, names: Sequence[str], color: dict[str, str], x: float, y: float) -> None:
    for name in names:
        canvas.rect(x, y - 9, 11, 11, color[name])
        canvas.text(x + 15, y, name, size=11)
        x += 30 + 6.4 * len(name)
    canvas.line(x, y - 4, x + 16, y - 4, "#c1121f", 1.1, dash=True)
    canvas.text(x + 21, y, "8192^3 matrix product in the same round", size=11)
