"""The scheduler: which warp runs next and when asynchronous work completes, at random but by a seed.

Any interleaving of warps, and any completion order of asynchronous operations that their own rules allow, is one that
hardware may produce. Seeds choose among policies that are far apart: copies that land at once or as late as can be,
one warp or one CTA starved, priorities that change now and then, long and short slices.

A deadlock is found when no warp can go on and no operation is left; mbarrier.try_wait, which may give up after a while,
gives up then and is counted as stuck if that changes nothing. Polling (test_wait, loads in spin loops) is a livelock
after many failed polls with nothing happening between.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxcheck.hb import FLYING
from ptxcheck.machine import Cluster, Stopped

if TYPE_CHECKING:
    from ptxcheck.machine import Cta, Machine, Warp

ROUNDS = 3  # times that all try_waits give up in vain before it is a deadlock
POLLS = 3000  # failed polls a warp, with no progress, before it is a livelock
STEPS = 4_000_000  # instructions with no progress before it is a livelock


class AsyncOp:
    """Asynchronous work that was issued: `run` does its effect once `ready` holds."""

    __slots__ = ("_ready", "_run", "done", "site", "warp", "what")

    def __init__(
        self,
        site: Any,
        warp: Warp,
        run: Callable[[], None] | None = None,
        ready: Callable[[], bool] | None = None,
        what: str = "",
    ) -> None:
        self.site = site
        self.warp = warp
        self.what = what
        self.done = False
        self._run = run
        self._ready = ready

    def ready(self) -> bool:
        """Whether it may complete now (work before it in its channel has)."""
        return self._ready is None or self._ready()

    def run(self) -> None:
        """Do the effect."""
        assert self._run is not None
        self._run()


class AsyncQueue:
    """Operations in flight."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.pending: list[AsyncOp] = []

    def submit(self, op: AsyncOp) -> None:
        """An operation is on its way."""
        self.pending.append(op)

    def pick(self, tries: int | None = None) -> AsyncOp | None:
        """A random operation that is ready; with `tries`, a few random looks are enough."""
        n = len(self.pending)
        if tries is not None and n > tries:
            for _ in range(tries):
                k = self.rng.randrange(n)
                if self.pending[k].ready():
                    return self.pending.pop(k)
            return None
        order = list(range(n))
        self.rng.shuffle(order)
        for k in order:
            if self.pending[k].ready():
                return self.pending.pop(k)
        return None


class Policy:
    """How a seed schedules."""

    def __init__(self, rng: random.Random, warps: int, ctas: int) -> None:
        self.rng = rng
        self.copies = rng.choice([0.0, 0.0, 0.1, 0.3, 1.0])  # chance that an operation completes at a turn
        self.slice = rng.choice([3, 12, 40, 120])
        self.kind = rng.choice(["uniform", "uniform", "priority", "starve-warp", "starve-cta", "round"])
        self.victim = rng.randrange(warps if self.kind == "starve-warp" else ctas)
        self.priorities: dict[Any, float] = {}

    def length(self) -> int:
        """How many instructions to run."""
        return 1 + int(-log(1.0 - self.rng.random()) * self.slice)

    def choose(self, runnable: list[Warp], stuck: bool) -> Warp:
        """The next warp. `stuck`: polls have been failing for a while, so be fair."""
        rng, n = self.rng, len(runnable)
        if n == 1:
            return runnable[0]
        if stuck or self.kind == "uniform":
            return runnable[int(rng.random() * n)]
        if self.kind == "round":
            return runnable[0]
        if self.kind == "priority":
            if rng.random() < 0.02:
                self.priorities.clear()
            p = self.priorities
            for w in runnable:
                if w not in p:
                    p[w] = rng.random()
            return max(runnable, key=p.__getitem__)
        for _ in range(4):
            w = runnable[int(rng.random() * n)]
            key = w.id if self.kind == "starve-warp" else w.cta.number
            if key != self.victim or rng.random() < 0.01:
                return w
        return w


class Scheduler:
    """Runs one launch to its end."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.rng = machine.rng
        self.queue: AsyncQueue = machine.async_
        self.waiting = machine.waiting = deque(machine.clusters())
        self.resident: list[Cluster] = []
        self.runnable: list[Warp] = []
        self.asleep: list[Warp] = []
        self.stopped = False
        size = machine.cluster[0] * machine.cluster[1] * machine.cluster[2]
        self.places = max(1, machine.sms // size)
        x, y, z = machine.block
        self.policy = Policy(self.rng, -(-x * y * z // 32), max(1, machine.sms))
        self._last_progress = -1
        self._polls = 0
        self._steps = 0
        self._wakes = -1
        self._rounds = 0

    def run(self) -> None:
        """All CTAs of the grid, a few at a time."""
        m, policy = self.machine, self.policy
        self._admit()
        while self.resident:
            stuck = self._watch()
            if self.queue.pending and (stuck or (policy.copies and self.rng.random() < policy.copies)):
                self._complete(self.queue.pick(4))
            if not self.runnable:
                self._stalled()
                continue
            warp = policy.choose(self.runnable, stuck)
            try:
                n = warp.step(policy.length())
            except Stopped:
                self._stop(warp)
                continue
            self._steps += n
            m.ticks += n
            if warp.done:
                self.runnable.remove(warp)
                self._exit(warp)
            elif n == 0 and (len(warp.fragments) == 1 or not _can_run(warp)):  # of several, one may have freed another
                self.runnable.remove(warp)
                self.asleep.append(warp)
            elif policy.kind == "round" and len(self.runnable) > 1:
                self.runnable.remove(warp)
                self.runnable.append(warp)
            if m.wakes != self._wakes:
                self._wake()

    # ---- coming and going ----------------------------------------------------------------------------------------
    def _admit(self) -> None:
        while self.waiting and len(self.resident) < self.places:
            cluster = Cluster(self.machine, self.waiting.popleft())
            self.resident.append(cluster)
            for c in cluster.ctas:
                self.runnable += c.warps

    def _exit(self, warp: Warp) -> None:
        m = self.machine
        m.progress += 1
        m.wakes += 1
        cluster = warp.cta.cluster
        cluster.barrier.check()
        if all(w.done for w in warp.cta.warps):
            warp.cta.exited = True
        if all(c.exited for c in cluster.ctas):
            self._drain(cluster)
            if not self.stopped:
                for c in cluster.ctas:
                    at_exit(c)
            self.resident.remove(cluster)
            for c in cluster.ctas:
                c.retire()
            self._admit()

    def _drain(self, cluster: Cluster) -> None:
        """Let what the cluster has issued complete."""
        while mine := [op for op in self.queue.pending if op.warp.cta.cluster is cluster]:
            ready = [op for op in mine if op.ready()]
            if not ready:
                op = mine[0]
                self.machine.note("async-in-flight", f"{op.what or op.site.op} can never complete", op.site.where)
                self.queue.pending = [o for o in self.queue.pending if o not in mine]
                return
            op = self.rng.choice(ready)
            self.queue.pending.remove(op)
            self._complete(op)

    def _stop(self, warp: Warp) -> None:
        """A fault ended a warp: go on without it, and ask no more why others wait."""
        self.stopped = True
        warp.fragments = []
        self.runnable.remove(warp)
        self._exit(warp)

    def _complete(self, op: AsyncOp | None) -> None:
        if op is None:
            return
        try:
            op.run()
        except Stopped:
            self.stopped = True
        op.done = True
        self.machine.progress += 1
        self.machine.wakes += 1

    def _wake(self) -> None:
        self._wakes = self.machine.wakes
        if self.asleep:
            self.runnable += self.asleep
            self.asleep = []

    # ---- standing still --------------------------------------------------------------------------------------------
    def _watch(self) -> bool:
        """Whether polls fail for a while; ends the launch at the bound."""
        m = self.machine
        if m.progress != self._last_progress:
            self._last_progress = m.progress
            self._polls = m.polls
            self._steps = 0
            self._rounds = 0
            return False
        live = len(self.runnable) + len(self.asleep)
        failed = m.polls - self._polls
        if failed > POLLS * live or self._steps > STEPS:
            self._end("livelock", f"{failed} polls and {self._steps} instructions, and nothing has changed")
        return failed > 32

    def _stalled(self) -> None:
        """No warp can run."""
        m = self.machine
        op = self.queue.pick()
        if op is not None:
            self._complete(op)
            self._wake()
            return
        woken = [w for w in self.asleep if _can_run(w)]
        if woken:
            self.asleep = [w for w in self.asleep if w not in woken]
            self.runnable += woken
            return
        self._rounds += 1
        if self._rounds > ROUNDS or not m.give_up():
            self._end("deadlock", "no warp can go on")
        self._wake()

    def _end(self, kind: str, message: str) -> None:
        m = self.machine
        if self.stopped:  # the fault that stopped a warp says more
            m.abandon()
        waits = [w for c in self.resident for cta in c.ctas for w in cta.warps if not w.done]
        if kind == "deadlock" and any(
            f.wait is not None and "setmaxnreg" in f.wait.why for w in waits for f in w.fragments
        ):
            kind = "register-over-budget"
        lines = [message]
        for w in waits:
            for f in w.fragments:
                lines.append("  " + describe(w, f))
        for c in self.resident:
            lines += ["  " + t for cta in c.ctas for t in (*cta.barriers.describe(), *cta.named.describe())]
            lines += ["  " + t for t in c.barrier.describe()]
        lines += [f"  in flight: {op.what or op.site.op}, {op.site.where}" for op in self.queue.pending]
        m.note(kind, "\n".join(lines), f"{len(waits)} warp(s) left")
        m.abandon()


def _can_run(warp: Warp) -> bool:
    return any(not f.parked if f.wait is None else f.wait.ready() for f in warp.fragments)


def describe(warp: Warp, fragment: Any) -> str:
    """One line: where a fragment is and what it waits for."""
    pc = fragment.pc - 1 if fragment.wait is not None or fragment.idle else fragment.pc
    insts = warp.program.kernel.insts
    where = insts[pc].where if 0 <= pc < len(insts) else "the end"
    why = (
        fragment.wait.why if fragment.wait is not None else "waits for its other lanes" if fragment.parked else "polls"
    )
    lanes = "" if fragment.mask.all() else f" ({int(fragment.mask.sum())} lanes)"
    return f"cta {warp.cta.ctaid} warp {warp.id}{lanes}: {why}; {where}"


def at_exit(cta: Cta) -> None:
    """What a CTA must have finished when its last warp ends: by clocks, so that the schedule does not matter."""
    m, h = cta.machine, cta.machine.history
    seen = cta.warps[0].clock.seen
    for w in cta.warps[1:]:
        seen = h.join_of(seen, w.clock.seen)
    seen = h.fit(seen)
    cta.barriers.at_exit(seen)
    shadow = cta.shared.shadow
    assert shadow.read_by is not None
    for k in _used(shadow.written, len(h.events)):
        _unseen(cta, seen, int(k), shadow.written, int(k), "written")
    for k in _used(shadow.read_by, len(h.readers)):
        for event in h.readers[k].values():
            _unseen(cta, seen, event, shadow.read_by, int(k), "read")
    for check in m.exit_checks:
        check(cta)


def _used(numbers: Any, count: int) -> Any:
    """The distinct numbers, of `count` possible ones."""
    mark = np.zeros(count, np.bool_)
    mark[numbers] = True
    return np.flatnonzero(mark)


def _unseen(cta: Cta, seen: Any, event: int, numbers: Any, number: int, how: str) -> None:
    """Faults for an access to the CTA's shared memory that may come after its exit, where `numbers` say `number`."""
    m, e = cta.machine, cta.machine.history.events[event]
    if seen[e.chain] >= e.epoch or e.site is None:
        return
    name = cta.shared.name(int((numbers == number).argmax()))
    key = (str(e.site.index),)
    if e.mode & FLYING:
        kind = "async-in-flight" if how == "read" else "unwaited-data"
        m.note(
            kind, f"{name} is {how} by {e.label}, and no warp of the CTA has waited for it at exit", e.where, "", key
        )
    elif e.home is not cta:
        m.note("exited-peer", f"{name} is {how} by {e.label}, and its CTA may have exited before", e.where, "", key)
