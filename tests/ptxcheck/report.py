"""What a check found: faults of a closed set of kinds, and what was counted on the way.

A fault names the place where it was noticed and, where two accesses conflict, the other one. `Report` either raises at
the first fault or, with `collect`, gathers up to that many distinct ones (one for each kind and pair of places), so
that one run shows all that is wrong with a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NoReturn

KINDS: dict[str, str] = {
    "deadlock": "no warp can go on and no asynchronous operation is left to complete",
    "livelock": "warps poll without end while nothing else moves",
    "race": "two accesses to the same bytes, one of them a write, that nothing orders",
    "missing-proxy-fence": "the async proxy touches bytes written through the generic proxy without fence.proxy.async",
    "uninitialised-read": "shared memory is read that nothing has written",
    "uninitialised-register": "a register is read that nothing has written",
    "register-in-flight": "a register is touched that an asynchronous operation still owns",
    "uninitialised-tmem": "tensor memory is read that nothing has written",
    "tmem-race": "two accesses to the same tensor memory that nothing orders",
    "tmem-allocation": "tensor memory is used outside an allocation, allocated twice, or not freed at exit",
    "out-of-bounds": "an address lies in no allocation, or an access crosses the end of one",
    "misaligned": "an address is not a multiple of what the instruction asks for",
    "shared-over-budget": "a CTA asks for more shared memory than the SM can give it",
    "register-over-budget": "setmaxnreg asks for more registers than the register file has left, or breaks its rules",
    "barrier-uninitialised": "an mbarrier is used where none was initialised",
    "barrier-unsynchronised": "an mbarrier is used that its initialisation does not precede or is not visible to",
    "barrier-over-arrival": "more arrivals in a phase than the barrier's count",
    "barrier-transaction": "bytes signalled to an mbarrier that no expect_tx announced, or a count out of range",
    "barrier-misuse": "a barrier is initialised over a live one, or its participants disagree about its count",
    "barrier-unfinished": "an mbarrier is left with part of a phase's arrivals, or bytes that nothing announced",
    "async-in-flight": "a CTA exits while an asynchronous operation still reads or writes its shared memory",
    "unwaited-data": "bytes arrived in shared memory through an mbarrier phase that no one waited for",
    "missing-grid-dependency": "memory of the preceding launch is touched before griddepcontrol.wait",
    "exited-peer": "shared memory of a CTA of the cluster is touched after that CTA may have exited",
    "wgmma-order": "no wgmma.fence after registers were written, or a warpgroup that is not whole",
    "divergence": "an instruction for all lanes or warps is executed by some, or operands that must agree differ",
    "bad-operand": "an operand, a descriptor or a tensor map holds a value that the instruction does not allow",
    "launch-control": "clusterlaunchcontrol is used where the manual leaves the behaviour undefined",
    "trap": "the kernel executed trap",
}


@dataclass(frozen=True)
class Fault:
    """One finding: `where` it was noticed and, for a conflict, `other_where` the other side is."""

    kind: str
    message: str
    where: str = ""
    other_where: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of fault {self.kind!r}")

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.message}"]
        if self.where:
            lines.append(f"  at    {self.where}")
        if self.other_where:
            lines.append(f"  other {self.other_where}")
        return "\n".join(lines)


class FaultFound(Exception):
    """Raised with every fault found so far."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        super().__init__("\n".join(str(f) for f in faults))


class Abandoned(Exception):
    """The launch cannot go on after a fault that was already noted (used while faults are collected)."""


@dataclass
class Report:
    """Faults and counters of one check. `collect` is how many distinct faults to gather; 0 raises at the first."""

    collect: int = 0
    faults: list[Fault] = field(default_factory=list)
    counters: Any = None
    _keys: set[tuple[str, ...]] = field(default_factory=set)

    def fault(self, kind: str, message: str, where: str = "", other_where: str = "", key: tuple[str, ...] = ()) -> None:
        """Note a fault; `key` names the pair of places for deduplication (default: the places as they read)."""
        k = (kind, *key) if key else (kind, where, other_where)
        if k in self._keys:
            return
        self._keys.add(k)
        self.faults.append(Fault(kind, message, where, other_where))
        if not self.collect:
            raise FaultFound(list(self.faults))
        if len(self.faults) >= self.collect:
            raise Abandoned

    def fatal(self, kind: str, message: str, where: str = "", other_where: str = "") -> NoReturn:
        """Note a fault that ends the launch."""
        self.fault(kind, message, where, other_where)
        raise Abandoned

    def kinds(self) -> set[str]:
        """The kinds of the faults found."""
        return {f.kind for f in self.faults}

    def __str__(self) -> str:
        head = "no faults" if not self.faults else f"{len(self.faults)} fault(s)"
        return "\n".join([head, *map(str, self.faults)] + ([str(self.counters)] if self.counters is not None else []))
