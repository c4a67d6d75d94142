"""Atomic operations: atom, red, in all types and with vectors (PTX ISA, "atom", "red").

Lanes that name one address take effect one after another, in lane order or its reverse at random. A read-modify-write
continues the release sequence of its address: it joins the clock that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from ptxcheck import spaces
from ptxcheck.hb import STRONG
from ptxcheck.machine import FULL, LANES, YIELD, Signal, Warp
from ptxcheck.memory import Ints
from ptxcheck.ops_memory import clocks, expand, space_of, type_of
from ptxcheck.ptx import Inst, Sink
from ptxcheck.rounding import bf16_codes, bf16_values
from ptxcheck.table import DTYPES, Array, Build, Step, op

# old value, operand, third operand -> new value, element by element
Update: TypeAlias = "Callable[[Array, Array, Array], Array]"
OPERATIONS = ("and", "or", "xor", "cas", "exch", "add", "inc", "dec", "min", "max")
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


def _via_floats(old: Array, new: Array, type_: str, fn: Callable[[Array, Array], Array]) -> Array:
    if type_ == "bf16":
        return bf16_codes(fn(bf16_values(old), bf16_values(new)))
    if type_ in ("bf16x2", "f16x2"):
        inner = type_[:-2]
        half = DTYPES[inner]
        a, b = (np.ascontiguousarray(x).view(half) for x in (old, new))
        return np.ascontiguousarray(_via_floats(a, b, inner, fn)).view(np.uint32)
    return fn(old, new)


def update(operation: str, type_: str) -> Update:
    """The function of one operation on one type; integers wrap."""
    if operation == "exch":
        return lambda old, b, c: b
    if operation == "cas":
        return lambda old, b, c: np.where(old == b, c, old)
    if operation == "inc":
        return lambda old, b, c: np.where(old >= b, 0, old + 1).astype(old.dtype)
    if operation == "dec":
        return lambda old, b, c: np.where((old == 0) | (old > b), b, old - 1).astype(old.dtype)
    if operation in _BITS:
        fn = _BITS[operation]
        return lambda old, b, c: fn(old, b)
    floats = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation]
    return lambda old, b, c: _via_floats(old, b, type_, floats)


def apply(w: Warp, space: str, lanes: Array, at: Ints, b: Array, c: Array, fn: Update, item: np.dtype[Any]) -> Array:
    """Read-modify-write of `b.shape[1]` elements at the address of each lane; returns what was there."""
    n = b.shape[1]
    nbytes = n * item.itemsize
    if np.unique(at).size == at.size:
        old = spaces.load(w, space, lanes, at, nbytes, STRONG).view(item)
        new = np.ascontiguousarray(fn(old, b, c).astype(item, copy=False)).reshape(old.shape)
        spaces.store(w, space, lanes, at, new.view(np.uint8), STRONG)
        return old
    out = np.empty((at.size, n), item)
    order = range(at.size) if w.machine.rng.random() < 0.5 else range(at.size - 1, -1, -1)
    for k in order:
        one = slice(k, k + 1)
        out[one] = apply(w, space, lanes[one], at[one], b[one], c[one], fn, item)
    return out


@op("atom", "red")
def atom(b: Build, i: Inst) -> Step:
    """`atom` gives the old value, `red` does not. Without .release or .acquire they are relaxed."""
    type_, space = type_of(b, i), space_of(i)
    operation = next((x for x in i.mods[1:] if x in OPERATIONS), None)
    if operation is None or type_ == "b128":
        raise b.error("an operation that is not modelled")
    ops = list(i.ops)
    dest = ops.pop(0) if i.mods[0] == "atom" else Sink()
    addr = b.address(ops[0], space)
    reads = [b.read(x, type_) for x in b.vector(ops[1])]
    third = b.read(ops[2], type_) if operation == "cas" else None
    item = DTYPES[type_]
    fn = update(operation, type_)
    writes = [b.write(x, type_) for x in b.vector(dest)]
    release = i.has("release") or i.has("acq_rel")
    acquire = i.has("acquire") or i.has("acq_rel")

    def run(w: Warp, m: Array) -> Signal:
        w.clock.site = i
        at, lanes = addr(w), LANES
        new = np.stack([np.broadcast_to(r(w), (32,)).view(item) for r in reads], 1)
        other = np.broadcast_to(third(w), (32,)).view(item)[:, None] if third is not None else new
        if m is not FULL:
            at, lanes, new, other = at[m], LANES[m], new[m], other[m]
        before = w.machine.progress
        old = apply(w, space, lanes, at, new, other, fn, item)
        h = w.machine.history
        for c in clocks(w, space, at):
            if acquire:
                h.acquire(w.clock, c)
            else:
                h.acquire_relaxed(w.clock, c)
            if release:
                h.release(w.clock, c)
            else:
                h.release_relaxed(w.clock, c)
        for k, write in enumerate(writes):
            write(w, m, expand(m, old[:, k]))
        w.machine.wakes += 1
        if operation == "cas" and not (old == new).any():  # a lock that was not to be had
            w.machine.progress = before
            w.machine.polls += 1
            return YIELD
        return None

    return run
