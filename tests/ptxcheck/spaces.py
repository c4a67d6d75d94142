"""Where an address leads: shared memory of a CTA of the cluster, global, local or parameter memory.

PTX ISA, "Generic Addressing". `load` and `store` work on the active lanes of a warp; the state space is the one named
in the opcode, or found from each lane's address where none is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from ptxcheck.machine import Cta, Warp
from ptxcheck.memory import OFFSET_MASK, RANK_SHIFT, Bytes, Ints
from ptxcheck.table import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, Array

Load: TypeAlias = "Callable[[Warp, Ints, int, int], Bytes]"
Store: TypeAlias = "Callable[[Warp, Ints, Bytes, int], None]"
_WINDOW = 1 << 32


def shared_addresses(at: Array) -> Ints:
    """32-bit shared addresses, from those or from generic ones in the shared window."""
    return np.where(at >= SHARED_WINDOW, at - SHARED_WINDOW, at) if (at >= _WINDOW).any() else at


def owner(w: Warp, address: int) -> Cta:
    """The CTA of the cluster that a 32-bit shared address belongs to."""
    rank, ctas = address >> RANK_SHIFT, w.cta.cluster.ctas
    if not 0 <= rank < len(ctas):
        w.fault("out-of-bounds", f"shared address {address:#x}: CTA {rank} of a cluster of {len(ctas)}")
    cta = ctas[rank]
    if cta.exited and cta is not w.cta:
        w.fault("exited-peer", f"shared memory of cta {cta.ctaid}, which has exited")
    return cta


def _parts(w: Warp, at: Ints) -> list[tuple[Cta, Array]]:
    at = at >> RANK_SHIFT
    return [(owner(w, int(r) << RANK_SHIFT), at == r) for r in np.unique(at)]


def _all_offsets(own: Ints) -> bool:
    """Whether none is negative or past the window: then neither are all their bits together."""
    return 0 <= int(np.bitwise_or.reduce(own)) <= OFFSET_MASK


def load_shared(w: Warp, at: Ints, nbytes: int, mode: int) -> Bytes:
    """`uint8[n, nbytes]` at shared addresses of active lanes."""
    own = at - (w.cta.rank << RANK_SHIFT)
    if _all_offsets(own):
        return w.cta.shared.load(w.clock, own, nbytes, mode)
    at = shared_addresses(at)
    out = np.zeros((at.size, nbytes), np.uint8)
    for cta, select in _parts(w, at):
        out[select] = cta.shared.load(w.clock, at[select] & OFFSET_MASK, nbytes, mode)
    return out


def store_shared(w: Warp, at: Ints, data: Bytes, mode: int) -> None:
    """Write at shared addresses of active lanes."""
    own = at - (w.cta.rank << RANK_SHIFT)
    if _all_offsets(own):
        w.cta.shared.store(w.clock, own, data, mode)
        return
    at = shared_addresses(at)
    for cta, select in _parts(w, at):
        cta.shared.store(w.clock, at[select] & OFFSET_MASK, data[select], mode)


def load_global(w: Warp, at: Ints, nbytes: int, mode: int) -> Bytes:
    """`uint8[n, nbytes]` at global addresses."""
    return w.machine.global_.load(w.clock, at, nbytes, mode)


def store_global(w: Warp, at: Ints, data: Bytes, mode: int) -> None:
    """Write at global addresses."""
    w.machine.global_.store(w.clock, at, data, mode)


def load_param(w: Warp, at: Ints, nbytes: int, mode: int) -> Bytes:
    """Parameters, by their offset."""
    raw = np.frombuffer(w.machine.params, np.uint8)
    first, held = int(at[0]), at.tobytes()
    if held == held[:8] * at.size and 0 <= first <= raw.size - nbytes:  # as nearly always, the same one for all lanes
        out = np.empty((at.size, nbytes), np.uint8)
        out[:] = raw[first : first + nbytes]
        return out
    if at.min() < 0 or at.max() + nbytes > raw.size:
        w.fault("out-of-bounds", f"{nbytes} bytes at {int(at.max()):#x} of {raw.size} bytes of parameters")
    return np.asarray(raw[at[:, None] + np.arange(nbytes)])


def _local(w: Warp, at: Ints, nbytes: int) -> Array:
    size = w.program.local_bytes
    if at.min() < 0 or at.max() + nbytes > size:
        w.fault("out-of-bounds", f"{nbytes} bytes at {int(at.max()):#x} of {size} bytes of local memory")
    return at[:, None] + np.arange(nbytes)


def load_local(w: Warp, lanes: Array, at: Ints, nbytes: int) -> Bytes:
    """Local memory of each lane."""
    local: Bytes = w.local
    return local[lanes[:, None], _local(w, at, nbytes)]


def store_local(w: Warp, lanes: Array, at: Ints, data: Bytes) -> None:
    """Write local memory of each lane."""
    w.local[lanes[:, None], _local(w, at, data.shape[1])] = data


def classify(at: Ints) -> list[tuple[str, Array]]:
    """The state spaces that generic addresses lie in, with the selection of each."""
    out = []
    for space, low in (("shared", SHARED_WINDOW), ("local", LOCAL_WINDOW), ("param", PARAM_WINDOW)):
        select = (at >= low) & (at < low + _WINDOW)
        if select.any():
            out.append((space, select))
    rest = np.ones(at.size, np.bool_)
    for _, select in out:
        rest &= ~select
    if rest.any():
        out.append(("global", rest))
    return out


WINDOWS = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0}


def load(w: Warp, space: str, lanes: Array, at: Ints, nbytes: int, mode: int = 0) -> Bytes:
    """`uint8[n, nbytes]` at the addresses of lanes `lanes` in a state space, or "generic"."""
    if space == "global" or space == "const":
        return load_global(w, at, nbytes, mode)
    if space == "shared":
        return load_shared(w, at, nbytes, mode)
    if space == "local":
        return load_local(w, lanes, at, nbytes)
    if space == "param":
        return load_param(w, at, nbytes, mode)
    parts = classify(at)
    if len(parts) == 1:
        return load(w, parts[0][0], lanes, at - WINDOWS[parts[0][0]], nbytes, mode)
    out = np.zeros((at.size, nbytes), np.uint8)
    for where, select in parts:
        out[select] = load(w, where, lanes[select], at[select] - WINDOWS[where], nbytes, mode)
    return out


def store(w: Warp, space: str, lanes: Array, at: Ints, data: Bytes, mode: int = 0) -> None:
    """Write `uint8[n, nbytes]`."""
    if space == "global":
        store_global(w, at, data, mode)
    elif space == "shared":
        store_shared(w, at, data, mode)
    elif space == "local":
        store_local(w, lanes, at, data)
    elif space == "generic":
        for where, select in classify(at):
            store(w, where, lanes[select], at[select] - WINDOWS[where], data[select], mode)
    else:
        w.fault("out-of-bounds", f"a store to .{space} memory")
