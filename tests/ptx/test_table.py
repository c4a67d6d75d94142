"""The instruction table: it holds every opcode of a census of attention kernels, and how opcodes are looked up.

census.txt: all opcodes of our gallery and of FlashAttention-4's forward and backward on sm_90a and sm_100a.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import ptxcheck
import pytest
from ptxcheck import build, table

CENSUS = (Path(__file__).parent / "census.txt").read_text().split()


def test_census() -> None:
    assert len(CENSUS) > 200
    assert [o for o in CENSUS if table.lookup(o) is None] == []


def test_lookup_takes_the_longest_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TABLE", {})
    made = {}
    for key, types in (("cp.async", ""), ("cp.async.bulk.tensor", ""), ("add", "u32 s32"), ("add", "f32"), ("x", "")):

        @table.op(key, types=types)
        def builder(b: build.Program, i: object) -> None: ...

        made[key, types] = builder
    assert table.lookup("cp.async.ca.shared") is made["cp.async", ""]
    assert table.lookup("cp.async.bulk.tensor.2d") is made["cp.async.bulk.tensor", ""]
    assert table.lookup("cp.async.bulk") is made["cp.async", ""]
    assert table.lookup("add.sat.s32") is made["add", "u32 s32"] and table.lookup("add.rn.f32") is made["add", "f32"]
    assert table.lookup("add.f16") is None and table.lookup("xy") is None and table.lookup("x.y.z") is made["x", ""]
    with pytest.raises(ValueError, match="two builders"):
        table.op("cp.async")(builder)


def test_every_module_of_instructions_is_loaded() -> None:
    names = [m.name for m in pkgutil.iter_modules(ptxcheck.__path__) if m.name.startswith("ops_")]
    keys = set(table.TABLE)
    for name in names:
        module = importlib.import_module(f"ptxcheck.{name}")
        owned = [k for k in keys if getattr(table.TABLE[k], "__module__", "") == module.__name__]
        assert owned or name == "ops_special", name
    assert "%tid.x" in table.SPECIALS


def test_modules_are_on_the_map() -> None:
    """README.md names every module, and no module that is not there."""
    root = Path(ptxcheck.__path__[0])
    text = (root / "README.md").read_text()
    rows = [
        line for line in text[text.index("## Map") : text.index("## Scalar")].splitlines() if line.startswith("| `")
    ]
    named = {n for row in rows for n in re.findall(r"`(\w+)\.py`", row.split("|")[1])}
    there = {p.stem for p in root.glob("*.py")} - {"__init__"}
    assert named == there
