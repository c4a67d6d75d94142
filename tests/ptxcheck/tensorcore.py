"""What a warp has in flight of tcgen05 work, and which CTAs it concerns.

Order. What a warp issues with `mma` and `cp` executes in issue order and completes in that order, for accumulators of
any shape (the manual promises it for one accumulator, shape and kind; kernels rely on more, and hardware does it);
`commit` signals its mbarrier after all of that. `ld` and `st` take effect at once and end at `wait::ld` and `wait::st`:
before, destination registers are out of bounds and the cells belong to the access. Every access has an event in the
launch's history (hb.py): a cell touched without having waited, or without telling the others, is a race in any
schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ptxcheck.hb import Actor, Channel
from ptxcheck.machine import FULL, Poison, Warp
from ptxcheck.ptx import Inst
from ptxcheck.sched import AsyncOp
from ptxcheck.table import Array, Build

if TYPE_CHECKING:
    from ptxcheck.machine import Cta


class Unit:
    """The tcgen05 work of one warp: a pipeline of mma, cp and commit, and its loads and stores of tensor memory."""

    def __init__(self, warp: Warp) -> None:
        self.warp, self.history = warp, warp.machine.history
        who = f"cta {warp.cta.ctaid} warp {warp.id}"
        self.channel = warp.cta.channel(f"{who} (tcgen05)")
        self.loads = warp.cta.channel(f"{who} (tcgen05.ld)")
        self.stores = warp.cta.channel(f"{who} (tcgen05.st)")
        self.loading: list[int] = []  # registers that loads will write, and copies of them
        self.waited = 0  # the epoch of the loads up to which they have been waited for
        self.queue: deque[tuple[Inst, Callable[[], None]]] = deque()

    def fork(self, inst: Inst, channel: Channel) -> Actor:
        """An operation issued now, which comes after all that the channel holds if that is the pipeline."""
        before = channel.epoch
        actor = self.history.fork(
            self.warp.clock, inst, channel, f"{inst.mods[0]}.{inst.mods[1]} of warp {self.warp.id}"
        )
        if channel is self.channel:
            actor.seen[channel.chain] = before
        return actor

    def push(self, inst: Inst, run: Callable[[], None]) -> None:
        """Append to the pipeline; only its head waits at the scheduler."""
        self.queue.append((inst, run))
        if len(self.queue) == 1:
            self._submit()

    def wait_loads(self, epoch: int) -> None:
        """Loads up to this one are complete for the warp."""
        left = []
        for k in self.loading:
            held = self.warp.regs[k]
            if held.__class__ is Loading:
                if held.epoch <= epoch:
                    self.warp.regs[k] = held.value
                else:
                    left.append(k)
        self.loading, self.waited = left, epoch
        self.history.join(self.warp.clock, self.loads, epoch)

    def _submit(self) -> None:
        inst = self.queue[0][0]
        self.warp.machine.async_.submit(AsyncOp(inst, self.warp, self._advance))

    def _advance(self) -> None:
        """Execute the head, and now and then some of what follows."""
        rng = self.warp.machine.rng
        while True:
            self.queue[0][1]()
            self.queue.popleft()
            if not self.queue:
                return
            if rng.random() < 0.3:
                self._submit()
                return


class Loading(Poison):
    """A register that `tcgen05.ld` may still write."""

    __slots__ = ("epoch",)

    def __init__(self, op: Inst, value: Array, epoch: int) -> None:
        super().__init__("tcgen05.ld may still write it: tcgen05.wait::ld comes first", op, value)
        self.epoch = epoch

    def settle(self, warp: Warp, pc: int) -> bool:
        unit = unit_of(warp)
        if self.epoch > unit.waited and "tcgen05.wait::ld" not in warp.machine.relaxed:
            return False
        unit.wait_loads(max(self.epoch, unit.waited))
        for k in warp.program.sources(pc):
            if warp.regs[k] is self:
                warp.regs[k] = self.value
        return True

    def moved(self, warp: Warp, value: Array, to: int | None = None) -> Poison:
        if to is not None:
            unit_of(warp).loading.append(to)
        return Loading(self.op, value, self.epoch)


def unit_of(warp: Warp) -> Unit:
    found: Unit | None = getattr(warp, "tcgen05", None)
    if found is None:
        found = warp.tcgen05 = Unit(warp)  # type: ignore[attr-defined]
    return found


def whole(w: Warp, m: Array) -> bool:
    """Whether all lanes of the warp are here (`.sync.aligned`)."""
    return m is FULL or bool((m == w.alive).all())


def group_of(b: Build) -> int:
    return 2 if b.inst.has("cta_group::2") else 1


def ctas_of(w: Warp, b: Build) -> list[Cta]:
    """The CTAs of the group, the one with the even rank first."""
    cta = w.cta
    if group_of(b) == 1:
        return [cta]
    ctas = cta.cluster.ctas
    if len(ctas) % 2:
        w.fault("bad-operand", f"cta_group::2 in a cluster of {len(ctas)} CTA(s)")
    first = cta.rank & ~1
    return [ctas[first], ctas[first + 1]]
