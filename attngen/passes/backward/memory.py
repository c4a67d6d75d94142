"""memory: shared-memory buffers of the backward's main kernel, and the workspace in global memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from attngen.ir.backward import BackwardCompute, BackwardMemory
from attngen.ir.plan import Buffer
from attngen.passes.backward.compute import fragment_registers
from attngen.passes.base import Reject
from attngen.passes.memory import aligned, row_columns
from attngen.targets import sm90

Q_STAGES = DS_STAGES = WALK_STAGES = 2
#: Words beside the sums of each query tile, to 16 bytes: how many KV tiles have added to it, by warpgroup (of both CTAs
#: of a cluster), where they take turns; the last one of the first query tile counts the KV tiles that were handed out.
COUNTER_WORDS = {1: 4, 2: 8}


def num_mbarriers(c: BackwardCompute, do_stages: int, dq_stages: int, p_stages: int) -> int:
    """A full and an empty one for K, V, each stage of walks, Q, dO, dS, dQ and P; in a cluster also K and tickets."""
    cluster = 2 if c.cluster > 1 else 0
    return 2 * (2 + cluster + WALK_STAGES + Q_STAGES + do_stages + DS_STAGES + c.warpgroups * dq_stages + p_stages)


def head_bytes(c: BackwardCompute, do_stages: int, dq_stages: int, p_stages: int) -> int:
    """mbarriers, descriptors of walks and steps, and row statistics, in front of the tiles."""
    words = 2 * num_mbarriers(c, do_stages, dq_stages, p_stages)
    words += 2 * WALK_STAGES + 2 * Q_STAGES + c.warpgroups * dq_stages + c.cluster - 1
    statistics = -(-4 * c.tile_m * Q_STAGES // 128) * 128 + 4 * c.tile_m * do_stages
    return aligned(-(-4 * words // 128) * 128 + statistics)


def step_columns(extent: int) -> int:
    """Columns of a row of Q or dO, where there is room: whole swizzles of 128 bytes where the forward takes those.

    Swizzles of 64 bytes in place of 32 gained nothing here (head dim 144).
    """
    columns = row_columns(extent)
    return columns if columns % 64 == 0 else extent


def plan_memory(c: BackwardCompute, exact_p: bool = False) -> BackwardMemory | Reject:
    """Lay out K, V, Q, dO, dS, and the staged dQ or the exchanged P, in fp32 where `exact_p`.

    Rewrite   (tiles, head dims) -> sK, sV, sQ[2], sdO[2], sdS[2], and sdQ[2 or 1]; or, where the warpgroups split the
              operands and dQ leaves from registers, sPeerK (half of the columns of the other CTA's keys), sdO[2 or 1],
              sdS[2] of the keys of both CTAs, and sP[2 or 1]
    Keeps     1024-byte alignment of every tile (128-byte swizzle); dK and dV leave through the bytes of K and V; rows
              of Q and dO, which every step loads, of whole swizzles of 128 bytes where that costs no stage
    Rejects   tiles that do not fit with one stage of the last
    """
    qk, v, m, two = c.head_dim_qk_padded, c.head_dim_v_padded, c.tile_m, 2
    p_bytes = 4 if exact_p else 2
    found: BackwardMemory | Reject
    rows = dict.fromkeys(((step_columns(qk), step_columns(v)), (qk, v)))  # wide where they fit
    stages_of = ((2, 2), (2, 1), (1, 2), (1, 1)) if c.splits_operands else ((2, 2), (2, 1))
    for (do_stages, stages), (q_columns, do_columns) in product(stages_of, rows):
        shapes = [
            ("sK", two, (c.keys, qk, 1)),
            ("sV", two, (c.keys, v, 1)),
            ("sQ", two, (m, q_columns, Q_STAGES)),
            ("sdO", two, (m, do_columns, do_stages)),
        ]
        if c.splits_operands:
            shapes += [
                ("sPeerK", two, (c.keys, qk // 2, 1)),
                ("sdS", two, (c.keys, m, 2 * DS_STAGES)),
                ("sP", p_bytes, (c.keys, m, stages)),
            ]
        else:
            shapes += [("sdS", two, (m, c.tile_n, DS_STAGES)), ("sdQ", 4, (m, qk, stages))]
        buffers = [Buffer(name=name, bytes=aligned(size * prod(shape)), shape=shape) for name, size, shape in shapes]
        found = _planned(c, buffers, do_stages, stages, p_bytes if c.splits_operands else 2)
        if isinstance(found, BackwardMemory):
            break
    return found


def _planned(
    c: BackwardCompute, buffers: Sequence[Buffer], do_stages: int, last_stages: int, p_bytes: int
) -> BackwardMemory | Reject:
    """The memory, if it fits; `last_stages`: of dQ, or of P with split operands."""
    dq_stages, p_stages = (0, last_stages) if c.splits_operands else (last_stages, 0)
    total = head_bytes(c, do_stages, dq_stages, p_stages) + sum(b.bytes for b in buffers)
    if total > sm90.SMEM_BYTES:
        return Reject(
            "memory",
            f"smem {total / 1024:.0f} KB of {sm90.SMEM_BYTES / 1024:.0f} KB: "
            + ", ".join(f"{b.name} {b.bytes / 1024:.0f} KB" for b in buffers),
            total / sm90.SMEM_BYTES,
        )
    return BackwardMemory(
        q_stages=Q_STAGES,
        do_stages=do_stages,
        ds_stages=DS_STAGES,
        dq_stages=dq_stages,
        p_stages=p_stages,
        p_bytes=p_bytes,
        buffers=tuple(buffers),
        smem_bytes=total,
        smem_limit=sm90.SMEM_BYTES,
        fragment_registers=fragment_registers(c),
        register_limit=sm90.REGISTERS[c.warpgroups][1],
        workspace_per_tile=c.tile_m * (c.head_dim_qk_padded + 2) + COUNTER_WORDS[c.cluster],
    )
