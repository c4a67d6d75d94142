"""The instruction table: opcode -> builder, and `Build`, what a builder uses to read and write operands.

    @op("add", "sub")
    def build(b: Build, i: Inst) -> Step: ...

A builder runs once per instruction of a kernel and returns a `Step`, which runs once per execution by a warp. Keys are
leading parts of the opcode; the longest that fits is used ("cp.async.bulk.tensor" before "cp.async").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ptxcheck.machine import FULL, Poison, Signal, Warp
from ptxcheck.ptx import Addr, Imm, Inst, Kernel, Neg, Operand, Pair, Reg, Sink, Special, Sym, Vec

if TYPE_CHECKING:
    from ptxcheck.build import Program

Array: TypeAlias = "np.ndarray[Any, Any]"
Step: TypeAlias = Callable[[Warp, Array], Signal]
Read: TypeAlias = Callable[[Warp], Any]
Write: TypeAlias = Callable[[Warp, Array, Any], None]
Builder: TypeAlias = "Callable[[Build, Inst], Step]"

TABLE: dict[str, Builder] = {}
# Special registers: name -> reader, u32 or u64, array of 32 or scalar. Filled by ops_special.
SPECIALS: dict[str, Read] = {}
# Instructions whose first operands are written (or read) asynchronously: these registers are checked at each write.
ASYNC_REGISTERS = ("wgmma.mma_async", "tcgen05.ld")

# The NumPy type a value of a PTX type has while it is computed on. bf16 and the packed types stay bit patterns; f16 is
# NumPy's own half. Types under 16 bits live in 16-bit (or wider) registers.
DTYPES: dict[str, np.dtype[Any]] = {
    k: np.dtype(v)
    for k, v in {
        "pred": np.bool_,
        "b8": np.uint8,
        "u8": np.uint8,
        "s8": np.int8,
        "b16": np.uint16,
        "u16": np.uint16,
        "s16": np.int16,
        "f16": np.float16,
        "bf16": np.uint16,
        "b32": np.uint32,
        "u32": np.uint32,
        "s32": np.int32,
        "f32": np.float32,
        "tf32": np.uint32,
        "f16x2": np.uint32,
        "bf16x2": np.uint32,
        "u16x2": np.uint32,
        "s16x2": np.uint32,
        "b64": np.uint64,
        "u64": np.uint64,
        "s64": np.int64,
        "f64": np.float64,
        "f32x2": np.uint64,
    }.items()
}


# The system keeps the first KiB of shared memory (PTX ISA, "%reserved_smem_offset_end").
SHARED_BASE = 1024
# Windows of the generic address space: parameters, shared and local memory, variables of the module. Addresses of
# global memory are the process's own, far below.
PARAM_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
SHARED_WINDOW = 0x7C00_0000_0000
GLOBAL_VARIABLES = 0x7B00_0000_0000


class UnknownInstruction(Exception):
    """An opcode, or a form of it, that the table does not have. Names it and its line."""


def op(*keys: str, types: str = "") -> Callable[[Builder], Builder]:
    """Register a builder for all opcodes that begin with one of `keys` (whole parts) and, if `types` are given, end in
    one of them: "add" has one builder for integers and others for floats."""

    def add(builder: Builder) -> Builder:
        for key in (f"{k} {t}".rstrip() for k in keys for t in types.split() or [""]):
            if key in TABLE:
                raise ValueError(f"two builders for {key}")
            TABLE[key] = builder
        return builder

    return add


def lookup(opcode: str) -> Builder | None:
    key, type_ = opcode, opcode.rpartition(".")[2]
    while key:
        found = TABLE.get(f"{key} {type_}") or TABLE.get(key)
        if found is not None:
            return found
        key = key.rpartition(".")[0]
    return None


def immediate(text: str, type_: str) -> Any:
    """A literal as a NumPy scalar of the type (PTX ISA, "Constants")."""
    dtype = DTYPES[type_]
    t = text.strip()
    if t[:2] in ("0f", "0F"):
        bits = np.uint32(int(t[2:], 16))
        if type_ == "f64":
            return np.float64(bits.view(np.float32))
        return bits.view(dtype) if dtype.itemsize == 4 else dtype.type(bits)
    if t[:2] in ("0d", "0D"):
        value = np.uint64(int(t[2:], 16))
        return value.view(dtype) if dtype.itemsize == 8 else np.float32(value.view(np.float64)).view(dtype)
    if "." in t or (dtype.kind == "f" and not t.lower().startswith("0x")):
        return dtype.type(float(t))
    n = int(t.rstrip("U"), 8 if len(t) > 1 and t[0] == "0" and t[1:].isdigit() else 0)
    if type_ == "pred":
        return np.bool_(n != 0)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.array(n & ((1 << (8 * dtype.itemsize)) - 1), unsigned).view(dtype)[()]


def merge(w: Warp, k: int, v: Array, m: Array) -> None:
    """Write lanes `m` of register k. Lanes never written hold 0: the checker does not track them one by one."""
    old = w.regs[k]
    if old is None:
        new = np.zeros(32, v.dtype)
    elif isinstance(old, Poison):
        w.poisoned(k, "written")
    else:
        new = old.view(v.dtype).copy()
    np.copyto(new, v, where=m)
    w.regs[k] = new


class Build:
    """Operand access for one instruction of one kernel."""

    def __init__(self, program: Program, inst: Inst) -> None:
        self.program, self.inst = program, inst
        self.kernel: Kernel = program.kernel
        self.arch = program.arch

    def error(self, message: str) -> UnknownInstruction:
        return UnknownInstruction(f"{self.inst.op}: {message}\n  {self.inst.where}")

    def number(self, operand: Operand) -> int:
        """The index of a register in `warp.regs`."""
        if not isinstance(operand, Reg):
            raise self.error(f"{operand} is not a register")
        return self.program.numbers[operand.name]

    def bits(self, operand: Operand) -> int:
        """Width of a register."""
        if not isinstance(operand, Reg):
            raise self.error(f"{operand} is not a register")
        type_ = self.kernel.regs[operand.name]
        return 1 if type_ == "pred" else 128 if type_ == "b128" else 8 * DTYPES[type_].itemsize

    def read(self, operand: Operand, type_: str) -> Read:
        """A function of the warp: the 32 values in the NumPy type of `type_`; not to be written to."""
        dtype = DTYPES.get(type_)
        if dtype is None and type_ != "b128":
            raise self.error(f"type .{type_}")
        if isinstance(operand, Reg):
            return self._read_reg(operand, dtype)
        if isinstance(operand, Neg):
            inner = self.read(operand.reg, type_)
            return (lambda w: ~inner(w)) if type_ == "pred" else (lambda w: -inner(w))
        assert dtype is not None
        if isinstance(operand, Imm):
            value = np.full(32, immediate(operand.text, type_), dtype)
            value.flags.writeable = False
            return lambda w: value
        if isinstance(operand, Special):
            special = SPECIALS.get(operand.name)
            if special is None:
                raise self.error(f"special register {operand.name}")

            def read_special(w: Warp) -> Any:
                v = special(w)
                v = v.view(dtype) if v.dtype.itemsize == dtype.itemsize else v.astype(dtype)
                return v if v.shape else np.full(32, v)

            return read_special
        if isinstance(operand, Sym):
            space, base = self.program.symbol(operand.name, self)
            if space == "shared":  # addresses in a cluster carry the CTA's rank
                return lambda w: np.full(32, base | w.cta.rank << 24, dtype)
            value = np.full(32, base, dtype)
            return lambda w: value
        raise self.error(f"operand {operand}")

    def _read_reg(self, operand: Reg, dtype: np.dtype[Any] | None) -> Read:
        k = self.number(operand)
        if dtype is None:
            return lambda w: w.regs[k]
        have = self.bits(operand) if self.bits(operand) > 1 else 8
        want = 8 * dtype.itemsize
        if have == want:

            def same(w: Warp) -> Any:
                a = w.regs[k]
                return a if a.dtype is dtype else a.view(dtype)

            return same
        unsigned = np.dtype(f"u{have // 8}")
        narrow = np.dtype(f"u{want // 8}")
        if want > have:
            raise self.error(f"a register of {have} bits, {operand.name}, used as .{dtype}")
        return lambda w: w.regs[k].view(unsigned).astype(narrow).view(dtype)

    def write(self, operand: Operand, type_: str) -> Write:
        """A function of warp, mask and value (array of 32, or scalar). A value of another width than the register is
        sign-extended if signed, zero-extended if not, and truncated to fit."""
        if isinstance(operand, Sink):
            return lambda w, m, v: None
        if not isinstance(operand, Reg):
            raise self.error(f"destination {operand}")
        k = self.number(operand)
        if self.kernel.regs[operand.name] == "b128":
            return _write_wide(k)
        size = DTYPES[self.kernel.regs[operand.name]].itemsize
        bank = np.dtype(f"u{size}") if self.kernel.regs[operand.name] != "pred" else np.dtype(np.bool_)
        checked = operand.name in self.program.async_registers

        def write(w: Warp, m: Array, v: Any) -> None:
            if v.dtype.itemsize != size:
                v = v.astype(f"i{size}") if v.dtype.kind == "i" else v.view(f"u{v.dtype.itemsize}").astype(bank)
            regs = w.regs
            old = regs[k]
            if checked and isinstance(old, Poison):
                w.poisoned(k, "written")
            if not v.shape:
                v = np.full(32, v)
            if m is FULL:
                regs[k] = v
            else:
                merge(w, k, v, m)

        return write

    def uniform(self, operand: Operand, type_: str) -> Callable[[Warp, Array], int]:
        """The value of the first active lane as a Python int; a fault if active lanes differ."""
        if isinstance(operand, Imm):
            fixed = int(immediate(operand.text, type_))
            return lambda w, m: fixed
        read = self.read(operand, type_)
        inst = self.inst

        def get(w: Warp, m: Array) -> int:
            v = read(w)
            if m is not FULL:
                v = v[m]
            first = v[0]
            if v.tobytes() != first.tobytes() * len(v):
                w.fault("divergence", f"lanes disagree on an operand of {inst.op} that must be uniform")
            return int(first)

        return get

    def address(self, operand: Operand, space: str = "generic") -> Callable[[Warp], Array]:
        """`[base + offset]` as int64[32]. 32-bit bases are unsigned; a parameter's address is its offset in the
        parameter bytes for space "param" and its generic address otherwise."""
        if not isinstance(operand, Addr):
            raise self.error(f"{operand} is not an address")
        offset = operand.offset
        if isinstance(operand.base, Reg):
            type_ = "s64" if self.bits(operand.base) == 64 else "u32"
            read = self.read(operand.base, type_)

            def moved(w: Warp) -> Array:
                at = read(w).astype(np.int64)
                at += offset
                return at

            return moved if offset else lambda w: read(w).astype(np.int64)
        if isinstance(operand.base, Imm):
            fixed = np.full(32, int(operand.base.text, 0) + offset, np.int64)
            return lambda w: fixed
        where, base = self.program.symbol(operand.base.name, self)
        if where == "param" and space == "param":
            base = self.program.param(operand.base.name)
        fixed = np.full(32, base + offset, np.int64)
        if where == "shared":
            return lambda w: fixed | w.cta.rank << 24
        return lambda w: fixed

    def vector(self, operand: Operand) -> tuple[Operand, ...]:
        """The items of a vector operand, or the operand itself as the only item."""
        return operand.items if isinstance(operand, Vec) else (operand,)

    def pair(self, operand: Operand) -> tuple[Operand, Operand]:
        """Both parts of `a|b`; a lone operand goes with the bit bucket."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


def _write_wide(k: int) -> Write:
    def write(w: Warp, m: Array, v: Any) -> None:
        old = w.regs[k]
        w.regs[k] = v if m is FULL or old is None else np.where(m[:, None], v, old)

    return write
