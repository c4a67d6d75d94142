"""Synchronisation: mbarrier, bar/barrier, barrier.cluster, fences, griddepcontrol, setmaxnreg.

PTX ISA, "Parallel Synchronization and Communication Instructions" and "Miscellaneous Instructions". Scopes are not told
apart: every release and acquire acts as if its scope were wide enough.
"""

from __future__ import annotations

import numpy as np

from ptxcheck.machine import CONVERGE, YIELD, Block, Cta, Signal, Warp
from ptxcheck.memory import OFFSET_MASK
from ptxcheck.ptx import Addr, Imm, Inst, Sink
from ptxcheck.spaces import owner, shared_addresses
from ptxcheck.table import Array, Build, Step, op


def groups(w: Warp, m: Array, addresses: Array) -> list[tuple[Cta, int, Array]]:
    """The mbarriers that active lanes name: CTA, offset, lanes."""
    at = shared_addresses(addresses)[m]
    lanes = np.flatnonzero(m)
    return [(owner(w, a), a & OFFSET_MASK, lanes[at == a]) for a in dict.fromkeys(at.tolist())]


def _relaxed(i: Inst) -> bool:
    return i.has("relaxed")


@op("mbarrier.init")
def mbarrier_init(b: Build, i: Inst) -> Step:
    addr, count = b.address(i.ops[0], _space(i)), b.read(i.ops[1], "u32")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        counts = np.broadcast_to(count(w), (32,))
        for cta, at, lanes in groups(w, m, addr(w)):
            if (counts[lanes] != counts[lanes[0]]).any():
                w.fault(
                    "barrier-misuse", f"lanes initialise {cta.barriers.name(at)} with different counts", fatal=False
                )
            cta.barriers.init(at, int(counts[lanes[0]]), w.clock)
        return None

    return run


@op("mbarrier.inval")
def mbarrier_inval(b: Build, i: Inst) -> Step:
    addr = b.address(i.ops[0], _space(i))

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        for cta, at, _ in groups(w, m, addr(w)):
            cta.barriers.inval(at, w.clock)
        return None

    return run


@op("mbarrier.arrive", "mbarrier.arrive_drop")
def mbarrier_arrive(b: Build, i: Inst) -> Step:
    """All forms: with expect_tx, noComplete, drop; local or remote; each active lane arrives."""
    ops = list(i.ops)
    dest = ops.pop(0) if not isinstance(ops[0], Addr) else Sink()
    addr = b.address(ops[0], _space(i))
    expect, drop, relaxed = i.has("expect_tx"), i.mods[1] == "arrive_drop", _relaxed(i)
    operand = b.read(ops[1], "u32") if len(ops) > 1 else None
    write = b.write(dest, "b64")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        values = np.ones(32, np.uint32) if operand is None else np.broadcast_to(operand(w), (32,))
        state = np.zeros(32, np.uint64)
        acting = w.clock.lanes
        for cta, at, lanes in groups(w, m, addr(w)):
            if lanes.size < 32:
                w.clock.lanes = np.zeros(32, np.bool_)
                w.clock.lanes[lanes] = True
            total = int(values[lanes].astype(np.int64).sum())
            if expect:
                cta.barriers.expect_tx(at, total, w.clock)
                total = lanes.size
            state[lanes] = cta.barriers.arrive(at, total, w.clock, relaxed=relaxed, drop=drop)
        w.clock.lanes = acting
        w.machine.wakes += 1
        write(w, m, state)
        return None

    return run


@op("mbarrier.expect_tx")
def mbarrier_expect_tx(b: Build, i: Inst) -> Step:
    addr, nbytes = b.address(i.ops[0], _space(i)), b.read(i.ops[1], "u32")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        n = np.broadcast_to(nbytes(w), (32,))
        for cta, at, lanes in groups(w, m, addr(w)):
            cta.barriers.expect_tx(at, int(n[lanes].astype(np.int64).sum()), w.clock)
        return None

    return run


@op("mbarrier.complete_tx")
def mbarrier_complete_tx(b: Build, i: Inst) -> Step:
    """A simulated completion: no copy behind it."""
    addr, nbytes = b.address(i.ops[0], _space(i)), b.read(i.ops[1], "u32")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        n = np.broadcast_to(nbytes(w), (32,))
        for cta, at, lanes in groups(w, m, addr(w)):
            cta.barriers.complete_tx(at, int(n[lanes].astype(np.int64).sum()), w.clock)
        w.machine.wakes += 1
        return None

    return run


@op("mbarrier.pending_count")
def mbarrier_pending_count(b: Build, i: Inst) -> Step:
    raise b.error("the state's contents are opaque here")


@op("mbarrier.test_wait", "mbarrier.try_wait")
def mbarrier_wait(b: Build, i: Inst) -> Step:
    """Active lanes may name several barriers. try_wait suspends until all have passed, or gives up (sched.py)."""
    pred, operand = i.ops[0], i.ops[2]
    addr = b.address(i.ops[1], _space(i))
    parity = i.has("parity")
    want = b.read(operand, "u32" if parity else "b64")
    write = b.write(pred, "pred")
    patient, relaxed = i.mods[1] == "try_wait", _relaxed(i)

    def run(w: Warp, m: Array) -> Signal:
        clock, machine = w.clock, w.machine
        clock.site = i
        wants = np.broadcast_to(want(w), (32,))
        tests = []
        for cta, at, lanes in groups(w, m, addr(w)):
            if cta is not w.cta:
                w.fault("bad-operand", f"a wait on {cta.barriers.name(at)}, which is another CTA's", fatal=False)
            cta.barriers.get(at, clock, "waited on")
            for v in dict.fromkeys(wants[lanes].tolist()):
                tests.append((cta.barriers, at, v & 1 if parity else v, lanes[wants[lanes] == v]))

        def passed(test: tuple) -> bool:  # type: ignore[type-arg]
            barriers, at, v, _ = test
            return bool(barriers.passed(at, v) if parity else barriers.beyond(at, v))

        def settle() -> bool:
            """Write the predicate; whether all passed."""
            out = np.zeros(32, np.bool_)
            for t in tests:
                if passed(t):
                    t[0].acquire(t[1], clock, relaxed)
                    out[t[3]] = True
            write(w, m, out)
            return bool(out[m].all())

        if settle():
            return None
        if not patient or machine.rng.random() < 0.1:
            machine.polls += 1
            return YIELD
        start = machine.timeouts
        machine.patient += 1

        def ready() -> bool:
            return machine.timeouts != start or all(map(passed, tests))

        def then() -> None:
            machine.patient -= 1
            clock.site = i
            settle()

        v = tests[0][2]
        more = f" (and {len(tests) - 1} more)" if len(tests) > 1 else ""
        name = f"{tests[0][0].name(tests[0][1])}{more}, " + (f"parity {v}" if parity else f"phase {v}")
        return Block(ready, f"waits for {name}", then)

    return run


def _space(i: Inst) -> str:
    return "shared" if any(x.startswith("shared") for x in i.mods) else "generic"


# ---------------------------------------------------------------------------------------------------- bar and barrier
@op("bar.warp.sync")
def bar_warp_sync(b: Build, i: Inst) -> Step:
    """Lanes of the mask wait for each other; all of them together have then met."""
    members = b.uniform(i.ops[0], "u32")

    def run(w: Warp, m: Array) -> Signal:
        want = members(w, m)
        bits = np.array([want >> k & 1 for k in range(32)], np.bool_)
        if (m & ~bits).any():
            w.fault("divergence", "a lane executes bar.warp.sync with a mask that leaves it out")
        if (bits & w.alive & ~m).any():
            return CONVERGE
        if not (w.alive & ~bits).any():
            w.machine.history.meet(w.clock)
        return None

    return run


@op("bar.sync", "bar.cta.sync", "barrier.sync", "barrier.cta.sync")
def bar_sync(b: Build, i: Inst) -> Step:
    return _barrier(b, i, wait=True)


@op("bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive")
def bar_arrive(b: Build, i: Inst) -> Step:
    return _barrier(b, i, wait=False)


@op("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red")
def bar_red(b: Build, i: Inst) -> Step:
    return _barrier(b, i, wait=True)


def _barrier(b: Build, i: Inst, wait: bool) -> Step:
    """`bar` is `barrier.aligned`: all lanes of the warp execute it together. The other form counts lanes."""
    aligned = i.mods[0] == "bar" or i.has("aligned")
    reduce = next((x for x in ("popc", "and", "or") if i.has(x) and i.has("red")), "")
    ops = list(i.ops)
    dest = ops.pop(0) if reduce else None
    vote = b.read(ops.pop(), "pred") if reduce else None
    number = b.uniform(ops[0], "u32")
    count = b.uniform(ops[1], "u32") if len(ops) > 1 else None
    write = b.write(dest, "pred" if reduce != "popc" else "u32") if dest is not None else None

    def run(w: Warp, m: Array) -> Signal:
        if (w.alive & ~w.running.mask).any() and (aligned or not wait):
            return CONVERGE
        w.clock.site = i
        expected = -(-w.cta.threads // 32) * 32 if count is None else count(w, m)
        threads = 32 if aligned or (m == w.alive).all() else int(m.sum())
        n = number(w, m)
        phase = w.cta.named.arrive(n, threads, expected, w.clock)
        if vote is not None:
            v = np.broadcast_to(vote(w), (32,))[m]
            phase.votes[0] += int(v.sum())
            phase.votes[1] = phase.votes[1] and bool(v.all())
            phase.votes[2] = phase.votes[2] or bool(v.any())
        if phase.complete:
            w.machine.wakes += 1
        if not wait:
            return None

        def then() -> None:
            w.machine.history.acquire(w.clock, phase.clock)
            if threads == 32:
                w.machine.history.meet(w.clock)
            if write is not None:
                got = phase.votes[("popc", "and", "or").index(reduce)]
                write(w, m, np.full(32, got, np.uint32 if reduce == "popc" else np.bool_))

        if phase.complete:
            then()
            return None
        return Block(lambda: phase.complete, f"waits at barrier {n} for {expected} threads", then)

    return run


# --------------------------------------------------------------------------------------------------- barrier.cluster
@op("barrier.cluster.arrive")
def cluster_arrive(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        if (w.alive & ~w.running.mask).any():
            return CONVERGE
        w.clock.site = i
        w.cta.cluster.barrier.arrive(w, w.clock, _relaxed(i))
        w.machine.wakes += 1
        return None

    return run


@op("barrier.cluster.wait")
def cluster_wait(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        if (w.alive & ~w.running.mask).any():
            return CONVERGE
        w.clock.site = i
        phase = w.cta.cluster.barrier.waited(w, w.clock)
        if phase is None:
            return None

        def then() -> None:
            w.machine.history.acquire(w.clock, phase.clock)
            w.machine.history.meet(w.clock)

        if phase.complete:
            then()
            return None
        return Block(lambda: phase.complete, "waits at the cluster barrier", then)

    return run


# ------------------------------------------------------------------------------------------------------------- fences
@op("fence.acq_rel", "fence.sc", "fence.acquire", "fence.release", "membar", "fence.cta", "fence.gpu", "fence.cluster")
def fence(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        w.machine.history.fence(w.clock)
        return None

    return run


@op("fence.proxy.async")
def fence_proxy_async(b: Build, i: Inst) -> Step:
    """For all state spaces alike, whether or not one is named."""

    def run(w: Warp, m: Array) -> Signal:
        w.machine.history.fence_proxy_async(w.clock)
        return None

    return run


@op("fence.proxy.alias", "fence.proxy.tensormap")
def fence_proxy_other(b: Build, i: Inst) -> Step:
    """No aliases and no tensor map changed on the device are modelled: nothing to order."""
    return lambda w, m: None


@op("fence.mbarrier_init")
def fence_mbarrier_init(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        w.machine.history.fence_mbarrier_init(w.clock)
        return None

    return run


# ----------------------------------------------------------------------------------------- griddepcontrol, setmaxnreg
@op("griddepcontrol.wait")
def griddepcontrol_wait(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        h = w.machine.history
        if not w.clock.has_seen(w.machine.grid_chain, 1):
            seen = h.fit(w.clock.seen).copy()
            seen[w.machine.grid_chain] = 1
            w.clock.seen = seen
        return None

    return run


@op("griddepcontrol.launch_dependents")
def griddepcontrol_launch(b: Build, i: Inst) -> Step:
    def run(w: Warp, m: Array) -> Signal:
        if not w.clock.has_seen(w.machine.grid_chain, 1):
            w.machine.waited_for_grid = False
        return None

    return run


@op("setmaxnreg")
def setmaxnreg(b: Build, i: Inst) -> Step:
    """`.dec` gives registers back to the CTA's pool, `.inc` waits until the pool has enough."""
    if not isinstance(i.ops[0], Imm):
        raise b.error("the count is a constant")
    n, up = int(i.ops[0].text, 0), i.has("inc")

    def run(w: Warp, m: Array) -> Signal:
        if (w.alive & ~w.running.mask).any():
            return CONVERGE
        pool, machine = w.cta.registers, w.machine
        if n % 8 or not 24 <= n <= 256:
            w.fault("register-over-budget", f"setmaxnreg {n}: a multiple of 8 from 24 to 256 is allowed")
        if up != (n >= w.maxnreg) and n != w.maxnreg:
            w.fault(
                "register-over-budget",
                f"setmaxnreg.{'inc' if up else 'dec'} to {n}, from {w.maxnreg} registers a thread",
            )
        change = n - w.maxnreg
        if not up:
            pool.free -= 32 * change
            w.maxnreg = n
            machine.progress += 1
            machine.wakes += 1
            return None

        def then() -> None:
            pool.free -= 32 * change
            w.maxnreg = n

        if pool.free >= 32 * change:
            then()
            return None
        return Block(lambda: pool.free >= 32 * change, f"setmaxnreg waits for {change} registers a thread more", then)

    return run
