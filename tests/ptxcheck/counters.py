"""What a run counts: instructions, bank conflicts of each access site, MMA shapes, exponentials, bytes of copies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
BANKS = 32  # of four bytes each


def wavefronts(at: Ints, nbytes: int) -> tuple[int, int]:
    """Shared-memory cycles of one access by the lanes at byte offsets `at`, and the fewest their bytes could take.

    Lanes are served in groups that move 128 bytes at most: all 32 for up to 4 bytes a lane, 16 for 8, 8 for 16. In a
    group, distinct words of one bank take a cycle each; lanes that read the same word share it.
    """
    lanes = 32 if nbytes <= 4 else 128 // nbytes
    total = best = 0
    for k in range(0, at.size, lanes):
        part = at[k : k + lanes]
        words = (part >> 2) if nbytes <= 4 else ((part >> 2)[:, None] + np.arange(nbytes // 4)).ravel()
        distinct = np.unique(words)
        total += int(np.bincount(distinct % BANKS).max())
        best += -(-distinct.size // BANKS)
    return total, best


@dataclass
class Site:
    """Bank conflicts of one instruction."""

    where: str
    executed: int = 0
    wavefronts: int = 0
    minimum: int = 0


@dataclass
class Counters:
    """Counts of one check, over all its launches."""

    instructions: int = 0
    tiles: int = 0  # CTAs that ran; set it to the number of tiles of the problem for counts a tile
    sites: dict[tuple[str, int], Site] = field(default_factory=dict)
    mma: Counter[str] = field(default_factory=Counter)  # wgmma and tcgen05.mma by shape
    operands: int = 0  # bytes of shared memory that wgmma reads, each operand of each instruction
    exponentials: int = 0  # values that ex2 was applied to
    copied: Counter[str] = field(default_factory=Counter)  # bytes through TMA, by tensor
    _seen: dict[tuple[str, int, bytes], tuple[int, int]] = field(default_factory=dict)

    def access(self, kernel: str, inst: Any, at: Ints, nbytes: int) -> None:
        """One shared-memory access by some lanes."""
        if at.size == 0:
            return
        low = int(at.min()) & ~127
        key = (kernel, inst.index, (at - low).tobytes())
        both = self._seen.get(key)
        if both is None:
            both = self._seen[key] = wavefronts(at, nbytes)
        site = self.sites.get(key[:2])
        if site is None:
            site = self.sites[key[:2]] = Site(inst.where)
        site.executed += 1
        site.wavefronts += both[0]
        site.minimum += both[1]

    def conflicts(self) -> list[Site]:
        """Sites that take more cycles than their bytes need, the worst first."""
        bad = [s for s in self.sites.values() if s.wavefronts > s.minimum]
        return sorted(bad, key=lambda s: s.minimum - s.wavefronts)

    def per_tile(self) -> dict[str, float]:
        """Instructions, exponentials and copied bytes a tile."""
        n = max(self.tiles, 1)
        return {
            "instructions": self.instructions / n,
            "exponentials": self.exponentials / n,
            "copied": sum(self.copied.values()) / n,
            "mma": sum(self.mma.values()) / n,
        }

    def __str__(self) -> str:
        lines = [f"{self.instructions} warp instructions, {self.exponentials} exponentials"]
        lines += [f"{n} x {shape}" for shape, n in sorted(self.mma.items())]
        lines += [f"{n} bytes copied: {tensor}" for tensor, n in sorted(self.copied.items())]
        lines += [f"{s.wavefronts} wavefronts for {s.minimum} in {s.executed}: {s.where}" for s in self.conflicts()]
        return "\n".join(lines)
