"""schedule: warp roles, the order of tiles, ping-pong, and the ledger of pipelines and barriers."""

from __future__ import annotations

from attngen.ir.plan import ComputePlan, MaskPlan, MemoryPlan, NamedBarrier, Pipeline, Role, SchedulePlan
from attngen.passes.base import Reject
from attngen.targets import sm90

#: Bytes of K and V that heads which walk their row tiles together may take, and how many heads do at least (measured:
#: docs/schedules.md). A group of fewer ends in a tail of short tiles, whatever L2 holds.
L2_GROUP_BYTES, GROUP_HEADS = 32 << 20, 8


def takes_turns(compute: ComputePlan, mask: MaskPlan) -> bool:
    """Whether warpgroups issue their GEMMs in turn unless a spec says otherwise.

    A turn is for every KV tile of a row tile, also where a warpgroup passes it. Where each warpgroup's rows have two
    edges of their own (windows, documents) the first is at the end of a walk while the last has yet to begin, and with
    narrow heads, whose products are short, waiting for one another costs more than the order gives.
    """
    apart = mask.ranges_per_warpgroup and mask.form.clauses[0].lower is not None
    return not (apart and compute.head_dim_v_padded <= 64)


def plan_schedule(
    compute: ComputePlan,
    mask: MaskPlan,
    memory: MemoryPlan,
    order: str | None,
    pingpong: bool | None,
    pack: int = 1,
    ctas: int = 1,
) -> SchedulePlan | Reject:
    """Assign roles and write down who arrives where.

    Rewrite   tile -> persistent CTAs, one TMA producer warp, `warpgroups` consumers that issue their GEMMs in turn
    Keeps     one producer and one consumer group for each pipeline; full: one arrival and the bytes, empty: one arrival
              of each consumer warp, of all `ctas` of a cluster where K and V go to all of them
    Rejects   ping-pong that was asked for and has one warpgroup only
    Sources   FlashAttention-3 section 3.1 (ping-pong); LPT: Graham 1969
    """
    c, n = compute, compute.warpgroups
    if pingpong and n == 1:
        return Reject("schedule", f"ping-pong takes two consumer warpgroups: tile_m {c.tile_m} has one", 2.0)
    producer, consumer = sm90.REGISTERS[n]
    chosen = order if order not in (None, "auto") else "lpt" if mask.grows else "linear"
    k_bytes, v_bytes = c.tile_n * memory.columns_qk * 2, c.tile_n * memory.columns_v * 2
    q_bytes = 64 * memory.columns_qk * 2

    def pipeline(
        name: str, buffer: str, stages: int, stage_bytes: int, empty: int, consumer_name: str = "consumers"
    ) -> Pipeline:
        return Pipeline(
            name=name,
            buffer=buffer,
            stages=stages,
            producer="producer",
            consumer=consumer_name,
            stage_bytes=stage_bytes,
            full_arrivals=1,
            empty_arrivals=empty,
        )

    pipelines = (
        pipeline("q", "sQ", n, q_bytes, 1 if memory.o_in_q else 4, "one warpgroup each"),
        pipeline("k", "sK", memory.kv_stages, k_bytes, 4 * n * ctas),
        pipeline("v", "sV", memory.kv_stages, v_bytes, 4 * n * ctas),
        pipeline("mailbox", "slot", 1, 0, 4 * n),
        *([pipeline("ticket", "ticket", 1, 4, 1, "the producer of CTA 1")] if ctas > 1 else []),
    )
    turn = n > 1 and (takes_turns(c, mask) if pingpong is None else pingpong)
    named = (
        NamedBarrier(id=0, name="cta", threads=128 * (n + 1)),
        *(NamedBarrier(id=1 + w, name=f"turn of warpgroup {w}", threads=256) for w in range(n) if turn),
        *(NamedBarrier(id=5 + w, name=f"store of warpgroup {w}", threads=128) for w in range(n) if memory.stages_o),
    )
    return SchedulePlan(
        roles=(
            Role(name="producer", warps=(0, 1), registers=producer),
            Role(name="idle", warps=(1, 4), registers=producer),
            *(Role(name=f"consumer {w}", warps=(4 + 4 * w, 8 + 4 * w), registers=consumer) for w in range(n)),
        ),
        pipelines=pipelines,
        named_barriers=named,
        pingpong=turn,
        order="lpt" if chosen == "lpt" else "linear",
        l2_group_bytes=L2_GROUP_BYTES if chosen == "lpt" else 0,
        pack=pack,
    )
