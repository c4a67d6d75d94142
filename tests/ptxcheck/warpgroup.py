"""The wgmma operations of a warpgroup in flight: who has issued what, accumulators, groups, when registers are safe.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Async proxy", "wgmma.fence",
"wgmma.wait_group". The four warps issue the same instructions, each at its own pace; an operation may take effect once
all four have, after those before it. Accumulators belong to the operation from its issue by a warp until that warp
waits for its group; registers that hold A must not be written meanwhile (that they are read, which the manual forbids
as well, is let pass: nothing can come of it). Sums stay in matrix form while operations on the same accumulators follow
one another. Not seen: a register that is read, not written, between the last fence and a wgmma that overwrites it.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ptxcheck import wgmma
from ptxcheck.formats import BYTES
from ptxcheck.hb import ASYNC, Actor
from ptxcheck.machine import Poison
from ptxcheck.sched import AsyncOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from ptxcheck.build import Program
    from ptxcheck.machine import Cta, Warp
    from ptxcheck.ptx import Inst

Array: TypeAlias = "np.ndarray[Any, Any]"
#: Register numbers, in order.
Registers: TypeAlias = "tuple[int, ...]"
_F32 = np.dtype(np.float32)


@lru_cache(maxsize=8192)
def _cells(word: int, rows: int, mn_major: bool, shift: int) -> Array:
    """Shadow granules of an operand."""
    units = wgmma.operand_units(word, rows, mn_major).ravel()
    return ((units << (4 - shift))[:, None] + np.arange(16 >> shift)).ravel()


class Operation(AsyncOp):
    """One wgmma.mma_async of a warpgroup."""

    __slots__ = ("a", "actor", "arrived", "b_word", "group", "initial", "issuers", "mma", "number", "scale_d")

    def __init__(self, group: Warpgroup, number: int, mma: Mma, warp: Warp, a_word: int, b_word: int, scale_d: bool):
        super().__init__(mma.inst, warp, what=f"{mma.shape}")
        self.group, self.number, self.mma = group, number, mma
        self.b_word, self.scale_d = b_word, scale_d
        self.a: list[Any] = [a_word] * 4  # each warp's descriptor, or its fragment
        self.initial: list[Any] = [None] * 4  # each warp's accumulators before, where they come from its registers
        self.issuers: list[Actor] = []
        self.arrived = 0
        self.actor: Actor | None = None

    def ready(self) -> bool:
        return self.arrived == 4 and self.group.finished == self.number

    def run(self) -> None:
        group, mma = self.group, self.mma
        shape = mma.shape
        b = self._load(self.b_word, shape.n, shape.b, mma.b_mn_major)
        if mma.a_registers:
            a = np.concatenate([wgmma.a_from_registers(r, shape.a) for r in self.a])
        else:
            a = self._load(self.a[0], wgmma.ROWS, shape.a, mma.a_mn_major)
        if mma.sign < 0:
            a = -a
        before = group.sums.get(mma.accumulators)
        if not self.scale_d:
            before = None
        elif any(x is not None for x in self.initial):
            parts = [None if x is None else wgmma.from_registers(x, shape.d) for x in self.initial]
            if before is not None:
                parts = [before[16 * k : 16 * k + 16] if x is None else x for k, x in enumerate(parts)]
            before = np.concatenate([x for x in parts if x is not None])
        group.sums[mma.accumulators] = wgmma.product(a, b, before, shape.d, mma.saturate)
        group.finished += 1

    def _load(self, word: int, rows: int, type_: str, mn_major: bool) -> Array:
        shared = self.group.cta.shared
        units = wgmma.operand_units(word, rows, mn_major)
        assert self.actor is not None
        if int(units.max()) * 16 + 16 > shared.size:
            shared.check(self.actor, units.ravel() * 16, 16)
            return np.full((rows, wgmma.K_BYTES // BYTES[type_]), np.nan, np.float32)
        shared.shadow.read(self.actor, _cells(word, rows, mn_major, shared.shift), ASYNC)
        raw = shared.words[16][units].view(np.uint8).reshape(*units.shape, 16)
        return wgmma.operand(raw, type_, mn_major)


class Mma:
    """What one wgmma.mma_async instruction says, apart from register values."""

    def __init__(
        self,
        inst: Inst,
        shape: wgmma.Shape,
        accumulators: Registers,
        a_registers: Registers,
        a_mn_major: bool,
        b_mn_major: bool,
        sign: int,
        saturate: bool,
    ) -> None:
        self.inst, self.shape = inst, shape
        self.accumulators, self.a_registers = accumulators, a_registers
        self.a_mn_major, self.b_mn_major = a_mn_major, b_mn_major
        self.sign, self.saturate = sign, saturate
        self.span = _span(accumulators)


def _span(numbers: Registers) -> slice | None:
    """The slice that consecutive register numbers make."""
    if all(b == a + 1 for a, b in pairwise(numbers)):
        return slice(numbers[0], numbers[-1] + 1)
    return None


class Watched:
    """The registers of a kernel that wgmmas use: what a wgmma.fence takes note of."""

    def __init__(self, program: Program) -> None:
        self.numbers = sorted(program.numbers[name] for name in program.async_registers)
        self.at = {k: place for place, k in enumerate(self.numbers)}  # places of consecutive numbers are consecutive
        self._get = itemgetter(*self.numbers) if len(self.numbers) > 1 else None

    def values(self, regs: list[Any]) -> list[Any]:
        return list(self._get(regs)) if self._get else [regs[k] for k in self.numbers]


def watched(program: Program) -> Watched:
    """One for each program."""
    known = vars(program)
    if "watched" not in known:
        known["watched"] = Watched(program)
    found: Watched = known["watched"]
    return found


class Held:
    """Accumulators of a warp in flight."""

    __slots__ = ("last", "mma")

    def __init__(self, mma: Mma) -> None:
        self.mma = mma
        self.last = 0  # number of the last operation on them


class Side:
    """One warp's view of its warpgroup's operations."""

    def __init__(self, warp: Warp) -> None:
        self.warp = warp
        self.issued = 0
        self.committed: list[int] = []  # of each group: operations issued before its commit
        self.waited = 0  # operations that were waited for
        self.watched: Watched = watched(warp.program)
        self.fenced: list[Any] | None = None  # the watched registers as they were at the last wgmma.fence
        self.sums: dict[Registers, Held] = {}
        self.a: dict[int, tuple[int, Any, Inst]] = {}  # registers that hold A: last operation, value, instruction

    def fence(self) -> None:
        """wgmma.fence: wgmmas that follow may use the registers as they are now."""
        self.fenced = self.watched.values(self.warp.regs)

    # ---- registers
    def _values(self, numbers: Registers, span: slice | None) -> list[Any]:
        regs = self.warp.regs
        return regs[span] if span is not None else [regs[k] for k in numbers]

    def _ordered(self, numbers: Registers, values: list[Any], span: slice | None, what: str) -> None:
        """The registers are free, and have not been written since the last wgmma.fence."""
        w = self.warp
        fenced = self.fenced
        if fenced is None:
            w.fault("wgmma-order", "the first wgmma.mma_async of this warp, with no wgmma.fence before it")
            return
        at = self.watched.at
        first = at[numbers[0]]
        then = fenced[first : first + len(numbers)] if span is not None else [fenced[at[k]] for k in numbers]
        for k, v in zip(numbers, values, strict=True):
            if v.__class__ is Poison:
                w.poisoned(k, f"used as {what}")
        if not all(map(is_, values, then)):
            k = next(k for k, v, t in zip(numbers, values, then, strict=True) if v is not t)
            w.fault(
                "wgmma-order",
                f"{w.program.names[k]} is used as {what} and was written after this warp's last wgmma.fence",
            )

    def take_sums(self, mma: Mma, number: int, scale_d: bool) -> Any:
        """Accumulators go in flight. Returns their values, or None if they are in flight already or not read."""
        w = self.warp
        held = self.sums.get(mma.accumulators)
        if held is not None:
            if held.mma.shape != mma.shape:
                w.fault("wgmma-order", f"accumulators of {held.mma.shape} in flight are used by {mma.shape}")
            held.last, held.mma = number, mma
            return None
        values = self._values(mma.accumulators, mma.span)
        self._ordered(mma.accumulators, values, mma.span, "an accumulator")
        out = None
        if scale_d:
            for k, v in zip(mma.accumulators, values, strict=True):
                if v is None:
                    w.fault(
                        "uninitialised-register",
                        f"{w.program.names[k]} is added to by wgmma and was never written",
                    )
            out = np.array([v if v.dtype is _F32 else v.view(_F32) for v in values])
        poison = Poison("a wgmma that was not waited for accumulates in it", mma.inst)
        regs = w.regs
        if mma.span is not None:
            regs[mma.span] = [poison] * len(values)
        else:
            for k in mma.accumulators:
                regs[k] = poison
        held = self.sums[mma.accumulators] = Held(mma)
        held.last = number
        return out

    def take_a(self, mma: Mma, number: int) -> Array:
        """The registers of A are read, at any time until the operation is waited for."""
        w, out = self.warp, []
        for k in mma.a_registers:
            v = w.regs[k]
            if k in self.a:
                self._unchanged(k)
            else:
                if v is None:
                    w.fault("uninitialised-register", f"{w.program.names[k]} is read as A and was never written")
                self._ordered((k,), [v], None, "a register of A")
            self.a[k] = (number, v, mma.inst)
            out.append(v.view(np.uint32))
        return np.array(out)

    def _unchanged(self, k: int) -> None:
        """A register of A may be read while an operation does, and not written."""
        w = self.warp
        _, v, inst = self.a[k]
        if w.regs[k] is not v:
            w.fault(
                "register-in-flight",
                f"{w.program.names[k]} was written while a wgmma that was not waited for reads A from it",
                other=f"issued at {inst.where}",
            )

    def _give_back(self, numbers: Registers, values: list[Any], span: slice | None) -> None:
        """What an operation leaves in registers needs no wgmma.fence before the next one."""
        regs, fenced, at = self.warp.regs, self.fenced, self.watched.at
        if span is not None:
            regs[span] = values
        else:
            for k, v in zip(numbers, values, strict=True):
                regs[k] = v
        if fenced is not None:
            for k, v in zip(numbers, values, strict=True):
                fenced[at[k]] = v

    def settle(self, finished: int) -> None:
        """Operations before number `finished` were waited for: their registers are the warp's again."""
        w = self.warp
        row = 16 * (w.id % 4)
        sums = warpgroup(w).sums
        for numbers, held in [x for x in self.sums.items() if x[1].last < finished]:
            del self.sums[numbers]
            values = list(wgmma.to_registers(sums[numbers][row : row + 16], held.mma.shape.d))
            self._give_back(numbers, values, held.mma.span)
        for k in [k for k, held in self.a.items() if held[0] < finished]:
            self._unchanged(k)
            del self.a[k]
        self.waited = max(self.waited, finished)


class Warpgroup:
    """Four warps and the operations they have issued together."""

    def __init__(self, cta: Cta, index: int) -> None:
        self.cta, self.index = cta, index
        self.operations: list[Operation] = []
        self.epochs: list[int] = []
        self.finished = 0  # operations that have taken effect
        self.sums: dict[Registers, Array] = {}  # results, (64, n), by accumulators
        self.sides = [Side(w) for w in cta.warps[4 * index : 4 * index + 4]]
        self.channel = cta.channel(f"cta {cta.ctaid} warpgroup {index} (wgmma)")

    def issue(self, w: Warp, mma: Mma, a_word: int, b_word: int, scale_d: bool) -> None:
        """One warp's part of an operation."""
        side, history = self.sides[w.id % 4], self.cta.machine.history
        number = side.issued
        if number == len(self.operations):
            self.operations.append(Operation(self, number, mma, w, a_word, b_word, scale_d))
        operation = self.operations[number]
        if operation.mma is not mma:
            w.fault(
                "divergence",
                f"the warps of warpgroup {self.index} execute different wgmmas: warp {operation.warp.id} another",
                other=operation.site.where,
            )
        if (operation.b_word, operation.scale_d) != (b_word, scale_d) or (a_word and operation.a[0] != a_word):
            w.fault("divergence", f"the warps of warpgroup {self.index} give one wgmma different operands")
        side.issued += 1
        initial = side.take_sums(mma, number, scale_d)
        if initial is not None:
            operation.initial[w.id % 4] = initial
        if mma.a_registers:
            operation.a[w.id % 4] = side.take_a(mma, number)
        # The warp's clocks as they are now: it may go on before the others come.
        c = w.clock
        issuer = Actor(history, c.label, c.chain, c.epoch, c.seen, c.fenced, False)
        issuer.lone = dict(c.lone)
        operation.issuers.append(issuer)
        c.epoch += 1
        operation.arrived += 1
        if operation.arrived == 4:
            label = f"cta {self.cta.ctaid} warpgroup {self.index} (wgmma)"
            operation.actor = history.fork(operation.issuers, mma.inst, self.channel, label)
            self.epochs.append(self.channel.epoch)
            operation.issuers = []
            counters = self.cta.machine.counters
            if counters is not None:
                counters.mma[f"wgmma {mma.shape}"] += 1
                rows = mma.shape.n + (0 if mma.a_registers else wgmma.ROWS)
                counters.operands += rows * wgmma.K_BYTES
            self.cta.machine.async_.submit(operation)

    def wait(self, w: Warp, keep: int) -> tuple[Callable[[], bool], Callable[[], None]]:
        """When all groups of the warp but the last `keep` are complete, and what is to be done then."""
        side = self.sides[w.id % 4]
        target = side.committed[-keep - 1] if len(side.committed) > keep else 0

        def then() -> None:
            side.settle(target)
            if target:
                self.cta.machine.history.join(w.clock, self.channel, self.epochs[target - 1])
            side.committed = side.committed[len(side.committed) - keep :] if keep else []

        return lambda: self.finished >= target, then


def warpgroup(w: Warp) -> Warpgroup:
    """The warpgroup of a warp; made when first asked for."""
    groups: dict[int, Warpgroup] = vars(w.cta).setdefault("warpgroups", {})
    index = w.id // 4
    if index not in groups:
        groups[index] = Warpgroup(w.cta, index)
        checks = w.machine.exit_checks
        if at_exit not in checks:
            checks.append(at_exit)
    return groups[index]


def at_exit(cta: Cta) -> None:
    """Nothing may be left in flight: every warp must have committed and waited for what it issued."""
    groups: dict[int, Warpgroup] = vars(cta).get("warpgroups", {})
    for group in groups.values():
        for operation in group.operations:
            if operation.arrived < 4:
                who = f"{operation.arrived} of the 4 warps of warpgroup {group.index} of cta {cta.ctaid}"
                cta.machine.note("wgmma-order", f"{who} executed a wgmma", operation.site.where)
                return
        for side in group.sides:
            if side.waited < side.issued:
                operation = group.operations[side.waited]
                left = side.issued - side.waited
                done = side.committed[-1] if side.committed else side.waited
                what = "committed and not waited for" if done > side.waited else "not committed"
                cta.machine.note(
                    "async-in-flight",
                    f"{side.warp.clock.label} exits with {left} wgmma(s) {what}",
                    operation.site.where,
                )
                break
