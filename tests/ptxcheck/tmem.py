"""Tensor memory of a CTA: 128 lanes by 512 columns of 32-bit cells, its allocations, and the shadow that finds races.

PTX ISA, "Tensor Memory", "Tensor Memory Allocation and Management Instructions". The shadow keeps one history for 16
lanes of a column: nothing but `tcgen05.cp.4x256b` and disabled output lanes touches less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ptxcheck.hb import Actor
from ptxcheck.shadow import Shadow
from ptxcheck.tcgen05 import COLUMNS, GROUP_LANES, GROUPS

if TYPE_CHECKING:
    from ptxcheck.machine import Cta

Array: TypeAlias = "np.ndarray[Any, Any]"

#: The unit of allocation.
LEAST = 32
_KINDS = {"race": "tmem-race", "uninitialised-read": "uninitialised-tmem"}


@dataclass(frozen=True, slots=True)
class Allocation:
    """Columns that `tcgen05.alloc` gave out, by which CTA group, and the events (chain, epoch) of that: one in each CTA
    of the group."""

    base: int
    columns: int
    group: int
    events: tuple[tuple[int, int], ...]
    where: str


class _RectangleShadow(Shadow):
    """Shadow memory indexed by (groups of lanes, columns)."""

    def _first(self, at: Any, hit: Any) -> int:
        return int(np.arange(GROUPS * COLUMNS).reshape(GROUPS, COLUMNS)[at][hit].flat[0])


class Tmem:
    """Cells, allocations and histories."""

    def __init__(self, cta: Cta) -> None:
        self.cta, self.machine = cta, cta.machine
        self.cells = np.zeros((GROUPS, GROUP_LANES, COLUMNS), np.uint32)
        self.shadow = _RectangleShadow(self.machine.history, GROUPS * COLUMNS, self._name, self._note)
        assert self.shadow.read_by is not None
        self.shadow.written = self.shadow.written.reshape(GROUPS, COLUMNS)
        self.shadow.read_by = self.shadow.read_by.reshape(GROUPS, COLUMNS)
        self.allocations: dict[int, Allocation] = {}
        self._owner: list[Allocation | None] = [None] * COLUMNS
        self.permit = True
        self.asked: list[Actor] = []  # who has asked for columns, in order
        self.given = 0  # how many of those requests are served
        self.base = 0  # what the last one got

    def _name(self, granule: int) -> str:
        group, column = divmod(granule, COLUMNS)
        lane = group * GROUP_LANES
        return f"tensor memory of cta {self.cta.ctaid}, lanes {lane}-{lane + GROUP_LANES - 1}, column {column},"

    def _note(self, kind: str, message: str, where: str, other: str, key: tuple[str, ...]) -> None:
        self.machine.note(_KINDS.get(kind, kind), message, where, other, key)

    # ---- allocation
    def room(self, columns: int) -> int | None:
        """The lowest base of so many free columns."""
        for base in range(0, COLUMNS - columns + 1, LEAST):
            if not any(self._owner[base : base + columns]):
                return base
        return None

    def allocate(self, base: int, columns: int, actors: Sequence[Actor], actor: Actor) -> None:
        """Give out columns that are free. `actors`: who asked, in each CTA of the group; `actor`: in this one."""
        events = tuple((x.chain, x.epoch) for x in actors)
        new = Allocation(base, columns, len(actors), events, actor.where)
        self.allocations[base] = new
        self._owner[base : base + columns] = [new] * columns
        self.shadow.forget((slice(None), slice(base, base + columns)))

    def free(self, base: int, columns: int, group: int, actor: Actor) -> str:
        """Take columns back; says what is wrong if they are not one allocation of this group."""
        held = self.allocations.get(base)
        if held is None or held.columns != columns:
            return f"columns {base}-{base + columns - 1} are freed, which are not one allocation"
        if held.group != group:
            return f"columns allocated with cta_group::{held.group} are freed with cta_group::{group}"
        # Whoever still uses them must have been waited for.
        self.shadow.write(actor, (slice(None), slice(base, base + columns)))
        del self.allocations[base]
        self._owner[base : base + columns] = [None] * columns
        return ""

    def allocated(self, actor: Actor, columns: slice) -> bool:
        """Whether these columns lie in one allocation that the actor knows to have been made; notes a fault if not."""
        first = self._owner[columns.start] if 0 <= columns.start < COLUMNS else None
        if first is None or columns.stop > first.base + first.columns:
            self.machine.note(
                "tmem-allocation",
                f"columns {columns.start}-{columns.stop - 1} of cta {self.cta.ctaid} are not in one allocation",
                actor.where,
            )
            return False
        if not any(actor.chain == chain or actor.has_seen(chain, epoch) for chain, epoch in first.events):
            self.machine.note(
                "tmem-race",
                f"columns {columns.start}-{columns.stop - 1} of cta {self.cta.ctaid} are used while nothing orders it "
                "after their allocation",
                actor.where,
                first.where,
            )
        return True

    # ---- accesses; arrays are (lanes, columns)
    def read(self, actor: Actor, groups: slice, columns: slice) -> Array:
        """Cells, read by the actor."""
        n = columns.stop - columns.start
        if not self.allocated(actor, columns):
            return np.zeros((self.cells[groups].shape[0] * GROUP_LANES, n), np.uint32)
        self.shadow.read(actor, (groups, columns))
        return self.peek(groups, columns)

    def peek(self, groups: slice, columns: slice) -> Array:
        """Cells, without an access."""
        return self.cells[groups, :, columns].reshape(-1, columns.stop - columns.start)

    def write(self, actor: Actor, groups: slice, columns: slice, cells: Array) -> None:
        """Cells, written by the actor."""
        if not self.allocated(actor, columns):
            return
        self.shadow.write(actor, (groups, columns))
        self.cells[groups, :, columns] = cells.reshape(-1, GROUP_LANES, columns.stop - columns.start)


def tmem_of(cta: Cta) -> Tmem:
    """The tensor memory of a CTA, made when it is first used."""
    found: Tmem | None = getattr(cta, "tmem", None)
    if found is None:
        found = Tmem(cta)
        cta.tmem = found  # type: ignore[attr-defined]
        checks = cta.machine.exit_checks
        if at_exit not in checks:
            checks.append(at_exit)
    return found


def at_exit(cta: Cta) -> None:
    """A CTA that ends must have freed what it allocated."""
    tmem: Tmem | None = getattr(cta, "tmem", None)
    for a in tmem.allocations.values() if tmem is not None else ():
        cta.machine.note(
            "tmem-allocation",
            f"columns {a.base}-{a.base + a.columns - 1} of cta {cta.ctaid} are still allocated at exit",
            a.where,
        )
