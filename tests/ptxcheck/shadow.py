"""Shadow memory: for every few bytes, the last write and the reads since (see hb.py for what orders them).

Two numbers a granule: the event of the last write and the set of readers since, both interned in the launch's
`History`, so that an access to a uniform region costs a few vectorised comparisons however wide it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck.hb import ASYNC, FLYING, STRONG, Actor, Event, History

Ints = NDArray[np.int64]
# (kind, message, where, other_where, key) -> None
Note = Callable[[str, str, str, str, tuple[str, ...]], None]
NEVER, BARRIER = 0, 1  # numbers of the first two events: never written; an mbarrier object lives here


def alike(numbers: NDArray[np.int32]) -> bool:
    """Whether all are equal; bytes are compared much faster than arrays of this size."""
    held = numbers.tobytes()
    return held == held[: numbers.itemsize] * numbers.size


class Shadow:
    """Histories of one memory. `name(granule)` says what lies there; `note` takes faults.

    `initialised`: memory that holds data before the launch (global); reads of it are no fault.
    `readers=False` keeps no readers: a write over an unordered read is then found only in schedules where the write
    comes first and the read is the later of the two.
    """

    def __init__(
        self,
        history: History,
        granules: int,
        name: Callable[[int], str],
        note: Note,
        *,
        initialised: bool = False,
        readers: bool = True,
    ) -> None:
        self.history = history
        self.name = name
        self.note = note
        self.initialised = initialised
        self.written: NDArray[np.int32] = np.zeros(granules, np.int32)
        self.read_by: NDArray[np.int32] | None = np.zeros(granules, np.int32) if readers else None

    # ---- accesses ------------------------------------------------------------------------------------------------
    def read(self, actor: Actor, at: Any, mode: int = 0) -> None:
        """The actor reads granules `at` (an index array or a slice)."""
        ids = self.written[at]
        if ids.size == 0:
            return
        first, uniform = int(ids.flat[0]), alike(ids)
        self._ordered(actor, at, ids, first, uniform, mode, "read")
        if self.read_by is not None:
            self._add_reader(actor, at, mode)

    def write(self, actor: Actor, at: Any, mode: int = 0, same: Callable[[], Any] | None = None) -> None:
        """The actor writes granules `at`. `same`: which of them it leaves as they are, where that is no race."""
        ids = self.written[at]
        if ids.size == 0:
            return
        first, uniform = int(ids.flat[0]), alike(ids)
        if not (uniform and first == NEVER):
            self._ordered(actor, at, ids, first, uniform, mode, "write", same)
        if self.read_by is not None:
            sets = self.read_by[at]
            s = int(sets.flat[0])
            if alike(sets):
                if s:
                    self._after_readers(actor, at, s, sets, mode)
            else:
                for k in np.unique(sets):
                    if k:
                        self._after_readers(actor, at, int(k), sets, mode)
            self.read_by[at] = 0
        self.written[at] = self.history.event(actor, mode)

    def barrier(self, at: Any) -> None:
        """An mbarrier object lives here from now on: plain accesses to it are faults."""
        self.written[at] = BARRIER
        if self.read_by is not None:
            self.read_by[at] = 0

    def forget(self, at: Any) -> None:
        """The bytes hold nothing any more (mbarrier.inval)."""
        self.written[at] = NEVER
        if self.read_by is not None:
            self.read_by[at] = 0

    # ---- checks --------------------------------------------------------------------------------------------------
    def _ordered(
        self,
        actor: Actor,
        at: Any,
        ids: NDArray[np.int32],
        first: int,
        uniform: bool,
        mode: int,
        how: str,
        same: Callable[[], Any] | None = None,
    ) -> None:
        h = self.history
        if uniform:
            if (first if not mode & ASYNC else -first) in actor.known and first:
                return
            if not self._fine(actor, first, mode, how):
                if same is None or not same().all():
                    self._say(actor, at, ids, first, mode, how)
            elif first and not self._strong_pair(first, mode):
                actor.known.add(first if not mode & ASYNC else -first)
            return
        if actor.seen.size < h.capacity:
            actor.seen = h.fit(actor.seen)
        chains = h.chain_at[ids]
        good = actor.seen[chains] >= h.epoch_of[ids]
        if mode & ASYNC:
            if actor.fenced.size < h.capacity:
                actor.fenced = h.fit(actor.fenced)
            good &= actor.fenced[chains] >= h.fence_of[ids]
        if b"\0" not in good.tobytes():
            return
        if same is not None:
            good |= same()
        for k in np.unique(ids[~good]):
            if not self._fine(actor, int(k), mode, how):
                self._say(actor, at, ids, int(k), mode, how)

    def _strong_pair(self, event: int, mode: int) -> bool:
        return bool(mode & STRONG and self.history.events[event].mode & STRONG)

    def _fine(self, actor: Actor, event: int, mode: int, how: str) -> bool:
        if event == NEVER:
            return self.initialised or how == "write"
        if event == BARRIER:
            return False
        e = self.history.events[event]
        if self._strong_pair(event, mode) or (e.chain == actor.chain and e.epoch == actor.epoch):
            return True
        if not actor.has_seen(e.chain, e.epoch):
            return False
        return not (mode & ASYNC) or bool(e.mode & ASYNC) or actor.has_fenced(e.chain, e.epoch)

    def _after_readers(self, actor: Actor, at: Any, number: int, sets: NDArray[np.int32], mode: int) -> None:
        for chain, event in self.history.readers[number].items():
            if event in actor.known:
                continue
            e = self.history.events[event]
            if actor.has_seen(chain, e.epoch):
                actor.known.add(event)
            elif not self._strong_pair(event, mode) and (chain != actor.chain or e.epoch != actor.epoch):
                where = self._first(at, sets == number)
                verb = "still reads" if e.mode & FLYING else "reads"
                self._report(
                    "race", f"{self.name(where)} is overwritten while {e.label} {verb} it, unordered", actor, e
                )

    def _add_reader(self, actor: Actor, at: Any, mode: int) -> None:
        assert self.read_by is not None
        event = self.history.event(actor, mode)
        sets = self.read_by[at]
        s = int(sets.flat[0])
        if alike(sets):
            n = self.history.with_reader(s, event, actor)
            if n != s:
                self.read_by[at] = n
            return
        numbers = sets.ravel().tolist()
        new = {k: self.history.with_reader(k, event, actor) for k in dict.fromkeys(numbers)}
        self.read_by[at] = np.array([new[k] for k in numbers], np.int32).reshape(sets.shape)

    # ---- reports -------------------------------------------------------------------------------------------------
    def _first(self, at: Any, hit: NDArray[np.bool_]) -> int:
        index = np.arange(self.written.size)[at] if isinstance(at, slice) else np.asarray(at)
        return int(index[hit].flat[0])

    def _say(self, actor: Actor, at: Any, ids: NDArray[np.int32], event: int, mode: int, how: str) -> None:
        where = self.name(self._first(at, ids == event))
        e = self.history.events[event]
        if event == NEVER:
            self._report("uninitialised-read", f"{where} is read and was never written", actor, None)
        elif event == BARRIER:
            self._report("barrier-misuse", f"{where} holds an mbarrier, and is {_past(how)} as data", actor, None)
        elif not actor.has_seen(e.chain, e.epoch):
            still = " (in flight)" if e.mode & FLYING else ""
            self._report("race", f"{where} is {_past(how)} while nothing orders it after a write{still}", actor, e)
        else:
            self._report(
                "missing-proxy-fence",
                f"{where} is {_past(how)} through the async proxy, and its last write, through the generic proxy, "
                "is not made visible to it by fence.proxy.async",
                actor,
                e,
            )

    def _report(self, kind: str, message: str, actor: Actor, other: Event | None) -> None:
        key = (actor.key, str(other.site.index) if other and other.site is not None else "")
        self.note(kind, message, actor.where, other.where if other else "", key)


def _past(how: str) -> str:
    return "read" if how == "read" else "written"
