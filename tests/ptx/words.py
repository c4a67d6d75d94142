"""Addresses of a thread's own word, in shared memory and in an output, for tests of memory."""

from __future__ import annotations

import numpy as np

# %r4: shared base, %r5: 4 tid, %r6: own word; %rd8: own word of the output
OWN = """
mov.u32 %r4, smem;
shl.b32 %r5, %r0, 2;
add.u32 %r6, %r4, %r5;
cvt.u64.u32 %rd7, %r5;
add.s64 %rd8, %rd0, %rd7;
"""


def out(n: int = 64) -> np.ndarray:
    return np.zeros(n, np.uint32)
