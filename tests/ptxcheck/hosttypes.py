"""Types of MLIR's LLVM dialect as text, their memory layout, and the byte-addressable memory that host code sees.

Layout: natural alignment, as in the data layout of a 64-bit host (LLVM LangRef, "Data Layout"); packed structs have
none. A value is a Python int (masked to its width), a float, an address, or a tuple for structs and arrays; poison is
None and stores as zero bytes.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

Value = Any  # int | float | tuple[Value, ...] | None


class HostError(Exception):
    """The host code did something that this reading of it does not cover, or that is wrong."""


@dataclass(frozen=True)
class Type:
    """One LLVM type: `kind` is int, float, ptr, struct, array (vectors too, by another alignment) or void."""

    kind: str
    bits: int = 0
    items: tuple[Type, ...] = ()
    count: int = 0
    packed: bool = False
    vector: bool = False

    @cached_property
    def align(self) -> int:
        if self.vector:
            return 1 << (self.size - 1).bit_length()
        if self.kind in ("struct", "array"):
            return 1 if self.packed else max((t.align for t in self.items), default=1)
        return min(1 << (max(self.bits, 8) // 8 - 1).bit_length(), 16)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offsets of a struct's fields."""
        at, out = 0, []
        for item in self.items:
            step = 1 if self.packed else item.align
            at = -(-at // step) * step
            out.append(at)
            at += item.size
        return tuple(out)

    @cached_property
    def size(self) -> int:
        """Bytes between two of them in an array."""
        if self.kind == "array":
            return self.count * self.items[0].size
        if self.kind == "struct":
            end = self.offsets[-1] + self.items[-1].size if self.items else 0
            return -(-end // self.align) * self.align
        return -(-self.bits // 8)

    def step(self, index: int) -> tuple[int, Type]:
        """Byte offset and type of member `index`."""
        if self.kind == "struct":
            return self.offsets[index], self.items[index]
        if self.kind == "array":
            return index * self.items[0].size, self.items[0]
        raise HostError(f"no member {index} in a value of type {self.kind}")


_FLOAT_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
_FLOAT_CODE = {16: "<e", 32: "<f", 64: "<d"}


def parse_type(text: str) -> Type:
    """The type that the whole of `text` spells."""
    found, rest = _parse(text.strip())
    if rest.strip():
        raise HostError(f"cannot read the type {text!r}")
    return found


def leading_type(text: str) -> tuple[Type, str]:
    """The type at the start of `text`, and what follows it."""
    return _parse(text.strip())


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Type, str]:
    text = text.removeprefix("!llvm.")
    if m := re.match(r"i(\d+)", text):
        return Type("int", int(m[1])), text[m.end() :]
    if m := re.match(r"bf16|f16|f32|f64", text):
        return Type("float", _FLOAT_BITS[m[0]]), text[m.end() :]
    if m := re.match(r"ptr(<\d+>)?", text):
        return Type("ptr", 64), text[m.end() :]
    if text.startswith("void"):
        return Type("void"), text[4:]
    if m := re.match(r"array<(\d+) x ", text):
        item, rest = _parse(text[m.end() :])
        return Type("array", items=(item,), count=int(m[1])), rest[1:]
    if m := re.match(r"vector<(\d+)x", text):
        item, rest = _parse(text[m.end() :])
        return Type("array", items=(item,), count=int(m[1]), vector=True), rest[1:]
    if m := re.match(r'struct<(?:"[^"]*", )?(packed )?\(', text):
        rest, items = text[m.end() :], []
        while not rest.startswith(")"):
            item, rest = _parse(rest.lstrip(", "))
            items.append(item)
        return Type("struct", items=tuple(items), packed=bool(m[1])), rest[2:]
    raise HostError(f"cannot read the type {text[:80]!r}")


def encode(kind: Type, value: Value) -> bytes:
    """The bytes of a value in memory; padding is zero."""
    if value is None:
        return bytes(kind.size)
    if kind.kind == "struct":
        out = bytearray(kind.size)
        for at, item, part in zip(kind.offsets, kind.items, value, strict=True):
            out[at : at + item.size] = encode(item, part)
        return bytes(out)
    if kind.kind == "array":
        return b"".join(encode(kind.items[0], part) for part in value)
    if kind.kind == "float":
        return struct.pack(_FLOAT_CODE[kind.bits], value)
    number = int(value) & ((1 << kind.bits) - 1)
    return number.to_bytes(kind.size, "little")


def decode(kind: Type, data: bytes) -> Value:
    """The value that `data` holds."""
    if kind.kind == "struct":
        return tuple(decode(item, data[at : at + item.size]) for at, item in zip(kind.offsets, kind.items, strict=True))
    if kind.kind == "array":
        item = kind.items[0]
        return tuple(decode(item, data[i * item.size : (i + 1) * item.size]) for i in range(kind.count))
    if kind.kind == "float":
        return struct.unpack(_FLOAT_CODE[kind.bits], data)[0]
    return int.from_bytes(data, "little") & ((1 << kind.bits) - 1)


def empty(kind: Type) -> Value:
    """Poison of this type: aggregates can be filled member by member."""
    if kind.kind == "struct":
        return tuple(empty(t) for t in kind.items)
    if kind.kind == "array":
        return (empty(kind.items[0]),) * kind.count
    return None


def zero(kind: Type) -> Value:
    """The all-zero value."""
    return decode(kind, bytes(kind.size))


class HostMemory:
    """Allocations of the host code, far from any address of a tensor; an access outside one is an error."""

    BASE, SPACING = 1 << 60, 1 << 28

    def __init__(self) -> None:
        self._blocks: list[bytearray] = []

    def allocate(self, size: int) -> int:
        """A new block, zeroed; its number is in its address."""
        if size > self.SPACING:
            raise HostError(f"an allocation of {size} bytes on the host's stack")
        self._blocks.append(bytearray(size))
        return self.BASE + (len(self._blocks) - 1) * self.SPACING

    def place(self, data: bytes) -> int:
        """A new block holding `data`."""
        at = self.allocate(len(data))
        self.write(at, data)
        return at

    def _find(self, address: int, size: int) -> tuple[bytearray, int]:
        number, at = divmod(address - self.BASE, self.SPACING)
        if not 0 <= number < len(self._blocks) or at + size > len(self._blocks[number]):
            raise HostError(f"the host code touches {size} bytes at {address:#x}, outside its own allocations")
        return self._blocks[number], at

    def read(self, address: int, size: int) -> bytes:
        block, at = self._find(address, size)
        return bytes(block[at : at + size])

    def write(self, address: int, data: bytes) -> None:
        block, at = self._find(address, len(data))
        block[at : at + len(data)] = data

    def string(self, address: int) -> str:
        """The zero-terminated text at `address`."""
        block, at = self._find(address, 0)
        return bytes(block[at : block.index(0, at)]).decode(errors="replace")
