"""tcgen05's data: descriptors, operand layouts in shared memory, placement in tensor memory, register fragments.

PTX ISA, "TensorCore 5th Generation Family Instructions": "Instruction Descriptor", "Shared Memory Descriptor",
"Canonical Layouts", "Data Path Layout Organization", "Data Movement Shape". Modelled: dense `tcgen05.mma` without block
scaling and not `.ws`, of kinds f16, tf32, f8f6f4 (8-bit elements) and i8; the swizzles none, 32, 64 and 128 bytes. Not
modelled: the 128-byte swizzle of 32-byte atoms, 6-bit and 4-bit elements, absolute leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from ptxcheck.formats import BYTES, to_f32

Array: TypeAlias = "np.ndarray[Any, Any]"

#: K of one instruction is 32 bytes of either operand, whatever their type.
K_BYTES = 32
#: Lanes of tensor memory are handled in groups of 16: the finest that any placement uses.
GROUP_LANES, GROUPS, COLUMNS = 16, 8, 512

_D_TYPES = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
_OPERAND_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
_SWIZZLE_BYTES = {0: 16, 2: 128, 4: 64, 6: 32}  # bits 63-61 of a shared memory descriptor -> bytes of an atom's row


class BadDescriptor(ValueError):
    """A descriptor that the manual does not allow, or that the model does not cover; the message says which."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction descriptor of `tcgen05.mma`."""

    d: str
    a: str
    b: str
    m: int
    n: int
    a_mn_major: bool
    b_mn_major: bool
    a_sign: int
    b_sign: int
    saturate: bool

    @property
    def k(self) -> int:
        return K_BYTES // BYTES[self.a]

    def __str__(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}.{self.d}.{self.a}.{self.b}"


@lru_cache(maxsize=256)
def instruction(word: int, kind: str, group: int) -> Instruction:
    """Decode and check a descriptor for an MMA of `kind` by `group` CTAs."""
    if word & 1 << 2:
        raise BadDescriptor("instruction descriptor: sparse A, which is not modelled")
    if word & (1 << 6 | 1 << 23 | 1 << 29 | 3 << 30):
        raise BadDescriptor(f"instruction descriptor {word:#010x}: reserved bits are set")
    d = _D_TYPES[kind].get(word >> 4 & 3)
    a = _OPERAND_TYPES[kind].get(word >> 7 & 7)
    b = _OPERAND_TYPES[kind].get(word >> 10 & 7)
    if d is None or a is None or b is None:
        raise BadDescriptor(
            f"instruction descriptor {word:#010x}: types that kind::{kind} lacks or that are not modelled"
        )
    m, n = (word >> 24 & 31) << 4, (word >> 17 & 63) << 3
    if m not in ((64, 128) if group == 1 else (128, 256)):
        raise BadDescriptor(f"instruction descriptor: M = {m} with cta_group::{group}")
    if not 8 <= n <= 256 or n % (8 if m == 64 else 16):
        raise BadDescriptor(f"instruction descriptor: N = {n} with M = {m}, cta_group::{group}")
    return Instruction(
        d, a, b, m, n,
        a_mn_major=bool(word >> 15 & 1),
        b_mn_major=bool(word >> 16 & 1),
        a_sign=-1 if word >> 13 & 1 else 1,
        b_sign=-1 if word >> 14 & 1 else 1,
        saturate=bool(word >> 3 & 1),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- operands in shared memory
@dataclass(frozen=True, slots=True)
class Descriptor:
    """A shared memory descriptor, addresses in bytes. `row_bytes`: the swizzle, 16 for none."""

    start: int
    leading: int
    stride: int
    base_offset: int
    row_bytes: int


def descriptor(word: int) -> Descriptor:
    """Decode and check a shared memory descriptor."""
    if word >> 46 & 7 != 1:
        raise BadDescriptor(f"shared memory descriptor {word:#018x}: bits 46-48 must be 0b001")
    if word & (3 << 14 | 3 << 30 | 0xFF << 53):
        raise BadDescriptor(f"shared memory descriptor {word:#018x}: reserved bits are set")
    if word >> 52 & 1:
        raise BadDescriptor("shared memory descriptor: an absolute leading dimension, which is not modelled")
    mode = word >> 61
    if mode not in _SWIZZLE_BYTES:
        raise BadDescriptor(f"shared memory descriptor: swizzle mode {mode}, which is invalid or not modelled")
    return Descriptor(
        start=(word & 0x3FFF) << 4,
        leading=(word >> 16 & 0x3FFF) << 4,
        stride=(word >> 32 & 0x3FFF) << 4,
        base_offset=word >> 49 & 7,
        row_bytes=_SWIZZLE_BYTES[mode],
    )


@lru_cache(maxsize=1024)
def _relative(leading: int, stride: int, row_bytes: int, rows: int, size: int, mn_major: bool, units: int) -> Array:
    """Byte offsets of an operand's 16-byte units before swizzling; shape as `operand_units` says."""
    if not mn_major:
        row, unit = np.arange(rows)[:, None], np.arange(units)
        return (row % 8) * row_bytes + (row // 8) * stride + unit * (leading if row_bytes == 16 else 16)
    wide = row_bytes // 16
    chunk, k = np.arange(rows * size // 16), np.arange(K_BYTES // size)[:, None]
    if wide == 1:
        return chunk * stride + (k % 8) * 16 + (k // 8) * leading
    return (chunk % wide) * 16 + (k % 8) * row_bytes + (chunk // wide) * leading + (k // 8) * stride


@lru_cache(maxsize=4096)
def operand_units(word: int, rows: int, size: int, mn_major: bool, units: int = 2) -> Array:
    """Numbers of the 16-byte units of shared memory that hold an operand of `rows` rows, elements of `size` bytes.

    K-major: (rows, units), each unit 16 bytes along K. MN-major: (K, rows * size / 16), each unit along M or N.
    The swizzle XORs address bits 4-6 with bits 7-9, as many as the atom's row has.
    """
    d = descriptor(word)
    at = (d.start + _relative(d.leading, d.stride, d.row_bytes, rows, size, mn_major, units)) >> 4
    mask = d.row_bytes // 16 - 1
    if mask:
        at = at ^ ((at >> 3) - d.base_offset & mask)
    at.flags.writeable = False
    return at


def operand(raw: Array, type_: str, mn_major: bool) -> Array:
    """fp32 matrix (rows, k) from the bytes, uint8[..., 16], of the units that `operand_units` names."""
    values = to_f32(raw.reshape(raw.shape[0], -1), type_)
    return values.T if mn_major else values


# ---------------------------------------------------------------------------------------- placement in tensor memory
@dataclass(frozen=True, slots=True)
class Block:
    """A part of D that lies in one CTA: the columns of D, and the groups of 16 lanes that hold this CTA's rows of them.
    The columns lie at D's address on."""

    columns: slice
    groups: slice


def lane_groups(m: int, group: int, half: int = 0) -> slice:
    """Groups of 16 lanes that hold the rows of one CTA. M = 64: 16 of each 32 lanes, the upper with `half` = 1."""
    return slice(half, GROUPS, 2) if m == 64 and group == 1 else slice(0, GROUPS)


@lru_cache(maxsize=256)
def d_blocks(m: int, n: int, group: int, half: int = 0) -> tuple[tuple[Block, ...], ...]:
    """For each CTA of the group, the parts of D it holds ("Layout" A, B, D and F of the manual)."""
    every = slice(0, n)
    if group == 1:
        return ((Block(every, lane_groups(m, 1, half)),),)
    if m == 256:
        return ((Block(every, lane_groups(m, 2)),),) * 2
    # M = 128 over two CTAs: 64 rows each, the right half of D in the upper 64 lanes.
    return ((Block(slice(0, n // 2), slice(0, 4)), Block(slice(n // 2, n), slice(4, 8))),) * 2


def a_from_cells(cells: Array, type_: str) -> Array:
    """fp32 rows of A from its cells uint32 (lanes, 8): 32 bytes of K a lane, elements packed."""
    return to_f32(np.ascontiguousarray(cells).view(np.uint8).reshape(cells.shape[0], K_BYTES), type_)


def product(i: Instruction, a: Array, b: Array, d: Array | None) -> Array:
    """D = A B^T + D in D's type; f16 results stay fp32 values. Products are exact, the order of sums is NumPy's."""
    out = (a if i.a_sign == 1 else -a) @ (b if i.b_sign == 1 else -b).T
    if i.d == "s32":
        total = out.astype(np.int64) + (0 if d is None else d.astype(np.int64))
        return (np.clip(total, -(2**31), 2**31 - 1) if i.saturate else total).astype(np.int32)
    if d is not None:
        out += d
    return out.astype(np.float16).astype(np.float32) if i.d == "f16" else out


def d_values(cells: Array, type_: str) -> Array:
    """Values of accumulator cells: 32 bits each; f16 lies in the lower half of its cell."""
    if type_ == "f16":
        return (cells & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16).astype(np.float32)
    return cells.view(np.int32 if type_ == "s32" else np.float32)


def d_cells(values: Array, type_: str) -> Array:
    """The inverse of `d_values`; the upper half of an f16's cell is zero."""
    if type_ == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return np.ascontiguousarray(values).view(np.uint32)


# ------------------------------------------------------------------------------------------------ ld and st fragments
#: shape -> (lanes, columns of one repetition, registers of one repetition)
SHAPES = {
    "32x32b": (32, 1, 1),
    "16x64b": (16, 2, 1),
    "16x128b": (16, 4, 2),
    "16x256b": (16, 8, 4),
    "16x32bx2": (16, 1, 1),
}


@lru_cache(maxsize=64)
def fragment(shape: str, times: int, split: int = 0) -> tuple[Array, Array]:
    """Row and column of each register, int (registers, 32). `split`: the second half's distance of .16x32bx2."""
    t = np.arange(32)
    _, width, count = SHAPES[shape]
    rep, r = (x[:, None] for x in np.divmod(np.arange(count * times), count))
    if shape == "32x32b":
        return t + 0 * rep, rep + 0 * t
    if shape == "16x32bx2":
        return t % 16 + 0 * rep, rep + split * (t // 16)
    if shape == "16x64b":
        return t // 4 + 8 * (t % 2) + 0 * rep, width * rep + t // 2 % 2
    if shape == "16x128b":
        return t // 4 + 8 * r, width * rep + t % 4
    return t // 4 + 8 * (r // 2), width * rep + 2 * (t % 4) + r % 2


def pack(cells: Array) -> Array:
    """.pack::16b: the lower halves of two adjacent columns become one register."""
    return cells[:, 0::2] & np.uint32(0xFFFF) | cells[:, 1::2] << np.uint32(16)


def unpack(packed: Array) -> Array:
    """.unpack::16b: a register becomes two adjacent columns, lower half first."""
    out = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint32)
    out[:, 0::2], out[:, 1::2] = packed & np.uint32(0xFFFF), packed >> np.uint32(16)
    return out
