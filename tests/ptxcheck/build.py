"""A kernel made ready to run: register numbers, addresses of symbols, one step per instruction."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import numpy as np

import ptxcheck
from ptxcheck import ops_flow
from ptxcheck.machine import ALL_LANES, CONVERGE, FULL, NO_LANES, Block, Part, Signal, Warp
from ptxcheck.ptx import Addr, Inst, Kernel, Module, Neg, Operand, Pair, Reg, TensorAddr, Vec
from ptxcheck.table import (
    ASYNC_REGISTERS,
    DTYPES,
    GLOBAL_VARIABLES,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_BASE,
    SHARED_WINDOW,
    Array,
    Build,
    Step,
    UnknownInstruction,
    lookup,
)

__all__ = ["GLOBAL_VARIABLES", "LOCAL_WINDOW", "PARAM_WINDOW", "SHARED_BASE", "SHARED_WINDOW", "Program"]

# Every module ops_*.py adds its builders to the table.
for _module in pkgutil.iter_modules(ptxcheck.__path__):
    if _module.name.startswith("ops_"):
        importlib.import_module(f"ptxcheck.{_module.name}")


def registers(operand: Operand) -> Iterator[str]:
    """Names of all registers in an operand."""
    if isinstance(operand, Reg):
        yield operand.name
    elif isinstance(operand, Neg):
        yield operand.reg.name
    elif isinstance(operand, Vec):
        for x in operand.items:
            yield from registers(x)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Addr):
        yield from registers(operand.base)
    elif isinstance(operand, TensorAddr):
        yield from registers(operand.map)
        yield from registers(operand.coords)
        if operand.offsets is not None:
            yield from registers(operand.offsets)


def _writes_first(i: Inst) -> bool:
    """Whether the first operand is a destination and nothing else; single operands and addresses are sources."""
    return (
        len(i.ops) > 1 and not isinstance(i.ops[0], Addr | TensorAddr) and i.mods[0] not in ("wgmma", "bar", "barrier")
    )


class Program:
    """One kernel of a module. `steps[pc](warp, mask)` executes an instruction."""

    def __init__(self, module: Module, kernel: Kernel | str | None = None) -> None:
        if kernel is None:
            (kernel,) = module.kernels.values()
        self.kernel: Kernel = module.kernels[kernel] if isinstance(kernel, str) else kernel
        self.module, self.arch = module, module.target
        self.names = list(self.kernel.regs)
        self.numbers = {n: k for k, n in enumerate(self.names)}
        self._params = {p.name: p for p in self.kernel.params}
        self._symbols: dict[str, tuple[str, int]] = {}
        self._place()
        self.async_registers = {
            n for i in self.kernel.insts if i.op.startswith(ASYNC_REGISTERS) for o in i.ops[:2] for n in registers(o)
        }
        # Fragments do not merge here: a poll and its `@p bra.uni` say that lanes which poll together agree, and say
        # nothing of lanes that polled at another time.
        self.apart = {i.index for i in self.kernel.insts if i.guard is not None and i.op == "bra.uni"}
        self.steps: list[Step] = [self._step(i) for i in self.kernel.insts]
        self.steps.append(ops_flow.fall_off)

    def _place(self) -> None:
        """Static shared variables, then the dynamic ones, which all share one address (PTX ISA, ".extern .shared")."""
        end = SHARED_BASE
        for v in self.kernel.shared:
            end = -(-end // v.align) * v.align
            self._symbols[v.name] = ("shared", end)
            end += v.size
        self.static_shared = end - SHARED_BASE
        align = max((v.align for v in self.kernel.extern_shared), default=16)
        self.dynamic_offset = -(-end // align) * align
        for v in self.kernel.extern_shared:
            self._symbols[v.name] = ("shared", self.dynamic_offset)
        end = 0
        for v in self.kernel.local:
            end = -(-end // v.align) * v.align
            self._symbols[v.name] = ("local", end)
            end += v.size
        self.local_bytes = end
        end = GLOBAL_VARIABLES
        for v in self.module.globals_.values():
            end = -(-end // 256) * 256
            self._symbols[v.name] = (v.space, end)
            end += v.size
        for p in self.kernel.params:
            self._symbols[p.name] = ("param", p.offset)

    def symbol(self, name: str, b: Build) -> tuple[str, int]:
        """State space and address of a variable or parameter."""
        found = self._symbols.get(name)
        if found is None:
            raise b.error(f"unknown name {name}")
        space, address = found
        return space, address + PARAM_WINDOW if space == "param" else address

    def variable(self, name: str) -> int:
        """Address of a variable of the module."""
        return self._symbols[name][1]

    def param(self, name: str) -> int:
        """Offset of a parameter in the parameter bytes."""
        return self._params[name].offset

    def sources(self, pc: int) -> list[int]:
        """Numbers of the registers that an instruction reads, guard and accumulators included."""
        i = self.kernel.insts[pc]
        names = [n for o in (i.ops[1:] if _writes_first(i) else i.ops) for n in registers(o)]
        if i.guard is not None:
            names.append(i.guard[0].name)
        return [self.numbers[n] for n in names]

    def garbage(self, k: int) -> Array:
        """What a register may hold that was never written: bits that are a NaN as a number and no sensible index."""
        type_ = self.kernel.regs[self.names[k]]
        if type_ == "pred":
            return np.arange(32) % 3 == 1
        if type_ == "b128":
            return np.full((32, 2), 0x7FF87FFE7FC1FFFD, np.uint64)
        bits = {1: 0xFD, 2: 0x7FFD, 4: 0x7FC1FFFD, 8: 0x7FF87FFE7FC1FFFD}[DTYPES[type_].itemsize]
        return np.full(32, bits, f"u{DTYPES[type_].itemsize}")

    def targets(self, pc: int) -> list[int]:
        """Numbers of the registers that an instruction only writes."""
        i = self.kernel.insts[pc]
        return [self.numbers[n] for n in registers(i.ops[0])] if _writes_first(i) else []

    def _step(self, i: Inst) -> Step:
        builder = lookup(i.op)
        if builder is None:
            raise UnknownInstruction(f"{i.op} is not in the instruction table\n  {i.where}")
        b = Build(self, i)
        step = builder(b, i)
        if i.guard is None or i.mods[0] in ("bra", "brx"):
            return step
        return _guarded(step, self.numbers[i.guard[0].name], i.guard[1])


def _guarded(step: Step, k: int, negated: bool) -> Step:
    """Lanes whose guard is false skip the instruction."""

    lanes = ops_flow.guarded_lanes(k, negated)

    def run(w: Warp, m: Array) -> Signal:
        p = lanes(w, m)
        held = p.tobytes()
        if held == NO_LANES:
            return None
        if held == ALL_LANES:
            return step(w, FULL)
        around, w.clock.lanes = w.clock.lanes, p
        r = step(w, p)
        w.clock.lanes = around
        # Lanes whose guard is false do not wait with the others.
        if (r is CONVERGE or r.__class__ is Block) and held != m.tobytes():
            return Part(r, p)
        return r

    return run
