"""The test of whole tiles is sound: what it says of a tile holds for every pair of it, for random masks over loads."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen.ir.tile_map import KNOWN, LEAST, MOST, LoadRange, TileTest
from attngen.passes.tile_test import tile_test
from attngen.ref.evaluate import evaluate
from attngen.syntax import load_spec, print_expr

TENSORS = """
  tensor doc: i32[batch, seqlen_kv]
  tensor rising: i32[seqlen_kv] sorted
  tensor marks: bool[batch, seqlen_kv]
  tensor table: i32[4, 5]
  tensor bias: f32[seqlen_kv]
  tensor blocks: bool[batch, heads_q, rows, columns]
  param n: int >= 1 = 3
  param w: int = 2
"""
ATOMS = ["q_idx", "q_pos", "kv_idx", "b", "h", "h_kv", "n", "w", "seqlen_kv", "seqlen_q"]
INTS = st.recursive(
    st.sampled_from([*ATOMS, "0", "1", "2", "7"]),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-"]), inner),
        st.builds("({} {} {})".format, inner, st.sampled_from(["//", "%", "*"]), st.sampled_from(["2", "3", "n", "w"])),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
        st.builds("abs({})".format, inner),
        st.builds("doc[b, {}]".format, inner),
        st.builds("rising[{}]".format, inner),
        st.builds("table[{} % 4, {} // 3]".format, inner, inner),
    ),
    max_leaves=6,
)
BOOLS = st.recursive(
    st.one_of(
        st.builds("({} {} {})".format, INTS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), INTS),
        st.builds("marks[b, {}]".format, INTS),
        st.builds("blocks[b, h, q_idx // 3, kv_idx // {}]".format, st.sampled_from(["2", "4"])),
        st.builds("(bias[{}] {} 0.25)".format, INTS, st.sampled_from(["<", ">", ">="])),
    ),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("(not {})".format, inner),
        st.builds("({} if {} else {})".format, inner, inner, inner),
    ),
    max_leaves=4,
)
SIZES = {"batch": 2, "heads_q": 2, "heads_kv": 1}
BOX = 1024


def of_tile(test: TileTest, env: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> tuple[bool, bool]:
    """(every, some), the loads looked through as a kernel does: where a tile is not `near`, none is."""
    env = dict(env)
    if not bool(evaluate(test.near, env, tensors, clamp=True)):
        return False, False
    for load in test.loads:
        low, high, known = looked_through(load, env, tensors)
        env |= {f"{LEAST}{load.number}": low, f"{MOST}{load.number}": high, f"{KNOWN}{load.number}": known}
    every, some = (evaluate(e, env, tensors, clamp=True) for e in (test.every, test.some))
    return bool(every), bool(some)


def looked_through(load: LoadRange, env: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> Any:
    source = tensors[load.tensor]
    ranges = []
    for axis, n in zip(load.axes, source.shape, strict=True):
        first, last = (int(evaluate(e, env, tensors, clamp=True)) for e in (axis.first, axis.last))
        assert first <= last
        ranges.append(range(min(max(first, 0), n - 1), min(max(last, 0), n - 1) + 1))
    values = torch.stack([source[i] for i in product(*ranges)])
    wide = values if values.dtype is torch.bool else values.double() if values.is_floating_point() else values.long()
    low, high = (wide.all(), wide.any()) if wide.dtype is torch.bool else (wide.min(), wide.max())
    return low, high, torch.tensor(len(values) <= BOX and not bool(values.isnan().any()))


@settings(max_examples=120, deadline=None)
@given(mask=BOOLS, seed=st.integers(0, 99), data=st.data())
def test_sound(mask: str, seed: int, data: st.DataObject) -> None:
    spec = load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n{TENSORS}\n  mask = {mask}\n}}\n")
    test = tile_test(spec)
    sq, skv = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14))
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "doc": torch.randint(0, 4, (2, skv), generator=g),
        "rising": torch.randint(0, 4, (skv,), generator=g).sort().values,
        "marks": torch.rand(2, skv, generator=g) < 0.7,
        "table": torch.randint(-3, 9, (4, 5), generator=g),
        "bias": torch.randn(skv, generator=g, dtype=torch.float64),
        "blocks": torch.rand(2, 2, -(-sq // 3), -(-skv // 2), generator=g) < 0.6,
    }
    if seed % 7 == 0:
        tensors["bias"][0] = torch.nan
    scalars = {**SIZES, "seqlen_q": sq, "seqlen_kv": skv, "n": 3, "w": data.draw(st.sampled_from([-2, 1, 2]))}
    fixed = {name: torch.tensor(x) for name, x in scalars.items()}
    q_lo, kv_lo = data.draw(st.integers(0, sq - 1)), data.draw(st.integers(0, skv - 1))
    q_hi, kv_hi = data.draw(st.integers(q_lo, sq - 1)), data.draw(st.integers(kv_lo, skv - 1))
    for b, h in product(range(2), range(2)):
        here = {**fixed, "b": torch.tensor(b), "h": torch.tensor(h), "h_kv": torch.tensor(0)}
        ends = {"q_lo": q_lo, "q_hi": q_hi, "kv_lo": kv_lo, "kv_hi": kv_hi}
        every, some = of_tile(test, {**here, **{n: torch.tensor(x) for n, x in ends.items()}}, tensors)
        q_idx, kv_idx = torch.arange(q_lo, q_hi + 1)[:, None], torch.arange(kv_lo, kv_hi + 1)[None]
        env = {**here, "q_idx": q_idx, "q_pos": q_idx + (skv - sq), "kv_idx": kv_idx}
        kept = evaluate(spec.mask, env, tensors, clamp=True)
        assert not every or bool(kept.all()), "a tile is said to be whole, and drops a pair"
        assert some or not bool(kept.any()), "a tile is said to be empty, and keeps a pair"


def test_decides_what_it_should() -> None:
    """Packed documents, blocks and bands: only tiles on an edge are left undecided."""
    spec = load_spec(
        "attn 1\nattention a {\n  head_dim = 64\n  tensor doc: i32[batch, seqlen_kv]\n"
        "  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]\n}\n"
    )
    test = tile_test(spec)
    assert print_expr(test.near) == "kv_lo + seqlen_q <= q_hi + seqlen_kv"
    doc = torch.tensor([[0] * 8 + [1] * 8]).long()
    fixed = {n: torch.tensor(x) for n, x in {"b": 0, "h": 0, "seqlen_q": 16, "seqlen_kv": 16}.items()}

    def at(m: int, n: int) -> tuple[bool, bool]:
        ends = {"q_lo": 4 * m, "q_hi": 4 * m + 3, "kv_lo": 4 * n, "kv_hi": 4 * n + 3}
        return of_tile(test, {**fixed, **{k: torch.tensor(v) for k, v in ends.items()}}, {"doc": doc})

    found = {(m, n): at(m, n) for m in range(4) for n in range(4)}
    assert [t for t, (every, _) in found.items() if every] == [(1, 0), (3, 2)]
    assert [t for t, (every, some) in found.items() if some and not every] == [(0, 0), (1, 1), (2, 2), (3, 3)]
