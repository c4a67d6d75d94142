"""Calls of few row tiles: rounds of the SMs choose the plan, not the length alone."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import pytest

from attngen import api, specs
from attngen.emit.module import emit
from attngen.ir.plan import PlanSet
from attngen.jit import launch
from attngen.jit.reach import Reach
from attngen.options import Options
from attngen.passes.few import ROUNDS, Beside, Pace, Sibling, are_few, cycles, paces, pick
from attngen.search import plan
from attngen.syntax import load_all
from attngen.targets.sm90 import LAUNCH_CYCLES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDE, TALL = Pace(128, 128, 2700, 3500, False), Pace(192, 80, 2070, 5250, False)
LOW = Pace(64, 128, 1990, 1750, False)
SMS = 132


def planned(name: str, **changes: Any) -> PlanSet:
    return plan(specs.resolve((EXAMPLES / f"{name}.attn").read_text(), None, Options.parse(changes)))


@pytest.mark.parametrize(
    ("heads", "seqlen", "best"),
    [
        (8, 2048, 0),  # 128 tiles of 128 rows, 88 of 192: one round each
        (8, 4096, 0),  # 256 and 176: two rounds each
        (8, 3072, 1),  # 192 tiles, two rounds of 128; 128 tiles, one round of 192
        (128, 4096, 1),  # many
    ],
)
def test_the_plan_that_needs_less_time_in_whole_rounds(heads: int, seqlen: int, best: int) -> None:
    assert pick((WIDE, TALL), 1, heads, seqlen, seqlen, SMS) == best


@pytest.mark.parametrize("keys", [4096, 16384])
def test_rounds_count_where_work_hardly_grows(keys: int) -> None:
    """128 rows against many keys: 192 tiles that 8 query heads share are two rounds of 132 SMs, as 256 tiles of
    128 rows are. By an even share of the work, 1.45 rounds, they were taken, and reached 0.72 of FlashAttention-3.
    """
    wide, tall = (p._replace(grows=True) for p in (WIDE, TALL))
    sibling = Beside(packs=True).sibling
    assert sibling((wide, tall), 0, 256, 8, 128, keys, SMS) is None
    assert sibling((wide, tall), 0, 256, 8, 16, keys, SMS) is not None
    shared = tuple(p._replace(pack=8) for p in (wide, tall))
    assert pick(shared, 1, 256, 128, keys, SMS) == 0


def test_shared_row_tiles_go_by_estimates() -> None:
    """Lengths are split by what was measured of row tiles of one head; the diagonal lets those of eight skip more."""
    shared = tuple(p._replace(grows=True, pack=8) for p in (WIDE, TALL))
    assert not are_few(shared[0], 512, 1024, SMS) and pick(shared, 0, 512, 1024, 1024, SMS) == 1


def test_many_row_tiles_keep_the_plan_of_their_length() -> None:
    slow = WIDE._replace(kv_tile_cycles=10**6)
    heads = ROUNDS * SMS
    assert not are_few(WIDE, heads, 128, SMS) and are_few(WIDE, heads - 1, 128, SMS)
    assert pick((slow, TALL), 0, heads, 128, 128, SMS) == 0 and pick((slow, TALL), 0, heads - 1, 128, 128, SMS) == 1
    assert pick((), 2, 1, 128, 128, SMS) == 2, "kernels that say nothing of their pace go by length"


def test_a_gain_below_the_noise_moves_nothing() -> None:
    near = WIDE._replace(kv_tile_cycles=round(WIDE.kv_tile_cycles * 0.985))
    assert pick((near, WIDE), 1, 8, 4096, 4096, SMS) == 1


def queue(pace: Pace, heads: int, seqlen_q: int, seqlen_kv: int) -> float:
    """When the last SM (or pair) ends: row tiles longest first, each to the SM that ends first."""
    work: list[float] = []
    sms = SMS // pace.ctas
    for lo in range(0, seqlen_q, pace.rows):
        keys = min(lo + pace.rows, seqlen_q) + seqlen_kv - seqlen_q if pace.grows else seqlen_kv
        work += [pace.row_tile_cycles + pace.kv_tile_cycles * -(-keys // pace.tile_n)] * heads
    work.sort(reverse=True)
    ends = [0.0] * sms
    for tile in work:
        heapq.heapreplace(ends, ends[0] + tile)
    return max(ends)


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_kv"),
    [(8, 4096, 4096), (16, 2048, 2048), (16, 4096, 4096), (3, 700, 9000), (40, 1000, 1000), (1, 1, 5000)],
)
def test_estimates_are_those_of_a_queue(grows: bool, heads: int, seqlen_q: int, seqlen_kv: int) -> None:
    """Against the SMs served one row tile after the other, and a launch's own share. A few lengths that many tiles
    share, five of 40 each in 1000 rows, are furthest from the line that the estimate takes them for.
    """
    near = 0.1 if heads == 40 else 0.05
    for pace in (p._replace(grows=grows) for p in (WIDE, TALL, LOW)):
        found = cycles(pace, heads, seqlen_q, seqlen_kv, SMS) - LAUNCH_CYCLES
        assert found == pytest.approx(queue(pace, heads, seqlen_q, seqlen_kv), rel=near if grows else 1e-9)


def test_a_cluster_is_one_server() -> None:
    pairs = WIDE._replace(ctas=2)
    for call in ((8, 4096, 4096), (40, 1000, 1000), (1, 1, 5000)):
        assert cycles(pairs, *call, SMS) - LAUNCH_CYCLES == pytest.approx(queue(pairs, *call), rel=1e-9)
    assert pairs.row_tiles(8, 4096) * 2 == WIDE.row_tiles(8, 4096) and pairs.row_tiles(8, 100) == 8


def test_the_longest_tile_takes_the_shortest_with_it() -> None:
    """Causal, 8 heads of 4096 rows: 256 tiles of 1 to 32 KV tiles on 132 SMs. Whoever ends first takes the longest that
    is left, so that an SM walks 33 of them; with tickets drawn as a tile begins it was 32 and then 16.
    """
    grows = WIDE._replace(grows=True)
    assert cycles(grows, 8, 4096, 4096, SMS) == pytest.approx(
        33 * WIDE.kv_tile_cycles + 2 * WIDE.row_tile_cycles, rel=0.03
    )


def test_which_kernels_say_their_pace() -> None:
    found = paces(planned("causal"))
    assert [(p.tile_m, p.tile_n) for p in found] == [(128, 128), (192, 80)] and all(p.grows for p in found)
    assert not any(p.grows for p in paces(planned("full")))
    assert len(paces(planned("causal", tile="128x128"))) == 1
    assert paces(planned("causal", layout="varlen")) == () == paces(planned("causal", cluster="2x1"))


def launcher_of(name: str, **changes: Any) -> Any:
    """A launcher whose functions are the rows of their tiles, as are those of the kernels beside it."""

    def named(attn: Any) -> Any:
        attn.launcher.functions = tuple(p.tile_m for p in attn.launcher.paces)
        attn.relatives.rebuild = lambda spec: named(api.build(spec))
        return attn

    return named(api.build(str(EXAMPLES / f"{name}.attn"), **changes)).launcher


def test_a_launch_counts_its_row_tiles() -> None:
    launcher = launcher_of("full")
    assert launcher.paces == paces(planned("full"))
    keys = [(1, heads, heads, 4096, 4096, SMS) for heads in (8, 128)]
    assert [launcher.choose(key) for key in keys] == [128, 192]
    assert launcher._chosen == dict(zip(keys, (128, 192), strict=True))


def test_an_attention_alone_keeps_to_its_file() -> None:
    attn = api.build(str(EXAMPLES / "full.attn")).alone()
    attn.launcher.functions = tuple(p.tile_m for p in attn.launcher.paces)
    assert attn.launcher.choose((1, 8, 8, 512, 512, SMS)) == 128 and not attn.relatives.siblings


def test_a_launch_remembers_no_more_than_it_must() -> None:
    launcher = launcher_of("full")
    for length in range(1, 1200):
        launcher.choose((1, 1, 1, 1, length, SMS))
    assert len(launcher._chosen) <= 1024


@pytest.mark.parametrize(("name", "d"), [("full", 64), ("full", 128), ("causal", 128), ("gemma2", 256), ("mla", None)])
def test_calls_that_leave_sms_idle_take_small_tiles(name: str, d: int | None) -> None:
    """8 heads: up to 1K rows 64 rows a tile fill 128 SMs in one round, and took a fifth to nearly a half less time."""
    launcher = launcher_of(name, **({} if d is None else {"head_dim": d}))
    small = launcher.beside.small
    assert small.tile_m == 64 and small.tile_n == (96 if d == 256 else 128)
    window = [2**30] if launcher.reach is not None else []
    taken = [launcher.choose((1, 8, 8, n, n, SMS, *window)) for n in (64, 512, 1024, 2048, 4096)]
    assert taken[:3] == [64, 64, 64] and 64 not in taken[3:]
    assert launcher.choose((16, 8, 8, 128, 128, SMS)) != 64, "two rounds of small tiles, one of wide ones"


def test_small_tiles_must_promise_a_tenth() -> None:
    wide, call = WIDE, (8, 8, 1024, 1024, SMS)

    def taken(kv_tile: int) -> bool:
        return Beside(LOW._replace(kv_tile_cycles=kv_tile)).sibling((wide,), 0, call[0], 1, *call[2:]) is not None

    assert taken(LOW.kv_tile_cycles) and not taken(round(wide.kv_tile_cycles * 0.95)) and not taken(wide.kv_tile_cycles)
    assert Beside().sibling((wide,), 0, 8, 1, 1024, 1024, SMS) is None
    assert Beside(LOW).sibling((), 0, 8, 1, 1024, 1024, SMS) is None


def test_few_rows_of_grouped_heads_take_small_packed_tiles() -> None:
    """32 query heads over 4 KV heads, 8 sequences: 32 row tiles of 8 rows each, packed, whatever their height."""
    launcher = launcher_of("causal")
    assert launcher.choose((8, 32, 4, 1, 4096, SMS)) == 64
    assert launcher._made == {Sibling(8)} and launcher.choose((8, 32, 32, 1, 4096, SMS)) == 128


def test_a_graph_waits_for_no_kernel_of_small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, call = launcher_of("full"), (1, 8, 8, 512, 512, SMS)
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    assert launcher.choose(call) == 128 and not launcher._chosen, "what a graph got is not remembered"
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    assert launcher.choose(call) == 64 and launcher._made == {Sibling(1, (64, 128))}
    monkeypatch.setattr(launch, "_capturing", lambda: True)
    assert launcher.choose(call) == 64, "it is there now"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("causal", {"tile": "128x128"}),  # named
        ("causal", {"layout": "varlen"}),  # tiles that the host cannot count
        ("bigbird", {}),  # a map, whose memory is laid out for a plan
        ("causal", {"pingpong": True}),  # one warpgroup takes no turns
        ("bias", {}),  # an element for each pair: spills
        ("evoformer", {}),
    ],
)
def test_where_the_plans_of_the_file_serve_all(name: str, changes: dict[str, Any]) -> None:
    planned_set = planned(name, **changes)
    assert planned_set.small is None and "small" not in emit(planned_set).meta


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("causal", {}),
        ("gpt_oss", {}),
        ("gemma2", {}),
        ("mla", {}),
        ("packing", {}),
        ("t5", {}),
        ("causal", {"pack_gqa": 4}),
    ],
)
def test_the_kernel_beside_a_file_is_the_one_it_names(name: str, changes: dict[str, Any]) -> None:
    found = planned(name, **changes)
    assert found.small is not None
    pace = Pace(**emit(found).meta["small"])
    sibling = plan(Sibling(pace.pack, (pace.tile_m, pace.tile_n)).of(found.spec))
    assert sibling.plans == (found.small,) and sibling.small is None and pace.pack == changes.get("pack_gqa", 1)


@pytest.mark.parametrize(
    ("name", "values", "rows", "keys", "reach"),
    [
        ("mistral", (1024,), 16384, 16384, 1024),
        ("mistral", (1024,), 300, 300, 300),
        ("mistral", (2**31 - 1,), 4096, 4096, 4096),
        ("modernbert", (64,), 4096, 4096, 129),
        ("llama4", (8192,), 32768, 32768, 8192),
    ],
)
def test_how_far_a_row_reaches(name: str, values: tuple[int, ...], rows: int, keys: int, reach: int) -> None:
    spec = next(s for s in load_all(EXAMPLES / f"{name}.attn") if s.params)
    found = Reach.of(spec)
    assert found is not None and found.names == tuple(p.name for p in spec.params)
    assert found.keys(values, rows, keys) == reach


@pytest.mark.parametrize("name", ["full", "causal", "packing", "bigbird", "decode"])
def test_rows_that_only_lengths_or_data_bound(name: str) -> None:
    assert Reach.of(load_all(EXAMPLES / f"{name}.attn")[0]) is None


def test_a_short_window_takes_the_plan_of_short_sequences() -> None:
    """16 K rows with a window of 128, head dim 64: 256 x 64 took 219 us where 192 x 128 took 277."""
    launcher = launcher_of("gpt_oss")
    spec = launcher.spec
    assert [p.tile_m for p in launcher.paces] == [256, 192] and [p.name for p in spec.params] == ["window"]
    launcher.reach = Reach.of(spec)
    assert launcher.choose((2, 32, 32, 16384, 16384, SMS, 128)) == 256
    assert launcher.choose((2, 32, 32, 16384, 16384, SMS, 16384)) == 192
