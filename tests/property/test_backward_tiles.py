"""The load warp's loop of the emitted text, run by CTAs that take KV tiles in any order of tickets: each tile once."""

from __future__ import annotations

import ast
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attngen.emit.backward import emit_backward
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


@cache
def loop(name: str) -> str:
    """The source of `load`, as a function of the module."""
    plans = plan_backward(load_spec(f"attn 1\nattention a {{\n  {SPECS[name]}\n}}\n"))
    tree = ast.parse(emit_backward(plans).text)
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AttentionBackward")
    (method,) = (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "load")
    method.decorator_list = []
    return ast.unparse(method)


class Cta:
    """What `load` calls: tickets from a list that ends past the last tile, and what it tells and loads."""

    def __init__(self, tickets: list[int], walks: dict[int, int]):
        self.tickets, self.walks = iter(tickets), walks
        self.told: list[tuple[int, int, int]] = []
        self.steps: list[int] = []
        self.keys: list[int] = []

    def next_tile(self, *_: Any) -> int:
        return next(self.tickets)

    def tile_coords(self, tile: int, _: Any) -> tuple[int, int, int]:
        return tile, 0, 0

    def walk(self, p: Any, b: int, h: int, m_block: int, n_block: int) -> tuple[int, int]:
        """Live query tiles of 32, from the first place on."""
        return (1 << self.walks[n_block]) - 1 if m_block == 0 else 0, 0

    def descends(self, *_: Any) -> bool:
        return False

    def m_block_at(self, _: Any, place: int, __: bool) -> int:
        return place

    def tell(self, _: Any, __: Any, j: int, count: int, tile: int) -> None:
        self.told.append((j, count, tile))

    def load_step(self, p: Any, t: Any, rings: Any, i: int, *_: Any) -> None:
        self.steps.append(i)

    def load_kv(self, t: Any, rings: Any, j: int, n_block: int, *_: Any) -> None:
        self.keys.append(n_block)
        assert j == len(self.keys) - 1, "stages and phases of K and V follow from j"


@pytest.mark.parametrize("name", SPECS)
@given(data=st.data())
def test_every_kv_tile_is_taken_once(name: str, data: st.DataObject) -> None:
    """By any number of CTAs, whoever is the next to take one; and every step and every K is loaded once, in order."""
    kv_tiles, heads = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    ctas = min(kv_tiles, data.draw(st.integers(1, 5)))
    walks = {n: data.draw(st.integers(0, 4)) for n in range(kv_tiles)}
    takers = [data.draw(st.integers(0, ctas - 1)) for _ in range(kv_tiles)]
    running = []
    for number in range(ctas):
        cta = Cta([*(n for n, taker in enumerate(takers) if taker == number), kv_tiles + number], walks)
        space: dict[str, Any] = {
            "Int32": int,
            "lowest_bit": lambda word: (word & -word).bit_length() - 1,
            "cutlass": SimpleNamespace(
                max=max, range=lambda *at, unroll: range(*at), range_constexpr=range
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
        exec(loop(name), space)
        p = SimpleNamespace(num_tiles=kv_tiles, heads_per_cta=heads, qhead_per_kvhead=heads, m_blocks=4)
        space["load"](cta, p, None, None)
        running.append(cta)
    taken = [tile for cta in running for _, count, tile in cta.told if count > 0]
    assert sorted(taken) == list(range(kv_tiles))
    for cta in running:
        assert [j for j, _, _ in cta.told] == list(range(len(cta.told))), "stages and phases of walks follow from j"
        *told, last = cta.told
        assert last[1] == 0, "the others learn that there is no tile"
        assert [count for _, count, _ in told] == [max(heads * walks[tile], 1) for _, _, tile in told]
        assert [tile for _, _, tile in told] == sorted(tile for _, _, tile in told) == cta.keys
        assert cta.steps == list(range(sum(count for _, count, _ in told)))
