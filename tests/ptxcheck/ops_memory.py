"""Loads and stores of all state spaces, ldmatrix and stmatrix (PTX ISA, "Data Movement and Conversion Instructions").

`.relaxed`, `.volatile`, `.acquire` and `.release` are strong operations: two of them on one address are no race, and
they synchronise through the clock of that address (hb.py). Cache operators, eviction priorities and hints do nothing.
"""

from __future__ import annotations

import numpy as np

from ptxcheck import spaces
from ptxcheck.hb import STRONG, Clock
from ptxcheck.machine import CONVERGE, FULL, LANES, YIELD, Signal, Warp
from ptxcheck.memory import OFFSET_MASK, Bytes, Ints
from ptxcheck.ptx import Inst
from ptxcheck.table import DTYPES, LOCAL_WINDOW, SHARED_WINDOW, Array, Build, Step, op

SPACES = ("global", "shared", "local", "param", "const")
_STRONG = ("relaxed", "volatile", "acquire", "release", "mmio", "acq_rel", "sc")


def space_of(i: Inst) -> str:
    """The state space in the opcode: shared for its ::cta and ::cluster windows, generic where none is named."""
    for m in i.mods[1:]:
        name = m.partition("::")[0]
        if name in SPACES:
            return name
    return "generic"


def type_of(b: Build, i: Inst) -> str:
    """The last part of the opcode that is a type."""
    found = next((m for m in reversed(i.mods) if m in DTYPES or m == "b128"), None)
    if found is None:
        raise b.error("no type in the opcode")
    return found


def expand(m: Array, v: Array) -> Array:
    """Values of active lanes as an array of 32."""
    if m is FULL:
        return np.ascontiguousarray(v)
    out = np.zeros((32, *v.shape[1:]), v.dtype)
    out[m] = v
    return out


def clocks(w: Warp, space: str, at: Ints) -> list[Clock]:
    """Clocks of the addresses, for strong operations."""
    out = []
    for a in dict.fromkeys(at.tolist()):
        where = space
        if space == "generic":
            where = spaces.classify(np.array([a]))[0][0]
            a -= spaces.WINDOWS[where]
        if where == "global":
            out.append(w.machine.global_.clock(a))
        elif where == "shared":
            out.append(spaces.owner(w, a).shared.clock(a & OFFSET_MASK))
    return out


@op("ld", "ldu")
def ld(b: Build, i: Inst) -> Step:
    """A load of one to eight values a lane."""
    space, type_ = space_of(i), type_of(b, i)
    addr = b.address(i.ops[1], space)
    items = b.vector(i.ops[0])
    writes = [b.write(x, type_) for x in items]
    dtype = DTYPES.get(type_, np.dtype(np.uint64))
    size = 16 if type_ == "b128" else dtype.itemsize
    nbytes = size * len(items)
    acquire, strong = i.has("acquire"), any(i.has(x) for x in _STRONG)
    mode = STRONG if strong else 0
    read_only = i.has("nc")
    watched = space in ("shared", "generic")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        at, lanes = addr(w), LANES
        if m is not FULL:
            at, lanes = at[m], LANES[m]
        data = spaces.load(w, space, lanes, at, nbytes, mode)
        if read_only and (name := w.machine.global_.written_now(at)):
            w.fault("race", f"{name} is read through the non-coherent path and this launch writes it", fatal=False)
        if watched and w.machine.counters is not None:
            count(w, i, space, at, nbytes)
        if type_ == "b128":
            writes[0](w, m, expand(m, data.view(np.uint64)))
        elif len(writes) == 1:
            writes[0](w, m, expand(m, data.view(dtype)[:, 0]))
        else:
            columns = data.view(dtype)
            for k, write in enumerate(writes):
                write(w, m, expand(m, columns[:, k]))
        if not strong:
            return None
        h = w.machine.history
        for c in clocks(w, space, at):
            if acquire:
                h.acquire(w.clock, c)
            else:
                h.acquire_relaxed(w.clock, c)
        w.machine.polls += 1
        return YIELD

    return run


@op("st")
def st(b: Build, i: Inst) -> Step:
    """A store of one to eight values a lane."""
    space, type_ = space_of(i), type_of(b, i)
    addr = b.address(i.ops[0], space)
    items = b.vector(i.ops[1])
    reads = [b.read(x, type_) for x in items]
    dtype = DTYPES.get(type_, np.dtype(np.uint64))
    release, strong = i.has("release"), any(i.has(x) for x in _STRONG)
    mode = STRONG if strong else 0
    watched = space in ("shared", "generic")
    size = 16 if type_ == "b128" else dtype.itemsize
    nbytes = size * len(items)

    def values(w: Warp, m: Array) -> Bytes:
        if type_ == "b128":
            return np.asarray(reads[0](w)[m], np.uint64).view(np.uint8)
        out = np.empty((32, len(reads)), dtype)
        for k, read in enumerate(reads):
            out[:, k] = read(w)
        return (out if m is FULL else out[m]).view(np.uint8)

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        at, lanes = addr(w), LANES
        if m is not FULL:
            at, lanes = at[m], LANES[m]
        spaces.store(w, space, lanes, at, values(w, m), mode)
        if watched and w.machine.counters is not None:
            count(w, i, space, at, nbytes)
        if strong:
            h, fresh = w.machine.history, w.machine.history.clock()
            if release:
                h.release(w.clock, fresh)
            else:
                h.release_relaxed(w.clock, fresh)
            for c in clocks(w, space, at):  # a store starts a new release sequence
                c.seen, c.fenced = fresh.seen, fresh.fenced
            w.machine.wakes += 1
        return None

    return run


def count(w: Warp, i: Inst, space: str, at: Ints, nbytes: int) -> None:
    """Bank conflicts of the lanes that go to the CTA's own shared memory."""
    if space == "generic":
        at = at[(at >= SHARED_WINDOW) & (at < LOCAL_WINDOW)] & OFFSET_MASK
    counters = w.machine.counters
    assert counters is not None
    counters.access(w.program.kernel.name, i, at, nbytes)


# ----------------------------------------------------------------------------------------------- ldmatrix, stmatrix
def _shape(b: Build, i: Inst) -> tuple[int, bool]:
    """How many 8x8 matrices, and whether transposed."""
    if not i.has("m8n8") or i.mods[-1] != "b16":
        raise b.error("a shape other than m8n8 of b16")
    n = next((int(x[1:]) for x in i.mods if x in ("x1", "x2", "x4")), 1)
    return n, i.has("trans")


def fragments(rows: Array, trans: bool) -> Array:
    """uint16[n, 8, 8] rows of matrices as what each lane holds of each: uint32[n, 32] (PTX ISA, "ldmatrix")."""
    if trans:
        rows = rows.swapaxes(1, 2)
    return np.ascontiguousarray(rows).reshape(-1, 64).view(np.uint32)


def rows_of(held: Array, trans: bool) -> Array:
    """The reverse of `fragments`."""
    rows = held.view(np.uint16).reshape(-1, 8, 8)
    return rows.swapaxes(1, 2) if trans else rows


@op("ldmatrix")
def ldmatrix(b: Build, i: Inst) -> Step:
    """Lanes 8j to 8j+7 hold the row addresses of matrix j."""
    n, trans = _shape(b, i)
    space = space_of(i)
    addr = b.address(i.ops[1], space)
    writes = [b.write(x, "b32") for x in b.vector(i.ops[0])]

    def run(w: Warp, m: Array) -> Signal:
        if (w.alive & ~m).any():
            return CONVERGE
        w.clock.site = i
        at = addr(w)[: 8 * n]
        data = spaces.load(w, space, LANES[: 8 * n], at, 16)
        if w.machine.counters is not None:
            count(w, i, space, at, 16)
        rows = data.view(np.uint16).reshape(n, 8, 8)
        for write, held in zip(writes, fragments(rows, trans), strict=True):
            write(w, m, held)
        return None

    return run


@op("stmatrix")
def stmatrix(b: Build, i: Inst) -> Step:
    """As ldmatrix, the other way."""
    n, trans = _shape(b, i)
    space = space_of(i)
    addr = b.address(i.ops[0], space)
    reads = [b.read(x, "b32") for x in b.vector(i.ops[1])]

    def run(w: Warp, m: Array) -> Signal:
        if (w.alive & ~m).any():
            return CONVERGE
        w.clock.site = i
        at = addr(w)[: 8 * n]
        rows = np.ascontiguousarray(rows_of(np.array([read(w) for read in reads]), trans))
        spaces.store(w, space, LANES[: 8 * n], at, rows.view(np.uint8).reshape(8 * n, 16))
        if w.machine.counters is not None:
            count(w, i, space, at, 16)
        return None

    return run
