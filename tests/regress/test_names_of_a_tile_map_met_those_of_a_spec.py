"""A tensor called `lane`, `least_0` or `map_rows` took the place of the kernel's own in the launch that makes a map."""

from __future__ import annotations

import ast

import pytest

import attngen
from attngen.syntax import load_spec


@pytest.mark.parametrize("name", ["lane", "least_0", "known_1", "map_rows", "near"])
@pytest.mark.parametrize("only", ["forward", "backward"])
def test_names(name: str, only: str) -> None:
    spec = load_spec(
        f"attn 1\nattention a {{\n  head_dim = 64\n  tensor {name}: i32[batch, seqlen_kv]\n"
        f"  mask = kv_idx <= q_pos and {name}[b, q_pos] == {name}[b, kv_idx]\n"
        "  block_sparse { q = 64, kv = 64 }\n}\n"
    )
    tree = ast.parse(attngen.compile(spec, only=only).text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "least_and_most"]
    assert [ast.unparse(x) for c in calls for x in c.args[:2]] == [f"{name}_", "lane"] * 2
    for f in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in ("tile_test", "inner_boxes")):
        said = [
            t.id
            for n in ast.walk(f)
            if isinstance(n, ast.Assign)
            for t in ast.walk(n.targets[0])
            if isinstance(t, ast.Name)
        ]
        assert f"{name}_" in said and name not in set(said) - {"least_0", "known_1"}
        assert len(said) - said.count("boxes") == len(set(said) - {"boxes"}), "a name means two things"
