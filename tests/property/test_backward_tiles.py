"""The load warp's loop of the emitted text, run by CTAs that take KV tiles in any order of tickets: each tile once, or
each of the shares of its walk.
"""

from __future__ import annotations

import ast
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.emit.backward import emit_backward
from attngen.ir.backward import LEAST_SHARE
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

#: Every form of the loop: grouped heads side by side, plain, by turns, and clusters of wide heads.
SPECS = {
    "grouped": "head_dim = 64\n  mask = kv_idx <= q_pos",
    "plain": "head_dim = 64",
    "turns": "head_dim = 64\n  backward { deterministic = true }",
    "wide": "head_dim = 256",
    "wide turns": "head_dim = 256\n  mask = kv_idx <= q_pos\n  backward { deterministic = true }",
}


#: The loop, and what shares out walks where the plan does.
SCHEDULE = ("load", "load_steps", "tile_of", "steps_of")


@cache
def methods(name: str) -> str:
    """The source of `load`, and of what shares out walks where the plan does, as functions of the module."""
    plans = plan_backward(load_spec(f"attn 1\nattention a {{\n  {SPECS[name]}\n}}\n"))
    tree = ast.parse(emit_backward(plans).text)
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AttentionBackward")
    found = [n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name in SCHEDULE]
    assert len(found) == (len(SCHEDULE) if plans.plans[0].schedule.shares_walks else 1)
    for method in found:
        method.decorator_list = []
    return ast.unparse(ast.Module(body=found, type_ignores=[]))


class Cta:
    """What `load` calls: tickets from a list that ends past the last tile, and what it tells and loads."""

    def __init__(self, tickets: list[int], walks: dict[int, int], space: dict[str, Any]):
        self.tickets, self.walks, self.space = iter(tickets), walks, space
        self.told: list[tuple[int, int, int]] = []
        self.steps: list[int] = []
        self.keys: list[int] = []
        self.places: list[tuple[int, int]] = []
        self.zeroed: list[int] = []

    def next_tile(self, *_: Any) -> int:
        return next(self.tickets)

    def tile_coords(self, tile: int, p: Any) -> tuple[int, int, int]:
        return self.space["tile_of"](self, p, tile) if "tile_of" in self.space else tile, 0, 0

    def steps_of(self, p: Any, item: int, count: int) -> tuple[int, int]:
        first, end = self.space["steps_of"](self, p, item, count)
        return first, end

    def load_steps(self, *rest: Any) -> int:
        i: int = self.space["load_steps"](self, *rest)
        return i

    def zero_share(self, p: Any, item: int, lane: int) -> None:
        self.zeroed.append(item)

    def walk(self, p: Any, b: int, h: int, m_block: int, n_block: int) -> tuple[int, int]:
        """Live query tiles of 32, from the first place on."""
        return (1 << self.walks[n_block]) - 1 if m_block == 0 else 0, 0

    def descends(self, *_: Any) -> bool:
        return False

    def m_block_at(self, _: Any, place: int, __: bool) -> int:
        return place

    def tell(self, _: Any, __: Any, j: int, count: int, tile: int) -> None:
        self.told.append((j, count, tile))

    def load_step(self, p: Any, t: Any, rings: Any, i: int, m_block: int, h: int, *_: Any) -> None:
        self.steps.append(i)
        self.places.append((h, m_block))

    def load_kv(self, t: Any, rings: Any, j: int, n_block: int, *_: Any) -> None:
        self.keys.append(n_block)
        assert j == len(self.keys) - 1, "stages and phases of K and V follow from j"


@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
def test_every_kv_tile_is_taken_once(name: str, data: st.DataObject) -> None:
    """By any number of CTAs, whoever is the next to take one; and every step and every K is loaded once, in order."""
    kv_tiles, heads = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    source = methods(name)
    shared, shares = 0, 1
    if "def steps_of" in source:
        shared, shares = data.draw(st.integers(0, kv_tiles)), data.draw(st.integers(1, 4))
    whole = kv_tiles - shared
    items = whole + shared * shares
    ctas = min(items, data.draw(st.integers(1, 5)))
    walks = {n: data.draw(st.integers(0, 8)) for n in range(kv_tiles)}
    takers = [data.draw(st.integers(0, ctas - 1)) for _ in range(items)]

    def share_of_walk(item: int) -> list[tuple[int, int]]:
        tile, share = (item, 0) if item < whole else (whole + (item - whole) // shares, (item - whole) % shares)
        steps = [(h, m) for h in range(heads) for m in range(walks[tile])]
        of = 1 if item < whole else max(min(len(steps) // LEAST_SHARE, shares), 1)
        return steps[len(steps) * share // of : len(steps) * (share + 1) // of] if share < of else []

    running = []
    for number in range(ctas):
        space: dict[str, Any] = {
            "Int32": int,
            "LEAST_SHARE": LEAST_SHARE,
            "select": lambda condition, a, b: a if condition else b,
            "lowest_bit": lambda word: (word & -word).bit_length() - 1,
            "cutlass": SimpleNamespace(
                max=max, min=min, range=lambda *at, unroll: range(*at), range_constexpr=range
            ),
            "cute": SimpleNamespace(
                arch=SimpleNamespace(
                    thread_idx=lambda: (0, 0, 0),
                    block_idx=lambda number=number: (number, 0, 0),
                    grid_dim=lambda: (ctas, 1, 1),
                    popc=lambda word: word.bit_count(),
                )
            ),
        }  # fmt: skip
        exec(source, space)
        cta = Cta([*(n for n, taker in enumerate(takers) if taker == number), items + number], walks, space)
        p = SimpleNamespace(
            num_tiles=items, heads_per_cta=heads, qhead_per_kvhead=heads, m_blocks=8, whole_tiles=whole, shares=shares
        )
        space["load"](cta, p, None, None)
        running.append(cta)
    taken = [tile for cta in running for _, count, tile in cta.told if count > 0]
    idle = [item for cta in running for item in cta.zeroed]
    assert sorted(taken + idle) == list(range(items))
    for cta in running:
        assert [j for j, _, _ in cta.told] == list(range(len(cta.told))), "stages and phases of walks follow from j"
        *told, last = cta.told
        assert last[1] == 0, "the others learn that there is no tile"
        at = 0
        for _, count, item in told:
            walk = share_of_walk(item)
            assert count == max(len(walk), 1), "one step at least, so that every pipeline turns"
            assert sorted(cta.places[at : at + count]) == (walk or [(0, 0)])
            at += count
        assert cta.keys == [n if n < whole else whole + (n - whole) // shares for _, _, n in told]
        assert [tile for _, _, tile in told] == sorted(tile for _, _, tile in told)
        assert cta.steps == list(range(at))
        assert all(item >= whole and not share_of_walk(item) for item in cta.zeroed), "a share without a step, no other"
        assert all(item < whole or share_of_walk(item) for _, _, item in told), "a share's only step would hold pairs"
