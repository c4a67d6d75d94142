"""The search: plans for every head dim, overrides honoured or refused with reasons, what no kernel serves yet."""

from __future__ import annotations

import itertools
import re

import pytest
from builders import CAUSAL, K, O, Q, S, f, spec, x

from attngen.diag.codes import CODES
from attngen.diag.diagnostic import AttnError, Diagnostic
from attngen.ir.plan import PlanSet
from attngen.ir.spec import AttentionSpec, Branch, Segment, TensorDecl
from attngen.ir.types import DType, Layout
from attngen.passes.choose import LENGTHS, MIN_TILE_N, choose
from attngen.passes.cost import launch_cycles
from attngen.passes.mask_form import mask_form
from attngen.passes.serves import why_not
from attngen.search import candidates, plan, plan_candidate
from attngen.syntax import load_spec
from attngen.targets import measured, sm90
from attngen.verify.plan import faults, set_faults

MASKS = {
    "full": "",
    "causal": "mask = kv_idx <= q_pos",
    "window": "param window: int >= 1 = 128\n  mask = kv_idx <= q_pos and q_pos - kv_idx < window",
    "elementwise": "mask = q_idx * kv_idx % 3 == 1",
    "score": "param cap: float = 30.0\n  score = cap * tanh(s / cap)\n  mask = kv_idx <= q_pos",
}
DIMS = [(d, d) for d in range(8, 257, 8)] + [(192, 128), (128, 192), (64, 256), (256, 64), (16, 256)]


def written(d: int = 128, dv: int | None = None, clauses: str = "", schedule: str = "") -> AttentionSpec:
    hints = f"  schedule {{ {schedule} }}\n" if schedule else ""
    return load_spec(f"attn 1\nattention a {{\n  head_dim = {d}, v = {dv or d}\n  {clauses}\n{hints}}}\n")


def shown(fault: Diagnostic) -> str:
    """The text that a diagnostic points at."""
    assert fault.primary is not None
    span = fault.primary.span
    return span.source.text[span.start : span.end]


def refused(s: AttentionSpec, target: str = sm90.NAME) -> AttnError:
    with pytest.raises(AttnError) as caught:
        plan(s, target)
    return caught.value


@pytest.mark.parametrize("kind", MASKS)
def test_every_head_dim_has_plans(kind: str) -> None:
    for d, dv in DIMS:
        found = plan(written(d, dv, MASKS[kind]))
        where = f"{kind} {d} {dv}"
        assert 1 <= len(found.plans) <= 3 and len(found.limits) == len(found.plans) - 1, where
        assert all(a < b for a, b in itertools.pairwise(found.limits)), where
        assert set_faults(found) == [] and all(faults(p) == [] for p in found.plans), where
        assert all((p.compute.head_dim_qk, p.compute.head_dim_v) == (d, dv) for p in found.plans), where
        assert not set(found.plans) & set(found.others), where


def test_index_goes_by_the_longer_length() -> None:
    found = plan(written(64, clauses="mask = kv_idx <= q_pos"))
    three = found.replace(plans=(*found.plans[:1], *found.others[:2]), limits=(512, 2048))
    assert isinstance(three, PlanSet)
    assert [three.index(q, k) for q, k in ((1, 1), (512, 512), (1, 513), (2048, 7), (2049, 2048), (9, 10**9))] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip
    assert found.replace(plans=found.plans[:1], limits=()).index(10**6, 1) == 0


def test_every_candidate_is_a_plan_or_has_a_reason() -> None:
    s = written(128)
    found = plan(s)
    names = {c.name for c in candidates(s)}
    told = {p.name for p in (*found.plans, *found.others)} | {
        r.candidate.removesuffix(" (O in Q)") for r in found.rejected
    }
    assert len(names) == 60 and told == names
    assert {r.by for r in found.rejected} == {"compute", "memory"} and all(r.why for r in found.rejected)
    assert len(set(found.rejected)) == len(found.rejected)


# ---- ranking ---------------------------------------------------------------------------------------------------------


def test_the_cost_model_ranks_the_measured_best_first() -> None:
    """Full attention, head dim 128, long rows: 192 x 80, as measured; without the table."""
    s = written(128)
    form = mask_form(s)
    outcomes = [plan_candidate(s, form, c, o_in_q=False) for c in candidates(s)]
    served = [p for p in outcomes if hasattr(p, "compute") and p.compute.tile_n >= MIN_TILE_N]
    ranked = sorted(served, key=lambda p: launch_cycles(p, 32768))
    assert ranked[0].name == "192x80"


def test_the_best_measured_tile_serves_the_longest() -> None:
    for kind in ("full", "causal"):
        for d, dv in ((64, 64), (128, 128), (192, 128), (256, 256)):
            found = plan(written(d, dv, MASKS[kind]))
            times = {p.name: measured.seconds_per_flop(d, dv, kind, p.name) for p in (*found.plans, *found.others)}
            known = {name: t[-1] for name, t in times.items() if t is not None}
            assert found.plans[-1].name in known
            assert known[found.plans[-1].name] <= 1.03 * min(known.values())


@pytest.mark.parametrize(("direction", "named"), [("forward", "192x80"), ("backward", "80x128")])
def test_the_table_of_measurements(direction: measured.Direction, named: str) -> None:
    assert measured.lengths(8, 8, "full", direction=direction) == ()
    lengths = measured.lengths(128, 128, "full", direction=direction)
    found = measured.seconds_per_flop(128, 128, "full", named, direction=direction)
    assert found is not None and len(found) == len(lengths) and all(1e-16 < t < 1e-14 for t in found)
    assert measured.seconds_per_flop(128, 128, "full", "64x16", direction=direction) is None
    assert measured.seconds_per_flop(8, 8, "full", named, direction=direction) is None
    rows = measured._table(direction)["rows"]
    keys = [(r["head_dim_qk"], r["head_dim_v"], r["mask"], r["tile"]) for r in rows]
    assert len(set(keys)) == len(keys) and {r["mask"] for r in rows} <= {"full", "causal"}
    for q, v, mask, tile in keys:
        lengths = measured.lengths(q, v, mask, direction=direction)
        assert list(lengths) == sorted(lengths) and lengths[0] >= 128
        rates = measured.seconds_per_flop(q, v, mask, tile, direction=direction)
        assert rates and len(rates) == len(lengths), "a group was measured in one run"


def test_unmeasured_head_dims_take_no_narrow_tile() -> None:
    found = plan(written(40))
    assert all(p.compute.tile_n >= MIN_TILE_N for p in found.plans)
    assert set(found.limits) <= set(LENGTHS)


def test_one_plan_where_a_second_saves_nothing() -> None:
    s = written(40)
    one = plan_candidate(s, mask_form(s), next(c for c in candidates(s) if c.name == "128x128"), o_in_q=False)
    assert choose([one]) == ((one,), ())


def test_plans_of_one_file_share_a_kernel_class() -> None:
    for mask, clauses in MASKS.items():
        for schedule, turns in (("pingpong = false", False), ("pingpong = true", True), ("", mask != "window")):
            found = plan(written(40, clauses=clauses, schedule=schedule))
            assert len({p.mask.ranges_per_warpgroup for p in found.plans}) == 1
            assert {p.schedule.pingpong for p in found.plans} == {turns}


# ---- overrides -------------------------------------------------------------------------------------------------------


def test_overrides_are_honoured() -> None:
    (p,) = plan(written(128, schedule="tile = 128 x 96, stages = 2, order = linear, pingpong = false")).plans
    assert (p.name, p.memory.kv_stages, p.schedule.order, p.schedule.pingpong) == ("128x96", 2, "linear", False)
    assert {q.compute.tile_m for q in plan(load_spec(TALL)).plans} == {192}
    (lpt,) = plan(written(64, schedule="order = lpt, tile = 64 x 64")).plans
    assert lpt.schedule.order == "lpt" and lpt.schedule.l2_group_bytes > 0


TALL = "attn 1\nattention a {\n  head_dim = 64\n  schedule { tile = 192 x 96 }\n}\n"


@pytest.mark.parametrize(
    ("d", "schedule", "message", "notes"),
    [
        (
            128,
            "tile = 100 x 128",
            "sm_90a kernels have no tile 100 x 128",
            (
                "tile_m is one of 64, 128, 192, 256; tile_n a multiple of 16 from 32 to 256",
                "without `tile` these fit: 128x128 with 2 stages, 128x128 with 3 stages, 64x128 with 3 stages",
            ),
        ),
        (
            128,
            "tile = 256 x 256",
            "no plan fits sm_90a for head dims 128 and 128",
            (
                "256x256 was rejected by compute: registers 256 + 32 of 112: S 128, P 64, O 64",
                "without `tile` these fit: 128x192 with 2 stages, 128x176 with 2 stages, 128x160 with 2 stages",
            ),
        ),
        (
            256,
            "stages = 8",
            "no plan fits sm_90a for head dims 256 and 256",
            (
                "64x32 (O in Q) was rejected by memory: smem 289 KB of 227 KB: tile 64x32, stages 8, Q 32 KB",
                "64x32 was rejected by memory: smem 321 KB of 227 KB: tile 64x32, stages 8, Q 32 KB, O 32 KB",
                "128x32 (O in Q) was rejected by memory: smem 321 KB of 227 KB: tile 128x32, stages 8, Q 64 KB",
                "70 candidates were tried and rejected, 50 by compute, 20 by memory; ATTNGEN_LOG=debug lists them",
                "without `stages` these fit: 128x80 with 2 stages, 128x64 with 2 stages, 128x48 with 2 stages",
            ),
        ),
        (
            64,
            "pingpong = true, tile = 64 x 64",
            "no plan fits sm_90a for head dims 64 and 64",
            (
                "64x64 was rejected by schedule: ping-pong takes two consumer warpgroups: tile_m 64 has one",
                "without `tile` these fit: 128x64 with 6 stages, 128x80 with 5 stages, 128x48 with 6 stages",
            ),
        ),
    ],
)
def test_e0403_names_the_nearest_candidates(d: int, schedule: str, message: str, notes: tuple[str, ...]) -> None:
    (fault,) = refused(written(d, schedule=schedule)).diagnostics
    assert (fault.code, fault.message, fault.notes) == ("E0403", message, notes)
    assert fault.primary is not None and shown(fault) in schedule
    assert fault.helps == ("leave `tile` and `stages` to the planner, or take a smaller tile",)


def test_the_tiles_that_fit_do_fit() -> None:
    """Wishes that only together are too much: all are left out, and what is named can be asked for."""
    (fault,) = refused(written(256, schedule="stages = 8, pingpong = true, tile = 64 x 256")).diagnostics
    words = fault.notes[-1]
    assert words.startswith("without `tile` and `stages` and `pingpong` these fit: ")
    for tile, stages in re.findall(r"(\d+x\d+) with (\d) stages", words):
        (p,) = plan(written(256, schedule=f"tile = {tile.replace('x', ' x ')}, stages = {stages}")).plans
        assert (p.name, p.memory.kv_stages) == (tile, int(stages))


# ---- what no kernel serves yet ---------------------------------------------------------------------------------------


def test_e0401_names_the_targets() -> None:
    (fault,) = refused(written(), "sm_80").diagnostics
    assert (fault.code, fault.message) == ("E0401", "no kernels for target `sm_80`")
    assert fault.notes == ("kernels are generated for sm_90a",) and fault.helps == ("use `sm_90a`",)


ONE, TWO = x(True).e, S.e
GAPS: dict[str, tuple[AttentionSpec, str]] = {
    "dtype": (spec(dtype=DType.F32), "f32 inputs"),
    "head_dim 12": (spec(d=12, dv=64), "head_dim = 12"),
    "head_dim 264": (spec(d=264, dv=64), "head_dim = 264"),
    "head_dim v": (spec(d=64, dv=260), "v = 260"),
    "packed v": (spec(d=64, dv=32, layout=Layout.PACKED_QKV), "layout packed_qkv where V has a head dim of its own"),
    "packed view": (
        spec(d=64, dv=64, layout=Layout.PACKED_QKV, v_view_start=0),
        "layout packed_qkv with V as a view of K",
    ),
    "padded, its own name": (
        spec(layout=Layout.PADDED).replace(tensors=(TensorDecl(name="seqused_q", dtype=DType.I32, dims=("batch",)),)),
        "`seqused_q`, which layout padded has of its own,",
    ),
    "paged": (spec(layout=Layout.PAGED), "layout paged"),
    "v_view": (spec(d=64, dv=32, v_view_start=4), "a view of K that starts at column 4"),
}


def branched(**changes: object) -> AttentionSpec:
    return spec(branches=tuple(Branch(name=n, score=TWO, mask=ONE, weight=x(1.0).e) for n in ("one", "two")), **changes)


def with_more_keys(**changes: object) -> AttentionSpec:
    return spec(segments=(Segment(name="more", score=TWO, mask=ONE),), **changes)


GAPS |= {
    "branches packed": (branched(layout=Layout.PACKED_QKV), "layout packed_qkv with branches"),
}


def test_e0404_names_the_parts() -> None:
    """Branches and segments are no gap, and no single kernel either."""
    for s, names in ((branched(), "one, two"), (with_more_keys(), "main, more")):
        assert why_not(s, sm90.NAME) == ()
        with pytest.raises(AttnError, match=rf"E0404.*2 kernels: {names}"):
            plan(s)


@pytest.mark.parametrize("name", GAPS)
def test_e0402_names_what_is_not_served(name: str) -> None:
    s, what = GAPS[name]
    found = why_not(s, sm90.NAME)
    assert [d.code for d in found] == ["E0402"]
    assert found[0].message == f"sm_90a kernels do not serve {what} yet"
    assert found[0].helps[0] and found[0].notes
    with pytest.raises(AttnError, match=r"E0402"):
        plan(s)


@pytest.mark.parametrize(
    ("entry", "what", "place"),
    [
        ("cluster = 1 x 2", "a cluster of 1 x 2", "cluster"),
        ("cluster = 4 x 1", "a cluster of 4 x 1", "cluster"),
        ("split_kv = 4", "split_kv", "split_kv"),
        ("pack_gqa = 3", "this pack_gqa", "pack_gqa"),
        ("persistent = false", "persistent = false", "persistent"),
    ],
)
def test_e0402_of_a_schedule_points_at_its_entry(entry: str, what: str, place: str) -> None:
    (fault,) = refused(written(64, schedule=f"stages = 2, {entry}")).diagnostics
    assert (fault.code, fault.message) == ("E0402", f"sm_90a kernels do not serve {what} yet")
    assert fault.primary is not None and shown(fault).startswith(place)


@pytest.mark.parametrize(
    ("clauses", "clause"),
    [
        ("layout = paged", "paged"),
    ],
)
def test_e0402_shows_its_place(clauses: str, clause: str) -> None:
    (fault,) = refused(written(64, clauses=clauses)).diagnostics
    assert fault.primary is not None
    assert clause in shown(fault) or "attention a" in shown(fault)


def test_all_gaps_are_told_at_once() -> None:
    both = refused(spec(layout=Layout.PAGED, dtype=DType.F32))
    assert [d.message.split("serve ")[1] for d in both.diagnostics] == [
        "f32 inputs yet", "layout paged yet",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "entry", ["cluster = 1 x 1", "split_kv = 1", "persistent = true", "order = lpt", "order = auto"]
)
def test_a_hint_that_changes_nothing_is_no_gap(entry: str) -> None:
    assert why_not(written(64, schedule=entry), sm90.NAME) == ()


def test_what_kernels_serve_has_no_gap() -> None:
    served = spec(
        CAUSAL & (K < Q), f("tanh", S), d=72, dv=40, dtype=DType.FP16, layout=Layout.BHSD, sink=x(0.5),
        epilogue=O * 2.0, out_dtype=DType.FP16,
    )  # fmt: skip
    assert why_not(served, sm90.NAME) == ()


@pytest.mark.parametrize("code", ["E0401", "E0402", "E0403"])
def test_codes_have_rows(code: str) -> None:
    assert CODES[code].summary and len(CODES[code].explanation.strip().splitlines()) >= 3
