"""schedule: roles of the backward's main kernel and its ledger of pipelines and barriers."""

from __future__ import annotations

from attngen.ir.backward import BackwardCompute, BackwardMemory, BackwardSchedule
from attngen.ir.plan import NamedBarrier, Pipeline, Role
from attngen.passes.backward.memory import WALK_STAGES
from attngen.passes.backward.order import TileOrder
from attngen.targets import sm90


def plan_schedule(
    c: BackwardCompute,
    memory: BackwardMemory,
    deterministic: bool,
    tiles: TileOrder,
    ragged: bool = False,
    captured: bool = False,
) -> BackwardSchedule:
    """Assign roles and write down who arrives where.

    Rewrite   KV tile after KV tile, handed out as CTAs come: a TMA producer warp, a reducing warp and 64 keys for each
              consumer warpgroup; with split operands, to two CTAs at a time, which walk in step: a stage of dS is
              filled by the warps of both and given back by the warps of both. Where walks are about equal, the tiles
              that leave a wave short are walked by several CTAs each: 4 K tokens of 4096 tiles over 132 SMs lose 3 %
              otherwise. Not where `captured` gradients are summed along a walk, by one CTA
    Keeps     no barrier between the warpgroups inside the walk: dQ runs one step behind through the ring of dS
    """
    n, statistics = c.warpgroups, 4 * c.tile_m
    producer, consumer = sm90.REGISTERS[n]
    k_bytes, v_bytes = c.keys * c.head_dim_qk_padded * 2, c.keys * c.head_dim_v_padded * 2
    q_bytes, do_bytes = c.tile_m * memory.q_columns * 2, c.tile_m * memory.do_columns * 2

    def pipeline(
        name: str, buffer: str, stages: int, stage_bytes: int, full: int, empty: int, ends: tuple[str, str]
    ) -> Pipeline:
        return Pipeline(
            name=name, buffer=buffer, stages=stages, producer=ends[0], consumer=ends[1], stage_bytes=stage_bytes,
            full_arrivals=full, empty_arrivals=empty,
        )  # fmt: skip

    load, exchange, add = ("producer", "consumers"), ("consumers", "consumers"), ("consumer", "reducer")
    splits = c.splits_operands
    reducers = 0 if splits else n
    zeroes = not (splits or deterministic or ragged)  # turns take its counters; split operands have no reducer
    zeroers = int(zeroes)
    ds_bytes = c.keys * c.tile_m * 2 if splits else 0  # of the other CTA's keys: copies that its warps announce
    readers = 1 if splits else 4 * n  # of K and V; with split operands dK and dV leave through their bytes
    last = (
        pipeline("p", "sP", memory.p_stages, 0, 4, 4, ("consumer 0", "consumer 1"))
        if splits
        else pipeline("dq", "sdQ", memory.dq_stages, 0, 4, 1, add)
    )
    return BackwardSchedule(
        roles=(
            Role(name="producer", warps=(0, 1), registers=producer),
            *(Role(name=f"reducer {w}", warps=(1 + w, 2 + w), registers=producer) for w in range(reducers)),
            *(Role(name="zeroer", warps=(1 + n, 2 + n), registers=producer) for _ in range(zeroers)),
            *(Role(name="idle", warps=(w, 4), registers=producer) for w in (1 + reducers + zeroers,) if w < 4),
            *(Role(name=f"consumer {w}", warps=(4 + 4 * w, 8 + 4 * w), registers=consumer) for w in range(n)),
        ),
        pipelines=(
            pipeline("k", "sK", 1, k_bytes, 1, readers, load),
            pipeline("v", "sV", 1, v_bytes, 1, readers, load),
            *(
                (
                    pipeline("peer_k", "sPeerK", 1, k_bytes // 2, 1, 1, load),
                    pipeline("ticket", "ticket", 1, 4, 1, 1, ("producer", "producer")),
                )
                if splits
                else ()
            ),
            pipeline("walk", "walks", WALK_STAGES, 0, 1, 4 * n + reducers + zeroers, load),
            pipeline("q", "sQ", memory.q_stages, q_bytes + statistics, 1, 4 * n, load),
            pipeline("do", "sdO", memory.do_stages, do_bytes + statistics, 1, 4 * n, load),
            pipeline("ds", "sdS", memory.ds_stages, ds_bytes, 4 * n, 4 * n * c.cluster, exchange),
            last,
        ),
        named_barriers=(
            *(() if splits else (NamedBarrier(id=0, name="cta", threads=128 * (n + 1)),)),  # two CTAs meet as a cluster
            *(() if splits else (NamedBarrier(id=1, name="stagger", threads=128 * n),)),
            *(NamedBarrier(id=1 + w, name=f"store of warpgroup {w}", threads=128 * n) for w in range(n) if splits),
            *(NamedBarrier(id=3 + w, name=f"own sum of warpgroup {w}", threads=128) for w in range(n) if splits),
            *(
                NamedBarrier(id=5 + w, name=f"turn of warpgroup {w}", threads=128)
                for w in range(n)
                if splits and deterministic
            ),
        ),
        pingpong=False,
        order="linear",
        l2_group_bytes=0,
        kv_order=tiles.kv_order,
        grouped=tiles.grouped,
        serpentine=tiles.serpentine,
        zeroes_ahead=zeroes,
        shares_walks=zeroes and not tiles.grouped and not captured,
    )
