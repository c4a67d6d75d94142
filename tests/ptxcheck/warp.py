"""Warps: lanes, registers, fragments, and the loop that executes instructions.

A register is one NumPy array of 32. Lanes that diverge form fragments (pc, mask); the fragment with the lowest pc runs
first and fragments merge when their pcs meet, which reconverges at the post-dominator of structured code. Fragments
wait on their own, so lanes of one warp may wait for each other, as the manual allows since sm_70 (PTX ISA, "Independent
Thread Scheduling").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from ptxcheck.build import Program
    from ptxcheck.machine import Cta
    from ptxcheck.ptx import Inst

Array: TypeAlias = "np.ndarray[Any, Any]"

# The mask of all 32 lanes; steps test for it by identity.
FULL: Array = np.ones(32, np.bool_)
FULL.flags.writeable = False
LANES: Array = np.arange(32, dtype=np.uint32)
LANES.flags.writeable = False
ALL_LANES = FULL.tobytes()
NO_LANES = bytes(32)
NEVER = 1 << 60
# After so many instructions a fragment lets those at higher pcs run: lanes there may hold what it polls for.
PATIENCE = 256


def as_mask(m: Array) -> Array:
    """`FULL` itself when every lane is set."""
    return FULL if m.tobytes() == ALL_LANES else m


# ------------------------------------------------------------------------------------------------------------ signals
class Block:
    """The fragment waits until `ready()`, then runs `then()`, then goes on at the next pc. `why` is for reports."""

    __slots__ = ("ready", "then", "why")

    def __init__(self, ready: Callable[[], bool], why: str, then: Callable[[], None] | None = None) -> None:
        self.ready, self.why, self.then = ready, why, then


class Split:
    """Some lanes go to `target` (an instruction index), the others to the next pc."""

    __slots__ = ("taken", "target")

    def __init__(self, target: int, taken: Array) -> None:
        self.target, self.taken = target, taken


class Scatter:
    """Lanes go to several targets: pairs of target and mask."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[tuple[int, Array]]) -> None:
        self.parts = parts


class Part:
    """A signal of some lanes of the fragment, those whose guard holds; the others go on at the next pc."""

    __slots__ = ("mask", "signal")

    def __init__(self, signal: Any, mask: Array) -> None:
        self.signal, self.mask = signal, mask


class Mark:
    """EXIT: the lanes end. CONVERGE: lanes are missing here; wait at this pc until fragments merge. YIELD: a poll
    failed; go on at the next pc after others had a turn."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


EXIT, CONVERGE, YIELD = Mark("EXIT"), Mark("CONVERGE"), Mark("YIELD")
# None: go on. An int: jump there.
Signal: TypeAlias = "int | Block | Split | Scatter | Part | Mark | None"


class Stopped(Exception):
    """A fault after which this warp cannot go on; it is in the report already."""


class Poison:
    """Stands in a register that asynchronous work will write (or still reads). `value`: what the register held."""

    __slots__ = ("op", "reason", "value")

    def __init__(self, reason: str, op: Inst, value: Array | None = None) -> None:
        self.reason, self.op, self.value = reason, op, value

    def settle(self, warp: Warp, pc: int) -> bool:
        """Whether the register may be read after all by the instruction at `pc`; then it holds its value now."""
        return False

    def moved(self, warp: Warp, value: Array, to: int | None = None) -> Poison | None:
        """What stands in register `to` that a `mov` made from this one; None if a `mov` is a use like any other."""
        return None


class Fragment:
    """Lanes of a warp at one pc. `wait`: the Block it sits in. `parked`: waits at its pc for other lanes. `idle`:
    others have their turn first. `ran`: instructions since it was apart or had to give way."""

    __slots__ = ("idle", "mask", "parked", "pc", "ran", "wait")

    def __init__(self, pc: int, mask: Array) -> None:
        self.pc, self.mask = pc, mask
        self.wait: Block | None = None
        self.parked = self.idle = False
        self.ran = 0


# --------------------------------------------------------------------------------------------------------------- warps
class Warp:
    """32 lanes of a CTA. `regs[k]`: None (never written), an array of 32 of any dtype of the register's width, or
    Poison. Arrays are replaced, never changed in place."""

    def __init__(self, cta: Cta, id_: int) -> None:
        self.cta, self.id = cta, id_
        self.machine = cta.cluster.machine
        self.program: Program = self.machine.program
        self.regs: list[Any] = [None] * len(self.program.numbers)
        bx, by, bz = self.machine.block
        flat = np.arange(32 * id_, 32 * id_ + 32)
        self.tid = tuple(t.astype(np.uint32) for t in (flat % bx, flat // bx % by, flat // (bx * by)))
        self.lane = LANES
        self.alive: Array = as_mask(flat < bx * by * bz)
        self.fragments = [Fragment(0, self.alive)]
        self.pc = 0
        self.executed = 0
        self.clock = self.machine.history.warp(f"cta {cta.ctaid} warp {id_}", cta)
        if not self.machine.unsafe:
            self.clock.seen[self.machine.grid_chain] = 1
        self.maxnreg = cta.registers.launch
        self.local = np.zeros((32, self.program.local_bytes), np.uint8)
        self.running = self.fragments[0]
        self.carry: Array = np.zeros(32, np.bool_)  # CC.CF

    @property
    def inst(self) -> Inst:
        """The instruction being executed, for reports."""
        return self.program.kernel.insts[self.pc]

    def ticks(self) -> int:
        """A clock that goes on as the machine works."""
        return self.machine.ticks + self.executed

    @property
    def done(self) -> bool:
        return not self.fragments

    def fault(self, kind: str, message: str, *, fatal: bool = True, other: str | None = None) -> None:
        """Record a fault at the current instruction; a fatal one stops the warp."""
        self.machine.fault(kind, message, self, other)
        if fatal:
            raise Stopped

    def poisoned(self, k: int, how: str) -> None:
        p = self.regs[k]
        name = self.program.names[k]
        self.fault("register-in-flight", f"{name} is {how} while {p.reason} (issued at {p.op.where})")

    def _settle(self, mask: Array, pc: int) -> int | None:
        """A step met a register in flight. Where that is allowed: the pc to go on at, this one again or the next."""
        sources = self.program.sources(pc)
        never = [k for k in sources if self.regs[k] is None]
        if never and "uninitialised-register" in self.machine.relaxed:
            for k in never:
                self.regs[k] = self.program.garbage(k)
            return pc
        found = [(k, v) for k in sources if isinstance(v := self.regs[k], Poison)]
        if not found:
            return None
        if all(v.settle(self, pc) for _, v in found):
            return pc
        targets = self.program.targets(pc)
        found = [(k, v) for k, v in found if k not in targets]
        if self.program.kernel.insts[pc].mods[0] != "mov" or not found or found[0][1].moved(self, LANES) is None:
            return None
        # Compilers pack and rename such registers before the wait: the copy is in flight as its source is.
        for k, v in found:
            self.regs[k] = v.value
        self.program.steps[pc](self, mask)
        for k, v in found:
            self.regs[k] = v
        for k in targets:
            self.regs[k] = found[0][1].moved(self, self.regs[k], k)
        return pc + 1

    def _bad_register(self, error: Exception) -> None:
        """A step met None or a register in flight where it wanted an array: say which register it is."""
        sources = self.program.sources(self.pc)
        names = {type(v).__name__ for k in sources if (v := self.regs[k]) is None or isinstance(v, Poison)}
        if not any(n in str(error) for n in names):
            return
        for k in sources:
            if isinstance(self.regs[k], Poison):
                self.poisoned(k, "read")
        for k in reversed(sources):  # a destination, which may well be unwritten, comes first
            if self.regs[k] is None:
                self.fault("uninitialised-register", f"{self.program.names[k]} is read and was never written")

    # ---- fragments
    def pick(self) -> Fragment | None:
        """The runnable fragment with the lowest pc that has not just yielded; merges fragments whose pcs meet."""
        frags = self.fragments
        for f in frags:
            if f.wait is not None and f.wait.ready():
                then, f.wait = f.wait.then, None
                if then is not None:
                    self.pc = f.pc - 1
                    then()
        if len(frags) > 1:
            self._merge()
            frags = self.fragments
        best = None
        for f in frags:
            if f.wait is None and not f.parked and not f.idle:
                best = f
                break
        if best is None:
            for f in frags:
                if f.idle:
                    f.idle = False
                    if best is None and f.wait is None and not f.parked:
                        best = f
        return best

    def _merge(self) -> None:
        """One fragment a pc, of those that do not wait."""
        apart = self.program.apart
        self.fragments.sort(key=lambda f: (f.wait is not None, f.pc))
        out: list[Fragment] = []
        for f in self.fragments:
            last = out[-1] if out else None
            if last is not None and last.pc == f.pc and last.wait is f.wait is None and f.pc not in apart:
                last.mask = as_mask(last.mask | f.mask)
                last.parked = False
                last.idle = last.idle and f.idle
                last.ran = 0
            else:
                out.append(f)
        self.fragments = out

    def _unpark(self) -> None:
        for f in self.fragments:
            f.parked = False

    def step(self, limit: int = 100) -> int:
        """Run up to `limit` instructions of one fragment. Returns how many ran; 0 if every fragment waits."""
        while True:
            frag = self.pick()
            if frag is None:
                return 0
            n = self._run(frag, limit)
            if n:
                return n

    def _run(self, frag: Fragment, limit: int) -> int:
        """Run a fragment until it waits, meets another, or has had its turn; 0 if it only found lanes missing."""
        frag.idle = False
        self.running = frag
        self.clock.lanes = None if frag.mask is FULL else frag.mask
        steps = self.program.steps
        mask, pc, n = frag.mask, frag.pc, 0
        others = [f.pc for f in self.fragments if f is not frag and f.wait is None and f.pc not in self.program.apart]
        # Where this one meets another: the next pc from here on at which one stands.
        stop = min((p for p in others if p > pc), default=NEVER)
        try:
            with np.errstate(all="ignore"):
                while n < limit:
                    self.pc = pc
                    r = steps[pc](self, mask)
                    n += 1
                    if r is None:
                        pc += 1
                    elif r.__class__ is int:
                        if others and r <= pc:
                            stop = min((p for p in others if p >= r), default=NEVER)
                        pc = r
                    else:
                        n += self._signal(frag, pc, r)
                        return n
                    if pc >= stop:
                        frag.pc = pc
                        self._unpark()
                        return n
            frag.pc = pc
            frag.ran += n
            if frag.ran >= PATIENCE and len(self.fragments) > 1:
                frag.idle, frag.ran = True, 0
            return n
        except (AttributeError, TypeError) as error:
            after = self._settle(mask, pc)
            if after is None:
                self._bad_register(error)
                raise
            frag.pc = after
            self._unpark()
            return max(n, 1)
        finally:
            self.executed += n

    def _signal(self, frag: Fragment, pc: int, r: Any) -> int:
        """Handle a signal other than a jump; returns what to add to the number of instructions that ran."""
        if r.__class__ is Part:
            rest = frag.mask & ~r.mask
            frag.mask = r.mask
            self.fragments.append(Fragment(pc + 1, rest))
            self._unpark()
            r = r.signal
        if r.__class__ is Block:
            frag.pc, frag.wait = pc + 1, r
        elif r.__class__ is Split:
            frag.pc, frag.mask = pc + 1, frag.mask & ~r.taken
            self.fragments.append(Fragment(r.target, r.taken))
            self._unpark()
        elif r.__class__ is Scatter:
            self.fragments.remove(frag)
            self.fragments += [Fragment(t, m) for t, m in r.parts]
            self._unpark()
        elif r is EXIT:
            self.fragments.remove(frag)
            self.alive = self.alive & ~frag.mask
            self._unpark()
        elif r is CONVERGE:
            frag.pc, frag.parked = pc, True
            return -1
        elif r is YIELD:
            frag.pc, frag.idle = pc + 1, True
        else:
            raise TypeError(f"{self.inst.where}: signal {r!r}")
        return 0
