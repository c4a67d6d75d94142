"""mma.sync: the product of one warp from registers (PTX ISA, "Matrix multiply-accumulate operation using mma").

Shapes m16n8k*, A row-major, B column-major: bf16, f16, tf32, e4m3, e5m2, s8, u8. Fragments are the same for every type
if K is counted in bytes: lane l holds row (or column) l / 4 and bytes 4 * (l % 4) of each 16.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import numpy as np

from ptxcheck.formats import BYTES, to_f32
from ptxcheck.machine import CONVERGE, FULL, Signal, Warp
from ptxcheck.ptx import Inst
from ptxcheck.table import Build, Step, op
from ptxcheck.wgmma import from_registers, product, to_registers

Array: TypeAlias = "np.ndarray[Any, Any]"


def a_matrix(registers: Array, type_: str) -> Array:
    """A, fp32 (16, k), from its 2 or 4 registers uint32[count, 32]: register j has rows 8 * (j % 2) on."""
    raw = registers.view(np.uint8).reshape(-1, 2, 8, 4, 4).transpose(1, 2, 0, 3, 4)
    return to_f32(np.ascontiguousarray(raw).reshape(16, -1), type_)


def b_matrix(registers: Array, type_: str) -> Array:
    """B transposed, fp32 (8, k), from its 1 or 2 registers uint32[count, 32]."""
    raw = registers.view(np.uint8).reshape(-1, 8, 4, 4).transpose(1, 0, 2, 3)
    return to_f32(np.ascontiguousarray(raw).reshape(8, -1), type_)


@op("mma.sync.aligned")
def mma(b: Build, i: Inst) -> Step:
    """`mma.sync.aligned.m16n8kK.row.col{.satfinite}.d.a.b.c d, a, b, c`."""
    m = re.fullmatch(r"m16n8k(\d+)", i.mods[3])
    types = [t for t in i.mods[6:] if t not in ("satfinite", "kind::f8f6f4")]
    if m is None or i.mods[4:6] != ("row", "col") or len(types) != 4:
        raise b.error("a form of mma that is not modelled")
    d, a_type, b_type, c = types
    known = a_type in BYTES and b_type in BYTES and BYTES[a_type] == BYTES[b_type] and d == c
    k_bytes = int(m[1]) * BYTES.get(a_type, 0)
    if (
        not known
        or k_bytes not in (16, 32)
        or d not in ("f32", "f16", "s32")
        or (d == "s32") != (a_type in ("s8", "u8"))
    ):
        raise b.error("types of mma that are not modelled")
    saturate = "satfinite" in i.mods
    vectors = [b.vector(o) for o in i.ops]
    counts = (2 if d == "f16" else 4, k_bytes // 8, k_bytes // 16, 2 if c == "f16" else 4)
    if tuple(len(v) for v in vectors) != counts:
        raise b.error(f"operands of {tuple(len(v) for v in vectors)} registers, {counts} expected")
    reads = [[b.read(r, "b32") for r in v] for v in vectors]
    writes = [b.write(r, "b32") for r in vectors[0]]

    def gathered(w: Warp, which: int) -> Array:
        return np.array([np.broadcast_to(r(w), 32) for r in reads[which]])

    def step(w: Warp, mask: Array) -> Signal:
        if mask is not FULL:
            return CONVERGE
        a = a_matrix(gathered(w, 1), a_type)
        bt = b_matrix(gathered(w, 2), b_type)
        out = product(a, bt, from_registers(gathered(w, 3), d), d, saturate)
        for write, value in zip(writes, to_registers(out, d), strict=True):
            write(w, FULL, value.view(np.uint32))
        return None

    return step
