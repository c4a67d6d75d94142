"""cp.async.bulk, cp.reduce.async.bulk, their tensor forms, prefetches, and bulk groups.

PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor",
"cp.async.bulk.commit_group", "cp.async.bulk.wait_group". Every active lane makes a copy of its own; but where lanes of
a warp store the same bytes to the same place, as generated code does, it is one copy that belongs to them all. Cache
hints and prefetches have no effect here. Not modelled, and refused: im2col, gather and scatter modes, byte masks; not
modelled, and not seen: the tensormap proxy, where a kernel changes a map in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ptxcheck import bulk
from ptxcheck.bulk import UNIT, BulkGroups, Reduce, Signal, Sink, Source, Stages, fork, split_address
from ptxcheck.machine import Block, Cta, Warp
from ptxcheck.machine import Signal as Outcome
from ptxcheck.memory import OFFSET_MASK
from ptxcheck.ptx import Imm, Inst, Operand, TensorAddr
from ptxcheck.sched import AsyncOp
from ptxcheck.table import PARAM_WINDOW, Array, Build, Step, op
from ptxcheck.tma import SIZE, BadMap, TensorMap, decode

Scalar = Callable[[Warp, int], int]

_STATES = {"global", "shared::cluster", "shared::cta"}
_REFUSED = ("im2col", "gather4", "scatter4", "cp_mask", "ignore_oob")
_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _spaces(b: Build, i: Inst) -> tuple[str, str]:
    """Destination's and source's state space."""
    found = [m for m in i.mods if m in _STATES]
    if len(found) != 2 or any(x in m for m in i.mods for x in _REFUSED):
        raise b.error("a form that is not modelled")
    return found[0], found[1]


def _scalar(b: Build, o: Operand, type_: str) -> Scalar:
    """The value of an operand in one lane."""
    read = b.read(o, type_)

    def get(w: Warp, lane: int) -> int:
        v = read(w)
        return int(v[lane] if v.shape else v)

    return get


def _address(b: Build, o: Operand, space: str) -> Scalar:
    address = b.address(o, space)
    return lambda w, lane: int(address(w)[lane])


def _lanes(mask: Array) -> list[int]:
    return [int(x) for x in np.flatnonzero(mask)]


def _aligned(w: Warp, address: int, to: int, what: str) -> None:
    if address % to:
        w.fault("misaligned", f"{what}, {address:#x}, is not aligned to {to} bytes")


def _range(w: Warp, address: int, size: int, what: str) -> Array:
    """Addresses of the units of a bulk copy's source or destination."""
    if size % UNIT:
        w.fault("bad-operand", f"a bulk copy of {size} bytes, not a multiple of {UNIT}")
    _aligned(w, address, UNIT, what)
    return np.arange(address, address + size, UNIT)


def _all_groups(w: Warp) -> dict[int, BulkGroups]:
    """The bulk groups of a warp's threads, by lane: of those that have made a copy."""
    found: dict[int, BulkGroups] = vars(w).setdefault("bulk_groups", {})
    return found


def _count(w: Warp, address: int, nbytes: int) -> None:
    """Count bytes that move between an array and shared memory."""
    counters = w.machine.counters
    if counters is not None:
        counters.copied[bulk.array_name(w.machine, address)] += nbytes


# ---- into shared memory, signalled on an mbarrier


class Target(NamedTuple):
    """Where a copy's data go and where it signals: offsets in two CTAs, mostly the same one."""

    cta: Cta
    offset: int
    barrier_cta: Cta
    barrier: int


def _cta(w: Warp, rank: int, what: str) -> Cta:
    ctas = w.cta.cluster.ctas
    if rank >= len(ctas):
        w.fault("bad-operand", f"{what} lies in CTA {rank} of a cluster of {len(ctas)}")
    return ctas[rank]


def _targets(w: Warp, i: Inst, dst: int, mbar: int, cta_mask: int | None) -> list[Target]:
    """One target, or those of a multicast, each at the same offsets.

    With cta_group::2 the signal goes to the CTA of the pair that has the parity of the barrier's own.
    """
    rank, offset = split_address(dst)
    barrier_rank, barrier = split_address(mbar)
    pair = "cta_group::2" in i.mods
    if cta_mask is not None:
        ranks = [r for r in range(16) if cta_mask >> r & 1]
    else:
        ranks = [rank]
        if barrier_rank != rank and not (pair and barrier_rank ^ 1 == rank):
            w.fault("bad-operand", f"the data go to CTA {rank} of the cluster, the signal to CTA {barrier_rank}")
    _aligned(w, barrier, 8, "the mbarrier")
    out = []
    for r in ranks:
        signalled = (r & ~1) | (barrier_rank & 1) if pair else r
        out.append(Target(_cta(w, r, "the destination"), offset, _cta(w, signalled, "the mbarrier"), barrier))
    return out


def _fetch(w: Warp, i: Inst, target: Target, nbytes: int, source: Source, sink: Sink) -> None:
    """A copy that takes effect at once."""
    actor = fork(w, i)
    signal = Signal(target.barrier_cta, target.barrier, nbytes)

    def effect() -> None:
        sink(actor, source(actor))
        signal.complete(actor)

    w.machine.async_.submit(AsyncOp(i, w, effect))


def _send(w: Warp, i: Inst, target: Target, nbytes: int, source: Source, sink: Sink) -> None:
    """A copy between CTAs: its source is read at one time, its destination written at another."""
    actor = fork(w, i)
    signal = Signal(target.barrier_cta, target.barrier, nbytes)
    held: list[Array] = []

    def effect() -> None:
        sink(actor, held.pop())
        signal.complete(actor)

    first = AsyncOp(i, w, lambda: held.append(source(actor)))
    w.machine.async_.submit(first)
    w.machine.async_.submit(AsyncOp(i, w, effect, lambda: first.done))


def _copy_in(b: Build, i: Inst, reduce: Reduce | None) -> Step:
    dst_space, src_space = _spaces(b, i)
    dst, src = _address(b, i.ops[0], dst_space), _address(b, i.ops[1], src_space)
    size, mbar = _scalar(b, i.ops[2], "u32"), _address(b, i.ops[3], "shared::cluster")
    cta_mask = _scalar(b, i.ops[4], "u16") if "multicast::cluster" in i.mods else None

    def step(w: Warp, mask: Array) -> Outcome:
        for lane in _lanes(mask):
            n = size(w, lane)
            at = _range(w, src(w, lane), n, "the source")
            for t in _targets(w, i, dst(w, lane), mbar(w, lane), cta_mask(w, lane) if cta_mask else None):
                sink = bulk.to_shared(t.cta, _range(w, t.offset, n, "the destination"), reduce)
                if src_space == "global":
                    _fetch(w, i, t, n, bulk.from_global(w.machine, at), sink)
                    _count(w, int(at[0]) if n else 0, n)
                else:
                    _send(w, i, t, n, bulk.from_shared(w.cta, at & OFFSET_MASK), sink)
        return None

    return step


# ---- out of shared memory, waited for by groups


def _put(w: Warp, i: Inst, source: Source, sink: Sink) -> Stages:
    reader, writer = fork(w, i), fork(w, i)
    held: list[Array] = []
    first = AsyncOp(i, w, lambda: held.append(source(reader)))
    second = AsyncOp(i, w, lambda: sink(writer, held.pop()), lambda: first.done)
    w.machine.async_.submit(first)
    w.machine.async_.submit(second)
    return Stages(first, second, reader, writer)


def _puts(w: Warp, mask: Array, reduces: bool, key: Callable[[int], Any], put: Callable[[int], Stages]) -> None:
    """One copy for each lane, or for all lanes with the same `key` where that makes no difference."""
    made: dict[Any, Stages] = {}
    for lane in _lanes(mask):
        k = lane if reduces else key(lane)
        if k not in made:
            made[k] = put(lane)
        _all_groups(w).setdefault(lane, BulkGroups()).open.append(made[k])


def _copy_out(b: Build, i: Inst, reduce: Reduce | None) -> Step:
    dst, src = _address(b, i.ops[0], "global"), _address(b, i.ops[1], "shared::cta")
    size = _scalar(b, i.ops[2], "u32")

    def step(w: Warp, mask: Array) -> Outcome:
        def put(lane: int) -> Stages:
            to, n = dst(w, lane), size(w, lane)
            at = _range(w, src(w, lane), n, "the source") & OFFSET_MASK
            sink = bulk.to_global(w.machine, _range(w, to, n, "the destination"), reduce)
            _count(w, to, n)
            return _put(w, i, bulk.from_shared(w.cta, at), sink)

        _puts(w, mask, reduce is not None, lambda lane: (dst(w, lane), src(w, lane), size(w, lane)), put)
        return None

    return step


@op("cp.async.bulk")
def copy(b: Build, i: Inst) -> Step:
    """The forms without a tensor map."""
    return _copy_out(b, i, None) if _spaces(b, i)[0] == "global" else _copy_in(b, i, None)


def _operation(b: Build, i: Inst) -> str:
    found = next((m for m in i.mods if m in _OPERATIONS), None)
    if found is None:
        raise b.error("an operation that is not modelled")
    return found


@op("cp.reduce.async.bulk")
def reduce_copy(b: Build, i: Inst) -> Step:
    """As cp.async.bulk, combined with what is there; the type is the last part of the opcode."""
    reduce = bulk.reduction(_operation(b, i), i.mods[-1])
    return _copy_out(b, i, reduce) if _spaces(b, i)[0] == "global" else _copy_in(b, i, reduce)


# ---- tensor forms


def _tensor(b: Build, i: Inst, o: Operand) -> Callable[[Warp, int], tuple[TensorMap, tuple[int, ...]]]:
    """The map and the coordinates of `[map, {coordinates}]`."""
    if not isinstance(o, TensorAddr) or o.offsets is not None:
        raise b.error("a tensor address that is not modelled")
    address = _scalar(b, o.map, "u64")
    coords = [_scalar(b, c, "s32") for c in b.vector(o.coords)]

    def get(w: Warp, lane: int) -> tuple[TensorMap, tuple[int, ...]]:
        at = address(w, lane)
        _aligned(w, at, 64, "the tensor map")
        offset = at - PARAM_WINDOW
        if 0 <= offset < len(w.machine.params):
            data = bytes(w.machine.params[offset : offset + SIZE])
        else:
            w.clock.site = i
            data = w.machine.global_.load(w.clock, np.arange(at, at + SIZE, UNIT), UNIT).tobytes()
        try:
            found = decode(data)
        except BadMap as bad:
            w.fault("bad-operand", str(bad))
            raise
        if found.rank != len(coords):
            w.fault("bad-operand", f"{len(coords)} coordinates for a tensor map of rank {found.rank}")
        return found, tuple(c(w, lane) for c in coords)

    return get


def _units(w: Warp, m: TensorMap, address: int) -> Array:
    """Offsets of a box's units in shared memory."""
    _aligned(w, address, 128, "the box in shared memory")
    offset = split_address(address)[1]
    return offset + m.units(offset) * UNIT


@op("cp.async.bulk.tensor")
def tensor_copy(b: Build, i: Inst) -> Step:
    """Loads of a box; stores go to `_tensor_out`."""
    dst_space, _ = _spaces(b, i)
    if dst_space == "global":
        return _tensor_out(b, i, None)
    dst, tensor = _address(b, i.ops[0], dst_space), _tensor(b, i, i.ops[1])
    mbar = _address(b, i.ops[2], "shared::cluster")
    cta_mask = _scalar(b, i.ops[3], "u16") if "multicast::cluster" in i.mods else None

    def step(w: Warp, mask: Array) -> Outcome:
        for lane in _lanes(mask):
            m, coords = tensor(w, lane)
            to = dst(w, lane)
            at = _units(w, m, to)
            source = bulk.from_box(w.machine, m, coords)
            for t in _targets(w, i, to, mbar(w, lane), cta_mask(w, lane) if cta_mask else None):
                _fetch(w, i, t, m.box_bytes, source, bulk.to_shared(t.cta, at))
            _count(w, m.base, m.box_bytes)
        return None

    return step


def _tensor_out(b: Build, i: Inst, operation: str | None) -> Step:
    tensor, src = _tensor(b, i, i.ops[0]), _address(b, i.ops[1], "shared::cta")

    def step(w: Warp, mask: Array) -> Outcome:
        def put(lane: int) -> Stages:
            m, coords = tensor(w, lane)
            reduce = None if operation is None else bulk.reduction(operation, m.type)
            source = bulk.from_shared(w.cta, _units(w, m, src(w, lane)))
            _count(w, m.base, m.box_bytes)
            return _put(w, i, source, bulk.to_box(w.machine, m, coords, reduce))

        _puts(w, mask, operation is not None, lambda lane: (*tensor(w, lane), src(w, lane)), put)
        return None

    return step


@op("cp.reduce.async.bulk.tensor")
def tensor_reduce(b: Build, i: Inst) -> Step:
    """A box, combined with what is there; the type is the map's."""
    _spaces(b, i)
    return _tensor_out(b, i, _operation(b, i))


@op("cp.async.bulk.prefetch")
def prefetch(b: Build, i: Inst) -> Step:
    """To L2: no effect that a program can see. A map is read, so that a bad one is found."""
    if not isinstance(i.ops[0], TensorAddr):
        return lambda w, mask: None
    tensor = _tensor(b, i, i.ops[0])

    def step(w: Warp, mask: Array) -> Outcome:
        for lane in _lanes(mask):
            tensor(w, lane)
        return None

    return step


# ---- groups


@op("cp.async.bulk.commit_group")
def commit(b: Build, i: Inst) -> Step:
    """Each thread's copies since its last commit become a group."""

    def step(w: Warp, mask: Array) -> Outcome:
        for lane, groups in _all_groups(w).items():
            if mask[lane]:
                groups.commit()
        return None

    return step


@op("cp.async.bulk.wait_group")
def wait(b: Build, i: Inst) -> Step:
    """`.read`: until the sources have been read; else until the writes are made, and visible to this thread."""
    if not isinstance(i.ops[0], Imm):
        raise b.error("the number of groups is no constant")
    keep, reading = int(i.ops[0].text, 0), "read" in i.mods

    def step(w: Warp, mask: Array) -> Outcome:
        todo = [(g, g.waiting(keep)) for lane, g in _all_groups(w).items() if mask[lane]]
        stages = [c for _, groups in todo for members in groups for c in members]
        copies = [c.read if reading else c.write for c in stages]

        def then() -> None:
            for c in stages:
                w.machine.history.join(w.clock, c.reader)
                if not reading:
                    w.machine.history.join(w.clock, c.writer)
            if not reading:
                for g, groups in todo:
                    del g.groups[: len(groups)]

        if all(c.done for c in copies):
            then()
            return None
        return Block(lambda: all(c.done for c in copies), f"waits for all bulk groups but {keep}", then)

    return step
