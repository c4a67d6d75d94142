"""Special registers (PTX ISA, "Special Registers").

Clocks and %globaltimer advance with the work of the machine, so that code that times out ends; %smid is one legal
placement and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxcheck.machine import LANES, Warp
from ptxcheck.table import SHARED_BASE, SPECIALS, Read


def _u32(get: Callable[[Warp], int]) -> Read:
    return lambda w: np.uint32(get(w) & 0xFFFFFFFF)


def _u64(get: Callable[[Warp], int]) -> Read:
    return lambda w: np.uint64(get(w) & 0xFFFFFFFFFFFFFFFF)


def _axes(name: str, get: Callable[[Warp, int], Any]) -> None:
    for axis, letter in enumerate("xyz"):
        SPECIALS[f"%{name}.{letter}"] = _axis(get, axis)


def _axis(get: Callable[[Warp, int], Any], axis: int) -> Read:
    return lambda w: np.uint32(get(w, axis))


def _cluster_position(w: Warp, axis: int) -> int:
    return w.cta.ctaid[axis] % w.machine.cluster[axis]


for _axis_number, _letter in enumerate("xyz"):
    SPECIALS[f"%tid.{_letter}"] = lambda w, a=_axis_number: w.tid[a]  # type: ignore[misc]
_axes("ntid", lambda w, a: w.machine.block[a])
_axes("ctaid", lambda w, a: w.cta.ctaid[a])
_axes("nctaid", lambda w, a: w.machine.grid[a])
_axes("clusterid", lambda w, a: w.cta.cluster.index[a])
_axes("nclusterid", lambda w, a: w.machine.grid[a] // w.machine.cluster[a])
_axes("cluster_ctaid", _cluster_position)
_axes("cluster_nctaid", lambda w, a: w.machine.cluster[a])

_LANE_BITS = np.uint32(1) << LANES
SPECIALS.update(
    {
        "%laneid": lambda w: LANES,
        "%lanemask_eq": lambda w: _LANE_BITS,
        "%lanemask_lt": lambda w: _LANE_BITS - np.uint32(1),
        "%lanemask_le": lambda w: (_LANE_BITS - np.uint32(1)) | _LANE_BITS,
        "%lanemask_gt": lambda w: ~((_LANE_BITS - np.uint32(1)) | _LANE_BITS),
        "%lanemask_ge": lambda w: ~(_LANE_BITS - np.uint32(1)),
        "%warpid": _u32(lambda w: w.id),
        "%nwarpid": _u32(lambda w: 64),
        "%cluster_ctarank": _u32(lambda w: w.cta.rank),
        "%cluster_nctarank": _u32(lambda w: len(w.cta.cluster.ctas)),
        "%is_explicit_cluster": lambda w: np.bool_(w.machine.explicit_cluster),
        "%smid": _u32(lambda w: w.cta.sm),
        "%nsmid": _u32(lambda w: w.machine.sms),
        "%gridid": _u64(lambda w: 1),
        "%clock": _u32(lambda w: w.ticks()),
        "%clock_hi": _u32(lambda w: w.ticks() >> 32),
        "%clock64": _u64(lambda w: w.ticks()),
        "%globaltimer": _u64(lambda w: w.ticks()),
        "%globaltimer_lo": _u32(lambda w: w.ticks()),
        "%globaltimer_hi": _u32(lambda w: w.ticks() >> 32),
        "%dynamic_smem_size": _u32(lambda w: w.machine.dynamic_shared),
        "%total_smem_size": _u32(lambda w: w.program.static_shared + w.machine.dynamic_shared),
        "%aggr_smem_size": _u32(lambda w: SHARED_BASE + w.program.static_shared + w.machine.dynamic_shared),
        "%reserved_smem_offset_begin": _u32(lambda w: 0),
        "%reserved_smem_offset_end": _u32(lambda w: SHARED_BASE),
        "%reserved_smem_offset_cap": _u32(lambda w: SHARED_BASE),
    }
)
