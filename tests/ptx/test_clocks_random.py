"""The clocks against a model that keeps, for every actor, the set of all events behind it, on random programs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from ptxcheck.hb import ASYNC, Actor, Clock, History
from ptxcheck.shadow import Shadow

CELLS = 4
ACTIONS = ["access"] * 4 + ["sync"] * 2
ACTIONS += ["release", "acquire", "fence", "proxy", "relaxed", "got", "fork", "join", "signal"]


@dataclass
class Seen:
    """What an actor or an object knows: sets of access numbers, as bits."""

    seen: int = 0
    fenced: int = 0
    published: tuple[int, int] = (0, 0)
    got: tuple[int, int] = (0, 0)
    own: int = 0  # an operation's own accesses
    is_async: bool = False


@dataclass
class Model:
    """Every rule of hb.py without chains, epochs or interned sets."""

    accesses: list[bool] = field(default_factory=list)  # through the async proxy?
    writer: list[int | None] = field(default_factory=lambda: [None] * CELLS)
    readers: list[list[int]] = field(default_factory=lambda: [[] for _ in range(CELLS)])

    def access(self, a: Seen, cell: int, write: bool, mode: int) -> set[str]:
        n, last, out = len(self.accesses), self.writer[cell], set()
        behind = a.seen | a.own
        if last is None:
            if not write:
                out.add("uninitialised-read")
        elif not behind >> last & 1:
            out.add("race")
        elif mode & ASYNC and not self.accesses[last] and not (a.fenced >> last & 1):
            out.add("missing-proxy-fence")
        if write and any(not behind >> r & 1 for r in self.readers[cell]):
            out.add("race")
        self.accesses.append(bool(mode & ASYNC))
        if a.is_async:
            a.own |= 1 << n
        else:
            a.seen |= 1 << n
        if write:
            self.writer[cell], self.readers[cell] = n, []
        else:
            self.readers[cell].append(n)
        return out


class Both:
    """A random program on the clocks and on the model."""

    def __init__(self, seed: int, reuse: bool) -> None:
        self.rng = random.Random(seed)
        self.h = History()
        if not reuse:
            self.h._slot = lambda warp: self.h.chain(warp.label)  # type: ignore[method-assign]
        self.found: set[str] = set()
        self.shadow = Shadow(self.h, CELLS, str, lambda kind, *rest: self.found.add(kind))
        self.model = Model()
        self.warps: list[tuple[Actor, Seen]] = [(self.h.warp(f"warp {k}"), Seen()) for k in range(3)]
        self.ops: list[tuple[Actor, Seen]] = []
        self.objects: list[tuple[Clock, Seen]] = [(self.h.clock(), Seen()) for _ in range(3)]
        self.pc = 0

    def step(self) -> tuple[set[str], set[str]] | None:
        """One action; for an access, what the clocks found and what the model did."""
        rng, h = self.rng, self.h
        actor, seen = rng.choice(self.warps)
        clock, kept = rng.choice(self.objects)
        action = rng.choice(ACTIONS)
        if action == "access":
            if self.ops and rng.random() < 0.4:
                actor, seen = rng.choice(self.ops)
            self.pc += 1
            actor.site = SimpleNamespace(index=self.pc, text="", file=None)
            mode = ASYNC if actor.is_async else 0
            cell, write = rng.randrange(CELLS), rng.random() < 0.5
            self.found.clear()
            (self.shadow.write if write else self.shadow.read)(actor, slice(cell, cell + 1), mode)
            return set(self.found), self.model.access(seen, cell, write, mode)
        if action in ("release", "sync"):
            h.release(actor, clock)
            kept.seen |= seen.seen
            kept.fenced |= seen.fenced
        if action in ("acquire", "sync"):
            actor, seen = rng.choice(self.warps)
            h.acquire(actor, clock)
            seen.seen |= kept.seen
            seen.fenced |= kept.fenced
        elif action == "fence":
            h.fence(actor)
            seen.seen |= seen.got[0]
            seen.fenced |= seen.got[1]
            seen.got, seen.published = (0, 0), (seen.seen, seen.fenced)
        elif action == "proxy":
            h.fence_proxy_async(actor)
            seen.fenced = seen.seen
        elif action == "relaxed":
            h.release_relaxed(actor, clock)
            kept.seen |= seen.published[0]
            kept.fenced |= seen.published[1]
        elif action == "got":
            h.acquire_relaxed(actor, clock)
            seen.got = seen.got[0] | kept.seen, seen.got[1] | kept.fenced
        elif action == "fork":
            self.ops.append((h.fork(actor, None), Seen(seen.seen, seen.fenced, is_async=True)))
        elif self.ops and action in ("join", "signal"):
            # An operation is done once it is waited for or signals: it makes no access afterwards.
            op, done = self.ops.pop(rng.randrange(len(self.ops)))
            if action == "join":
                h.join(actor, op)
                seen.seen |= done.own
            else:
                h.release(op, clock)
                kept.seen |= done.own
        return None


@pytest.mark.parametrize("block", range(8))
def test_clocks_find_exactly_what_the_model_finds(block: int) -> None:
    """Every operation on a chain of its own. The programs hold faults of each kind, and accesses without."""
    kinds: dict[frozenset[str], int] = {}
    for seed in range(40):
        both = Both(1000 * block + seed, reuse=False)
        for _ in range(150):
            got = both.step()
            if got is not None:
                assert got[0] == got[1], f"seed {1000 * block + seed}, access {both.pc}"
                kinds[frozenset(got[1])] = kinds.get(frozenset(got[1]), 0) + 1
    assert kinds[frozenset()] > 300 and kinds[frozenset({"race"})] > 300
    assert kinds[frozenset({"missing-proxy-fence"})] > 3 and kinds[frozenset({"uninitialised-read"})] > 20


def test_shared_slots_find_nothing_that_is_not_there() -> None:
    """With slots reused, a waiter for a later operation counts as having seen the earlier ones of its slot."""
    missed = accesses = 0
    for seed in range(300):
        both = Both(seed, reuse=True)
        for _ in range(150):
            got = both.step()
            if got is not None:
                assert got[0] <= got[1], f"seed {seed}, access {both.pc}"
                missed += got[0] != got[1]
                accesses += 1
    assert missed < accesses / 200
