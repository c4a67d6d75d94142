"""Hopper, sm_90a: limits of one SM and the rates that the cost model uses.

Sources: CUDA programming guide, measured figures in docs/performance.md.
"""

from __future__ import annotations

NAME = "sm_90a"
SMS = 132
#: Shared memory that one CTA may ask for.
SMEM_BYTES = 227 * 1024
MAX_WARPGROUPS = 4
#: setmaxnreg of (producer, consumer) by consumer warpgroups; the sum over warpgroups stays within 64 K registers.
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}
#: Registers at launch: 65536 / threads, rounded down to a multiple of 8.
LAUNCH_REGISTERS = {1: 240, 2: 168, 3: 128, 4: 96}
#: Beyond S, P and O a consumer holds about this many registers (addresses, statistics, loop state); less spills.
REGISTER_OVERHEAD = 32

MMA_FLOP_PER_CYCLE = 4096
EXP_PER_CYCLE = 16
ISSUE_PER_CYCLE = 128
SMEM_BYTES_PER_CYCLE = 128
HBM_BYTES_PER_SECOND = 4.3e12
CLOCK_HZ = 1.65e9

#: How far the work of one unit hides the others', by consumer warpgroups: time over the busiest unit's time (fitted to
#: measured kernels; see docs/performance.md).
OVERLAP = {1: 1.7, 2: 1.2, 3: 0.95, 4: 0.95}
#: Cycles a KV tile costs beyond that (barriers, vote, statistics), and cycles a row tile costs (first GEMM, epilogue)
#: for each consumer warpgroup at head_dim_v 128.
TILE_CYCLES = 250
ROW_TILE_CYCLES = 1750
#: Cycles of a launch beside its row tiles: two microseconds (measured: docs/schedules.md, what 512 and 1024 rows have
#: in common).
LAUNCH_CYCLES = 3400
