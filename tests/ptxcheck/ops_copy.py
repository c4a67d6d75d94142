"""Copies and stores that complete later, other than bulk ones: cp.async, st.async, red.async; and address instructions.

PTX ISA, "cp.async", "st.async", "red.async", "mapa", "getctarank", "prefetch", "discard", "nanosleep". cp.async works
through the generic proxy; its groups complete in order. st.async and red.async signal an mbarrier in the destination's
CTA. Groups are kept for a warp, not for each of its lanes.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from ptxcheck.hb import STRONG, Actor, Channel
from ptxcheck.machine import YIELD, Block, Cta, Signal, Warp
from ptxcheck.memory import OFFSET_MASK, Bytes, Ints
from ptxcheck.ops_atomic import OPERATIONS, update
from ptxcheck.ops_memory import type_of
from ptxcheck.ops_sync import groups
from ptxcheck.ptx import Imm, Inst, Neg, Operand, Reg
from ptxcheck.sched import AsyncOp
from ptxcheck.spaces import owner, shared_addresses
from ptxcheck.table import DTYPES, SHARED_WINDOW, Array, Build, Step, op


# ---------------------------------------------------------------------------------------------------------- cp.async
class Copies:
    """The cp.async operations of one warp: those of the open group, and the committed groups."""

    def __init__(self, w: Warp) -> None:
        self.channel: Channel = w.cta.channel(f"{w.clock.label} (cp.async)")
        self.open: list[AsyncOp] = []
        self.groups: list[tuple[list[AsyncOp], int]] = []  # with the channel's epoch at the commit
        self.all: list[AsyncOp] = []


_COPIES: WeakKeyDictionary[Warp, Copies] = WeakKeyDictionary()


def _copies(w: Warp) -> Copies:
    found = _COPIES.get(w)
    if found is None:
        found = _COPIES[w] = Copies(w)
    return found


@op("cp.async.ca", "cp.async.cg")
def cp_async(b: Build, i: Inst) -> Step:
    """Copies 4, 8 or 16 bytes a lane; bytes past the source size, or all where it is ignored, become zero."""
    dst, src = b.address(i.ops[0], "shared"), b.address(i.ops[1], "global")
    if not isinstance(i.ops[2], Imm):
        raise b.error("the size is a constant")
    size = int(i.ops[2].text, 0)
    ops = i.ops[3:]
    hinted = any("L2::cache_hint" in x for x in i.mods)
    if hinted:
        ops = ops[:-1]
    ignore = bool(ops) and _is_predicate(b, ops[0])
    source = b.read(ops[0], "pred" if ignore else "u32") if ops else None

    def run(w: Warp, m: Array) -> Signal:
        copies, history = _copies(w), w.machine.history
        to, at = shared_addresses(dst(w))[m], src(w)[m]
        if source is None:
            used = np.full(at.size, size)
        else:
            v = np.broadcast_to(source(w), (32,))[m]
            used = np.where(v, 0, size) if ignore else np.minimum(v.astype(np.int64), size)
        actor = history.fork(w.clock, i, copies.channel, f"{w.clock.label} (cp.async)", generic=True)
        cta = w.cta

        def effect() -> None:
            data = np.zeros((at.size, size), np.uint8)
            for n in np.unique(used):
                if n:
                    some = used == n
                    data[some, :n] = _fetch(w, actor, at[some], int(n))
            cta.shared.store(actor, to & OFFSET_MASK, data)

        operation = AsyncOp(i, w, effect)
        copies.open.append(operation)
        copies.all = [x for x in copies.all if not x.done]
        copies.all.append(operation)
        w.machine.async_.submit(operation)
        return None

    return run


def _is_predicate(b: Build, o: Operand) -> bool:
    return isinstance(o, Neg) or (isinstance(o, Reg) and b.bits(o) == 1)


def _fetch(w: Warp, actor: Actor, at: Ints, n: int) -> Bytes:
    unit = n & -n
    if unit == n:
        return w.machine.global_.load(actor, at, n)
    parts = (at[:, None] + np.arange(0, n, unit)).ravel()
    return w.machine.global_.load(actor, parts, unit).reshape(at.size, n)


@op("cp.async.commit_group")
def commit_group(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        c = _copies(w)
        c.groups.append((c.open, c.channel.epoch))
        c.open = []
        return None

    return run


@op("cp.async.wait_group", "cp.async.wait_all")
def wait_group(b: Build, i: Inst) -> Step:
    """Waits until at most N of the last groups are pending; wait_all: also for what is not committed."""
    everything = i.mods[2] == "wait_all"
    keep = 0 if everything else int(i.ops[0].text, 0) if isinstance(i.ops[0], Imm) else -1
    if keep < 0:
        raise b.error("the number is a constant")

    def run(w: Warp, m: Array) -> Signal:
        c = _copies(w)
        if everything:
            c.groups.append((c.open, c.channel.epoch))
            c.open = []
        old = c.groups[: len(c.groups) - keep] if keep else c.groups
        if not old:
            return None
        pending = [x for ops, _ in old for x in ops if not x.done]

        def then() -> None:
            w.machine.history.join(w.clock, c.channel, old[-1][1])
            c.groups = c.groups[len(old) :]

        if all(x.done for x in pending):
            then()
            return None
        return Block(lambda: all(x.done for x in pending), f"waits for {len(pending)} cp.async", then)

    return run


@op("cp.async.mbarrier.arrive")
def cp_async_arrive(b: Build, i: Inst) -> Step:
    """An arrival for each lane once all its earlier copies are done; without .noinc the count is raised first."""
    addr, noinc = b.address(i.ops[0], "shared"), i.has("noinc")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        c, history = _copies(w), w.machine.history
        earlier = [x for x in c.all if not x.done]
        for cta, at, lanes in groups(w, m, addr(w)):
            if not noinc:
                found = cta.barriers.get(at, w.clock, "arrived on")
                if found is not None:
                    found.pending += lanes.size
            actor = history.fork(w.clock, i, c.channel, f"{w.clock.label} (cp.async)", generic=True)
            _later(w, i, cta, at, int(lanes.size), actor, earlier)
        return None

    return run


def _later(w: Warp, i: Inst, cta: Cta, at: int, n: int, actor: Actor, earlier: list[AsyncOp]) -> None:
    def effect() -> None:
        cta.barriers.arrive(at, n, actor)

    w.machine.async_.submit(AsyncOp(i, w, effect, lambda: all(x.done for x in earlier)))


# ---------------------------------------------------------------------------------------------- st.async, red.async
@op("st.async", "red.async")
def st_async(b: Build, i: Inst) -> Step:
    """A store or reduction in another CTA's shared memory that completes bytes on an mbarrier there, lane by lane."""
    type_ = type_of(b, i)
    reduce = i.mods[0] == "red"
    operation = next((x for x in i.mods if x in OPERATIONS), "add")
    fn = update(operation, type_) if reduce else None
    addr, mbar = b.address(i.ops[0], "shared"), b.address(i.ops[2], "shared")
    reads = [b.read(x, type_) for x in b.vector(i.ops[1])]
    item = DTYPES[type_]
    nbytes = item.itemsize * len(reads)

    def run(w: Warp, m: Array) -> Signal:
        to, signals = shared_addresses(addr(w)), shared_addresses(mbar(w))
        values = np.stack([np.broadcast_to(r(w), (32,)).view(item) for r in reads], 1)
        for lane in np.flatnonzero(m):
            _send(w, i, int(to[lane]), int(signals[lane]), values[lane : lane + 1], fn)
        return None

    def _send(w: Warp, i: Inst, to: int, signal: int, value: Array, fn: object) -> None:
        cta = owner(w, to)
        if owner(w, signal) is not cta:
            w.fault("bad-operand", "the data and the mbarrier lie in different CTAs")
        actor = w.machine.history.fork(w.clock, i, None, f"{w.clock.label} ({i.mods[0]}.async)", generic=True)
        phase = cta.barriers.issue(signal & OFFSET_MASK, nbytes)
        at = np.array([to & OFFSET_MASK])

        def effect() -> None:
            new = value
            if reduce:
                old = cta.shared.load(actor, at, nbytes, STRONG).view(item)
                assert callable(fn)
                new = np.ascontiguousarray(fn(old, value, value).astype(item, copy=False))
            cta.shared.store(actor, at, np.ascontiguousarray(new).view(np.uint8), STRONG if reduce else 0)
            cta.barriers.complete_tx(signal & OFFSET_MASK, nbytes, actor, phase)

        w.machine.async_.submit(AsyncOp(i, w, effect))

    return run


# ---------------------------------------------------------------------------------------------------------- addresses
@op("mapa")
def mapa(b: Build, i: Inst) -> Step:
    """The address in another CTA of the cluster of the same variable."""
    type_ = i.mods[-1]
    a, rank, write = b.read(i.ops[1], type_), b.read(i.ops[2], "u32"), b.write(i.ops[0], type_)

    def run(w: Warp, m: Array) -> Signal:
        v = np.broadcast_to(a(w), (32,)).astype(np.uint64)
        r = np.broadcast_to(rank(w), (32,)).astype(np.uint64)
        if (r[m] >= len(w.cta.cluster.ctas)).any():
            w.fault("bad-operand", f"mapa to CTA {int(r[m].max())} of a cluster of {len(w.cta.cluster.ctas)}")
        window = np.where(v >= SHARED_WINDOW, np.uint64(SHARED_WINDOW), np.uint64(0))
        out = (v & np.uint64(OFFSET_MASK)) | (r << np.uint64(24)) | window
        write(w, m, out.astype(DTYPES[type_]))
        return None

    return run


@op("getctarank")
def getctarank(b: Build, i: Inst) -> Step:
    """The rank of the CTA that a shared address belongs to."""
    a, write = b.read(i.ops[1], i.mods[-1]), b.write(i.ops[0], "u32")

    def run(w: Warp, m: Array) -> Signal:
        at = shared_addresses(np.broadcast_to(a(w), (32,)).astype(np.int64))
        write(w, m, (at >> 24).astype(np.uint32))
        return None

    return run


@op("nanosleep")
def nanosleep(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        w.machine.polls += 1
        return YIELD

    return run


@op("prefetch", "prefetchu", "discard", "applypriority")
def hint(b: Build, i: Inst) -> Step:
    """Caches are not modelled."""
    return lambda w, m: None
