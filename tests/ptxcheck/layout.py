"""Where a kernel's shared variables lie, and how finely shared memory must be watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxcheck.table import SHARED_BASE

if TYPE_CHECKING:
    from ptxcheck.build import Program

_PLAIN = ("ld", "st", "atom", "red")


def shared_shift(program: Program) -> int:
    """log2 of the narrowest access that the kernel makes to shared (or generic) memory, four bytes at most."""
    shift = 2
    for i in program.kernel.insts:
        if i.mods[0] in _PLAIN and not any(x in i.mods for x in ("global", "param", "const", "local")):
            bits = int("".join(c for c in i.mods[-1].partition("x")[0] if c.isdigit()) or 32)
            shift = min(shift, {8: 0, 16: 1}.get(bits, 2))
    return shift


def shared_layout(program: Program, dynamic: int) -> tuple[list[tuple[str, int, int]], int]:
    """Names, offsets and sizes of shared variables, and the end of shared memory."""
    names = []
    end = SHARED_BASE
    for v in program.kernel.shared:
        end = -(-end // v.align) * v.align
        names.append((v.name, end, v.size))
        end += v.size
    for v in program.kernel.extern_shared:
        names.append((v.name, program.dynamic_offset, dynamic))
    return names, max(end, program.dynamic_offset + dynamic)
