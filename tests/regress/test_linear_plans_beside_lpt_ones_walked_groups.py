"""A file of plans of both orders walked groups of heads in the linear one, too, whose text and plan say head by head.

Such files come of tuned records: each length takes what measured fastest there.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from attngen.emit.module import emit
from attngen.ir.plan import PlanSet
from attngen.search import plan
from attngen.syntax import load_spec

HEADS, ROWS, KEYS = 16, 4, 1000


def mixed(layout: str) -> PlanSet:
    clauses = f"head_dim = 64\n  layout = {layout}\n  mask = kv_idx <= q_pos"
    plans = plan(load_spec(f"attn 1\nattention a {{\n  {clauses}\n}}\n"))
    first = plans.plans[0]
    linear = first.replace(schedule=first.schedule.replace(order="linear", l2_group_bytes=0))
    assert first.schedule.l2_group_bytes > 0
    return plans.replace(plans=(first, linear), limits=(1024,))


class Array:
    """Extents in place of a tensor."""

    def __init__(self, *extents: int):
        self.extents = extents


def space(group_bytes: int) -> dict[str, object]:
    return {
        "cutlass": SimpleNamespace(min=min, max=max),
        "cute": SimpleNamespace(size=lambda x, mode: x.extents[mode[0]], ceil_div=lambda a, b: -(-a // b)),
        "const_expr": bool,
        "select": lambda c, a, b: a if c else b,
        "Int32": int,
        "Int64": int,
        "HEAD_DIM_QK": 64,
        "HEAD_DIM_V": 64,
        "ELEMENT_BYTES": 2,
        "self": SimpleNamespace(plan=SimpleNamespace(l2_group_bytes=group_bytes), tile_m=128),
        "mQ": Array(ROWS * 128, 64, HEADS, 1),
        "mK": Array(KEYS, 64, HEADS, 1),
    }


def method(text: str, name: str) -> ast.FunctionDef:
    owner = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "AttentionForward")
    return next(n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name)


def group(text: str, group_bytes: int) -> int:
    """What the launch computes of `group_heads`."""
    names = {"kv_head_bytes", "kv_heads", "group_heads"}
    body = [
        n
        for n in method(text, "__call__").body
        if names & {x.id for x in ast.walk(n) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    ]
    values = space(group_bytes) | {"heads": HEADS}
    exec(compile(ast.Module(body, []), "<emitted>", "exec"), values)
    return values["group_heads"]  # type: ignore[return-value]


def test_each_plan_walks_in_its_own_order() -> None:
    plans = mixed("bshd")
    text = emit(plans).text
    sizes = [group(text, p.schedule.l2_group_bytes) for p in plans.plans]
    assert sizes == [HEADS, 1]


@pytest.mark.parametrize("grouped", [True, False], ids=["lpt", "linear"])
def test_each_plan_walks_a_sequence_in_its_own_order(grouped: bool) -> None:
    plans = mixed("varlen")
    group_bytes = plans.plans[0].schedule.l2_group_bytes * grouped
    values = space(group_bytes)
    exec(compile(ast.Module([method(emit(plans).text, "locate")], []), "<emitted>", "exec"), values)
    kernel = SimpleNamespace(
        plan=values["self"].plan,  # type: ignore[attr-defined]
        tile_m=128,
        rank_of=lambda p, row_tile, lane: 0,
        extents=lambda p, b: (0, ROWS * 128, ROWS * 128, 0, KEYS),
    )
    p = SimpleNamespace(heads_q=HEADS, heads_kv=HEADS, qhead_per_kvhead=1, sequences=1, seq_order=[0, ROWS, 0])
    found = [values["locate"](kernel, p, tile, 0)[:2] for tile in range(ROWS * HEADS)]  # type: ignore[operator]
    head_by_head = [(m, h) for h in range(HEADS) for m in reversed(range(ROWS))]
    side_by_side = [(m, h) for m in reversed(range(ROWS)) for h in range(HEADS)]
    assert found == (side_by_side if grouped else head_by_head)
