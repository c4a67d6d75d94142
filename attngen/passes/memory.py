"""memory: shared-memory buffers, KV stages, and the register split."""

from __future__ import annotations

from attngen.ir.plan import Buffer, ComputePlan, MemoryPlan
from attngen.passes.base import Reject
from attngen.passes.compute import Candidate, fragment_registers
from attngen.targets import sm90

#: Keys in flight that hide TMA latency: tile_n * stages, where shared memory allows.
KEYS_IN_FLIGHT = 384
BARRIER_BYTES = 1024


def aligned(size: int) -> int:
    """Bytes that a buffer takes: the next multiple of 1024, what a 128-byte swizzle repeats over."""
    return -(-size // 1024) * 1024


def row_columns(head_dim: int) -> int:
    """Columns of a row in shared memory: whole swizzles of 64 or 128 bytes, so that TMA takes few boxes a row.

    A box is as wide as the swizzle, 32, 64 or 128 bytes, of which only whole ones make up a row. Narrow ones cost: rows
    that do not begin at a 32-byte sector of L2 touch two of them with every box of 32 bytes.
    """
    return 16 if head_dim <= 16 else -(-head_dim // 32) * 32


def _kilobytes(n: int) -> str:
    return f"{n / 1024:.0f} KB"


def distance_values(tile_n: int) -> int:
    """Values of a score by distance that a warp keeps for a tile of 16 rows: tile_n + 15, whole turns of 32 lanes."""
    return -(-(tile_n + 15) // 32) * 32


def plan_memory(
    compute: ComputePlan, wanted_stages: int | None, o_in_q: bool, by_distance: bool = False, stages_o: bool = True
) -> MemoryPlan | Reject:
    """Lay out Q, K, V and O in shared memory.

    Rewrite   (tiles, head dims) -> sQ, sK[stages], sV[stages], sO (its own, or in Q's bytes; none where O leaves from
              registers) behind the mbarriers, and sDistance where the score has a part by distance
    Keeps     1024-byte alignment of every buffer (128-byte swizzle); rows of whole swizzles of at least 64 bytes
    Rejects   tiles that leave no room for two KV stages, or for as many as were asked for; O wider than the Q whose
              bytes it takes
    """
    c = compute
    qk, v = row_columns(c.head_dim_qk), row_columns(c.head_dim_v)
    q = aligned(c.tile_m * qk * 2)
    o = aligned(c.tile_m * v * 2) if stages_o else 0
    stage = c.tile_n * (qk + v) * 2
    if o_in_q and not stages_o:
        return Reject("memory", "O leaves from registers: it needs no bytes of Q", 2.0)
    if o_in_q and o > q:
        return Reject("memory", f"O ({_kilobytes(o)}) does not fit in the bytes of Q ({_kilobytes(q)})", o / q)
    per_warp = distance_values(c.tile_n)
    distances = aligned(4 * c.warpgroups * per_warp * 4) if by_distance else 0
    fixed = BARRIER_BYTES + q + (0 if o_in_q else o) + distances
    fit = (sm90.SMEM_BYTES - fixed) // stage
    stages = wanted_stages or min(max(-(-KEYS_IN_FLIGHT // c.tile_n), 2), 6, max(fit, 2))
    k_bytes = aligned(stages * c.tile_n * qk * 2)
    v_bytes = aligned(stages * c.tile_n * v * 2)
    total = fixed + k_bytes + v_bytes
    if total > sm90.SMEM_BYTES:
        return Reject(
            "memory",
            f"smem {_kilobytes(total)} of {_kilobytes(sm90.SMEM_BYTES)}: tile {c.tile_m}x{c.tile_n}, stages {stages}, "
            f"Q {_kilobytes(q)}" + ("" if o_in_q else f", O {_kilobytes(o)}"),
            total / sm90.SMEM_BYTES,
        )
    buffers: tuple[Buffer, ...] = (
        Buffer(name="sQ", bytes=q, shape=(64, qk, c.warpgroups)),
        Buffer(
            name="sO",
            bytes=0 if o_in_q else o,
            shape=(64, v, c.warpgroups),
            alias_of="sQ" if o_in_q else None,
        ),
        Buffer(name="sK", bytes=k_bytes, shape=(c.tile_n, qk, stages)),
        Buffer(name="sV", bytes=v_bytes, shape=(c.tile_n, v, stages)),
    )
    if by_distance:
        buffers = (*buffers, Buffer(name="sDistance", bytes=distances, shape=(per_warp, 4 * c.warpgroups, 2)))
    return MemoryPlan(
        kv_stages=stages,
        buffers=tuple(b for b in buffers if stages_o or b.name != "sO"),
        smem_bytes=total,
        smem_limit=sm90.SMEM_BYTES,
        o_in_q=o_in_q,
        fragment_registers=fragment_registers(
            Candidate(warpgroups=c.warpgroups, tile_n=c.tile_n), c.head_dim_v, c.expression_registers
        ),
        register_limit=sm90.REGISTERS[c.warpgroups][1],
    )
