"""The state that instructions act on: machine, clusters, CTAs. Warps are in warp.py."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from ptxcheck.barriers import Barriers
from ptxcheck.counters import Counters
from ptxcheck.global_memory import Global
from ptxcheck.hb import Channel, History
from ptxcheck.memory import SHARED_LIMIT, Shared
from ptxcheck.named_barriers import ClusterBarrier, NamedBarriers
from ptxcheck.report import Abandoned, Report
from ptxcheck.warp import (
    ALL_LANES,
    CONVERGE,
    EXIT,
    FULL,
    LANES,
    NO_LANES,
    YIELD,
    Array,
    Block,
    Fragment,
    Mark,
    Part,
    Poison,
    Scatter,
    Signal,
    Split,
    Stopped,
    Warp,
    as_mask,
)

if TYPE_CHECKING:
    from ptxcheck.build import Program

# What instructions are written with; they import it from here.
__all__ = [
    "ALL_LANES",
    "CONVERGE",
    "EXIT",
    "FULL",
    "LANES",
    "NO_LANES",
    "YIELD",
    "Array",
    "Block",
    "Cluster",
    "Cta",
    "Fragment",
    "Machine",
    "Mark",
    "Part",
    "Poison",
    "RegisterFile",
    "Scatter",
    "Signal",
    "Split",
    "Stopped",
    "Warp",
    "as_mask",
]


class Cta:
    """A thread block: its warps, shared memory, barriers, and its share of the register file."""

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.machine = machine = cluster.machine
        self.number = machine.started  # in order of start
        machine.started += 1
        self.sm = self.number % machine.sms
        self.exited = False
        self.launch_control_failed = False  # it saw that no cluster is left to cancel
        x, y, z = machine.block
        self.threads = x * y * z
        self.shared = Shared(self, machine.shared_size, machine.shared_shift, machine.shared_names)
        self.barriers = Barriers(self)
        self.named = NamedBarriers(self)
        self.registers = RegisterFile(self.threads)
        self.channels: list[Channel] = []
        self.warps = [Warp(self, k) for k in range(-(-self.threads // 32))]

    def channel(self, label: str) -> Channel:
        """A channel for in-order asynchronous work that ends with the CTA."""
        c = self.machine.history.channel(label)
        self.channels.append(c)
        return c

    def retire(self) -> None:
        """The CTA has ended: give its chains back."""
        self.machine.instructions += sum(w.executed for w in self.warps)
        for w in self.warps:
            self.machine.history.retire(w.clock)
        for c in self.channels:
            self.machine.history.retire_channel(c)


class RegisterFile:
    """Registers that setmaxnreg moves between the warps of a CTA (PTX ISA, "setmaxnreg").

    The launch gives every thread the most that the file allows for so many threads, and no more than MOST; what warps
    release is what others may take.
    """

    FILE = 65536
    #: What ptxas gives a thread where the file has room for 256: cubins of kernels of 256 threads say 240.
    MOST = 240

    def __init__(self, threads: int) -> None:
        self.launch = min(self.FILE // (-(-threads // 128) * 128) // 8 * 8, self.MOST)
        self.free = 0


class Cluster:
    """The CTAs that are scheduled together; index in the grid of clusters."""

    def __init__(self, machine: Machine, index: tuple[int, int, int]) -> None:
        self.machine, self.index = machine, index
        cx, cy, cz = machine.cluster
        ix, iy, iz = index
        self.ctas: list[Cta] = []
        for z in range(cz):
            for y in range(cy):
                for x in range(cx):
                    self.ctas.append(Cta(self, len(self.ctas), (ix * cx + x, iy * cy + y, iz * cz + z)))
        self.barrier = ClusterBarrier(self)


class Machine:
    """One launch of one kernel.

    `global_` and `report` may be shared by several launches. `unsafe`: with programmatic dependent launch, the number
    of the first launch (from 1) that may still run when this one starts.
    """

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: bytes = b"",
        *,
        cluster: tuple[int, int, int] | None = None,
        dynamic_shared: int = 0,
        seed: int = 0,
        sms: int = 4,
        global_: Global | None = None,
        report: Report | None = None,
        unsafe: int = 0,
        relaxed: Collection[str] = (),
    ) -> None:
        # Both know machines.
        from ptxcheck.layout import granule_shift, shared_layout
        from ptxcheck.sched import AsyncQueue

        self.explicit_cluster = cluster is not None
        self.program, self.grid, self.block, self.cluster = program, grid, block, cluster or (1, 1, 1)
        self.params, self.dynamic_shared, self.seed, self.sms = params, dynamic_shared, seed, sms
        self.rng = random.Random(seed)
        self.report = Report() if report is None else report
        self.counters: Counters | None = self.report.counters
        self.history = History()
        self.async_ = AsyncQueue(self.rng)
        self.waiting: deque[tuple[int, int, int]] = deque()  # clusters that have not started
        self.exit_checks: list[Callable[[Cta], None]] = []  # of each CTA, when its cluster has ended
        # Counts of what happened: progress of any kind, what may let a waiting warp go on, failed polls, and how often
        # all try_waits were told to give up.
        self.progress = self.wakes = self.polls = self.timeouts = 0
        self.patient = 0  # fragments that wait in a try_wait
        self.started = self.instructions = self.ticks = 0
        self.waited_for_grid = True  # no warp has called launch_dependents before griddepcontrol.wait
        self.shared_shift, self.global_shift = granule_shift(program, "shared"), granule_shift(program, "global")
        self.shared_names, self.shared_size = shared_layout(program, dynamic_shared)
        self.grid_chain = self.history.chain("the preceding launch")
        self.unsafe = unsafe
        self.relaxed = frozenset(relaxed)  # rules, or whole kinds of faults, that are not asked for
        self.global_ = Global() if global_ is None else global_
        for v in program.module.globals_.values():
            if v.space in ("global", "const"):
                data = np.frombuffer(v.init, np.uint8) if v.init is not None else np.zeros(v.size, np.uint8)
                self.global_.register_bytes(v.name, program.variable(v.name), data)
        self.global_.begin(self, unsafe)

    def run(self) -> Report:
        """Run the launch to its end; faults go to the report, which raises at the first unless it collects."""
        from ptxcheck.sched import Scheduler

        budget = self.program.static_shared + self.dynamic_shared
        try:
            if budget > SHARED_LIMIT:
                self.note("shared-over-budget", f"{budget} bytes of shared memory a CTA; an SM gives {SHARED_LIMIT}")
                return self.report
            Scheduler(self).run()
        except Abandoned:
            pass
        if self.counters is not None:
            self.counters.instructions += self.instructions
            self.counters.tiles += self.started
        return self.report

    def note(self, kind: str, message: str, where: str = "", other_where: str = "", key: tuple[str, ...] = ()) -> None:
        """Take a fault down."""
        if kind in self.relaxed:
            return
        self.report.fault(kind, message, where, other_where, key)

    def abandon(self) -> None:
        """End the launch after a fault."""
        raise Abandoned

    def fault(self, kind: str, message: str, warp: Warp | None = None, other: str | None = None) -> None:
        """Take a fault of a warp's current instruction down."""
        where = "" if warp is None else f"cta {warp.cta.ctaid} warp {warp.id}, {warp.inst.where}"
        self.note(kind, message, where, other or "", () if warp is None else (str(warp.pc), other or ""))

    def give_up(self) -> bool:
        """Tell all try_waits to fail; False if there are none."""
        if not self.patient:
            return False
        self.timeouts += 1
        self.wakes += 1
        return True

    def clusters(self) -> list[tuple[int, int, int]]:
        """Indices of all clusters of the grid, x fastest."""
        nx, ny, nz = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        return [(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)]
