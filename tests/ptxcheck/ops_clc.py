"""Cluster launch control: a running cluster takes over one of the grid's that has not started.

PTX ISA, "clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel". The response is opaque; here its lower
half holds the first CTA's x and y, the upper half z and, above it, whether the launch was cancelled. Which clusters
have not started is the scheduler's business: `sms` CTAs run at a time.
"""

from __future__ import annotations

import numpy as np

from ptxcheck.hb import ASYNC
from ptxcheck.machine import Cta, Signal, Warp
from ptxcheck.memory import OFFSET_MASK
from ptxcheck.ptx import Inst, Sink
from ptxcheck.sched import AsyncOp
from ptxcheck.table import Array, Build, Step, op

_CANCELLED = np.uint64(1 << 32)
_UNDEFINED = np.uint32(0x7FFF0BAD)  # an index of a launch that was not cancelled: far outside of any grid
BYTES = 16


def encode(first: tuple[int, int, int] | None) -> Array:
    """The response: uint8[1, 16]."""
    x, y, z, cancelled = (*first, 1) if first is not None else (0, 0, 0, 0)
    return np.array([[x, y, z, cancelled]], np.uint32).view(np.uint8)


@op("clusterlaunchcontrol.try_cancel")
def try_cancel(b: Build, i: Inst) -> Step:
    address, barrier = b.address(i.ops[0]), b.address(i.ops[1])
    everywhere = i.has("multicast::cluster::all")

    def one(w: Warp, at: int, bar: int) -> None:
        if at % BYTES:
            w.fault("misaligned", f"the response at {at:#x} is no multiple of {BYTES}")
        if w.cta.launch_control_failed:
            w.fault("launch-control", "another request after this CTA saw one fail")
        machine, cluster = w.machine, w.cta.cluster
        targets: list[Cta] = cluster.ctas if everywhere else [w.cta]
        phases = [t.barriers.issue(bar, BYTES) for t in targets]
        actor = machine.history.fork(w.clock, i)

        def run() -> None:
            response = encode(None)
            if machine.waiting:
                index = machine.waiting.popleft()
                x, y, z = (p * c for p, c in zip(index, machine.cluster, strict=True))
                response = encode((x, y, z))
            for t, phase in zip(targets, phases, strict=True):
                t.shared.store(actor, np.array([at]), response, ASYNC)
                t.barriers.complete_tx(bar, BYTES, actor, phase)

        machine.async_.submit(AsyncOp(i, w, run, what="clusterlaunchcontrol.try_cancel"))

    def step(w: Warp, m: Array) -> Signal:
        at, bar = address(w), barrier(w)
        for lane in np.flatnonzero(m):
            one(w, int(at[lane]) & OFFSET_MASK, int(bar[lane]) & OFFSET_MASK)
        return None

    return step


@op("clusterlaunchcontrol.query_cancel.is_canceled")
def is_canceled(b: Build, i: Inst) -> Step:
    read, write = b.read(i.ops[1], "b128"), b.write(i.ops[0], "pred")

    def step(w: Warp, m: Array) -> Signal:
        yes = (read(w)[:, 1] & _CANCELLED) != 0
        if not (yes | ~m).all():
            w.cta.launch_control_failed = True
        write(w, m, yes)
        return None

    return step


@op("clusterlaunchcontrol.query_cancel")
def get_first_ctaid(b: Build, i: Inst) -> Step:
    """`.get_first_ctaid::x` (y, z) into one register, `.get_first_ctaid.v4` into four, the last unspecified."""
    read = b.read(i.ops[1], "b128")
    part = next((m[-1] for m in i.mods if m.startswith("get_first_ctaid::")), "")
    targets = b.vector(i.ops[0])
    words = ["xyz".index(part)] if part else [0, 1, 2, 3]
    writes = [(b.write(t, "u32"), k) for t, k in zip(targets, words, strict=True) if not isinstance(t, Sink)]

    def step(w: Warp, m: Array) -> Signal:
        response = np.ascontiguousarray(read(w)).view(np.uint32)
        none = response[:, 3] == 0
        for write, k in writes:
            write(w, m, np.where(none, _UNDEFINED, response[:, k]))
        return None

    return step
