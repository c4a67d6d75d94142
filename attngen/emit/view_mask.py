"""What templates read of a mask: its bounds over a tile, its test of an element, its tile map."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Clause:
    """Expression texts of one clause."""

    lower: str
    upper: str

    @property
    def is_short(self) -> bool:
        """Both fit one line."""
        return len(self.lower) + len(self.upper) < 96


@dataclass(frozen=True)
class Bounds:
    """Expression texts of one clause's bounds over a row tile."""

    lower_min: str
    lower_max: str
    upper_min: str
    upper_max: str


@dataclass(frozen=True)
class MapView:
    """A tile map, spelled: its extents, the number of one of its rows, and the test of a tile."""

    title: str
    range_elements: int
    whose: str
    outer: str
    inner: str
    tiles: str
    places: str
    maps: str
    plans: str
    counted: str
    halves: str
    rows: str
    transposed_row: str
    row: str
    batch: str
    head: str
    near_bindings: tuple[str, ...]
    near: str
    has_near: bool  # it decides tiles before any element is read
    inner_bindings: tuple[str, ...]  # of what all tiles of a column of the map read alike
    inner_names: str
    bindings: tuple[str, ...]
    every: str
    some: str
    keep_bindings: tuple[str, ...]
    keep: str
    # Of a ragged layout. Outer tiles have rows of the map, inner ones bits: totals of memory, tiles of a sequence.
    outer_total: str = ""
    outer_tile: str = ""
    outer_there: str = ""
    inner_total: str = ""
    inner_tile: str = ""
    inner_there: str = ""
    starts: str = ""  # of the sequences that outer tiles are counted by
    first_of: str = ""  # what says which outer tile is a sequence's first
    sized: str = ""  # heads that have maps of their own, on the device

    @property
    def has_inner_boxes(self) -> bool:
        """Some tensor is read by inner tiles alone."""
        return bool(self.inner_names)

    @property
    def shares_boxes(self) -> bool:
        """Rows of a CTA have the same inner tiles, whose boxes its warps share."""
        return self.has_inner_boxes and not self.starts


@dataclass(frozen=True)
class MaskView:
    """The mask pass's section of a plan, spelled."""

    title: str
    is_interval: bool
    is_map: bool
    map: MapView
    is_runs: bool
    by_limits: bool
    has_lower: bool
    has_right_edge: bool
    has_interior: bool
    has_left_edge: bool
    per_warpgroup: bool
    passes_left: bool
    interior_end: str
    clauses: tuple[Bounds, ...]
    bindings: tuple[str, ...]
    rows: tuple[Clause, ...]
    row_bindings: tuple[str, ...]
    keep: str
