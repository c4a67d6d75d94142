"""Tensor maps and the boxes that the TMA copies between global and shared memory.

PTX ISA, "Tensors" (dimensions, boxes, out-of-bounds, swizzling modes). A map is read from its 128 bytes. Their format
is NVIDIA's own and not in the manual; the fields below are those that compiled host code was seen to fill, for each
element type and swizzle, and any other bit that is set is refused. Not modelled, and refused: im2col and interleaved
maps, element strides other than 1, the 128-byte swizzles with other atoms, rows of a swizzled box narrower than the
swizzle.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

SIZE = 128
#: Element type by its code in bits 7-10 of byte 8; 8-bit floats travel as u8.
_TYPES = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}
_BYTES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2, "tf32": 4}
_SWIZZLE = (0, 32, 64, 128)  # bytes of a swizzled row, by bits 13-14
#: Bits of byte 8's word that have a meaning here: version, rank, type, swizzle, tf32, L2 promotion, "is large".
_KNOWN_BITS = 0xF | 7 << 4 | 15 << 7 | 3 << 13 | 1 << 16 | 3 << 17 | 1 << 21


class BadMap(Exception):
    """The bytes are no tensor map, one that breaks the manual's rules, or one of a kind that is not modelled."""


@dataclass(frozen=True)
class Region:
    """The part of a box that lies inside the tensor: bytes from the map's base, innermost dimension last."""

    offset: int
    shape: tuple[int, ...]  # the last one in bytes
    strides: tuple[int, ...]  # in bytes
    place: tuple[slice, ...]  # where it lies in the box

    @property
    def empty(self) -> bool:
        return not all(self.shape)

    @property
    def span(self) -> int:
        """Bytes from its first to past its last."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class TensorMap:
    """A tiled tensor map. Dimensions are innermost first, strides in bytes."""

    base: int
    type: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int  # bytes of a swizzled row; 0: none

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        return _BYTES[self.type]

    @cached_property
    def box_bytes(self) -> int:
        """What a load of one box signals to its mbarrier, whatever lies out of bounds."""
        return math.prod(self.box) * self.element_bytes

    @cached_property
    def extent(self) -> int:
        """Bytes from the base to past the last element."""
        return self.element_bytes + sum((n - 1) * s for n, s in zip(self.dims, self.strides, strict=True))

    @cached_property
    def box_shape(self) -> tuple[int, ...]:
        """Outermost dimension first, the innermost one in bytes."""
        return (*self.box[:0:-1], self.box[0] * self.element_bytes)

    def region(self, coords: tuple[int, ...]) -> Region:
        """The part of the box at `coords` (innermost first) that lies inside the tensor."""
        size = self.element_bytes
        offset, shape, place = 0, [], []
        for start, box, dim, stride in zip(coords, self.box, self.dims, self.strides, strict=True):
            low, high = max(start, 0), min(start + box, dim)
            offset += low * stride  # any, as addresses wrap around 64 bits
            shape.append(max(high - low, 0))
            place.append(slice(low - start, max(high, low) - start))
        shape[0] *= size
        place[0] = slice(place[0].start * size, place[0].stop * size)
        return Region(offset, tuple(shape[::-1]), (*self.strides[:0:-1], 1), tuple(place[::-1]))

    def units(self, address: int) -> Array:
        """Where the box's 16-byte units lie, counted from `address`, in the order of the box's bytes.

        Bits 4-6 of a shared-memory address are XORed with bits 7-9, with as many as the swizzle has.
        """
        return _units(self.box_bytes // 16, self.swizzle, address >> 7 & 7)


@lru_cache(maxsize=1024)
def _units(count: int, swizzle: int, phase: int) -> Array:
    units = np.arange(count)
    mask = swizzle // 16 - 1 if swizzle else 0
    if mask:
        units = units ^ ((units >> 3) + phase & mask)
    units.flags.writeable = False
    return units


@lru_cache(maxsize=1024)
def decode(data: bytes) -> TensorMap:
    """Read a map. Raises: BadMap."""
    if len(data) != SIZE:
        raise BadMap(f"a tensor map has {SIZE} bytes, not {len(data)}")
    words = struct.unpack("<32I", data)
    flags = words[2]
    code = flags >> 7 & 15
    if flags & 15 != 2 or flags & ~_KNOWN_BITS or code not in _TYPES or any(words[16:]):
        raise BadMap(f"not a tiled tensor map of a kind that is modelled: {data[:64].hex(' ', 4)}")
    if words[13] & 0xFFFFFF or words[15]:
        raise BadMap("a tensor map with element strides, which are not modelled")
    rank = (flags >> 4 & 7) + 1
    if words[12] and rank < 5:
        raise BadMap(f"a tensor map of rank {rank} with an extent in its fifth dimension")
    if rank > 5:
        raise BadMap(f"a tensor map of rank {rank}")
    kind = "tf32" if flags >> 16 & 1 and _TYPES[code] == "f32" else _TYPES[code]
    size = _BYTES[kind]
    high = [words[7] >> 4 * i & 15 for i in range(4)]
    strides = (size, *((words[3 + i] << 4) + (high[i] << 36) for i in range(rank - 1)))
    found = TensorMap(
        base=words[0] | words[1] << 32,
        type=kind,
        dims=tuple(words[8 + i] + 1 for i in range(rank)),
        strides=strides,
        box=tuple(data[55 + i] + 1 for i in range(rank)),
        swizzle=_SWIZZLE[flags >> 13 & 3],
    )
    _check(found)
    return found


def _check(m: TensorMap) -> None:
    """The rules for encoding a tiled map that its bytes can break (CUDA driver API, cuTensorMapEncodeTiled)."""
    row = m.box[0] * m.element_bytes
    if row % 16:
        raise BadMap(f"a box of {row} bytes in the innermost dimension, not a multiple of 16")
    if m.swizzle and row != m.swizzle:
        what = "wider than" if row > m.swizzle else "narrower (which is not modelled) than"
        raise BadMap(f"a box of {row} bytes in the innermost dimension, {what} the {m.swizzle}-byte swizzle")
