"""Which KV tile a CTA takes: chosen order, groups of heads, and that turns follow the order of launch in the text."""

from __future__ import annotations

import ast
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.emit.backward import emit_backward
from attngen.ir.backward import LEAST_SHARE, BackwardPlanSet
from attngen.passes.backward.order import KvOrder, kv_walks, makespan, plan_order
from attngen.passes.mask_form import mask_form
from attngen.ref.walk_backward import launch_order
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec


@cache
def planned(clauses: str, deterministic: bool = False) -> BackwardPlanSet:
    turns = "\n  backward { deterministic = true }" * deterministic
    return plan_backward(load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {clauses}{turns}\n}}\n"))


@pytest.mark.parametrize(
    ("clauses", "unordered", "turns", "grouped"),
    [
        ("", "ascending", "descending", False),
        ("mask = kv_idx <= q_pos", "ascending", "descending", True),
        ("mask = kv_idx >= q_pos", "descending", "descending", True),
        ("mask = kv_idx + q_idx >= seqlen_kv", "descending", "ascending", True),  # the last keys are seen first
        ("mask = kv_idx <= q_pos and q_pos - kv_idx < 300", "ascending", "descending", False),
        ("param w: int >= 1\n  mask = kv_idx <= q_pos and q_pos - kv_idx < w", "ascending", "descending", True),
        ("tensor start: i32[batch]\n  mask = kv_idx >= start[b]", "ascending", "descending", True),
    ],
    ids=["full", "causal", "later keys", "second diagonal", "window", "no default", "padding"],
)  # fmt: skip
def test_the_order_follows_from_the_mask(clauses: str, unordered: str, turns: str, grouped: bool) -> None:
    for deterministic, order in ((False, unordered), (True, turns)):
        schedule = planned(clauses, deterministic).plans[0].schedule
        assert schedule.kv_order == order
        assert schedule.grouped == (grouped and not deterministic)


def test_walks_of_the_small_call() -> None:
    """128 x 128: 16 tiles a side. Turns are counted between the outermost tiles."""
    spec = load_spec(
        "attn 1\nattention a {\n  head_dim = 64\n  mask = kv_idx <= q_pos and (q_pos - kv_idx < 100 or kv_idx < 4)\n}\n"
    )
    form = mask_form(spec)
    assert kv_walks(spec, form, 128, 128, False) == [list(range(16)), *([n, n + 1] for n in range(1, 15)), [15]]
    assert kv_walks(spec, form, 128, 128, True) == [list(range(n, 16)) for n in range(16)]
    assert [len(w) for w in kv_walks(spec, form, 64, 128, True) or ()] == [2 * (16 - n) for n in range(16)]


def test_makespan() -> None:
    """Two SMs, four heads of a tile of three steps and one of one step; START 2 and, waited for, TURN 0.6."""
    walks, orders = [[0, 1, 2], [2]], ("ascending", "descending")
    found = {(o, turns): makespan(walks, o, turns) for o in orders for turns in (False, True)}
    # with the start 5 and 3 steps: long ones first end together, at 8 and at 16
    assert found["ascending", False] == 16
    assert found["descending", False] == 18
    # the short tile has to wait for the long one's last step, unless it comes first
    assert found["ascending", True] > found["ascending", False]
    assert found["descending", True] == found["descending", False]


@pytest.mark.parametrize(
    ("heads", "n_blocks", "workers", "expected"),
    [
        (16, 32, 132, 4),
        (128, 32, 132, 4),
        (17, 32, 132, 5),  # four groups in place of five
        (12, 32, 132, 6),  # two in place of three
        (4, 32, 132, 4),  # a single one
        (4, 128, 132, 1),
        (3, 5000, 132, 2),  # a head alone more than fills the GPU; two groups in place of three
        (1, 1, 1, 1),
        (5, 7, 0, 2),  # no number of SMs: as if one
    ],
)
def test_groups_of_heads(heads: int, n_blocks: int, workers: int, expected: int) -> None:
    schedule = planned("").plans[0].schedule
    assert schedule.replace(grouped=True).group_heads(heads, n_blocks, workers) == expected
    assert schedule.replace(grouped=False).group_heads(heads, n_blocks, workers) == 1


@given(st.booleans(), st.booleans(), *(st.integers(1, n) for n in (5, 7, 12, 40)))
def test_a_head_is_zeroed_by_tiles_of_lower_numbers(
    grouped: bool, descends: bool, heads: int, batch: int, n_blocks: int, workers: int
) -> None:
    """So nothing deadlocks however few CTAs run; heads that come one by one are not even waited for."""
    schedule = (
        planned("").plans[0].schedule.replace(grouped=grouped, kv_order="descending" if descends else "ascending")
    )
    numbers: dict[int, list[int]] = {}
    for number, (b, h, _) in enumerate(launch_order(schedule, n_blocks, heads, batch, workers)):
        numbers.setdefault(b * heads + h, []).append(number)
    lag = schedule.zero_lag(heads * batch, n_blocks, workers)
    for head in range(lag, heads * batch):
        assert len(numbers[head - lag]) == n_blocks
        assert max(numbers[head - lag]) + (0 if grouped else workers) < min(numbers[head])


@pytest.mark.parametrize(
    ("clauses", "deterministic", "captured", "expected"),
    [
        ("", False, (), True),
        ("mask = kv_idx <= q_pos and q_pos - kv_idx < 300", False, (), True),
        ("mask = kv_idx <= q_pos", False, (), False),  # uneven: longest walks first fill the SMs
        ("", True, (), False),
        ("tensor bias: f32[heads_q, seqlen_kv] grad\n  score = s + bias[h, kv_idx]", False, (), True),
        ("tensor bias: f32[heads_q, seqlen_kv] grad\n  score = s + bias[h, kv_idx]", False, ("bias",), False),
    ],
    ids=["full", "window", "causal", "turns", "bias without a gradient", "bias"],
)
def test_walks_are_shared_where_they_are_even(
    clauses: str, deterministic: bool, captured: tuple[str, ...], expected: bool
) -> None:
    spec = planned(clauses, deterministic).spec
    plan = plan_backward(spec, captured=captured).plans[0]
    assert plan.schedule.shares_walks == expected == bool(plan.part_words)


@pytest.mark.parametrize(
    ("kv_tiles", "workers", "steps", "expected"),
    [
        (4096, 132, 205, (4092, 33)),  # 32 K tokens of 16 heads of 128: a 32nd wave of four tiles
        (4096, 132, 13, (4092, 3)),  # short walks: four steps a share at least
        (132, 132, 205, (132, 1)),
        (64, 132, 100, (0, 2)),  # fewer tiles than SMs
        (100, 132, 100, (100, 1)),  # no SM for a second share
        (5, 4, 7, (5, 1)),
    ],
)
def test_tiles_of_a_short_wave_are_shared(kv_tiles: int, workers: int, steps: int, expected: tuple[int, int]) -> None:
    schedule = planned("").plans[0].schedule
    assert schedule.shared(kv_tiles, workers, steps) == expected
    assert schedule.replace(shares_walks=False).shared(kv_tiles, workers, steps) == (kv_tiles, 1)


@given(st.integers(1, 300), st.integers(1, 140), st.integers(1, 400), st.integers(0, 400), st.integers(1, 12))
def test_shares_cover_every_walk_once(kv_tiles: int, workers: int, steps: int, count: int, n_blocks: int) -> None:
    """Each step of each tile is in one number that is handed out; parts and zeros have their place."""
    text, schedule = methods(planned(""), "tile_of", "steps_of"), planned("").plans[0].schedule
    whole, shares = schedule.shared(kv_tiles, workers, steps)
    p = SimpleNamespace(whole_tiles=whole, shares=shares)
    items = range(whole + (kv_tiles - whole) * shares)
    assert len(items) - whole <= workers  # as many parts as the workspace holds
    taken: dict[int, list[int]] = {}
    for item in items:
        first, end = text["steps_of"](None, p, item, count)
        taken.setdefault(text["tile_of"](None, p, item), []).extend(range(first, end))
    assert taken == {tile: list(range(count)) for tile in range(kv_tiles)}
    heads = -(-kv_tiles // n_blocks)
    lag = schedule.zero_lag(heads, n_blocks, workers)
    assert all(tile // n_blocks + lag >= heads for tile in range(whole, kv_tiles)), "a shared tile would zero twice"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads_kv", "batch", "group"), [(1, 1, 1), (2, 3, 1), (2, 3, 4), (3, 2, 6), (1, 5, 2)])
def test_the_text_launches_what_the_plan_says(deterministic: bool, heads_kv: int, batch: int, group: int) -> None:
    plans = planned("mask = kv_idx <= q_pos", deterministic)
    schedule = plans.plans[0].schedule
    n_blocks = 5
    workers = group * n_blocks
    schedule = schedule.replace(grouped=True)
    p = SimpleNamespace(
        n_blocks=n_blocks, heads_dkv=heads_kv, batch=batch,
        group_heads=schedule.group_heads(heads_kv * batch, n_blocks, workers), whole_tiles=10**6,
    )  # fmt: skip
    coords = methods(plans, "tile_coords")["tile_coords"]
    found = [coords(None, tile, p) for tile in range(n_blocks * heads_kv * batch)]
    assert [(b, h, n) for n, h, b in found] == list(launch_order(schedule, n_blocks, heads_kv, batch, workers))
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("clauses", "expected"),
    [
        ("mask = kv_idx <= q_pos", True),
        ("", False),  # walks are even
        ("mask = kv_idx >= q_pos", False),  # they meet at the first query tile
        ("mask = kv_idx <= q_pos and q_pos - kv_idx < 300", False),  # they do not meet
        ("mask = kv_idx <= q_pos + h", False),  # heads differ
    ],
    ids=["causal", "full", "later keys", "window", "by head"],
)
def test_serpentine_walks(clauses: str, expected: bool) -> None:
    for deterministic in (False, True):
        assert planned(clauses, deterministic).plans[0].schedule.serpentine == (expected and not deterministic)


@pytest.mark.parametrize(
    ("group_tiles", "ctas", "expected"),
    [
        (128, 132, [0] * 128 + [1] * 128),  # a group a wave
        (256, 132, [0] * 128 + [1] * 128 + [2] * 128),
        (5, 4, [0] * 5 + [1] * 5),
        (6, 4, [0] * 3 + [1] * 3 + [2] * 3),
        (1, 9, [0, 1, 2, 3]),
    ],
)
def test_waves(group_tiles: int, ctas: int, expected: list[int]) -> None:
    """Of the plan, and of the text that follows it."""
    plans = planned("mask = kv_idx <= q_pos")
    schedule = plans.plans[0].schedule
    assert [schedule.wave(tile, group_tiles, ctas) for tile in range(len(expected))] == expected
    found = methods(plans, "descends", grid=ctas)["descends"]
    for heads in (1, 4):
        p = SimpleNamespace(group_heads=1, n_blocks=group_tiles, heads_per_cta=heads)
        assert [found(None, tile, p) for tile in range(len(expected))] == [
            heads > 1 and wave % 2 == 0 for wave in expected
        ]


@pytest.mark.parametrize(
    "clauses",
    [
        "mask = kv_idx <= q_pos",
        "mask = kv_idx + q_idx >= seqlen_kv",
        "mask = kv_idx <= q_pos and q_pos - kv_idx < 300",
        "mask = kv_idx < 100 or (kv_idx <= q_pos and q_pos - kv_idx < 200)",
    ],
    ids=["causal", "second diagonal", "window", "two clauses"],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(700, 700), (300, 900), (900, 300)])
def test_turns_follow_the_order_of_launch_in_the_text(clauses: str, seqlen_q: int, seqlen_kv: int) -> None:
    """Whoever adds to a query tile has as many turns before it as tiles launched before it that add: no deadlock."""
    plans = planned(clauses, deterministic=True)
    c = plans.plans[0].compute
    m_blocks, n_blocks = -(-seqlen_q // c.tile_m), -(-seqlen_kv // c.tile_n)
    p = SimpleNamespace(
        seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, heads_q=1, heads_kv=1, heads_dkv=1, batch=1, qhead_per_kvhead=1,
        m_blocks=m_blocks, n_blocks=n_blocks, group_heads=1,
    )  # fmt: skip
    found = methods(plans, "tile_coords", "turn", "hull", "live_tiles", "kv_tiles")
    kernel = SimpleNamespace(tile_m=c.tile_m, tile_n=c.tile_n)
    for name, function in found.items():
        setattr(kernel, name, function.__get__(kernel))
    launched = [kernel.tile_coords(tile, p)[0] for tile in range(n_blocks)]
    assert sorted(launched) == list(range(n_blocks))
    adds = 0
    for tile in range(m_blocks):
        turns = [before for before, own in (kernel.turn(p, tile, n) for n in launched) if own]
        assert turns == list(range(len(turns)))
        adds += len(turns)
    assert adds >= n_blocks


def methods(plans: BackwardPlanSet, *names: str, grid: int = 1) -> dict[str, Any]:
    """Methods of the emitted class that compute with ints alone, to be called with Python's."""
    tree = ast.parse(emit_backward(plans).text)
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AttentionBackward")
    body = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name in names]
    space: dict[str, Any] = {
        "cutlass": SimpleNamespace(min=min, max=max),
        "cute": SimpleNamespace(ceil_div=lambda a, b: -(-a // b), arch=SimpleNamespace(grid_dim=lambda: (grid, 1, 1))),
        "select": lambda c, a, b: a if c else b,
        "Int32": int,
        "LEAST_SHARE": LEAST_SHARE,
    }
    exec(compile(ast.Module(body, []), "<emitted>", "exec"), space)
    return {n.name: space[n.name] for n in body}


def test_ties_keep_the_usual_order() -> None:
    """Equal walks: both orders take the same time, with and without turns."""
    plans = planned("")
    c, form = plans.plans[0].compute, mask_form(plans.spec)
    for deterministic, usual in ((False, "ascending"), (True, "descending")):
        walks = kv_walks(plans.spec, form, c.tile_m, c.tile_n, deterministic)
        orders: tuple[KvOrder, KvOrder] = ("ascending", "descending")
        assert walks is not None
        assert len({round(makespan(walks, o, deterministic), 6) for o in orders}) == 1
        assert plan_order(plans.spec, form, c, deterministic).kv_order == usual
