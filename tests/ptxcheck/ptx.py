"""What a PTX module says, as frozen data: kernels, variables, instructions, operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


class PtxSyntaxError(Exception):
    """A statement that the parser does not understand; the message quotes it."""


# ---------------------------------------------------------------------------------------------------------- operands
@dataclass(frozen=True, slots=True)
class Reg:
    """A register variable. The name is unique in the kernel: names of inner scopes carry `@scope`."""

    name: str


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal: integer (any base), `0f` / `0d` hexadecimal float, or decimal float."""

    text: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable or parameter by name: its address."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target: the index of an instruction."""

    index: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Labels:
    """The list that `.branchtargets` names."""

    targets: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class Sink:
    """The bit bucket `_`."""


@dataclass(frozen=True, slots=True)
class Neg:
    """A negated predicate operand `!%p`, or a negated register operand `-%r`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations, `a|b`."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Addr:
    """`[base + offset]`."""

    base: Reg | Sym | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class TensorAddr:
    """`[map, {coords}]` of the bulk tensor copies, with `[map, {coords}, {offsets}]` kept as written."""

    map: Operand
    coords: Vec
    offsets: Operand | None = None


Operand: TypeAlias = Reg | Imm | Special | Sym | Label | Labels | Sink | Neg | Vec | Pair | Addr | TensorAddr


# ------------------------------------------------------------------------------------------------ modules and kernels
@dataclass(frozen=True, slots=True)
class Inst:
    """One instruction. `mods` is the opcode split at its dots (`::` kept inside a part)."""

    index: int
    op: str
    mods: tuple[str, ...]
    ops: tuple[Operand, ...]
    guard: tuple[Reg, bool] | None
    file: str | None
    line: int | None
    text: str
    inlined_at: tuple[tuple[str, int], ...] = ()

    def has(self, mod: str) -> bool:
        return mod in self.mods

    @property
    def where(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else "no source line"
        return f"{place}, pc {self.index}: {self.text}"


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A `.shared`, `.local`, `.global` or `.const` variable; `init` are its bytes, or None."""

    name: str
    space: str
    size: int
    align: int
    init: bytes | None = None


SharedVar = Variable


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    params: tuple[Param, ...]
    param_size: int
    insts: tuple[Inst, ...]
    regs: dict[str, str]
    shared: tuple[Variable, ...]
    extern_shared: tuple[Variable, ...]
    local: tuple[Variable, ...]
    reqntid: tuple[int, int, int] | None
    reqnctapercluster: tuple[int, int, int] | None
    directives: dict[str, str]


@dataclass(frozen=True, slots=True)
class Module:
    version: str
    target: str
    kernels: dict[str, Kernel]
    globals_: dict[str, Variable]


def parse(text: str) -> Module:
    """Parse one PTX module."""
    from ptxcheck.parser import parse_module  # it imports this module's classes

    return parse_module(text)
