"""Passes of the planner: what each decides, what it rejects, and in which words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from builders import CAUSAL, FLAG_K, MASKS, QP, B, H, K, Q, S, W, f, load, spec
from cases import ALL_MASKS

from attngen.emit.module import emit
from attngen.ir.plan import ComputePlan, LaunchPlan, MaskPlan, Maxima, MemoryPlan, Rescale
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import Extreme
from attngen.ir.types import DType
from attngen.passes.base import Reject
from attngen.passes.compute import (
    CAPTURED_REGISTERS,
    COORDINATE_REGISTERS,
    WALK_REGISTERS,
    Candidate,
    expression_registers,
    fragment_registers,
    padded,
    plan_compute,
    walk_registers,
)
from attngen.passes.cost import launch_cycles, tile_cost
from attngen.passes.launch import plan_launch
from attngen.passes.mask_form import mask_form
from attngen.passes.mask_plan import MAX_LIMIT_CLAUSES, plan_mask
from attngen.passes.memory import aligned, plan_memory, row_columns
from attngen.passes.schedule import L2_GROUP_BYTES, plan_schedule
from attngen.plan_text import describe
from attngen.search import plan, plan_candidate
from attngen.syntax import make_spec
from attngen.targets import sm90

BIAS = load("bias", B, H, Q, K, dtype=DType.F32)


def tile(warpgroups: int, tile_n: int) -> Candidate:
    return Candidate(warpgroups=warpgroups, tile_n=tile_n)


def compute(s: AttentionSpec, warpgroups: int, tile_n: int) -> ComputePlan | Reject:
    return plan_compute(s, mask_form(s), tile(warpgroups, tile_n))


def computed(
    d: int = 128, dv: int | None = None, warpgroups: int = 2, tile_n: int = 128, **more: object
) -> ComputePlan:
    found = compute(spec(d=d, dv=dv, **more), warpgroups, tile_n)
    assert isinstance(found, ComputePlan), found
    return found


def remembered(c: ComputePlan, stages: int | None = None, o_in_q: bool = False) -> MemoryPlan:
    found = plan_memory(c, stages, o_in_q)
    assert isinstance(found, MemoryPlan), found
    return found


# ---- compute ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "extent"), [(8, 16), (16, 16), (24, 32), (64, 64), (72, 80), (248, 256), (256, 256)]
)
def test_head_dims_are_padded_to_the_k_step(head_dim: int, extent: int) -> None:
    assert padded(head_dim) == extent


def test_compute_fixes_the_mma() -> None:
    c = computed(72, 40, 3, 96)
    assert (c.tile_m, c.tile_n, c.warpgroups) == (192, 96, 3)
    assert (c.head_dim_qk, c.head_dim_v, c.head_dim_qk_padded, c.head_dim_v_padded) == (72, 40, 80, 40)
    assert c.rescale is Rescale.ON_GROWTH and not c.has_score


def test_registers_of_the_fragments() -> None:
    """S fp32, P packed pairs, O fp32: 64 rows over 128 threads give half a register for each column."""
    assert fragment_registers(tile(2, 128), 128, 0) == 64 + 32 + 64
    assert fragment_registers(tile(3, 80), 40, 8) == 40 + 20 + 20 + 8


def test_registers_of_expressions() -> None:
    """None without an element-wise clause; coordinates; then what loads that move with the column keep in flight."""
    slopes = S - load("slopes", H, dtype=DType.F32) * (QP - K)
    for t, captured in ((tile(2, 128), 0), (tile(3, 96), CAPTURED_REGISTERS)):
        assert expression_registers([], t) == 0
        assert expression_registers([(S + Q).e], t) == COORDINATE_REGISTERS
        assert expression_registers([slopes.e], t) == COORDINATE_REGISTERS + captured
        by_column, by_pair = expression_registers([FLAG_K.e], t), expression_registers([(S + BIAS).e], t)
        assert COORDINATE_REGISTERS + t.tile_n // 4 <= by_column < by_pair
        assert by_pair >= COORDINATE_REGISTERS + t.tile_n // 2


def test_registers_of_the_walk_over_a_union() -> None:
    one, two = (mask_form(spec(ALL_MASKS[n])) for n in ("causal", "sink_tokens"))
    assert (len(two.clauses), walk_registers(one), walk_registers(two)) == (2, 0, 2 * WALK_REGISTERS)
    plain, union = (computed(128, warpgroups=3, tile_n=64, mask=ALL_MASKS[n]) for n in ("causal", "sink_tokens"))
    assert union.expression_registers - plain.expression_registers == 2 * WALK_REGISTERS
    assert isinstance(compute(spec(ALL_MASKS["sink_tokens"], d=128), 3, 80), Reject)


def test_compute_rejects_what_would_spill() -> None:
    assert compute(spec(d=128), 3, 96) == Reject("compute", "registers 136 + 32 of 160: S 48, P 24, O 64", 168 / 160)
    with_score = compute(spec(score=S + f("abs", K - Q), d=128), 3, 80)
    assert isinstance(with_score, Reject)
    assert with_score.why == "registers 132 + 32 of 160: S 40, P 20, O 64, expressions 8"
    assert not isinstance(compute(spec(d=128), 3, 80), Reject)


def test_a_score_of_two_multiply_adds_holds_few_registers() -> None:
    """A shift for each of a thread's two rows, one slope: no coordinates."""
    slopes = S - load("slopes", H, dtype=DType.F32) * (QP - K)
    assert computed(128, warpgroups=3, tile_n=80, score=slopes, tensors=("slopes",)).expression_registers == 3
    assert computed(128, warpgroups=3, tile_n=80, score=S + Q).expression_registers == 2


@pytest.mark.parametrize(
    ("d", "dv", "score", "more", "maxima"),
    [
        (64, 64, "s", {}, Maxima.INTS),
        (104, 104, "s", {}, Maxima.INTS),
        (128, 128, "s", {}, Maxima.FLOATS),
        (192, 128, "s", {}, Maxima.FLOATS),
        (128, 128, "s - 0.1 * (q_pos - kv_idx)", {}, Maxima.INTS),
        (64, 64, "30.0 * tanh(s / 30.0)", {"max_logit": True}, Maxima.FLOATS),
        (64, 64, "90.0 * tanh(s / 90.0)", {}, Maxima.FLOATS),
        (64, 64, "s", {"max_logit": True}, Maxima.FLOATS),
        (64, 64, "s", {"normalizer": "sigmoid"}, Maxima.FLOATS),
    ],
)
def test_maxima_of_ints_where_the_softmax_is_in_the_way(d, dv, score, more, maxima) -> None:
    """Not where products or the score's own special functions hide them, nor where exact maxima or none are taken."""
    s = make_spec("a", head_dim=d, head_dim_v=dv, score=score, **more)
    plans = plan(s)
    assert {p.compute.maxima for p in plans.plans} == {maxima}
    assert ("def int_max" in emit(plans).text) == (maxima is Maxima.INTS)
    assert ("maxima of ints" in describe(plans)) == (maxima is Maxima.INTS)


def test_elementwise_masks_hold_registers_as_scores_do() -> None:
    masks = {"dilated": ALL_MASKS["dilated"], "longformer": ALL_MASKS["longformer"], "causal": CAUSAL}
    held = {
        n: computed(64, tile_n=64, mask=m, tensors=("flag", "row_flag")).expression_registers for n, m in masks.items()
    }
    assert held["causal"] == 0 < held["dilated"] < held["longformer"]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(8, 16), (16, 16), (24, 32), (32, 32), (40, 64), (64, 64), (72, 96), (80, 96), (96, 96), (104, 128), (112, 128),
     (136, 160), (160, 160), (176, 192), (224, 224), (232, 256), (256, 256)],
)  # fmt: skip
def test_rows_are_whole_swizzles(head_dim: int, columns: int) -> None:
    """Of 64 or 128 bytes, the narrowest heads' aside."""
    assert row_columns(head_dim) == columns
    m = remembered(computed(head_dim, 64, 2, 64))
    assert (m.columns_qk, m.columns_v) == (columns, 64)
    assert next(b.shape for b in m.buffers if b.name == "sK") == (64, columns, m.kv_stages)


def test_memory_lays_out_the_buffers() -> None:
    m = remembered(computed(128, None, 2, 128))
    assert [(b.name, b.bytes, b.shape, b.alias_of) for b in m.buffers] == [
        ("sQ", 32768, (64, 128, 2), None),
        ("sO", 32768, (64, 128, 2), None),
        ("sK", 65536, (128, 128, 2), None),
        ("sV", 65536, (128, 128, 2), None),
    ]
    assert m.smem_bytes == 1024 + 2 * 32768 + 2 * 65536 and m.smem_limit == 232448
    assert (m.kv_stages, m.fragment_registers, m.register_limit) == (2, 160, 240)


def test_o_in_the_bytes_of_q() -> None:
    m = remembered(computed(256, None, 2, 80), o_in_q=True)
    o = next(b for b in m.buffers if b.name == "sO")
    assert m.o_in_q and o.bytes == 0 and o.alias_of == "sQ"
    assert m.smem_bytes == 1024 + sum(b.bytes for b in m.buffers)


@pytest.mark.parametrize(("tile_n", "stages"), [(64, 6), (96, 4), (128, 3), (192, 2)])
def test_stages_keep_384_keys_in_flight(tile_n: int, stages: int) -> None:
    assert remembered(computed(64, None, 2, tile_n)).kv_stages == stages


def test_stages_that_were_asked_for() -> None:
    c = computed(64, None, 2, 64)
    assert [remembered(c, n).kv_stages for n in (1, 2, 5)] == [1, 2, 5]


def test_memory_rejects() -> None:
    wide = computed(256, None, 2, 64)
    found = plan_memory(wide, None, o_in_q=False)
    assert found == Reject(
        "memory", "smem 257 KB of 227 KB: tile 128x64, stages 2, Q 64 KB, O 64 KB", 263168 / sm90.SMEM_BYTES
    )
    assert isinstance(plan_memory(wide, None, o_in_q=True), MemoryPlan)
    many = plan_memory(wide, 4, o_in_q=True)
    assert isinstance(many, Reject) and many.why == "smem 321 KB of 227 KB: tile 128x64, stages 4, Q 64 KB"
    o_wider = plan_memory(computed(64, 128, 2, 64), None, o_in_q=True)
    assert o_wider == Reject("memory", "O (32 KB) does not fit in the bytes of Q (16 KB)", 2.0)


def test_alignment() -> None:
    assert [aligned(n) for n in (0, 1, 1024, 1025)] == [0, 1024, 1024, 2048]


# ---- mask ------------------------------------------------------------------------------------------------------------


def masked(name: str, warpgroups: int = 2) -> MaskPlan:
    tensors = ("start", "doc", "first", "flag", "row_flag")
    return plan_mask(mask_form(spec(ALL_MASKS[name], tensors=tensors)), warpgroups)


@pytest.mark.parametrize(
    ("name", "walk", "test", "edges"),
    [
        ("full", "interval", "limits", (False, True, False)),
        ("causal", "interval", "limits", (True, True, False)),
        ("causal_top_left", "interval", "limits", (True, True, False)),
        ("window", "interval", "limits", (True, True, True)),
        ("two_sided", "interval", "limits", (True, True, True)),
        ("prefix", "interval", "limits", (True, True, False)),
        ("left_pad", "interval", "limits", (True, True, True)),
        ("block_causal", "interval", "limits", (True, True, False)),
        ("sink_tokens", "runs", "limits", (True, True, False)),
        ("dilated", "interval", "elements", (True, False, False)),
        ("longformer", "runs", "elements", (True, True, False)),
    ],
)
def test_the_walk_of_a_mask(name: str, walk: str, test: str, edges: tuple[bool, bool, bool]) -> None:
    m = masked(name)
    assert (m.walk, m.test) == (walk, test)
    assert (m.has_right_edge, m.has_interior, m.has_left_edge) == edges


def test_warpgroups_have_ranges_of_their_own_where_there_is_an_edge() -> None:
    assert masked("causal").ranges_per_warpgroup and masked("window").ranges_per_warpgroup
    assert not masked("full").ranges_per_warpgroup
    assert not masked("causal", warpgroups=1).ranges_per_warpgroup
    assert not masked("sink_tokens").ranges_per_warpgroup


@pytest.mark.parametrize("name", ALL_MASKS)
def test_every_mask_has_a_walk(name: str) -> None:
    m = masked(name)
    assert m.walk == ("interval" if len(m.form.clauses) == 1 else "runs")
    assert m.test == ("limits" if m.form.is_exact and len(m.form.clauses) <= MAX_LIMIT_CLAUSES else "elements")
    assert not m.has_left_edge or m.has_interior


def test_many_clauses_are_tested_as_written() -> None:
    bands = CAUSAL & ((K < 1) | ((K >= 4) & (K < 5)) | ((K >= 8) & (K < 9)) | ((K >= 12) & (K < 13)))
    form = mask_form(spec(bands))
    assert form.is_exact and len(form.clauses) > MAX_LIMIT_CLAUSES
    assert plan_mask(form, 2).test == "elements"


# ---- schedule --------------------------------------------------------------------------------------------------------


def scheduled(mask: str = "causal", order: str | None = None, pingpong: bool | None = None, **tile_: int):  # type: ignore[no-untyped-def]
    c = computed(**tile_)  # type: ignore[arg-type]
    m = plan_mask(mask_form(spec(MASKS[mask], tensors=("start",))), c.warpgroups)
    return plan_schedule(c, m, remembered(c), order, pingpong)


def test_roles_and_registers() -> None:
    s = scheduled(warpgroups=3, tile_n=80)
    assert [(r.name, r.warps, r.registers) for r in s.roles] == [
        ("producer", (0, 1), 32),
        ("idle", (1, 4), 32),
        ("consumer 0", (4, 8), 160),
        ("consumer 1", (8, 12), 160),
        ("consumer 2", (12, 16), 160),
    ]


def test_the_ledger() -> None:
    s = scheduled(warpgroups=2, tile_n=128)
    assert [(p.name, p.buffer, p.stages, p.stage_bytes, p.full_arrivals, p.empty_arrivals) for p in s.pipelines] == [
        ("q", "sQ", 2, 16384, 1, 4),
        ("k", "sK", 2, 32768, 1, 8),
        ("v", "sV", 2, 32768, 1, 8),
        ("mailbox", "slot", 1, 0, 1, 8),
    ]
    assert [(b.id, b.name, b.threads) for b in s.named_barriers] == [
        (0, "cta", 384),
        (1, "turn of warpgroup 0", 256),
        (2, "turn of warpgroup 1", 256),
        (5, "store of warpgroup 0", 128),
        (6, "store of warpgroup 1", 128),
    ]


@pytest.mark.parametrize(
    ("mask", "asked", "order"),
    [
        ("causal", None, "lpt"),
        ("prefix", None, "lpt"),
        ("window", None, "linear"),
        ("full", None, "linear"),
        ("causal", "linear", "linear"),
        ("full", "lpt", "lpt"),
        ("causal", "auto", "lpt"),
    ],
)
def test_the_longest_tiles_first_where_rows_differ(mask: str, asked: str | None, order: str) -> None:
    s = scheduled(mask, asked, tile_n=64)
    assert s.order == order and s.l2_group_bytes == (L2_GROUP_BYTES if order == "lpt" else 0)


def test_ping_pong() -> None:
    assert scheduled(tile_n=64).pingpong and scheduled(pingpong=True, tile_n=64).pingpong
    without = scheduled(pingpong=False, tile_n=64)
    assert not without.pingpong and not any(b.name.startswith("turn") for b in without.named_barriers)
    assert not scheduled(warpgroups=1, tile_n=64).pingpong
    assert not scheduled("window", d=64, tile_n=64).pingpong
    assert scheduled("window", d=64, pingpong=True, tile_n=64).pingpong
    assert scheduled("window", d=128, tile_n=64).pingpong and scheduled("causal", d=64, tile_n=64).pingpong
    alone = scheduled(pingpong=True, warpgroups=1, tile_n=64)
    assert alone == Reject("schedule", "ping-pong takes two consumer warpgroups: tile_m 64 has one", 2.0)


# ---- launch, cost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warpgroups", "threads", "registers"), [(1, 256, 240), (2, 384, 168), (3, 512, 128), (4, 640, 96)]
)
def test_launch(warpgroups: int, threads: int, registers: int) -> None:
    for cluster, ctas in ((None, (1, 1, 1)), ((2, 1), (2, 1, 1))):
        found = plan_launch(computed(64, None, warpgroups, 64), masked("causal"), cluster)
        assert isinstance(found, LaunchPlan)
        assert (found.threads, found.launch_registers, found.cluster) == (threads, registers, ctas)
    assert threads * registers <= 65536


def test_row_tiles_side_by_side_need_windows_of_bounds_that_hold_them() -> None:
    rows = MaskPlan.model_construct(form=SimpleNamespace(tables=(Extreme.model_construct(),)))
    assert isinstance(plan_launch(computed(64, None, 2, 64), rows, (2, 1)), LaunchPlan)
    found = plan_launch(computed(64, None, 3, 64), rows, (2, 1))
    assert found == Reject("launch", "two windows of bounds do not cover the 384 rows of a cluster", 2.0)


def test_cycles_of_a_tile() -> None:
    """128 x 128 x 128: 4 m n d flop at 4096 a cycle, an exp an element at 16, five and a half slots at 128."""
    cost = tile_cost(spec(d=128), computed(128))
    assert cost.mma_cycles == 4 * 128 * 128 * 128 / 4096
    assert cost.exp_cycles == 128 * 128 / 16 and cost.issue_cycles == 128 * 128 * 5.5 / 128
    assert cost.smem_cycles == 2 * (128 * 128 + 2 * 128 * 256) / 128
    assert 0 < cost.efficiency < 1


def test_a_score_costs() -> None:
    """tanh is one more call of the special-function unit; dividing by a constant is a multiplication."""
    plain, capped = spec(d=64), spec(score=f("tanh", S / 5.0) * 5.0, d=64)
    c = computed(64, tile_n=64)
    scored = computed(64, tile_n=64, score=f("tanh", S / 5.0) * 5.0)
    assert tile_cost(capped, scored).exp_cycles == 2 * tile_cost(plain, c).exp_cycles
    assert tile_cost(capped, scored).efficiency < tile_cost(plain, c).efficiency


def test_a_causal_launch_costs_about_half() -> None:
    def cycles(mask: str, seqlen: int) -> float:
        s = spec(MASKS[mask], d=128)
        return launch_cycles(plan_candidate(s, mask_form(s), tile(2, 128), False), seqlen)  # type: ignore[arg-type]

    assert 0.5 < cycles("causal", 16384) / cycles("full", 16384) < 0.56
    assert cycles("full", 8192) * 3.5 < cycles("full", 16384) < cycles("full", 8192) * 4


def test_a_pass_ends_a_candidate() -> None:
    s = spec(QP - K < W, d=256)
    form = mask_form(s)
    outcomes = [plan_candidate(s, form, tile(*t), False) for t in ((3, 96), (2, 64), (2, 32))]
    assert [o.by if isinstance(o, Reject) else o.name for o in outcomes] == ["compute", "memory", "128x32"]
