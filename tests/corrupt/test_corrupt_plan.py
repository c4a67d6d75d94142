"""Break one edge, size or count of a valid plan: the verifier must name the fault."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from attngen.ir.plan import KernelPlan, Maxima, PlanSet, Rescale
from attngen.ir.types import Layout
from attngen.search import plan
from attngen.syntax import load_spec
from attngen.verify.plan import PlanError, faults, set_faults, verify, verify_set

CAUSAL = "attn 1\nattention causal {\n  head_dim = 128\n  mask = kv_idx <= q_pos\n}\n"
FULL = "attn 1\nattention full {\n  head_dim = 64\n}\n"
WIDE = "attn 1\nattention wide {\n  head_dim = 256\n  mask = kv_idx <= q_pos and q_pos - kv_idx < 99\n}\n"


@cache
def planned(text: str) -> PlanSet:
    return plan(load_spec(text))


def section(name: str, /, **changes: object) -> Callable[[KernelPlan], KernelPlan]:
    """Change fields of one section."""
    return lambda p: p.replace(**{name: getattr(p, name).replace(**changes)})


def item(name: str, field: str, which: str | int, /, **changes: object) -> Callable[[KernelPlan], KernelPlan]:
    """Change one entry of a tuple of a section: by its name or its index."""

    def corrupt(p: KernelPlan) -> KernelPlan:
        entries = list(getattr(getattr(p, name), field))
        i = which if isinstance(which, int) else next(k for k, e in enumerate(entries) if e.name == which)
        entries[i] = entries[i].replace(**changes)
        return p.replace(**{name: getattr(p, name).replace(**{field: tuple(entries)})})

    return corrupt


def drop(name: str, field: str, i: int = -1) -> Callable[[KernelPlan], KernelPlan]:
    def corrupt(p: KernelPlan) -> KernelPlan:
        entries = list(getattr(getattr(p, name), field))
        del entries[i]
        return p.replace(**{name: getattr(p, name).replace(**{field: tuple(entries)})})

    return corrupt


CORRUPTIONS: dict[str, tuple[Callable[[KernelPlan], KernelPlan], str]] = {
    "tile_m": (section("compute", tile_m=192), "compute: tile_m 192 is not 64 x 2 warpgroups"),
    "warpgroups": (section("compute", warpgroups=5, tile_m=320), "compute: 5 warpgroups of 4"),
    "tile_n": (section("compute", tile_n=120), "compute: tile_n 120 is no WGMMA extent"),
    "tile_n too wide": (section("compute", tile_n=272), "compute: tile_n 272 is no WGMMA extent"),
    "padding": (section("compute", head_dim_qk_padded=160), "compute: head_dim_qk 128 is padded to 160"),
    "padding below": (section("compute", head_dim_v_padded=112), "compute: head_dim_v 128 is padded to 112"),
    "smem total": (section("memory", smem_bytes=200_000), "memory: buffers take"),
    "maxima of no growth": (
        section("compute", maxima=Maxima.INTS, rescale=Rescale.NEVER),
        "compute: maxima of ints are none, rescale never takes none",
    ),
    "smem limit": (section("memory", smem_limit=64 * 1024), "memory: total"),
    "buffer bytes": (item("memory", "buffers", "sK", bytes=1024), "memory: sK"),
    "buffer alignment": (item("memory", "buffers", "sV", bytes=65552), "memory: a buffer breaks 1024-byte alignment"),
    "buffer shape": (item("memory", "buffers", "sQ", shape=(64, 128, 3)), "memory: sQ has shape (64, 128, 3)"),
    "row of no swizzle": (item("memory", "buffers", "sV", shape=(128, 144, 2)), "memory: rows of 144 columns"),
    "row too narrow": (item("memory", "buffers", "sK", shape=(128, 96, 2)), "memory: rows of 96 columns for head_dim"),
    "buffer lost": (drop("memory", "buffers"), "memory: buffers ['sK', 'sO', 'sQ']"),
    "buffer alias": (item("memory", "buffers", "sO", alias_of="sK"), "memory: sO lives in sK, o_in_q is False"),
    "alias of nothing": (item("memory", "buffers", "sO", alias_of="sX"), "does not fit in sX"),
    "o_in_q": (section("memory", o_in_q=True), "memory: sO lives in None, o_in_q is True"),
    "kv_stages": (section("memory", kv_stages=3), "memory: sK has shape"),
    "fragments": (section("memory", fragment_registers=241), "memory: 241 registers of 240"),
    "fragments forgotten": (section("memory", fragment_registers=100), "memory: 100 registers, S, P and O take 160"),
    "role registers": (
        item("schedule", "roles", 2, registers=250),
        "schedule: a register count is no setmaxnreg value",
    ),
    "role registers sum": (item("schedule", "roles", 1, registers=240), "schedule: roles take"),
    "role registers uneven": (item("schedule", "roles", 2, registers=232), "schedule: consumers differ in registers"),
    "warps lost": (
        item("schedule", "roles", "consumer 1", warps=(8, 11)),
        "schedule: roles do not cover the warps once",
    ),
    "warps shared": (
        item("schedule", "roles", "consumer 1", warps=(7, 12)),
        "schedule: roles do not cover the warps once",
    ),
    "producer moved": (item("schedule", "roles", "producer", name="idle"), "schedule: warp 0 is idle"),
    "consumer lost": (drop("schedule", "roles"), "schedule: 1 consumers for 2 warpgroups"),
    "barrier number": (item("schedule", "named_barriers", 1, id=16), "schedule: named barriers"),
    "barrier twice": (item("schedule", "named_barriers", 1, id=0), "schedule: named barriers"),
    "barrier threads": (
        item("schedule", "named_barriers", 3, threads=256),
        "schedule: barrier 5 (store of warpgroup 0, 256",
    ),
    "barrier lost": (drop("schedule", "named_barriers"), "schedule: 4 named barriers of 5"),
    "turns": (section("schedule", pingpong=False), "schedule: 2 turns for 2 warpgroups"),
    "arrivals full": (item("schedule", "pipelines", "k", full_arrivals=2), "schedule: pipeline k arrivals (2, 8)"),
    "arrivals empty": (item("schedule", "pipelines", "v", empty_arrivals=4), "schedule: pipeline v arrivals (1, 4)"),
    "arrivals q": (item("schedule", "pipelines", "q", empty_arrivals=1), "schedule: pipeline q arrivals (1, 1)"),
    "pipeline stages": (item("schedule", "pipelines", "k", stages=5), "schedule: pipeline k has 5 stages"),
    "pipeline bytes": (item("schedule", "pipelines", "v", stage_bytes=32752), "schedule: pipeline v announces 32752"),
    "pipeline buffer": (item("schedule", "pipelines", "k", buffer="sV"), "schedule: pipeline k guards sV"),
    "pipeline producer": (
        item("schedule", "pipelines", "k", producer="idle"),
        "schedule: pipeline k is produced by idle",
    ),
    "pipeline loop": (item("schedule", "pipelines", "v", consumer="producer"), "one role at both ends"),
    "pipeline lost": (drop("schedule", "pipelines"), "schedule: pipelines ['q', 'k', 'v']"),
    "threads": (section("launch", threads=256), "launch: 256 threads, the roles need 384"),
    "launch registers": (section("launch", launch_registers=176), "launch: 176 registers for 384 threads"),
    "cluster": (section("launch", cluster=(4, 1, 1)), "launch: cluster (4, 1, 1)"),
    "cluster without tickets": (section("launch", cluster=(2, 1, 1)), "schedule: pipelines ['q', 'k', 'v', 'mailbox']"),
    "walk": (section("mask", walk="runs"), "mask: walk runs over 1 clauses"),
    "right edge": (section("mask", has_right_edge=False), "mask: no masked tiles for a right edge"),
    "left edge": (section("mask", has_left_edge=True, has_interior=False), "mask: a left edge without an interior"),
    "bounds lost": (
        lambda p: p.replace(mask=p.mask.replace(form=p.mask.form.replace(bounds=()))),
        "mask: one bound for each clause",
    ),
}


@pytest.mark.parametrize("text", [CAUSAL, FULL, WIDE])
def test_a_valid_plan_has_no_fault(text: str) -> None:
    found = planned(text)
    assert [faults(p) for p in (*found.plans, *found.others)] == [[]] * (len(found.plans) + len(found.others))
    assert set_faults(found) == []
    verify_set(found)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_fault_is_named(name: str) -> None:
    corrupt, fault = CORRUPTIONS[name]
    (good,) = (p for p in planned(CAUSAL).plans if p.name == "128x128")
    broken = corrupt(good)
    assert broken != good
    found = faults(broken)
    assert any(fault in f for f in found), found
    with pytest.raises(PlanError, match="plan 128x128: "):
        verify(broken)


def test_limits_do_not_decide_a_residual() -> None:
    spec = load_spec("attn 1\nattention odd {\n  head_dim = 64\n  mask = kv_idx * q_idx % 3 == 1\n}\n")
    p = plan(spec).plans[0]
    assert p.mask.test == "elements" and faults(p) == []
    assert "mask: limits cannot decide a residual" in faults(section("mask", test="limits")(p))


def test_a_full_mask_needs_its_interior() -> None:
    p = planned(FULL).plans[0]
    assert "mask: a full mask without unmasked tiles" in faults(section("mask", has_interior=False)(p))


def test_one_warpgroup_has_no_neighbour() -> None:
    spec = load_spec(CAUSAL.replace("}", "  schedule { tile = 64 x 128 }\n}"))
    p = plan(spec).plans[0]
    assert faults(p) == []
    alone = faults(section("schedule", pingpong=True)(p))
    assert "schedule: one warpgroup has nobody to take turns with" in alone
    assert "mask: nothing to tell warpgroups apart" in faults(section("mask", ranges_per_warpgroup=True)(p))


SETS: dict[str, tuple[Callable[[PlanSet], PlanSet], str]] = {
    "no plan": (lambda s: s.replace(plans=()), "0 plans, at most 3"),
    "too many": (lambda s: s.replace(plans=(*s.plans, *s.others[:3])), "plans, at most 3"),
    "limit lost": (lambda s: s.replace(limits=()), "0 limits for 2 plans"),
    "limits equal": (lambda s: s.replace(plans=(*s.plans, s.others[0]), limits=(512, 512)), "limits (512, 512) do not"),
    "limits descend": (
        lambda s: s.replace(plans=(*s.plans, s.others[0]), limits=(512, 256)),
        "limits (512, 256) do not",
    ),
    "limit zero": (lambda s: s.replace(limits=(0,)), "limits (0,) do not ascend"),
    "same plan": (lambda s: s.replace(plans=(s.plans[0], s.plans[0])), "two plans are the same tile"),
    "two skeletons": (
        lambda s: s.replace(plans=(s.plans[0], section("schedule", pingpong=False)(s.plans[1]))),
        "more than one kernel class",
    ),
    "two kinds of maxima": (
        lambda s: s.replace(plans=(s.plans[0], section("compute", maxima=Maxima.INTS)(s.plans[1]))),
        "more than one kernel class",
    ),
    "small of two warpgroups": (lambda s: s.replace(small=s.plans[0]), "the small plan has more than one warpgroup"),
    "small of another mask": (lambda s: s.replace(small=planned(FULL).small), "the small plan has another mask"),
    "small in the file": (
        lambda s: s.replace(plans=tuple(p for p in [s.small] if p), limits=()),
        "a plan of the file is as small",
    ),
    "small where length decides": (
        lambda s: s.replace(spec=s.spec.replace(layout=Layout.VARLEN)),
        "goes by length: no small plan",
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_the_fault_of_a_set_is_named(name: str) -> None:
    corrupt, fault = SETS[name]
    found = set_faults(corrupt(planned(CAUSAL)))
    assert any(fault in f for f in found), found


def test_a_broken_small_plan_is_raised() -> None:
    good = planned(CAUSAL)
    assert good.small is not None
    with pytest.raises(PlanError, match="plan 64x128: compute: tile_m 128"):
        verify_set(good.replace(small=section("compute", tile_m=128)(good.small)))


def test_a_broken_set_is_raised() -> None:
    with pytest.raises(PlanError, match="plans of causal: 0 limits for 2 plans"):
        verify_set(planned(CAUSAL).replace(limits=()))
