"""Measured throughput of tiles on one H200 (data, not code: sm90_measured.json), for ranking candidates."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Direction = Literal["forward", "backward"]


@cache
def _tables() -> dict[str, Any]:
    text = (files("attngen.targets") / "sm90_measured.json").read_text(encoding="utf-8")
    tables: dict[str, Any] = json.loads(text)
    return tables


def _table(direction: Direction) -> dict[str, Any]:
    found: dict[str, Any] = _tables()["backward"] if direction == "backward" else _tables()
    return found


def lengths(head_dim_qk: int, head_dim_v: int, mask: str, *, direction: Direction = "forward") -> tuple[int, ...]:
    """Sequence lengths of a group's measurements, ascending; () where there are none. `mask`: full or causal."""
    table = _table(direction)
    group = next((r for r in table["rows"] if _of(r) == (head_dim_qk, head_dim_v, mask)), None)
    return () if group is None else tuple(group.get("lengths", table["lengths"]))


def seconds_per_flop(
    head_dim_qk: int, head_dim_v: int, mask: str, tile: str, *, direction: Direction = "forward"
) -> tuple[float, ...] | None:
    """Inverse throughput of a tile at each of its group's `lengths`; None where it was not measured."""
    for row in _table(direction)["rows"]:
        if (*_of(row), row["tile"]) == (head_dim_qk, head_dim_v, mask, tile):
            return tuple(1e-12 / t for t in row["tflops"])
    return None


def _of(row: dict[str, Any]) -> tuple[int, int, str]:
    return row["head_dim_qk"], row["head_dim_v"], row["mask"]
