"""Calls of few row tiles: rounds of the SMs choose the plan, not the length alone."""

from __future__ import annotations

import heapq
from pathlib import Path
from typing import Any

import pytest

from attngen import api, specs
from attngen.ir.plan import PlanSet
from attngen.jit.reach import Reach
from attngen.options import Options
from attngen.passes.few import ROUNDS, Pace, are_few, cycles, paces, packs, pick
from attngen.search import plan
from attngen.syntax import load_all

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDE, TALL = Pace(128, 128, 2700, 3500, False), Pace(192, 80, 2070, 5250, False)
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
    assert not packs((wide, tall), 0, 256, 8, 128, keys, SMS)
    assert packs((wide, tall), 0, 256, 8, 16, keys, SMS)
    shared = tuple(p._replace(pack=8) for p in (wide, tall))
    assert pick(shared, 1, 256, 128, keys, SMS) == 0


def test_shared_row_tiles_go_by_estimates() -> None:
    """Lengths are split by what was measured of row tiles of one head; the diagonal lets those of eight skip more."""
    shared = tuple(p._replace(grows=True, pack=8) for p in (WIDE, TALL))
    assert not are_few(shared[0], 512, 1024, SMS) and pick(shared, 0, 512, 1024, 1024, SMS) == 1


def test_many_row_tiles_keep_the_plan_of_their_length() -> None:
    slow = WIDE._replace(kv_tile=10**6)
    heads = ROUNDS * SMS
    assert not are_few(WIDE, heads, 128, SMS) and are_few(WIDE, heads - 1, 128, SMS)
    assert pick((slow, TALL), 0, heads, 128, 128, SMS) == 0 and pick((slow, TALL), 0, heads - 1, 128, 128, SMS) == 1
    assert pick((), 2, 1, 128, 128, SMS) == 2, "kernels that say nothing of their pace go by length"


def test_a_gain_below_the_noise_moves_nothing() -> None:
    near = WIDE._replace(kv_tile=round(WIDE.kv_tile * 0.985))
    assert pick((near, WIDE), 1, 8, 4096, 4096, SMS) == 1


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_kv"), [(8, 4096, 4096), (3, 700, 9000), (40, 1000, 1000), (1, 1, 5000)]
)
def test_estimates_are_those_of_a_queue(grows: bool, heads: int, seqlen_q: int, seqlen_kv: int) -> None:
    """Against the SMs served one row tile after the other, longest first."""
    for pace in (WIDE._replace(grows=grows), TALL._replace(grows=grows)):
        tiles = []
        for lo in range(0, seqlen_q, pace.tile_m):
            keys = min(lo + pace.tile_m, seqlen_q) + seqlen_kv - seqlen_q if grows else seqlen_kv
            tiles += [pace.row_tile + pace.kv_tile * -(-keys // pace.tile_n)] * heads
        ends = [0.0] * SMS
        for work in sorted(tiles, reverse=True):
            heapq.heapreplace(ends, ends[0] + work)
        assert cycles(pace, heads, seqlen_q, seqlen_kv, SMS) == pytest.approx(max(ends), rel=0.2 if grows else 1e-9)


def test_which_kernels_say_their_pace() -> None:
    found = paces(planned("causal"))
    assert [(p.tile_m, p.tile_n) for p in found] == [(128, 128), (192, 80)] and all(p.grows for p in found)
    assert not any(p.grows for p in paces(planned("full")))
    assert len(paces(planned("causal", tile="128x128"))) == 1
    assert paces(planned("causal", layout="varlen")) == ()


def launcher_of(name: str) -> Any:
    """A launcher whose functions are the rows of their tiles."""
    launcher = api.build(str(EXAMPLES / f"{name}.attn")).launcher
    launcher.functions = tuple(p.tile_m for p in launcher.paces)
    return launcher


def test_a_launch_counts_its_row_tiles() -> None:
    launcher = launcher_of("full")
    assert launcher.paces == paces(planned("full"))
    keys = [(1, heads, heads, 4096, 4096, SMS) for heads in (8, 128)]
    assert [launcher.choose(key) for key in keys] == [128, 192]
    assert launcher._chosen == dict(zip(keys, (128, 192), strict=True))


def test_a_launch_remembers_no_more_than_it_must() -> None:
    launcher = launcher_of("full")
    for length in range(1, 1200):
        launcher.choose((1, 1, 1, 1, length, SMS))
    assert len(launcher._chosen) <= 1024


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
