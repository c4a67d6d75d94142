"""Bulk asynchronous copies as operations in flight: what they read, write and signal, and the groups they belong to.

PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy", "Async proxy", and "Bulk async-group". A copy
takes effect at one time or, where its source is shared memory, at two: when it has read its source, and when it has
written its destination. Both times are the scheduler's choice. All accesses go through the async proxy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from ptxcheck.hb import ASYNC, STRONG, Actor
from ptxcheck.memory import OFFSET_MASK, RANK_SHIFT
from ptxcheck.sched import AsyncOp
from ptxcheck.tma import Region, TensorMap

if TYPE_CHECKING:
    from ptxcheck.machine import Cta, Machine, Warp
    from ptxcheck.ptx import Inst

Array: TypeAlias = "np.ndarray[Any, Any]"
UNIT = 16


class Signal:
    """Bytes that a copy will complete on an mbarrier."""

    def __init__(self, cta: Cta, offset: int, nbytes: int) -> None:
        self.cta, self.offset, self.nbytes = cta, offset, nbytes
        self.phase = cta.barriers.issue(offset, nbytes)

    def complete(self, actor: Actor) -> None:
        self.cta.barriers.complete_tx(self.offset, self.nbytes, actor, self.phase)


def fork(w: Warp, site: Inst) -> Actor:
    """A copy that this warp issues now, as an actor."""
    return w.machine.history.fork(w.clock, site, None, f"{w.clock.label} ({'.'.join(site.mods[:4])})")


class Stages(NamedTuple):
    """A copy out of shared memory: its reading half and its writing half, as operations and as actors."""

    read: AsyncOp
    write: AsyncOp
    reader: Actor
    writer: Actor


class BulkGroups:
    """The bulk groups of one thread: copies out of shared memory, waited for in the order of their commits."""

    def __init__(self) -> None:
        self.open: list[Stages] = []
        self.groups: list[list[Stages]] = []

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def waiting(self, keep: int) -> list[list[Stages]]:
        """The groups that a wait for all but `keep` waits for."""
        return self.groups[: max(len(self.groups) - keep, 0)]


# ---- where bytes come from and go to; data are 16-byte units, uint8[n, 16]

Source: TypeAlias = "Callable[[Actor], Array]"
Sink: TypeAlias = "Callable[[Actor, Array], None]"
Reduce: TypeAlias = "Callable[[Array, Array], Array]"


def from_shared(cta: Cta, at: Array) -> Source:
    """Units of shared memory at these offsets."""
    return lambda actor: cta.shared.load(actor, at, UNIT, ASYNC)


def to_shared(cta: Cta, at: Array, reduce: Reduce | None = None) -> Sink:
    """Write units of shared memory, or combine them with what is there."""

    def sink(actor: Actor, data: Array) -> None:
        mode = ASYNC
        if reduce is not None:
            mode |= STRONG
            data = reduce(cta.shared.load(actor, at, UNIT, mode), data)
        cta.shared.store(actor, at, data, mode)

    return sink


def from_global(machine: Machine, at: Array) -> Source:
    """Units of global memory at these addresses."""
    return lambda actor: machine.global_.load(actor, at, UNIT, ASYNC)


def to_global(machine: Machine, at: Array, reduce: Reduce | None = None) -> Sink:
    """Write pieces of global memory, or combine them: each element atomically, so that others may hit the same ones."""

    def sink(actor: Actor, data: Array) -> None:
        mode = ASYNC
        if reduce is not None:
            mode |= STRONG
            data = reduce(machine.global_.load(actor, at, data.shape[1], mode), data)
        machine.global_.store(actor, at, data, mode)

    return sink


def _pieces(base: int, region: Region) -> tuple[Array, int]:
    """Addresses and size of the aligned pieces, 16 bytes where possible, that make up a region in its order."""
    *outer, row = region.shape
    first = (base + region.offset) % (1 << 64)  # addresses wrap around
    rows = np.full(1, first, np.int64)
    for count, stride in zip(outer, region.strides, strict=False):
        rows = (rows[:, None] + np.arange(count) * stride).ravel()
    size = math.gcd(UNIT, row, first)
    return (rows[:, None] + np.arange(0, row, size)).ravel(), size


def from_box(machine: Machine, m: TensorMap, coords: tuple[int, ...]) -> Source:
    """The box of a tensor at `coords`, zero where it lies outside the tensor.

    The base of the tensor must be memory, whatever the box: a Hopper GPU was seen to fault where it is not mapped.
    """

    def source(actor: Actor) -> Array:
        out = np.zeros(m.box_shape, np.uint8)
        if machine.global_.find(actor, np.array([m.base]), 1) is None:
            return out.reshape(-1, UNIT)
        region = m.region(coords)
        if not region.empty:
            at, size = _pieces(m.base, region)
            out[region.place] = machine.global_.load(actor, at, size, ASYNC).reshape(region.shape)
        if m.type == "tf32":
            out = (out.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.uint8)
        return out.reshape(-1, UNIT)

    return source


def to_box(machine: Machine, m: TensorMap, coords: tuple[int, ...], reduce: Reduce | None = None) -> Sink:
    """The part of a box that lies inside the tensor."""

    def sink(actor: Actor, data: Array) -> None:
        region = m.region(coords)
        if not region.empty:
            at, size = _pieces(m.base, region)
            inside = np.ascontiguousarray(data.reshape(m.box_shape)[region.place])
            to_global(machine, at, reduce)(actor, inside.reshape(-1, size))

    return sink


# ---- reductions

_NUMPY = {
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "f16": np.float16, "f32": np.float32,
    "f64": np.float64, "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip


def reduction(operation: str, type_: str) -> Reduce:
    """`f(old, new)` on bytes: PTX ISA, "cp.reduce.async.bulk". 16-bit floats are added in fp32 and rounded once."""
    combine: Reduce
    if operation == "inc":
        combine = lambda old, new: np.where(old >= new, 0, old + 1).astype(old.dtype)  # noqa: E731
    elif operation == "dec":
        combine = lambda old, new: np.where((old == 0) | (old > new), new, old - 1).astype(old.dtype)  # noqa: E731
    else:
        combine = {
            "add": np.add,
            "min": np.fmin,
            "max": np.fmax,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[operation]

    def run(old: Array, new: Array) -> Array:
        if type_ == "bf16":
            return _to_bf16(combine(_from_bf16(old), _from_bf16(new))).view(np.uint8).reshape(old.shape)
        kind = _NUMPY[type_]
        a, b = np.ascontiguousarray(old).view(kind), np.ascontiguousarray(new).view(kind)
        if type_ == "f16":
            return combine(a.astype(np.float32), b.astype(np.float32)).astype(np.float16).view(np.uint8)
        return combine(a, b).view(np.uint8)

    return run


def _from_bf16(raw: Array) -> Array:
    return (np.ascontiguousarray(raw).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bf16(values: Array) -> Array:
    """Round to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def split_address(address: int) -> tuple[int, int]:
    """Rank in the cluster and offset of a shared-memory address."""
    return address >> RANK_SHIFT, address & OFFSET_MASK


def array_name(machine: Machine, address: int) -> str:
    """The array at a global address, for counts."""
    region = next((r for r in machine.global_.regions if r.low <= address < r.high), None)
    return "?" if region is None else region.name(address).partition("[")[0]
