"""memory: shared-memory buffers of the backward's main kernel, and the workspace in global memory."""

from __future__ import annotations

from attngen.ir.backward import BackwardCompute, BackwardMemory
from attngen.ir.plan import Buffer
from attngen.passes.backward.compute import fragment_registers
from attngen.passes.base import Reject
from attngen.passes.memory import aligned
from attngen.targets import sm90

Q_STAGES = DO_STAGES = DS_STAGES = 2
#: Words that a deterministic plan keeps for each query tile: how many KV tiles have added to it, by warpgroup.
TURN_WORDS = 4


def num_mbarriers(c: BackwardCompute, dq_stages: int) -> int:
    """K, V and the walk's length: one each; a full and an empty one for each stage of Q, dO, dS and dQ."""
    return 3 + 2 * (Q_STAGES + DO_STAGES + DS_STAGES + c.warpgroups * dq_stages)


def head_bytes(c: BackwardCompute, dq_stages: int) -> int:
    """mbarriers, step descriptors and row statistics, in front of the tiles."""
    words = 2 * num_mbarriers(c, dq_stages) + 3 * Q_STAGES + c.warpgroups * dq_stages
    statistics = -(-4 * c.tile_m * Q_STAGES // 128) * 128 + 4 * c.tile_m * DO_STAGES
    return aligned(-(-4 * words // 128) * 128 + statistics)


def plan_memory(c: BackwardCompute, deterministic: bool) -> BackwardMemory | Reject:
    """Lay out K, V, Q, dO, dS and the staged dQ.

    Rewrite   (tiles, head dims) -> sK, sV, sQ[2], sdO[2], sdS[2], sdQ[2, or 1 where two do not fit]
    Keeps     1024-byte alignment of every tile (128-byte swizzle); dK and dV leave through the bytes of K and V
    Rejects   tiles that do not fit with one slot of dQ
    """
    qk, v = c.head_dim_qk_padded, c.head_dim_v_padded
    shapes = (
        ("sK", (c.tile_n, qk, 1), 2),
        ("sV", (c.tile_n, v, 1), 2),
        ("sQ", (c.tile_m, qk, Q_STAGES), 2),
        ("sdO", (c.tile_m, v, DO_STAGES), 2),
        ("sdS", (c.tile_m, c.tile_n, DS_STAGES), 2),
    )
    tiles = [Buffer(name=n, bytes=aligned(s[0] * s[1] * s[2] * size), shape=s) for n, s, size in shapes]
    total = 0
    for dq_stages in (2, 1):
        staged = Buffer(name="sdQ", bytes=aligned(4 * c.tile_m * qk * dq_stages), shape=(c.tile_m, qk, dq_stages))
        buffers = (*tiles, staged)
        total = head_bytes(c, dq_stages) + sum(b.bytes for b in buffers)
        if total <= sm90.SMEM_BYTES:
            return BackwardMemory(
                q_stages=Q_STAGES,
                do_stages=DO_STAGES,
                ds_stages=DS_STAGES,
                dq_stages=dq_stages,
                buffers=buffers,
                smem_bytes=total,
                smem_limit=sm90.SMEM_BYTES,
                fragment_registers=fragment_registers(c),
                register_limit=sm90.REGISTERS[c.warpgroups][1],
                workspace_per_tile=c.tile_m * (qk + 2) + (TURN_WORDS if deterministic else 0),
            )
    return Reject(
        "memory",
        f"smem {total / 1024:.0f} KB of {sm90.SMEM_BYTES / 1024:.0f} KB: "
        + ", ".join(f"{b.name} {b.bytes / 1024:.0f} KB" for b in buffers),
        total / sm90.SMEM_BYTES,
    )
