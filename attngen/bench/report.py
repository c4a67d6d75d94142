"""A benchmark's results as text table, Markdown, JSON and bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attngen.bench.runner import OURS, Row
from attngen.draw.canvas import Canvas
from attngen.draw.chart import Group, bars


def as_json(rows: Sequence[Row], machine: dict[str, str], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured; `schema` moves when a field changes its meaning."""
    listed = [
        {
            "cell": r.label, "spec": r.spec, **r.shape, "kept_share": r.kept_share,
            "ceiling_tflops": r.ceiling, "ratio_to_best_peer": r.ratio,
            "kernels": {
                n: {
                    "tflops": v, "tflops_low": r.spread[n][0], "tflops_high": r.spread[n][1],
                    "ms": r.milliseconds[n], "host_us": r.host_us.get(n),
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


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and text rows: TFLOP/s with half the spread of the rounds, and attngen over the best peer."""
    names = columns(rows)
    header = ["cell", *names, "attngen / best peer", "matmul"]
    body = []
    for r in rows:
        row = [r.label]
        for n in names:
            if n in r.tflops:
                low, high = r.spread[n]
                row.append(f"{r.tflops[n]:.0f} ±{(high - low) / 2:.0f}")
            else:
                row.append("-")
        row += [f"{r.ratio:.3f}" if r.ratio is not None else "-", f"{r.ceiling:.0f}"]
        body.append(row)
    return header, body


def markdown(rows: Sequence[Row], machine: dict[str, str]) -> str:
    """The table for a document, with the machine above it."""
    header, body = cells(rows)
    lines = [f"Measured on {'; '.join(f'{k} {v}' for k, v in machine.items())}.", ""]
    lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join([*lines, ""])


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


def picture(rows: Sequence[Row], machine: dict[str, str]) -> Canvas:
    """The bars."""
    groups = [Group(r.label, {n: (v, *r.spread[n]) for n, v in r.tflops.items()}, r.ceiling) for r in rows]
    about = ", ".join(
        x for x in (machine.get("gpu"), f"torch {machine.get('torch', '?')}", f"CUDA {machine.get('cuda', '?')}") if x
    )
    return bars(groups, "Attention forward, kept pairs only", about)
