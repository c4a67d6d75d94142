"""mbarrier objects (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").

A barrier counts pending arrivals and pending transaction bytes of its current phase; when both are zero the phase
completes: the next one begins with the initial count, and who tests for the completed phase acquires what all that
arrived or completed bytes in it released. A parity test asks only whether the current phase's parity differs from the
one given, as on hardware: a wait that is two phases late passes or hangs for the wrong reason here too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptxcheck.hb import Actor, Clock, Epochs, place

if TYPE_CHECKING:
    from ptxcheck.machine import Cta

MAX_COUNT = (1 << 20) - 1  # of arrivals; transaction bytes lie in [-MAX_COUNT, MAX_COUNT]


class Mbarrier:
    """One object. `phase` counts all phases since init; its lowest bit is the parity of the current one."""

    __slots__ = ("completed", "count", "current", "flying", "init", "known", "pending", "phase", "remote", "site", "tx")

    def __init__(self, count: int, init: tuple[int, int], clock: Clock, site: Any) -> None:
        self.count = self.pending = count
        self.tx = 0
        self.phase = 0
        self.init = init  # the event of the initialisation
        self.known: set[int] = set()  # chains that have been found to have seen it
        self.current = clock  # what the current phase's arrivals released
        self.completed = clock  # the same of the phase before
        self.flying = 0  # bytes of copies on their way
        # The last signal from other CTAs, by chain: epoch, who, where.
        self.remote: dict[int, tuple[int, str, Any]] = {}
        self.site = site

    def __str__(self) -> str:
        return (
            f"phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.count} arrivals pending, "
            f"{self.tx} bytes expected"
        )


class Barriers:
    """The mbarriers in one CTA's shared memory, by offset."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.machine = cta.machine
        self.history = cta.machine.history
        self.objects: dict[int, Mbarrier] = {}

    # ---- life ----------------------------------------------------------------------------------------------------
    def init(self, at: int, count: int, actor: Actor) -> None:
        """mbarrier.init. Over a live object it is undefined behaviour: mbarrier.inval first."""
        if at in self.objects:
            old = self.objects[at]
            self._note(
                "barrier-misuse", f"{self.name(at)} is initialised again, with no mbarrier.inval before", actor, old
            )
        if not 1 <= count <= MAX_COUNT:
            self._note("bad-operand", f"{self.name(at)} is initialised with a count of {count}", actor)
            count = max(count, 1)
        shared = self.cta.shared
        if not shared.check(actor, np.array([at]), 8):
            return
        cells = slice(at >> shared.shift, (at + 8) >> shared.shift)
        if at not in self.objects:
            shared.shadow.write(actor, cells)
        shared.shadow.barrier(cells)
        self.objects[at] = Mbarrier(count, self.history.init(actor), self.history.clock(), actor.site)

    def inval(self, at: int, actor: Actor) -> None:
        """mbarrier.inval: the bytes may be used for anything afterwards, by those ordered after this."""
        if self.get(at, actor, "invalidated") is None:
            return
        del self.objects[at]
        shared = self.cta.shared
        cells = slice(at >> shared.shift, (at + 8) >> shared.shift)
        shared.shadow.forget(cells)
        shared.shadow.write(actor, cells)

    def get(self, at: int, actor: Actor, how: str) -> Mbarrier | None:
        """The object, checked for being initialised and for that being visible to the actor."""
        b = self.objects.get(at)
        if b is None:
            self._note("barrier-uninitialised", f"{self.name(at)} is {how} and was never initialised", actor)
            return None
        if actor.chain in b.known:
            return b
        if actor.has_seen(*b.init) and (not actor.is_async or actor.generic or actor.has_fenced(*b.init)):
            b.known.add(actor.chain)
            return b
        want = (
            "to the async proxy (fence.mbarrier_init or fence.proxy.async, and a barrier)"
            if actor.has_seen(*b.init)
            else "here: nothing orders this after it"
        )
        self._note(
            "barrier-unsynchronised", f"{self.name(at)} is {how}, and its mbarrier.init is not visible {want}", actor, b
        )
        b.known.add(actor.chain)
        return b

    # ---- what happens to one ---------------------------------------------------------------------------------------
    def arrive(self, at: int, count: int, actor: Actor, *, relaxed: bool = False, drop: bool = False) -> int:
        """`count` arrivals; returns the phase they belong to (the state that mbarrier.arrive gives)."""
        b = self.get(at, actor, "arrived on")
        if b is None:
            return 0
        phase = b.phase
        if count > b.pending:
            self._note(
                "barrier-over-arrival",
                f"{count} arrival(s) on {self.name(at)}, where {b.pending} of {b.count} are pending in phase {phase}",
                actor,
            )
            count = b.pending
        self._release(b, actor, relaxed)
        b.pending -= count
        if drop:
            b.count -= count
        self._maybe_complete(at, b, actor)
        return phase

    def expect_tx(self, at: int, nbytes: int, actor: Actor) -> None:
        """expect-tx: the current phase waits for so many bytes more."""
        b = self.get(at, actor, "told of bytes")
        if b is None:
            return
        b.tx += nbytes
        if not -MAX_COUNT <= b.tx <= MAX_COUNT:
            self._note("barrier-transaction", f"{self.name(at)} expects {b.tx} bytes, more than it can count", actor)
        self._maybe_complete(at, b, actor)

    def issue(self, at: int, nbytes: int) -> int | None:
        """A copy is on its way that will complete `nbytes` here. Returns the phase it is issued in."""
        b = self.objects.get(at)
        if b is None:
            return None
        b.flying += nbytes
        return b.phase

    def complete_tx(self, at: int, nbytes: int, actor: Actor, phase: int | None = None) -> None:
        """complete-tx by an asynchronous operation; `phase`: what `issue` returned, if it was told of the copy."""
        b = self.get(at, actor, "signalled")
        if b is None:
            return
        if phase is not None:
            b.flying -= nbytes
            if phase != b.phase:
                self._note(
                    "barrier-transaction",
                    f"{nbytes} bytes complete on {self.name(at)} in phase {b.phase}, of a copy issued in phase "
                    f"{phase}: the phase ended without them, so expect_tx announced too few",
                    actor,
                )
        b.tx -= nbytes
        if b.tx < -MAX_COUNT:
            self._note("barrier-transaction", f"{self.name(at)} has {b.tx} bytes, beyond what it can count", actor)
        self._release(b, actor, False)
        self._maybe_complete(at, b, actor)

    def _release(self, b: Mbarrier, actor: Actor, relaxed: bool) -> None:
        if actor.home is not self.cta:
            b.remote[self.history.arrives_on(actor)] = (actor.epoch, actor.label, actor.site)
        if relaxed:
            self.history.release_relaxed(actor, b.current)
        else:
            self.history.release(actor, b.current)

    def _maybe_complete(self, at: int, b: Mbarrier, actor: Actor) -> None:
        self.machine.progress += 1
        if b.pending or b.tx:
            return
        if b.flying > 0:
            self._note(
                "barrier-transaction",
                f"phase {b.phase} of {self.name(at)} completes while {b.flying} bytes of copies issued for it are "
                "still on their way: expect_tx announced too few",
                actor,
            )
            b.flying = 0
        b.phase += 1
        b.pending = b.count
        b.completed = b.current
        b.current = self.history.clock()

    # ---- tests -----------------------------------------------------------------------------------------------------
    def passed(self, at: int, parity: int) -> bool:
        """Whether the phase of that parity, the one before the current, is complete."""
        b = self.objects.get(at)
        return b is not None and (b.phase & 1) != parity

    def beyond(self, at: int, state: int) -> bool:
        """Whether the phase that an arrival's state names is complete."""
        b = self.objects.get(at)
        return b is not None and b.phase > state

    def acquire(self, at: int, actor: Actor, relaxed: bool = False) -> None:
        """A test succeeded."""
        b = self.objects.get(at)
        if b is None:
            return
        if relaxed:
            self.history.acquire_relaxed(actor, b.completed)
        else:
            self.history.acquire(actor, b.completed)

    # ---- reports -----------------------------------------------------------------------------------------------------
    def name(self, at: int) -> str:
        """`mbarrier at 0x420 (smem+32) of cta (0, 0, 0)`."""
        return f"mbarrier at {at:#x}{self.cta.shared.symbol(at)} of cta {self.cta.ctaid}"

    def describe(self) -> list[str]:
        """A line for each object."""
        return [f"{self.name(a)}: {b}" for a, b in sorted(self.objects.items())]

    def at_exit(self, seen: Epochs) -> None:
        """The CTA ends, having seen so much: no phase may be left half done, no signal may still come."""
        for at, b in sorted(self.objects.items()):
            for chain, (epoch, label, site) in b.remote.items():
                if seen[chain] < epoch:
                    self.machine.note(
                        "exited-peer",
                        f"{self.name(at)} is signalled by another CTA, and no warp of its own CTA waits for that "
                        "before it exits",
                        place(label, site),
                        self._where(b),
                        (str(site.index),),
                    )
            # Bytes that are expected and that no copy will bring are what a producer leaves that acquires the stages
            # once more before it exits; a waiter for them would be a deadlock.
            if b.tx < 0:
                self.machine.note(
                    "barrier-unfinished", f"{self.name(at)} got {-b.tx} bytes that nothing announced", self._where(b)
                )
            elif b.pending != b.count and not b.tx:
                self.machine.note(
                    "barrier-unfinished",
                    f"{self.name(at)} is left with {b.count - b.pending} of {b.count} arrivals of phase {b.phase} at "
                    "exit: a stage that some released and others did not",
                    self._where(b),
                )

    def _where(self, b: Mbarrier) -> str:
        return place(f"cta {self.cta.ctaid}, initialised", b.site)

    def _note(self, kind: str, message: str, actor: Actor, other: Mbarrier | None = None) -> None:
        key = (actor.key, "" if other is None or other.site is None else str(other.site.index))
        self.machine.note(kind, message, actor.where, self._where(other) if other is not None else "", key)
