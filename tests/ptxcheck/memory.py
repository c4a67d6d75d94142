"""Shared memory: bytes, bounds, alignment and the shadow that finds races (PTX ISA, "State Spaces").

Shared memory of a CTA is addressed by 32 bits, `rank in the cluster << 24 | offset`, as `mapa` makes them; a generic
address of it lies in a window. Global memory, whose addresses are those of the process's own arrays, is in
global_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck.hb import Actor, Clock
from ptxcheck.shadow import Shadow

if TYPE_CHECKING:
    from ptxcheck.machine import Cta

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
# A CTA's largest shared memory on sm_90 and sm_100 (CUDA programming guide, "Compute Capabilities").
SHARED_LIMIT = 227 * 1024
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


def typed(data: Bytes) -> dict[int, Any]:
    """The bytes as arrays of words of 1 to 16 bytes (for gathers and scatters; 16 as a pair of doubles' bits)."""
    return {n: data[: data.size // n * n].view(t) for n, t in WORDS.items()}


def gather(words: dict[int, Any], at: Ints, nbytes: int) -> Bytes:
    """`uint8[n, nbytes]` at byte offsets that are multiples of `nbytes` (or of 16, if it is more)."""
    if nbytes in words:
        return np.asarray(words[nbytes][at // nbytes]).view(np.uint8).reshape(-1, nbytes)
    n = 16 if nbytes % 16 == 0 else 4 if nbytes % 4 == 0 else 1
    index = (at // n)[:, None] + np.arange(nbytes // n)
    return np.asarray(words[n][index]).view(np.uint8).reshape(-1, nbytes)


def scatter(words: dict[int, Any], at: Ints, data: Bytes) -> None:
    """The reverse of `gather`; where offsets repeat, the last wins."""
    nbytes = data.shape[1]
    if nbytes in words:
        words[nbytes][at // nbytes] = np.ascontiguousarray(data).view(WORDS[nbytes])[:, 0]
        return
    n = 16 if nbytes % 16 == 0 else 4 if nbytes % 4 == 0 else 1
    index = (at // n)[:, None] + np.arange(nbytes // n)
    words[n][index] = np.ascontiguousarray(data).view(WORDS[n])


def granules(at: Ints, nbytes: int, shift: int) -> Ints:
    """Granule numbers that accesses of `nbytes` at offsets `at` cover."""
    first = at >> shift
    per = (nbytes - 1 >> shift) + 1
    return first if per <= 1 else (first[:, None] + np.arange(per)).ravel()


class Shared:
    """Shared memory of one CTA.

    The shadow's granule is the narrowest access that the kernel makes to shared memory, four bytes at most, so that
    neighbours never look like a race.
    """

    def __init__(self, cta: Cta, size: int, shift: int, names: Sequence[tuple[str, int, int]] = ()) -> None:
        self.cta = cta
        self.size = size
        self.shift = shift
        self.names = names
        self.data: Bytes = np.zeros(-(-size // 16) * 16, np.uint8)
        self.words = typed(self.data)
        machine = cta.machine
        self.shadow = Shadow(machine.history, (self.data.size >> shift) + 1, self.name, machine.note)
        self.clocks: dict[int, Clock] = {}  # of strong operations, by offset

    def name(self, granule: int) -> str:
        """`shared memory of cta (0, 0, 0) at 0x420 (smem+32)`."""
        offset = granule << self.shift
        return f"shared memory of cta {self.cta.ctaid} at {offset:#x}{self.symbol(offset)}"

    def symbol(self, offset: int) -> str:
        """` (smem+32)` where a variable lies there."""
        return next((f" ({n}+{offset - a})" for n, a, size in self.names if a <= offset < a + size), "")

    def check(self, actor: Actor, at: Ints, nbytes: int) -> bool:
        """Bounds and alignment; False where the access cannot be made."""
        unit = min(nbytes, 16)
        bits, high = int(np.bitwise_or.reduce(at, axis=None)), int(np.maximum.reduce(at, axis=None))
        if bits < 0 or high + nbytes > self.size:  # a negative one makes the union of bits negative
            bad = int(at.min()) if bits < 0 else high
            self.cta.machine.note(
                "out-of-bounds",
                f"{nbytes} bytes at {bad:#x} of shared memory of cta {self.cta.ctaid}, which has {self.size:#x}",
                actor.where,
                key=(actor.key,),
            )
            return False
        if bits & (unit - 1):
            bad = int(at[(at & (unit - 1)) != 0][0])
            self.cta.machine.note(
                "misaligned", f"shared address {bad:#x} is no multiple of {unit}", actor.where, key=(actor.key,)
            )
            return False
        return True

    def load(self, actor: Actor, at: Ints, nbytes: int, mode: int = 0) -> Bytes:
        """`uint8[n, nbytes]` at byte offsets `at`. `mode`: hb.ASYNC, hb.STRONG."""
        if not self.check(actor, at, nbytes):
            return np.zeros((at.size, nbytes), np.uint8)
        self.shadow.read(actor, granules(at, nbytes, self.shift), mode)
        return gather(self.words, at, nbytes)

    def store(self, actor: Actor, at: Ints, data: Bytes, mode: int = 0) -> None:
        """Write `uint8[n, nbytes]` at byte offsets `at`."""
        nbytes = data.shape[1]
        if not self.check(actor, at, nbytes):
            return
        self.shadow.write(actor, granules(at, nbytes, self.shift), mode)
        self.cta.machine.progress += 1
        scatter(self.words, at, data)
        if self.clocks and not mode:
            for a in at.tolist():
                self.clocks.pop(a, None)

    def clock(self, at: int) -> Clock:
        """The clock of the strong operations on an address."""
        c = self.clocks.get(at)
        if c is None:
            c = self.clocks[at] = self.cta.machine.history.clock()
        return c
