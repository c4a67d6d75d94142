"""The happens-before model on its own: clocks, slots, channels, proxies, reader sets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ptxcheck.hb import ASYNC, STRONG, Actor, History
from ptxcheck.shadow import Shadow


class World:
    """Some warps over one shadow of 64 granules; faults are gathered as (kind, pc, other pc)."""

    def __init__(self, warps: int = 4, **more: bool) -> None:
        self.h = History()
        self.warps = [self.h.warp(f"warp {k}") for k in range(warps)]
        self.faults: list[tuple[str, ...]] = []
        self.shadow = Shadow(self.h, 64, lambda g: f"granule {g}", self.note, **more)
        self.pc = 0

    def note(self, kind: str, message: str, where: str, other: str, key: tuple[str, ...]) -> None:
        self.faults.append((kind, *key))

    def at(self, actor: Actor, pc: int) -> Actor:
        actor.site = SimpleNamespace(index=pc, text=f"inst {pc}", file=None)
        return actor

    def write(self, actor: Actor, pc: int, at: object = slice(0, 8), mode: int = 0) -> None:
        self.shadow.write(self.at(actor, pc), at, mode)

    def read(self, actor: Actor, pc: int, at: object = slice(0, 8), mode: int = 0) -> None:
        self.shadow.read(self.at(actor, pc), at, mode)

    def sync(self, a: Actor, b: Actor) -> None:
        c = self.h.clock()
        self.h.release(a, c)
        self.h.acquire(b, c)


def test_release_covers_what_came_before_only() -> None:
    w = World()
    a, b, *_ = w.warps
    w.write(a, 1)
    w.sync(a, b)
    w.read(b, 2)
    assert w.faults == []
    w.write(a, 3, slice(8, 16))
    w.read(b, 4, slice(8, 16))
    assert w.faults == [("race", "4", "3")]


def test_release_is_transitive() -> None:
    w = World()
    a, b, c, _ = w.warps
    w.write(a, 1)
    w.sync(a, b)
    w.sync(b, c)
    w.read(c, 2)
    assert w.faults == []


def test_every_reader_since_the_last_write_counts() -> None:
    w = World()
    a, b, c, d = w.warps
    w.write(a, 1)
    for x in (b, c, d):
        w.sync(a, x)
    w.read(b, 2, slice(0, 4))
    w.read(c, 3, slice(2, 8))
    w.read(d, 4, np.array([3]))
    w.sync(b, a)
    w.sync(d, a)
    w.write(a, 5)
    assert set(w.faults) == {("race", "5", "3")}


def test_a_reader_that_another_has_seen_is_implied() -> None:
    w = World()
    a, b, c, _ = w.warps
    w.write(a, 1)
    w.sync(a, b)
    w.read(b, 2)
    w.sync(b, c)
    w.read(c, 3)
    assert max(map(len, w.h.readers)) == 1
    w.sync(c, a)
    w.write(a, 4)
    assert w.faults == []


def test_partial_overlaps_name_the_right_writer() -> None:
    w = World()
    a, b, c, _ = w.warps
    w.write(a, 1, slice(0, 8))
    w.write(b, 2, slice(8, 16))
    w.sync(a, c)
    w.read(c, 3, slice(0, 16))
    assert w.faults == [("race", "3", "2")]


def test_uninitialised() -> None:
    w = World()
    a, *_ = w.warps
    w.write(a, 1, slice(0, 4))
    w.read(a, 2, slice(0, 4))
    assert w.faults == []
    w.read(a, 3, slice(0, 8))
    assert w.faults == [("uninitialised-read", "3", "")]
    old = World(initialised=True)
    old.read(old.warps[0], 1)
    assert old.faults == []


def test_strong_operations_do_not_race_with_each_other() -> None:
    w = World()
    a, b, *_ = w.warps
    w.write(a, 1, mode=STRONG)
    w.write(b, 2, mode=STRONG)
    w.read(a, 3, mode=STRONG)
    assert w.faults == []
    w.read(a, 4)
    assert w.faults == [("race", "4", "2")]


# ---------------------------------------------------------------------------------------------------------- fences
def test_relaxed_needs_fences_on_both_sides() -> None:
    for before, after in ((True, True), (True, False), (False, True)):
        w = World()
        a, b, *_ = w.warps
        flag = w.h.clock()
        w.write(a, 1)
        if before:
            w.h.fence(a)
        w.h.release_relaxed(a, flag)
        w.h.acquire_relaxed(b, flag)
        if after:
            w.h.fence(b)
        w.read(b, 2)
        assert w.faults == ([] if before and after else [("race", "2", "1")])


def test_a_fence_covers_only_what_came_before_it() -> None:
    w = World()
    a, b, *_ = w.warps
    flag = w.h.clock()
    w.h.fence(a)
    w.write(a, 1)
    w.h.release_relaxed(a, flag)
    w.h.acquire_relaxed(b, flag)
    w.h.fence(b)
    w.read(b, 2)
    assert w.faults == [("race", "2", "1")]


@pytest.mark.parametrize("who", ["writer", "issuer", "nobody", "writer-early", "issuer-early", "third"])
def test_proxy_fences(who: str) -> None:
    """A generic write, a barrier, an asynchronous read: fenced by the writer before the barrier, or by the issuer (or
    one who passes it on) after it."""
    w = World()
    a, b, c, _ = w.warps
    if who == "writer-early":
        w.h.fence_proxy_async(a)
    if who == "issuer-early":
        w.h.fence_proxy_async(b)
    w.write(a, 1)
    if who == "writer":
        w.h.fence_proxy_async(a)
    if who == "third":
        w.sync(a, c)
        w.h.fence_proxy_async(c)
        w.sync(c, b)
    else:
        w.sync(a, b)
    if who == "issuer":
        w.h.fence_proxy_async(b)
    op = w.h.fork(b, None)
    w.read(op, 2, mode=ASYNC)
    good = who in ("writer", "issuer", "third")
    assert w.faults == ([] if good else [("missing-proxy-fence", "2", "1")])


def test_async_data_need_no_proxy_fence() -> None:
    w = World()
    a, b, *_ = w.warps
    op = w.h.fork(a, None)
    w.write(op, 1, mode=ASYNC)
    done = w.h.clock()
    w.h.release(op, done)
    w.h.acquire(b, done)
    w.read(b, 2)
    w.read(w.h.fork(b, None), 3, mode=ASYNC)
    assert w.faults == []


def test_reads_before_an_async_write_need_no_fence() -> None:
    w = World()
    a, b, *_ = w.warps
    first = w.h.fork(a, None)
    w.write(first, 1, mode=ASYNC)
    w.h.join(b, first)
    w.read(b, 2)
    w.sync(b, a)
    w.write(w.h.fork(a, None), 3, mode=ASYNC)
    assert w.faults == []


# --------------------------------------------------------------------------------------------- asynchronous operations
def test_an_operation_is_unordered_until_waited_for() -> None:
    w = World()
    a, b, *_ = w.warps
    op = w.h.fork(a, None)
    w.write(op, 1, mode=ASYNC)
    w.read(a, 2)  # its own issuer has not waited
    assert w.faults == [("race", "2", "1")]
    w.h.join(a, op)
    w.read(a, 3)
    w.sync(a, b)
    w.read(b, 4)
    assert len(w.faults) == 1


def test_an_operation_signals_itself_alone() -> None:
    """What its issuer did before is not released by its completion."""
    w = World()
    a, b, *_ = w.warps
    w.write(a, 1, slice(8, 16))
    op = w.h.fork(a, None)
    w.write(op, 2, mode=ASYNC)
    done = w.h.clock()
    w.h.release(op, done)
    w.h.acquire(b, done)
    w.read(b, 3)
    assert w.faults == []
    w.read(b, 4, slice(8, 16))
    assert w.faults == [("race", "4", "1")]


def test_what_an_issuer_does_later_is_not_before_its_operation() -> None:
    w = World()
    a, *_ = w.warps
    op = w.h.fork(a, None)
    w.write(a, 1)
    w.read(op, 2, mode=ASYNC)
    assert w.faults == [("race", "2", "1")]


def test_operations_of_one_issuer_are_unordered_among_themselves() -> None:
    for channel in (False, True):
        w = World()
        a, *_ = w.warps
        ch = w.h.channel("copies") if channel else None
        first, second = w.h.fork(a, None, ch), w.h.fork(a, None, ch)
        w.write(first, 1, mode=ASYNC)
        w.write(second, 2, mode=ASYNC)
        assert w.faults == [("race", "2", "1")]


def test_channels_are_waited_for_by_prefix() -> None:
    w = World()
    a, *_ = w.warps
    ch = w.h.channel("mma")
    w.write(a, 1)
    w.h.fence_proxy_async(a)
    first, second = w.h.fork(a, None, ch), w.h.fork(a, None, ch)
    w.read(first, 2, slice(0, 4), ASYNC)
    w.read(second, 3, slice(4, 8), ASYNC)
    w.h.join(a, ch, first.epoch)
    w.write(a, 4, slice(0, 4))
    assert w.faults == []
    w.write(a, 5, slice(4, 8))
    assert w.faults == [("race", "5", "3")]


def test_slots_are_reused_once_seen() -> None:
    """A ring of copies keeps vectors short; copies that nobody waits for do not share."""
    w = World()
    a, b, *_ = w.warps
    chains = set()
    for _ in range(100):
        ops = [w.h.fork(a, None) for _ in range(3)]
        chains |= {op.chain for op in ops}
        for op in ops:
            w.h.join(b, op)
        w.sync(b, a)
    assert len(chains) == 3
    assert len({w.h.fork(a, None).chain for _ in range(10)}) == 10


def test_a_warpgroup_has_seen_what_all_its_warps_have() -> None:
    w = World()
    writer, *group = [*w.warps, w.h.warp("warp 4")]
    w.write(writer, 1, slice(0, 4))
    w.h.fence_proxy_async(writer)
    w.sync(writer, group[0])
    op = w.h.fork(group, None)
    part = w.h.part(op, group[0])
    w.read(part, 2, slice(0, 4), ASYNC)
    assert w.faults == []
    w.read(op, 3, slice(0, 4), ASYNC)
    assert w.faults == [("race", "3", "1")]
    for g in group[1:]:
        w.sync(writer, g)
    w.read(w.h.fork(group, None), 4, slice(0, 4), ASYNC)
    assert len(w.faults) == 1


def lanes(*active: int) -> np.ndarray:
    return np.isin(np.arange(32), active)


@pytest.mark.parametrize("how", ["write", "read"])
def test_a_lane_that_arrives_alone_speaks_for_itself(how: str) -> None:
    """What other lanes wrote or read is released by one lane only once the warp has met."""
    w = World()
    a, b, *_ = w.warps
    for pc, met in ((1, False), (2, True)):
        at = slice(8 * pc, 8 * pc + 8)
        w.write(a, 10, at)
        w.sync(a, b)
        getattr(w, how)(a, 20 + pc, at)
        if met:
            w.h.meet(a)
        a.lanes = lanes(0)
        w.sync(a, b)
        a.lanes = None
        w.write(b, 30 + pc, at)
    assert w.faults == [("race", "31", "21")]


def test_what_a_lane_did_itself_it_releases_alone() -> None:
    """Also where others did something else before, which it does not release."""
    w = World()
    a, b, *_ = w.warps
    w.write(a, 1, slice(0, 4))
    a.lanes = lanes(5)
    w.write(a, 2, slice(4, 8))
    w.sync(a, b)
    w.read(b, 3, slice(4, 8))
    assert w.faults == []
    w.read(b, 4, slice(0, 4))
    assert w.faults == [("race", "4", "1")]
    a.lanes = lanes(6)
    w.sync(a, b)
    w.write(a, 5, slice(8, 12))
    a.lanes = lanes(5, 6, 7)
    w.sync(a, b)
    w.read(b, 6, slice(8, 12))
    assert len(w.faults) == 1


def test_a_reader_among_all_lanes_is_not_implied_by_one_lane() -> None:
    """Lane 0 reads what all lanes have read, and arrives: the others' reads are still open."""
    w = World()
    a, b, *_ = w.warps
    w.write(a, 1)
    w.sync(a, b)
    w.read(b, 2)
    b.lanes = lanes(0)
    w.read(b, 3)
    w.sync(b, a)
    w.write(a, 4)
    assert w.faults == [("race", "4", "2")]


def test_a_copy_that_one_lane_issues_reads_what_the_warp_wrote() -> None:
    w = World()
    a, *_ = w.warps
    w.write(a, 1)
    w.h.fence_proxy_async(a)
    a.lanes = lanes(0)
    w.read(w.h.fork(a, None), 2, mode=ASYNC)
    assert w.faults == [("race", "2", "1")]
    a.lanes = None
    w.h.meet(a)
    a.lanes = lanes(0)
    w.read(w.h.fork(a, None), 3, mode=ASYNC)
    assert len(w.faults) == 1


def test_capacity_grows_under_old_clocks() -> None:
    w = World()
    a, b, *_ = w.warps
    old = w.h.clock()
    w.write(a, 1)
    w.h.release(a, old)
    more = [w.h.warp(f"extra {k}") for k in range(200)]
    w.write(more[-1], 2, slice(8, 16))
    w.h.acquire(b, old)
    w.sync(more[-1], b)
    w.read(b, 3, slice(0, 16))
    assert w.faults == []
    w.read(more[0], 4, slice(0, 16))
    assert {f[0] for f in w.faults} == {"race"} and len(w.faults) == 2


def test_retired_chains_serve_again() -> None:
    h = History()
    for _ in range(50):
        warps = [h.warp("w") for _ in range(4)]
        for x in warps:
            h.fork(x, None)
            h.init(x)
        for x in warps:
            h.retire(x)
    assert h.capacity == 64
