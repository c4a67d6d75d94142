"""Break one edge, size or count of a valid backward plan: the verifier must name the fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from test_corrupt_plan import drop, item, section

from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec
from attngen.verify.backward import faults, set_faults, verify, verify_set
from attngen.verify.plan import PlanError

#: Rings of dQ; operands split between the warpgroups; its turns.
SPECS = {
    "plain": "head_dim = 128",
    "narrow": "head_dim = 72, v = 40\n  mask = kv_idx <= q_pos\n  backward { deterministic = true }",
    "wide": "head_dim = 256",
    "turns": "head_dim = 256\n  backward { deterministic = true }",
}
Corrupt = Callable[[BackwardPlan], BackwardPlan]


@cache
def planned(name: str) -> BackwardPlanSet:
    return plan_backward(load_spec(f"attn 1\nattention {name} {{\n  {SPECS[name]}\n}}\n"))


@pytest.mark.parametrize("name", SPECS)
def test_plans_have_no_fault(name: str) -> None:
    plans = planned(name)
    assert all(faults(p) == [] for p in (*plans.plans, *plans.others))
    assert plans.plans[0].compute.splits_operands == (name in ("wide", "turns"))


CORRUPTIONS: dict[str, tuple[str, Corrupt, str]] = {
    "tile_n": ("plain", section("compute", tile_n=64), "compute: tile_n 64, the warpgroups own 128 keys"),
    "tile_n split": ("wide", section("compute", tile_n=64), "compute: tile_n 64, the warpgroups own 128 keys"),
    "tile_m split": ("wide", section("compute", tile_m=128), "compute: split operands take 64 queries a step, not 128"),
    "padding split": ("wide", section("compute", head_dim_qk_padded=272), "compute: head_dim_qk 256 is padded to 272"),
    "no cluster": ("wide", section("launch", cluster=(1, 1, 1)), "launch: a cluster of (1, 1, 1)"),
    "transposed split": ("wide", section("compute", dq_transposed=True), "compute: split operands take dQ as it is"),
    "tile_m": ("plain", section("compute", tile_m=88), "compute: tile_m 88 is no k extent of a WGMMA"),
    "tile_m too tall": ("plain", section("compute", tile_m=272), "compute: tile_m 272 is no k extent of a WGMMA"),
    "dQ rows": ("plain", section("compute", dq_transposed=False), "compute: dQ has 80 rows, not a multiple of 64"),
    "dQ columns": (
        "wide", section("compute", head_dim_qk=1056, head_dim_qk_padded=1056),
        "compute: dQ has 264 columns a warpgroup",
    ),
    "dQ shared unevenly": (
        "plain", section("compute", tile_m=64, head_dim_qk=528, head_dim_qk_padded=528),
        "compute: the warpgroups do not share out dQ evenly",
    ),
    "padding": ("plain", section("compute", head_dim_qk_padded=160), "compute: head_dim_qk 128 is padded to 160"),
    "padding below": ("plain", section("compute", head_dim_v_padded=112), "compute: head_dim_v 128 is padded to 112"),
    "row of no swizzle": (
        "plain", item("memory", "buffers", "sQ", shape=(80, 144, 2)), "memory: rows of Q of 144 columns for 128"
    ),
    "row too narrow": (
        "plain", item("memory", "buffers", "sdO", shape=(80, 96, 2)), "memory: rows of dO of 96 columns for 128"
    ),
    "smem limit": ("plain", section("memory", smem_limit=64 * 1024), "memory: 231424 bytes of 65536"),
    "smem over": ("plain", section("memory", smem_bytes=240_000), "memory: 240000 bytes of 232448"),
    "smem total": ("plain", section("memory", smem_bytes=228_352), "memory: buffers take"),
    "buffer alignment": (
        "plain", item("memory", "buffers", "sV", bytes=32784), "memory: a buffer does not end at a multiple of 1024",
    ),
    "buffer bytes": ("plain", item("memory", "buffers", "sK", bytes=1024), "memory: sK takes 32768 bytes, has 1024"),
    "buffer waste": ("plain", item("memory", "buffers", "sK", bytes=65536), "memory: sK takes 32768 bytes, has 65536"),
    "buffer shape": ("plain", item("memory", "buffers", "sQ", shape=(80, 128, 3)), "memory: buffers {'sK'"),
    "buffer lost": ("plain", drop("memory", "buffers"), "memory: buffers {'sK'"),
    "buffer of the other kind": ("wide", item("memory", "buffers", "sP", name="sdQ"), "memory: buffers {'sK'"),
    "buffer alias": ("plain", item("memory", "buffers", "sdQ", alias_of="sK"), "memory: sdQ lives in sK"),
    "one stage of Q": ("plain", section("memory", q_stages=1), "memory: Q takes two stages"),
    "one stage of dO": ("plain", section("memory", do_stages=1), "memory: dO takes 2 stages at least, has 1"),
    "no stage of dO": ("wide", section("memory", do_stages=0), "memory: dO takes 1 stages at least, has 0"),
    "one stage of dS": ("plain", section("memory", ds_stages=1), "memory: dS takes two stages"),
    "no stage of dQ": ("plain", section("memory", dq_stages=0), "memory: 0 stages of P and 0 of dQ"),
    "no stage of P": ("wide", section("memory", p_stages=0), "memory: 0 stages of P and 0 of dQ"),
    "P beside dQ": ("plain", section("memory", p_stages=1), "memory: 1 stages of P and 1 of dQ"),
    "register limit": ("plain", section("memory", register_limit=255), "memory: register limit 255"),
    "fragments": ("plain", section("memory", fragment_registers=241), "memory: 241 of 240 registers"),
    "fragments forgotten": (
        "plain", section("memory", fragment_registers=200), "memory: 200 registers, sums, S and dP take 208",
    ),
    "dQ quads": (
        "narrow", section("compute", tile_m=48),
        "memory: a dQ tile of 3840 words is not whole quads of every thread",
    ),
    "workspace": ("plain", section("memory", workspace_per_tile=10401), "memory: 10401 words of workspace"),
    "workspace without counters": (
        "plain", section("memory", workspace_per_tile=10400), "memory: 10400 words of workspace",
    ),
    "workspace without D": ("plain", section("memory", workspace_per_tile=10320), "memory: 10320 words of workspace"),
    "threads": ("plain", section("launch", threads=256), "launch: 256 threads for 2 warpgroups"),
    "launch registers": ("plain", section("launch", launch_registers=176), "launch: 176 registers of 384 threads"),
    "cluster": ("plain", section("launch", cluster=(2, 1, 1)), "launch: a cluster of (2, 1, 1)"),
    "warps lost": ("plain", item("schedule", "roles", "consumer 1", warps=(8, 11)), "schedule: roles cover warps"),
    "warps shared": ("plain", item("schedule", "roles", "consumer 1", warps=(7, 12)), "schedule: roles cover warps"),
    "zeroer lost": ("plain", item("schedule", "roles", "zeroer", name="idle"), "schedule: roles {'producer'"),
    "reducer lost": ("plain", item("schedule", "roles", "reducer 1", name="idle 1"), "schedule: roles {'producer'"),
    "reducer of split operands": (
        "wide", item("schedule", "roles", "idle", name="reducer 0"), "schedule: roles {'producer'",
    ),
    "consumer lost": ("plain", drop("schedule", "roles"), "schedule: roles cover warps"),
    "role registers": (
        "plain", item("schedule", "roles", 0, registers=20), "schedule: a register count is no setmaxnreg value",
    ),
    "role registers uneven": (
        "plain", item("schedule", "roles", "consumer 1", registers=232), "schedule: consumers differ in registers",
    ),
    "producer registers uneven": (
        "plain", item("schedule", "roles", 0, registers=40), "schedule: other warps differ in registers: [24, 40]",
    ),
    "role registers sum": (
        "plain", item("schedule", "roles", "zeroer", registers=240), "registers of 65536",
    ),
    "walks shared with turns": (
        "plain", section("schedule", zeroes_ahead=False), "schedule: walks are shared where they are even",
    ),
    "uneven walks shared": (
        "plain", section("schedule", grouped=True), "schedule: walks are shared where they are even",
    ),
    "q arrivals": ("plain", item("schedule", "pipelines", "q", empty_arrivals=1), "schedule: arrivals"),
    "ds arrivals": ("plain", item("schedule", "pipelines", "ds", full_arrivals=4), "schedule: arrivals"),
    "ds arrivals split": ("wide", item("schedule", "pipelines", "ds", full_arrivals=4), "schedule: arrivals"),
    "ds given back by one CTA": ("wide", item("schedule", "pipelines", "ds", empty_arrivals=8), "schedule: arrivals"),
    "ds bytes split": (
        "wide", item("schedule", "pipelines", "ds", stage_bytes=0), "schedule: ds announces 0 bytes, 8192 land",
    ),
    "ticket bytes": (
        "wide", item("schedule", "pipelines", "ticket", stage_bytes=8), "schedule: ticket announces 8 bytes, 4 land",
    ),
    "peer's K": (
        "wide", item("schedule", "pipelines", "peer_k", stage_bytes=32768),
        "schedule: peer_k announces 32768 bytes, 16384 land",
    ),
    "p arrivals": ("wide", item("schedule", "pipelines", "p", empty_arrivals=1), "schedule: arrivals"),
    "k arrivals": ("plain", item("schedule", "pipelines", "k", empty_arrivals=0), "schedule: arrivals"),
    "v arrivals split": ("wide", item("schedule", "pipelines", "v", empty_arrivals=8), "schedule: arrivals"),
    "walk arrivals": ("plain", item("schedule", "pipelines", "walk", empty_arrivals=8), "schedule: arrivals"),
    "walk arrivals split": ("wide", item("schedule", "pipelines", "walk", empty_arrivals=10), "schedule: arrivals"),
    "stages of walks": (
        "plain", item("schedule", "pipelines", "walk", stages=1), "schedule: walk has 1 stages, memory 2",
    ),
    "dq arrivals": ("plain", item("schedule", "pipelines", "dq", full_arrivals=1), "schedule: arrivals"),
    "pipeline lost": ("plain", drop("schedule", "pipelines"), "schedule: arrivals"),
    "pipeline stages": (
        "plain", item("schedule", "pipelines", "do", stages=3), "schedule: do has 3 stages, memory 2",
    ),
    "pipeline buffer": (
        "plain", item("schedule", "pipelines", "q", buffer="sdO"), "schedule: q fills sdO, not sQ",
    ),
    "bytes of K": (
        "plain", item("schedule", "pipelines", "k", stage_bytes=1), "schedule: k announces 1 bytes, 32768 land",
    ),
    "bytes without statistics": (
        "plain", item("schedule", "pipelines", "q", stage_bytes=20480),
        "schedule: q announces 20480 bytes, 20800 land",
    ),
    "bytes of a ring of registers": (
        "plain", item("schedule", "pipelines", "ds", stage_bytes=64), "schedule: ds announces 64 bytes, 0 land",
    ),
    "barrier twice": ("plain", item("schedule", "named_barriers", 1, id=0), "schedule: two named barriers"),
    "barrier threads": (
        "plain", item("schedule", "named_barriers", "stagger", threads=128),
        "schedule: named barriers {0: 384, 1: 128",
    ),
    "barrier threads split": (
        "wide", item("schedule", "named_barriers", "store of warpgroup 0", threads=128),
        "schedule: named barriers {1: 128",
    ),
    "barrier lost": ("plain", drop("schedule", "named_barriers"), "schedule: named barriers {0: 384}"),
    "turn lost": ("turns", drop("schedule", "named_barriers"), "the roles meet at"),
    "own sum": (
        "wide", item("schedule", "named_barriers", "own sum of warpgroup 1", threads=256), "4: 256}, the roles meet at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_fault_is_named(name: str) -> None:
    spec, corrupt, fault = CORRUPTIONS[name]
    broken = corrupt(planned(spec).long_plan)
    found = faults(broken)
    assert any(fault in f for f in found), found
    with pytest.raises(PlanError, match=f"backward plan {broken.name}: "):
        verify(broken)


def causal() -> BackwardPlanSet:
    """Two plans by length."""
    plans = plan_backward(load_spec("attn 1\nattention causal {\n  head_dim = 128\n  mask = kv_idx <= q_pos\n}\n"))
    assert len(plans.plans) == 2 and set_faults(plans) == []
    return plans


SETS: dict[str, tuple[Callable[[BackwardPlanSet], BackwardPlanSet], str]] = {
    "no plan": (lambda s: s.replace(plans=()), "0 plans, at most 3"),
    "limit lost": (lambda s: s.replace(limits=()), "0 limits for 2 plans"),
    "limit zero": (lambda s: s.replace(limits=(0,)), "limits (0,) do not ascend"),
    "limits descend": (lambda s: s.replace(plans=(*s.plans, s.others[0]), limits=(512, 256)), "limits (512, 256) do"),
    "same plan": (lambda s: s.replace(plans=(s.plans[0], s.plans[0])), "two plans are the same tile"),
    "another order": (
        lambda s: s.replace(plans=(s.plans[0], section("schedule", kv_order="descending")(s.plans[1]))),
        "more than one kernel class",
    ),
    "another walk": (
        lambda s: s.replace(plans=(s.plans[0], section("schedule", serpentine=False)(s.plans[1]))),
        "more than one kernel class",
    ),
    "other stages of dS": (
        lambda s: s.replace(plans=(section("memory", ds_stages=3)(s.plans[0]), s.plans[1])),
        "more than one kernel class",
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_the_fault_between_plans_is_named(name: str) -> None:
    corrupt, fault = SETS[name]
    broken = corrupt(causal())
    found = set_faults(broken)
    assert any(fault in f for f in found), found


def test_a_fault_between_plans_is_raised() -> None:
    with pytest.raises(PlanError, match="backward plans of causal: 0 limits for 2 plans"):
        verify_set(causal().replace(limits=()))
