"""memory: shared-memory buffers of the backward's main kernel, and the workspace in global memory."""

from __future__ import annotations

from attngen.ir.backward import BackwardCompute, BackwardMemory
from attngen.ir.plan import Buffer
from attngen.passes.backward.compute import fragment_registers
from attngen.passes.base import Reject
from attngen.passes.memory import aligned
from attngen.targets import sm90

Q_STAGES = DO_STAGES = DS_STAGES = WALK_STAGES = 2
#: Words beside the sums of each query tile: how many KV tiles have added to it, by warpgroup, where they take turns;
#: the last one of the first query tile counts the KV tiles that were handed out.
COUNTER_WORDS = 4


def num_mbarriers(c: BackwardCompute, dq_stages: int, p_stages: int) -> int:
    """A full and an empty one for K, for V, and for each stage of walks, Q, dO, dS, dQ and P."""
    return 2 * (2 + WALK_STAGES + Q_STAGES + DO_STAGES + DS_STAGES + c.warpgroups * dq_stages + p_stages)


def head_bytes(c: BackwardCompute, dq_stages: int, p_stages: int) -> int:
    """mbarriers, step descriptors and row statistics, in front of the tiles."""
    words = 2 * num_mbarriers(c, dq_stages, p_stages) + 2 * WALK_STAGES + 2 * Q_STAGES + c.warpgroups * dq_stages
    statistics = -(-4 * c.tile_m * Q_STAGES // 128) * 128 + 4 * c.tile_m * DO_STAGES
    return aligned(-(-4 * words // 128) * 128 + statistics)


def plan_memory(c: BackwardCompute, exact_p: bool = False) -> BackwardMemory | Reject:
    """Lay out K, V, Q, dO, dS, and the staged dQ or the exchanged P, in fp32 where `exact_p`.

    Rewrite   (tiles, head dims) -> sK, sV, sQ[2], sdO[2], sdS[2], and sdQ[2 or 1]; or sP[2 or 1] where the warpgroups
              split the operands and dQ leaves from registers
    Keeps     1024-byte alignment of every tile (128-byte swizzle); dK and dV leave through the bytes of K and V
    Rejects   tiles that do not fit with one stage of the last
    """
    qk, v = c.head_dim_qk_padded, c.head_dim_v_padded
    shapes = (
        ("sK", (c.tile_n, qk, 1)),
        ("sV", (c.tile_n, v, 1)),
        ("sQ", (c.tile_m, qk, Q_STAGES)),
        ("sdO", (c.tile_m, v, DO_STAGES)),
        ("sdS", (c.tile_m, c.tile_n, DS_STAGES)),
    )
    tiles = [Buffer(name=name, bytes=aligned(2 * s[0] * s[1] * s[2]), shape=s) for name, s in shapes]
    total, p_bytes = 0, 4 if exact_p else 2
    for stages in (2, 1):
        if c.splits_operands:
            size = aligned(p_bytes * c.tile_n * c.tile_m * stages)
            last = Buffer(name="sP", bytes=size, shape=(c.tile_n, c.tile_m, stages))
        else:
            last = Buffer(name="sdQ", bytes=aligned(4 * c.tile_m * qk * stages), shape=(c.tile_m, qk, stages))
        dq_stages, p_stages = (0, stages) if c.splits_operands else (stages, 0)
        buffers = (*tiles, last)
        total = head_bytes(c, dq_stages, p_stages) + sum(b.bytes for b in buffers)
        if total <= sm90.SMEM_BYTES:
            return BackwardMemory(
                q_stages=Q_STAGES,
                do_stages=DO_STAGES,
                ds_stages=DS_STAGES,
                dq_stages=dq_stages,
                p_stages=p_stages,
                p_bytes=p_bytes,
                buffers=buffers,
                smem_bytes=total,
                smem_limit=sm90.SMEM_BYTES,
                fragment_registers=fragment_registers(c),
                register_limit=sm90.REGISTERS[c.warpgroups][1],
                workspace_per_tile=c.tile_m * (qk + 2) + COUNTER_WORDS,
            )
    return Reject(
        "memory",
        f"smem {total / 1024:.0f} KB of {sm90.SMEM_BYTES / 1024:.0f} KB: "
        + ", ".join(f"{b.name} {b.bytes / 1024:.0f} KB" for b in buffers),
        total / sm90.SMEM_BYTES,
    )
