"""Barriers of a CTA (`bar`, `barrier`) and of a cluster (`barrier.cluster`).

PTX ISA, "bar, barrier" and "barrier.cluster". Arrivals are counted in threads; a phase that is complete releases those
that wait and carries the clocks of all that arrived to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ptxcheck.hb import Actor, Clock, place

if TYPE_CHECKING:
    from ptxcheck.machine import Cluster, Cta, Warp


class Phase:
    """One use of a barrier, from its first arrival to the last."""

    __slots__ = ("arrived", "clock", "complete", "expected", "sites", "votes")

    def __init__(self, clock: Clock) -> None:
        self.expected = 0
        self.arrived = 0
        self.complete = False
        self.clock = clock
        self.sites: list[tuple[str, Any]] = []
        self.votes = [0, True, False]  # how many predicates were true; all; any


class NamedBarriers:
    """The sixteen barriers of a CTA."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.machine = cta.machine
        self.phases: dict[int, Phase] = {}

    def arrive(self, number: int, threads: int, expected: int, actor: Actor) -> Phase:
        """`threads` of an actor arrive at a barrier that waits for `expected`."""
        note, where = self.machine.note, actor.where
        if not 0 <= number < 16:
            note("bad-operand", f"barrier {number}: a CTA has barriers 0 to 15", where)
        if expected % 32 or expected <= 0:
            note("bad-operand", f"barrier {number} for {expected} threads: no multiple of the warp size", where)
        p = self.phases.get(number)
        if p is None:
            p = self.phases[number] = Phase(self.machine.history.clock())
            p.expected = expected
        elif p.expected != expected:
            note(
                "barrier-misuse",
                f"barrier {number} of cta {self.cta.ctaid} is used for {expected} threads here and for {p.expected} by "
                "who came before in this phase",
                where,
                place(*p.sites[-1]),
            )
        p.sites.append((actor.label, actor.site))
        p.arrived += threads
        if p.arrived > p.expected:
            note(
                "barrier-over-arrival",
                f"{p.arrived} threads arrive at barrier {number} of cta {self.cta.ctaid}, which waits for {p.expected}",
                where,
                place(*p.sites[0]),
            )
        self.machine.history.release(actor, p.clock)
        self.machine.progress += 1
        if p.arrived >= p.expected:
            p.complete = True
            del self.phases[number]
        return p

    def describe(self) -> list[str]:
        """A line for each barrier that someone waits at or has arrived on."""
        return [
            f"barrier {n} of cta {self.cta.ctaid}: {p.arrived} of {p.expected} threads have arrived, last "
            + place(*p.sites[-1])
            for n, p in sorted(self.phases.items())
        ]


class ClusterBarrier:
    """The barrier of a cluster. Threads that have exited are not waited for."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.machine = cluster.machine
        self.phase = Phase(self.machine.history.clock())
        self.number = 0
        self.pending: dict[Warp, Phase] = {}  # the phase that a warp has arrived at and not yet waited for
        self.here: set[Warp] = set()

    def arrive(self, warp: Warp, actor: Actor, relaxed: bool) -> None:
        """barrier.cluster.arrive: the whole warp."""
        if warp in self.pending:
            self.machine.note(
                "barrier-misuse", "barrier.cluster.arrive twice with no barrier.cluster.wait between", actor.where
            )
        self.pending[warp] = self.phase
        self.here.add(warp)
        self.phase.sites.append((actor.label, actor.site))
        if relaxed:
            self.machine.history.release_relaxed(actor, self.phase.clock)
        else:
            self.machine.history.release(actor, self.phase.clock)
        self.machine.progress += 1
        self.check()

    def check(self) -> None:
        """Complete the phase if all warps that are left have arrived (called on exits too)."""
        if not self.here:
            return
        if any(w not in self.here and not w.done for c in self.cluster.ctas for w in c.warps):
            return
        self.phase.complete = True
        self.phase = Phase(self.machine.history.clock())
        self.here = set()
        self.number += 1

    def waited(self, warp: Warp, actor: Actor) -> Phase | None:
        """The phase that barrier.cluster.wait waits for; None, with a fault, if the warp has not arrived."""
        p = self.pending.pop(warp, None)
        if p is None:
            self.machine.note(
                "barrier-misuse", "barrier.cluster.wait with no barrier.cluster.arrive before", actor.where
            )
        return p

    def describe(self) -> list[str]:
        """A line if someone has arrived."""
        if not self.here:
            return []
        missing = [
            f"cta {c.ctaid} warp {w.id}"
            for c in self.cluster.ctas
            for w in c.warps
            if w not in self.here and not w.done
        ]
        return [
            f"cluster barrier, phase {self.number}: {len(self.here)} warps have arrived, missing: {', '.join(missing)}"
        ]
