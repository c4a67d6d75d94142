"""Where a kernel's shared variables lie, and how finely shared memory must be watched."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from ptxcheck.table import SHARED_BASE

if TYPE_CHECKING:
    from ptxcheck.build import Program

_TYPE = re.compile(r"(?:b|u|s|f|bf)(8|16|32|64|128|16x2)")
_PLAIN = ("ld", "st", "atom", "red")
_SPACES = ("global", "shared", "param", "const", "local")


@lru_cache(maxsize=16)
def granule_shift(program: Program, space: str) -> int:
    """log2 of the narrowest access that the kernel makes to a state space (or a generic one), four bytes at most."""
    shift = 2
    for i in program.kernel.insts:
        named = [m.partition("::")[0] for m in i.mods if m.partition("::")[0] in _SPACES]
        if i.mods[0] in _PLAIN and (not named or space in named):
            bits = next((t[1] for m in reversed(i.mods) if (t := _TYPE.fullmatch(m))), "32")
            shift = min(shift, {"8": 0, "16": 1}.get(bits, 2))
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
