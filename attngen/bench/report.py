"""A benchmark's results as text table, Markdown, JSON and bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attngen.bench.memory import megabytes
from attngen.bench.runner import OURS, Row
from attngen.draw.canvas import Canvas
from attngen.draw.chart import Group, bars


def as_json(rows: Sequence[Row], machine: dict[str, str], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured; `schema` moves when a field changes its meaning."""
    listed = [
        {
            "cell": r.label, "spec": r.spec, **r.shape, "kept_share": r.kept_share, "tile_share": r.tile_share,
            "direction": r.direction, "ceiling_tflops": r.ceiling, "ratio_to_best_peer": r.ratio,
            "ratios": {n: r.over(n) for n in r.tflops if n != OURS}, "ratio_to_unordered": r.ratio_to_unordered,
            "memory": r.memory.as_json() if r.memory is not None else None,
            "kernels": {
                n: {
                    "tflops": v, "tflops_low": r.spread[n][0], "tflops_high": r.spread[n][1],
                    "ms": r.milliseconds[n], "host_us": r.host_us.get(n), "peak_bytes": r.peak_bytes.get(n),
                }
                for n, v in r.tflops.items()
            },
            "absent": r.absent,
        }
        for r in rows
    ]  # fmt: skip
    return {"schema": 1, "machine": machine, "settings": settings, "rows": listed}


def columns(rows: Sequence[Row]) -> list[str]:
    """Kernels that ran in some row, attngen first."""
    found = dict.fromkeys(n for r in rows for n in r.tflops)
    return [n for n in (OURS, *found) if n in found] if OURS not in found else [OURS, *(n for n in found if n != OURS)]


def cells(rows: Sequence[Row], against: str | None = None) -> tuple[list[str], list[list[str]]]:
    """Header and text rows: TFLOP/s with half the spread of the rounds, attngen over the best peer.

    Where a deterministic backward was measured, also attngen with turns over attngen without; with `against`, also the
    kept share of all pairs and attngen over that peer. Where an unmasked row of the same shape was measured, `/ tiles`
    is what a row takes over what its share of the tiles took there: 1.07 is 7 % more.
    """
    names = columns(rows)
    costs = [over_tiles(r, rows) for r in rows]
    costed = any(c is not None for c in costs)
    ordered = any(r.ratio_to_unordered is not None for r in rows)
    header = [
        "cell", *(["kept"] if against else []), *names, "attngen / best peer", *([f"/ {against}"] if against else []),
        *(["/ tiles"] if costed else []), *(["/ unordered"] if ordered else []), "matmul",
    ]  # fmt: skip
    body = []
    for r, cost in zip(rows, costs, strict=True):
        row = [r.label, *([f"{r.kept_share:.3f}"] if against else [])]
        for n in names:
            if n in r.tflops:
                low, high = r.spread[n]
                row.append(f"{r.tflops[n]:.0f} ±{(high - low) / 2:.0f}")
            else:
                row.append("-")
        ratios = [
            r.ratio, *([r.over(against)] if against else []), *([cost] if costed else []),
            *([r.ratio_to_unordered] if ordered else []),
        ]  # fmt: skip
        row += [*(f"{x:.3f}" if x is not None else "-" for x in ratios), f"{r.ceiling:.0f}"]
        body.append(row)
    return header, body


def over_tiles(row: Row, rows: Sequence[Row]) -> float | None:
    """Time of a masked row over its share of the tiles of an unmasked one of its shape; None without such a row."""
    for full in rows:
        alike = full.spec == "full" and full.dims == row.dims and full.shape == row.shape
        if alike and full is not row and OURS in full.milliseconds and OURS in row.milliseconds:
            return row.milliseconds[OURS] / (row.tile_share * full.milliseconds[OURS])
    return None


def memory_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and text rows of memory, where a backward was measured: what shapes say, and what each kernel held.

    Nothing of a peak is in `inputs`, which exist before; `N x N` is one matrix of scores, which is in no sum.
    """
    measured = [(r, r.memory) for r in rows if r.memory is not None and any(r.peak_bytes.values())]
    names = list(dict.fromkeys(n for r, _ in measured for n in r.peak_bytes))
    header = ["memory", "inputs", "O", "gradients", "fp32 dQ", "statistics", "their sum", *names, "N x N"]
    body = []
    for r, m in measured:
        parts = (m.inputs, m.output, m.gradients, m.dq_fp32, m.statistics, m.made)
        peaks = [megabytes(r.peak_bytes[n]) if n in r.peak_bytes else "-" for n in names]
        body.append([r.label, *map(megabytes, parts), *peaks, megabytes(m.square)])
    return header, body


def markdown(rows: Sequence[Row], machine: dict[str, str], against: str | None = None) -> str:
    """The table for a document, with the machine above it; of a backward, the table of memory below."""
    lines = [f"Measured on {'; '.join(f'{k} {v}' for k, v in machine.items())}.", "", *_table(*cells(rows, against))]
    header, body = memory_cells(rows)
    if body:
        lines += ["", "Memory of one forward and backward beside its inputs:", "", *_table(header, body)]
    return "\n".join([*lines, ""])


def _table(header: list[str], body: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in body)]


def line(row: Row, against: str | None = None) -> str:
    """One cell in a line, for the reader who waits: time and TFLOP/s of each kernel, the ratio, what did not run."""
    kernels = [f"{n} {v:.0f} TFLOP/s ({row.milliseconds[n]:.3f} ms)" for n, v in row.tflops.items()]
    ratio = row.over(against) if against else row.ratio
    said = [f"/ {against or 'best peer'} {ratio:.3f}"] if ratio is not None else []
    return ", ".join([*kernels, *said, *(f"{n}: {why}" for n, why in row.absent.items())])


def absences(rows: Sequence[Row]) -> list[str]:
    """One line for each kernel and reason: where it is missing from the table."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for name, why in r.absent.items():
            reasons.setdefault((name, why), []).append(r.label)
    return [
        f"{name}: {why}"
        + ("" if len(where) == len(rows) else f" ({', '.join(where[:3])}{', …' if len(where) > 3 else ''})")
        for (name, why), where in reasons.items()
    ]


def summary(rows: Sequence[Row], against: str | None = None) -> list[str]:
    """Geometric mean and worst cell of attngen over the best peer by head dims, and of turns; memory of a backward.

    With `against`, first those of attngen over that peer, over all cells.
    """
    groups: dict[str, list[tuple[float, str]]] = {}
    for r in rows:
        if against is not None and (over := r.over(against)) is not None:
            groups.setdefault(f"{r.direction}, attngen / {against}", []).append((over, r.label))
    for r in rows:
        dims = r.dims or r.spec
        if r.ratio is not None:
            groups.setdefault(f"{dims}, attngen / best peer", []).append((r.ratio, r.label))
        if r.ratio_to_unordered is not None:
            groups.setdefault(f"{dims}, deterministic / unordered", []).append((r.ratio_to_unordered, r.label))
    lines = []
    for name, found in groups.items():
        mean, worst = math.exp(sum(math.log(x) for x, _ in found) / len(found)), min(found)
        lines.append(f"{name}: geomean {mean:.3f}, worst {worst[0]:.3f} ({worst[1]})")
    held = max((r for r in rows if r.peak_bytes), key=lambda r: max(r.peak_bytes.values()), default=None)
    return [*lines, *(_memory(held) if held is not None and any(held.peak_bytes.values()) else ())]


def _memory(r: Row) -> list[str]:
    each = ", ".join(f"{n} {megabytes(b)}" for n, b in r.peak_bytes.items())
    lines = [f"memory of one forward and backward beside its inputs, {r.label}: {each}"]
    m = r.memory
    if m is not None:
        lines.append(
            f"from shapes: {megabytes(m.made)} = O {megabytes(m.output)} + dQ, dK, dV {megabytes(m.gradients)} "
            f"+ fp32 dQ {megabytes(m.dq_fp32)} + LSE, D and scaled LSE {megabytes(m.statistics)}; inputs "
            f"{megabytes(m.inputs)}; one N x N matrix would be {megabytes(m.square)}"
        )
    return lines


def picture(rows: Sequence[Row], machine: dict[str, str]) -> Canvas:
    """The bars."""
    groups = [Group(r.label, {n: (v, *r.spread[n]) for n, v in r.tflops.items()}, r.ceiling) for r in rows]
    about = ", ".join(
        x for x in (machine.get("gpu"), f"torch {machine.get('torch', '?')}", f"CUDA {machine.get('cuda', '?')}") if x
    )
    direction = rows[0].direction if rows else "forward"
    return bars(groups, f"Attention {direction}, kept pairs only", about)
