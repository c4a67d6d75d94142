"""Happens-before: who has seen what, so that a data race is found in any schedule in which its accesses occur.

PTX ISA, "Memory Consistency Model" and "Asynchronous Operations / Async proxy".

**Actors** are warps and asynchronous operations (TMA copies, wgmma, tcgen05, cp.async, st.async). The lanes of a warp
are one actor: races between lanes of one warp are not looked for. But a lane that arrives alone, or issues a copy
alone, releases what it did itself; what other lanes did only if the warp has met since (bar.warp.sync, bar.sync,
barrier.cluster.wait; instructions that only converge a warp order no memory). A fence counts for all lanes.

**Clocks.** Events lie on *chains*: one per warp; one per in-order channel (the wgmmas of a warpgroup, the bulk
groups of a thread, the tcgen05 work of a CTA pair); and *slots* for operations that complete in any order. A clock is
a vector of epochs, one per chain: `clock[c] >= e` says that the event (c, e) and all before it on that chain lie
behind. A slot is given to a new operation only when its issuer has seen the last one on it, so that vectors stay short
and exact.
Every actor has two clocks:

* `seen`:    the events that happened before whatever it does next;
* `fenced`:  the events whose generic-proxy writes are, besides, visible to the async proxy of whoever got this clock.

**Rules.**

* release (barrier arrive, st/atom/red.release, mbarrier.arrive): the object's clocks join the actor's; then the actor's
  epoch goes up, so that what it does later is not covered. By some lanes of a warp: what these did, and what all did
  before the warp last met. For this each lane that works alone has a chain of its own, on the warp's count of epochs;
* acquire (barrier wait, ld.acquire, a successful mbarrier test): the actor's clocks join the object's;
* relaxed writes release what the last fence.acq_rel (or membar) covered; relaxed reads acquire at the next such fence;
* fence.proxy.async: `fenced := seen`. It may be executed by the writer or by any actor that has acquired the writes;
  release and acquire carry it on (cumulativity);
* an asynchronous operation starts with both clocks of its issuer. It releases its own event alone, when it signals an
  mbarrier or when its group is waited for: what its issuer did before needs a release of its own. tcgen05.commit
  passes on, besides, what its issuer had acquired;
* an instruction of a whole warpgroup starts with the *meet* of its four warps' clocks: what one warp alone has seen
  does not count for the others;
* mbarrier.init happens on a chain of its own for each warp, since fence.mbarrier_init publishes just these writes.

**Accesses** (shadow.py): a read or write needs the last write in `seen`; through the async proxy it needs a generic
last write in `fenced` too; a write needs, besides, all reads since the last write in `seen`. Data written by the async
proxy needs no proxy fence once its completion has been observed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Epochs = NDArray[np.int32]
Lanes = NDArray[np.bool_]
ALL_LANES = (1 << 32) - 1
OWN = np.int32(2**31 - 1)  # a warp has always seen itself
# How an access is made: through the async proxy; as a strong operation (atomic, volatile, relaxed, acquire, release).
# In an event also: by an asynchronous operation.
ASYNC, STRONG, FLYING = 1, 2, 4


class Event(NamedTuple):
    """An access as shadow memory keeps it."""

    chain: int
    epoch: int
    mode: int
    label: str
    site: Any
    home: Any = None

    @property
    def where(self) -> str:
        """Who and where, for a report."""
        return place(self.label, self.site)


def place(label: str, site: Any) -> str:
    """`cta (0, 0, 0) warp 5, kernel.py:31, pc 120: text` of an instruction."""
    if site is None:
        return label
    line = f"{site.file}:{site.line}, " if getattr(site, "file", None) else ""
    return f"{label}, {line}pc {site.index}: {site.text}"


class Clock:
    """The clocks of a synchronisation object."""

    __slots__ = ("fenced", "seen")

    def __init__(self, zero: Epochs) -> None:
        self.seen = zero
        self.fenced = zero


class Channel:
    """A chain for asynchronous operations that are waited for in order."""

    __slots__ = ("chain", "epoch")

    def __init__(self, chain: int, epoch: int) -> None:
        self.chain = chain
        self.epoch = epoch


class Actor:
    """A warp or an asynchronous operation; set `site` (an instruction) before it touches memory."""

    __slots__ = (
        "carries",
        "chain",
        "epoch",
        "fenced",
        "generic",
        "got",
        "hb",
        "home",
        "init_chain",
        "is_async",
        "known",
        "label",
        "lanes",
        "lone",
        "met",
        "mixed",
        "published",
        "seen",
        "site",
        "slots",
    )

    def __init__(
        self, hb: History, label: str, chain: int, epoch: int, seen: Epochs, fenced: Epochs, is_async: bool
    ) -> None:
        self.hb = hb
        self.label = label
        self.chain = chain
        self.epoch = epoch
        self.seen = seen
        self.fenced = fenced
        self.is_async = is_async
        self.generic = False  # an asynchronous operation that works through the generic proxy (cp.async, st.async)
        self.site: Any = None
        self.home: Any = None  # the CTA that it belongs to
        self.published: Clock | None = None  # what relaxed writes release
        self.got: Clock | None = None  # what relaxed reads will have acquired at the next fence
        self.init_chain = 0
        self.known: set[int] = set()  # events that were found to lie behind: `seen` only grows
        self.slots: list[int] = []
        self.carries = False  # an operation that releases what it has seen, too
        self.lanes: Lanes | None = None  # of the warp, that act now; None: all
        self.lone: dict[int, int] = {}  # chains of what single lanes did
        self.met = 0  # the epoch when the warp last met
        self.mixed = 0  # bits of the lanes that acted with others since

    def has_seen(self, chain: int, epoch: int) -> bool:
        """Whether event (chain, epoch) lies behind."""
        return chain < self.seen.size and bool(self.seen[chain] >= epoch)

    def has_fenced(self, chain: int, epoch: int) -> bool:
        """Whether the generic write (chain, epoch) is visible to the async proxy here."""
        return chain < self.fenced.size and bool(self.fenced[chain] >= epoch)

    def acting(self) -> int:
        """Bits of the lanes that act now."""
        return ALL_LANES if self.lanes is None else int(np.packbits(self.lanes, bitorder="little").view(np.uint32)[0])

    def implies(self, chain: int, epoch: int) -> bool:
        """Whether whoever releases what this actor does now releases that event, too."""
        own = not self.is_async and (chain == self.chain or chain in self.lone.values())
        return epoch <= self.met if own else self.has_seen(chain, epoch)

    @property
    def where(self) -> str:
        """Who and where, for a report."""
        return place(self.label, self.site)

    @property
    def key(self) -> str:
        """The instruction, for telling one fault from another."""
        return "" if self.site is None else str(self.site.index)


class History:
    """The chains, events and reader sets of one launch."""

    def __init__(self) -> None:
        self.capacity = 64
        self.zero: Epochs = np.zeros(self.capacity, np.int32)
        self._labels: list[str] = ["nobody"]  # chain 0: no one has seen its event
        self._last: list[int] = [1]
        self._free: list[int] = []
        self.events: list[Event] = [Event(0, 1, 0, "nobody", None), Event(0, 1, 0, "mbarrier", None)]
        self._event_of: dict[tuple[int, int, int, int], int] = {}
        self.chain_at: Epochs = np.zeros(256, np.int32)
        self.epoch_of: Epochs = np.zeros(256, np.int32)
        self.fence_of: Epochs = np.zeros(256, np.int32)  # 0 where no proxy fence is called for
        self.epoch_of[:2] = 1
        self.readers: list[dict[int, int]] = [{}]  # reader sets: chain -> event
        self._reader_of: dict[tuple[int, ...], int] = {(): 0}
        self._extend: dict[tuple[int, int], int] = {}

    # ---- chains and actors -------------------------------------------------------------------------------------
    def chain(self, label: str) -> int:
        """A chain that no living actor uses."""
        if self._free:
            c = self._free.pop()
            self._labels[c] = label
            return c
        self._labels.append(label)
        self._last.append(0)
        if len(self._labels) > self.capacity:
            self.capacity *= 2
            self.zero = np.zeros(self.capacity, np.int32)
        return len(self._labels) - 1

    def warp(self, label: str, home: Any = None) -> Actor:
        """A new warp of a CTA, that has seen nothing."""
        c = self.chain(label)
        self._last[c] += 1
        seen = self.zero.copy()
        seen[c] = OWN
        warp = Actor(self, label, c, self._last[c], seen, self.zero, False)
        warp.home = home
        return warp

    def retire(self, actor: Actor) -> None:
        """The actor's CTA has ended: its chains may serve others."""
        self._free += [actor.chain, *actor.slots, *actor.lone.values()]
        self._free += [actor.init_chain] if actor.init_chain else []
        for chain in (actor.chain, *actor.lone.values()):
            self._last[chain] = actor.epoch
        actor.lone = {}
        actor.slots = []

    def channel(self, label: str) -> Channel:
        """A chain for in-order asynchronous operations."""
        c = self.chain(label)
        return Channel(c, self._last[c])

    def retire_channel(self, channel: Channel) -> None:
        """The channel's owner has ended."""
        self._last[channel.chain] = channel.epoch
        self._free.append(channel.chain)

    def fit(self, a: Epochs) -> Epochs:
        """The vector at full length."""
        if a.size == self.capacity:
            return a
        out = np.zeros(self.capacity, np.int32)
        out[: a.size] = a
        return out

    def join_of(self, a: Epochs, b: Epochs) -> Epochs:
        """Element-wise maximum of two vectors."""
        if a is b:
            return a
        if a.size != b.size:
            a, b = self.fit(a), self.fit(b)
        return np.maximum(a, b)

    def _snapshot(self, actor: Actor, whole: bool = False) -> Epochs:
        """The clock of what the actor does now: of the lanes that act, or of the whole warp."""
        s = actor.seen.copy() if actor.seen.size == self.capacity else self.fit(actor.seen)
        if not actor.is_async:
            lanes = ALL_LANES if whole else actor.acting()
            s[actor.chain] = actor.met if actor.mixed & ~lanes else actor.epoch
            for lane, chain in actor.lone.items():
                s[chain] = actor.epoch if lanes >> lane & 1 else actor.met
        return s

    def _acts_on(self, actor: Actor) -> int:
        """The chain of an access that the actor makes now: the warp's, or that of the one lane that acts."""
        if actor.is_async:
            return actor.chain
        lanes = actor.acting()
        if lanes & (lanes - 1):
            actor.mixed |= lanes
            return actor.chain
        return self.arrives_on(actor)

    def arrives_on(self, actor: Actor) -> int:
        """The chain that tells whether a signal of the actor's has been seen."""
        lanes = 0 if actor.is_async else actor.acting()
        if lanes & (lanes - 1) or not lanes:
            return actor.chain
        lane = lanes.bit_length() - 1
        if lane not in actor.lone:
            chain = actor.lone[lane] = self.chain(f"{actor.label} lane {lane}")
            actor.epoch = max(actor.epoch, self._last[chain] + 1)  # no one has seen it so far
            actor.seen = self.fit(actor.seen).copy()
            actor.seen[chain] = OWN
        return actor.lone[lane]

    def meet(self, actor: Actor) -> None:
        """All lanes of the warp have met: what each did before is every lane's to release."""
        actor.met, actor.mixed = actor.epoch, 0
        self._tick(actor)

    def _tick(self, actor: Actor) -> None:
        actor.epoch += 1

    # ---- asynchronous operations ---------------------------------------------------------------------------------
    def fork(
        self,
        warps: Actor | Sequence[Actor],
        site: Any,
        channel: Channel | None = None,
        label: str = "",
        generic: bool = False,
    ) -> Actor:
        """An asynchronous operation issued now by a warp, or by all of `warps` together (the meet of their clocks)."""
        group = [warps] if isinstance(warps, Actor) else list(warps)
        first = group[0]
        seen, fenced = self._snapshot(first), self.fit(first.fenced)
        for w in group[1:]:
            seen = np.minimum(seen, self._snapshot(w))
            fenced = np.minimum(fenced, self.fit(w.fenced))
        for w in group:
            self._tick(w)
        if channel is None:
            chain = self._slot(first)
            self._last[chain] += 1
            epoch = self._last[chain]
        else:
            channel.epoch += 1
            chain, epoch = channel.chain, channel.epoch
        op = Actor(self, label or f"{first.label} (asynchronous)", chain, epoch, self.fit(seen), self.fit(fenced), True)
        op.site = site
        op.home = first.home
        op.generic = generic
        return op

    def carry(self, op: Actor, warp: Actor) -> None:
        """The operation releases what its issuer had acquired, not what the issuer itself did: tcgen05.commit comes
        after MMAs that came after the copies they read, and whoever waits for it may overwrite what was copied."""
        op.carries = True
        op.seen = self.fit(op.seen).copy()
        for chain in (warp.chain, *warp.lone.values()):
            op.seen[chain] = 0

    def part(self, op: Actor, warp: Actor) -> Actor:
        """The share of one warp in an operation of several, for accesses that are that warp's alone (same event).

        To be taken right after `fork`: the warp's clocks as they are now count.
        """
        seen = self._snapshot(warp)
        for chain in (warp.chain, *warp.lone.values()):
            seen[chain] = min(seen[chain], warp.epoch - 1)
        own = Actor(self, op.label, op.chain, op.epoch, seen, self.fit(warp.fenced), True)
        own.site = op.site
        own.home = op.home
        return own

    def _slot(self, warp: Actor) -> int:
        if warp.slots:
            mine = np.array(warp.slots)
            seen = self.fit(warp.seen)
            free = seen[mine] >= np.array([self._last[c] for c in warp.slots])
            if free.any():
                return int(mine[free.argmax()])
        c = self.chain(warp.label)
        warp.slots.append(c)
        return c

    def join(self, warp: Actor, op: Actor | Channel, epoch: int | None = None) -> None:
        """The warp has waited for the operation, or for all of a channel up to `epoch`."""
        e = op.epoch if epoch is None else epoch
        if not warp.has_seen(op.chain, e):
            seen = self.fit(warp.seen)
            seen = seen.copy() if seen is warp.seen else seen
            seen[op.chain] = e
            warp.seen = seen

    # ---- synchronisation objects -----------------------------------------------------------------------------------
    def clock(self) -> Clock:
        """The clocks of a new synchronisation object."""
        return Clock(self.zero)

    def release(self, actor: Actor, clock: Clock) -> None:
        """All that the actor has done and seen happens before whoever acquires `clock`; for an async op just itself."""
        if actor.is_async:
            seen = self.fit(clock.seen)
            seen = seen.copy() if seen is clock.seen else seen
            seen[actor.chain] = max(seen[actor.chain], actor.epoch)
            clock.seen = seen
            if actor.carries:
                clock.seen = self.join_of(seen, actor.seen)
                clock.fenced = self.join_of(clock.fenced, actor.fenced)
            return
        clock.seen = self.join_of(clock.seen, self._snapshot(actor))
        clock.fenced = self.join_of(clock.fenced, actor.fenced)
        self._tick(actor)

    def release_relaxed(self, actor: Actor, clock: Clock) -> None:
        """A relaxed write: what the actor's last fence covered."""
        if actor.published is not None:
            clock.seen = self.join_of(clock.seen, actor.published.seen)
            clock.fenced = self.join_of(clock.fenced, actor.published.fenced)

    def acquire(self, actor: Actor, clock: Clock) -> None:
        """The actor has observed a release on `clock`."""
        actor.seen = self.join_of(actor.seen, clock.seen)
        actor.fenced = self.join_of(actor.fenced, clock.fenced)

    def acquire_relaxed(self, actor: Actor, clock: Clock) -> None:
        """A relaxed read: counts from the next fence on."""
        if actor.got is None:
            actor.got = self.clock()
        actor.got.seen = self.join_of(actor.got.seen, clock.seen)
        actor.got.fenced = self.join_of(actor.got.fenced, clock.fenced)

    def copy(self, clock: Clock) -> Clock:
        """A clock that stays as this one is now."""
        c = self.clock()
        c.seen, c.fenced = clock.seen, clock.fenced
        return c

    # ---- fences --------------------------------------------------------------------------------------------------
    def fence(self, actor: Actor) -> None:
        """fence.acq_rel, fence.sc, membar."""
        if actor.got is not None:
            self.acquire(actor, actor.got)
            actor.got = None
        actor.published = self.clock()
        actor.published.seen = self._snapshot(actor, whole=True)
        actor.published.fenced = actor.fenced
        self._tick(actor)

    def fence_proxy_async(self, actor: Actor) -> None:
        """fence.proxy.async: generic writes seen so far become visible to the async proxy."""
        actor.fenced = self._snapshot(actor, whole=True)
        self._tick(actor)

    def init(self, actor: Actor) -> tuple[int, int]:
        """The event of an mbarrier.init."""
        if not actor.init_chain:
            actor.init_chain = self.chain(actor.label)
        c = actor.init_chain
        self._last[c] += 1
        seen = self.fit(actor.seen).copy()
        seen[c] = self._last[c]
        actor.seen = seen
        return c, self._last[c]

    def fence_mbarrier_init(self, actor: Actor) -> None:
        """fence.mbarrier_init.release.cluster: the actor's own inits are released, to the async proxy too."""
        c = actor.init_chain
        if not c:
            return
        pub = self.clock() if actor.published is None else self.copy(actor.published)
        for name in ("seen", "fenced"):
            v = self.fit(getattr(pub, name)).copy()
            v[c] = self._last[c]
            setattr(pub, name, v)
        actor.published = pub
        fenced = self.fit(actor.fenced).copy()
        fenced[c] = self._last[c]
        actor.fenced = fenced

    # ---- events and reader sets, for shadow memory ---------------------------------------------------------------
    def event(self, actor: Actor, mode: int) -> int:
        """The number of the event "the actor accesses at its site"."""
        site = actor.site
        if actor.is_async:
            mode |= FLYING
        chain = self._acts_on(actor)
        key = (chain, actor.epoch, mode, -1 if site is None else site.index)
        n = self._event_of.get(key)
        if n is None:
            n = self._event_of[key] = len(self.events)
            self.events.append(Event(chain, actor.epoch, mode, actor.label, site, actor.home))
            if n >= self.chain_at.size:
                for name in ("chain_at", "epoch_of", "fence_of"):
                    old = getattr(self, name)
                    setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
            self.chain_at[n] = chain
            self.epoch_of[n] = actor.epoch
            self.fence_of[n] = 0 if mode & ASYNC else actor.epoch
        return n

    def with_reader(self, readers: int, event: int, actor: Actor) -> int:
        """The reader set with one more reader; those that a warp has seen are implied by it and dropped."""
        n = self._extend.get((readers, event))
        if n is None:
            e = self.events[event]
            old = self.readers[readers]
            keep = {}
            for c, k in old.items():
                o = self.events[k]
                if c != e.chain and (actor.is_async or not actor.implies(c, o.epoch)):
                    keep[c] = k
            keep[e.chain] = event
            key = tuple(sorted(keep.values()))
            n = self._reader_of.get(key)
            if n is None:
                n = self._reader_of[key] = len(self.readers)
                self.readers.append(keep)
            self._extend[readers, event] = n
        return n
