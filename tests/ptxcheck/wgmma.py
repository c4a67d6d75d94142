"""wgmma's data: shapes, shared-memory matrix descriptors and layouts, register fragments, and the product itself.

PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions": "Register Fragments and Shared Memory
Matrix Layouts", "Matrix Descriptor Format". Products of 16-bit and 8-bit operands are exact in fp32; sums are fp32 in
an order of NumPy's choosing, where the hardware's order is its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from ptxcheck.formats import BYTES, to_f32

Array: TypeAlias = "np.ndarray[Any, Any]"

ROWS = 64
#: K of one instruction for each type of A and B: 32 bytes of K whatever the type.
K_BYTES = 32
_SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # bits 63-62 of a descriptor -> bytes of a row of the layout atom
_FLOAT8 = ("e4m3", "e5m2")
_INT8 = ("s8", "u8")
_INT_N = {8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256}


@dataclass(frozen=True)
class Shape:
    """What the opcode says: m64nNkK, the accumulator's type, A's and B's."""

    n: int
    k: int
    d: str
    a: str
    b: str

    @property
    def registers(self) -> int:
        """32-bit accumulator registers of a lane."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    def __str__(self) -> str:
        return f"m64n{self.n}k{self.k}.{self.d}.{self.a}.{self.b}"


def shape_of(mods: tuple[str, ...]) -> Shape | None:
    """The shape of `wgmma.mma_async.sync.aligned.<shape>.<d>.<a>.<b>`, None if the manual has no such form."""
    types = [m for m in mods[5:] if m not in ("satfinite", "sp")]
    m = re.fullmatch(r"m64n(\d+)k(\d+)", mods[4])
    if m is None or len(types) != 3 or "sp" in mods:
        return None
    n, k, (d, a, b) = int(m[1]), int(m[2]), types
    if a not in BYTES or b not in BYTES or k * BYTES[a] != K_BYTES or not 8 <= n <= 256 or n % 8:
        return None
    if a in _INT8 and b in _INT8:
        good = d == "s32" and n in _INT_N
    elif a in _FLOAT8 and b in _FLOAT8:
        good = d in ("f32", "f16")
    else:
        good = a == b and ((d == "f32" and a in ("bf16", "f16", "tf32")) or (d, a) == ("f16", "f16"))
    return Shape(n, k, d, a, b) if good else None


@dataclass(frozen=True)
class Descriptor:
    """A shared-memory matrix descriptor, addresses in bytes."""

    start: int
    leading: int
    stride: int
    base_offset: int
    row_bytes: int  # 128, 64 or 32: the swizzle; 16: none

    @staticmethod
    def decode(word: int) -> Descriptor:
        return Descriptor(
            start=(word & 0x3FFF) << 4,
            leading=(word >> 16 & 0x3FFF) << 4,
            stride=(word >> 32 & 0x3FFF) << 4,
            base_offset=word >> 49 & 7,
            row_bytes=_SWIZZLE_BYTES[word >> 62 & 3],
        )

    @staticmethod
    def reserved(word: int) -> bool:
        """Whether bits are set that the format does not have."""
        return bool(word & (3 << 14 | 3 << 30 | 7 << 46 | 0x3FF << 52))


def swizzle(units: Array, row_bytes: int, base_offset: int = 0) -> Array:
    """Where 16-byte units of a matrix lie: bits 4-6 of an address are XORed with bits 7-9 (as many as the atom has).

    The pattern starts at an address whose bits 7-9 are `base_offset`.
    """
    mask = row_bytes // 16 - 1
    return units ^ ((units >> 3) - base_offset & mask) if mask else units


@lru_cache(maxsize=4096)
def operand_units(word: int, rows: int, mn_major: bool) -> Array:
    """Addresses, in 16-byte units, of one instruction's operand in the order that `operand` reads them.

    K-major: (rows, 2), each unit 16 bytes along K. MN-major (16-bit types): (16, rows / 8), each unit 8 rows at one k.
    """
    d = Descriptor.decode(word)
    if mn_major:
        wide = d.row_bytes // 16
        chunk, k = np.arange(rows // 8), np.arange(16)[:, None]
        if wide == 1:
            offset = chunk * d.stride + (k % 8) * 16 + (k // 8) * d.leading
        else:
            within = (chunk % wide) * 16 + (k % 8) * d.row_bytes
            offset = within + (chunk // wide) * d.leading + (k // 8) * d.stride
    else:
        row, unit = np.arange(rows)[:, None], np.arange(2)
        across = unit * (d.leading if d.row_bytes == 16 else 16)
        offset = (row % 8) * d.row_bytes + (row // 8) * d.stride + across
    units = swizzle((d.start + offset) >> 4, d.row_bytes, d.base_offset)
    units.flags.writeable = False
    return units


def operand(units: Array, type_: str, mn_major: bool) -> Array:
    """fp32 matrix (rows, k) from the 16-byte units that `operand_units` names, uint8[..., 16]."""
    raw = units.reshape(units.shape[0], -1)
    values = to_f32(raw, type_)
    return values.T if mn_major else values


def a_from_registers(registers: Array, type_: str) -> Array:
    """One warp's 16 rows of A, fp32 (16, k), from its 4 registers uint32[4, 32]."""
    # Register j: rows from 8 * (j % 2) on, half j // 2 of the 32 bytes of K; lane l: row l / 4, bytes 4 * (l % 4) on.
    raw = registers.view(np.uint8).reshape(2, 2, 8, 4, 4).transpose(1, 2, 0, 3, 4)
    return to_f32(np.ascontiguousarray(raw).reshape(16, K_BYTES), type_)


def to_registers(rows: Array, d: str) -> Array:
    """One warp's 16 rows of D, (16, n), as registers [count, 32]: f32/s32, or uint32 of two f16."""
    n = rows.shape[1]
    parts = rows.reshape(2, 8, n // 8, 4, 2)
    if d == "f16":
        packed = np.ascontiguousarray(parts.transpose(2, 0, 1, 3, 4)).astype(np.float16).view(np.uint32)
        return packed.reshape(n // 4, 32)
    return np.ascontiguousarray(parts.transpose(2, 0, 4, 1, 3)).reshape(n // 2, 32)


def from_registers(registers: Array, d: str) -> Array:
    """The inverse of `to_registers`: (16, n) fp32 or int32."""
    count = registers.shape[0]
    if d == "f16":
        halves = np.ascontiguousarray(registers).view(np.float16).reshape(count // 2, 2, 8, 4, 2)
        return np.ascontiguousarray(halves.transpose(1, 2, 0, 3, 4)).reshape(16, 4 * count).astype(np.float32)
    parts = registers.view(np.int32 if d == "s32" else np.float32).reshape(count // 4, 2, 2, 8, 4)
    return np.ascontiguousarray(parts.transpose(1, 3, 0, 4, 2)).reshape(16, 2 * count)


def product(a: Array, b: Array, accumulator: Array | None, d: str, saturate: bool = False) -> Array:
    """a (m, k) times b (n, k) transposed, plus the accumulator, in the accumulator's type (f16 is kept as fp32)."""
    out = a @ b.T
    if d == "s32":
        total = out.astype(np.int64) + (0 if accumulator is None else accumulator)
        return (np.clip(total, -(2**31), 2**31 - 1) if saturate else total).astype(np.int32)
    if accumulator is not None:
        out += accumulator
    return out.astype(np.float16).astype(np.float32) if d == "f16" else out
