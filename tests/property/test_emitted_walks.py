"""Walks of emitted kernels on random calls: every kept pair is computed once, in any plan, by any number of CTAs.

The emitted text runs as plain Python (`emitted`, `walks`): which tiles its loads, its warpgroups and its CTAs take, the
shares of a walk, turns, zeros ahead of the sums, packed heads, tile maps. Values and races are the PTX checker's.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import walks
from backward_plans import alone
from hypothesis import given, settings
from hypothesis import strategies as st

from attngen import samples, search
from attngen.emit.backward import emit_backward
from attngen.emit.module import emit
from attngen.ir.spec import AttentionSpec
from attngen.samples import Shape
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

WINDOW = "param w: int >= 1 = {w}\n  mask = kv_idx <= q_pos and q_pos - kv_idx < w"
TURNS = "\n  backward {{ deterministic = true }}"
#: Clauses, `{w}` a default: plans follow from those, calls do not.
MASKS = {
    "full": "",
    "causal": "mask = kv_idx <= q_pos",
    "window": WINDOW,
    "window in turns": WINDOW + TURNS,
    "ahead": "param w: int >= 0 = {w}\n  mask = kv_idx - q_pos >= w and kv_idx - q_pos <= w + 9",
    "corner": "param w: int = {w}\n  mask = kv_idx >= w and q_idx < w",
    "streaming": "param w: int >= 1 = {w}\n  mask = kv_idx <= q_pos and (q_pos - kv_idx < w or kv_idx < 4)",
    "three intervals": "param w: int = {w}\n  mask = kv_idx < w or kv_idx >= 90 and kv_idx <= q_pos or q_idx >= 2 * w",
    "two windows in turns": "param w: int >= 1 = {w}\n  mask = kv_idx <= q_pos and q_pos - kv_idx < w "
    "or q_pos - kv_idx >= 150 and q_pos - kv_idx < 150 + w" + TURNS,
    "chunks": "param w: int >= 1 = {w}\n  mask = kv_idx // w == q_pos // w",
    "documents": "tensor doc: i32[batch, seqlen_kv] sorted\n"
    "  mask = kv_idx <= q_pos and doc[b, max(q_pos, 0)] == doc[b, kv_idx]",
    "lengths": "tensor n: i32[batch]\n  mask = kv_idx < n[b] and q_idx >= n[b] // 2",
    "local heads": "param w: int >= 1 = {w}\n  mask = kv_idx <= q_pos and (h % 2 == 0 or q_pos - kv_idx < w)",
    "starts": "tensor first: i32[batch, seqlen_q]\n"
    "  mask = kv_idx >= first[b, q_idx] and kv_idx <= first[b, q_idx] + 9",
    "blocks": "block_sparse {{ q = 48, kv = 80, lists = given }}",
    "mapped documents in turns": "tensor doc: i32[batch, seqlen_kv]\n"
    "  mask = kv_idx <= q_pos and doc[b, max(q_pos, 0)] == doc[b, kv_idx]\n"
    "  block_sparse {{ q = 64, kv = 64 }}" + TURNS,
}  # fmt: skip
PACKED = ("full", "causal", "window", "three intervals", "chunks")
LENGTHS = st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 160, 257, 300, 700, 1100])
PARAMS = st.sampled_from([1, 2, 3, 20, 64, 65, 127, 128, 129, 300, 2**31 - 200])
settings.register_profile("walks", parent=settings.get_profile("attngen"), max_examples=10)


def written(name: str, draw: random.Random, more: str = "") -> AttentionSpec:
    d = draw.choice((8, 40, 64, 64, 128, 256))
    clauses = MASKS[name].format(w=draw.choice((1, 40, 128, 4096)))
    return load_spec(f"attn 1\nattention a {{\n  head_dim = {d}\n  {clauses}\n  {more}\n}}\n")


@cache
def forward(name: str, pack: int, seed: int) -> tuple[AttentionSpec, walks.Kernel]:
    """A plan that the seed picks of all that the planners allow, of a spec whose head dim and default it picks."""
    draw = random.Random(f"{name} {pack} {seed}")
    plans = search.plan(written(name, draw, f"schedule {{ pack_gqa = {pack} }}" if pack > 1 else ""))
    plan = draw.choice((*plans.plans, *plans.others))
    return plans.spec, walks.Kernel(plan, emit(plans.replace(plans=(plan,), limits=())).text)


@cache
def backward(name: str, seed: int) -> tuple[AttentionSpec, walks.Kernel]:
    """Of seed 0 the shortest steps: walks of few keys are long enough to be shared."""
    draw = random.Random(f"{name} {seed}")
    plans = plan_backward(written(name, draw))
    every = (*plans.plans, *plans.others)
    plan = draw.choice(every) if seed else min(every, key=lambda p: p.compute.tile_m)
    return plans.spec, walks.Kernel(plan, emit_backward(alone(plans, plan.name)).text)


def drawn(spec: AttentionSpec, kernel: walks.Kernel, data: st.DataObject, group: int) -> walks.Call:
    """A call: few keys for many rows and the reverse, lengths around those of tiles, tensors without any order."""
    batch, heads_kv = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    rows, keys = data.draw(LENGTHS), data.draw(LENGTHS)
    shape = Shape(batch, group * heads_kv, heads_kv, rows, keys)
    seed = data.draw(st.integers(0, 99))
    tensors = samples.tensors(spec, shape, seed=seed)
    g = torch.Generator().manual_seed(seed)
    for name in {"n", "first"} & tensors.keys():
        tensors[name] = torch.randint(-3, keys + 3, tensors[name].shape, generator=g, dtype=torch.int32)
    params = {p.name: data.draw(PARAMS) for p in spec.params}
    return walks.Call.of(spec, kernel.plan.mask.form, shape, params, tensors)


@pytest.mark.parametrize(("name", "pack"), [*((n, 1) for n in MASKS), *((n, p) for n in PACKED for p in (2, 8))])
@settings(settings.get_profile("walks"))
@given(data=st.data())
def test_forward(name: str, pack: int, data: st.DataObject) -> None:
    spec, kernel = forward(name, pack, data.draw(st.integers(0, 1 if pack == 1 else 0)))
    group = pack if pack > 1 else data.draw(st.sampled_from([1, 2, 3]))
    walks.forward(kernel, drawn(spec, kernel, data, group))


@pytest.mark.parametrize("name", MASKS)
@settings(settings.get_profile("walks"))
@given(data=st.data())
def test_backward(name: str, data: st.DataObject) -> None:
    spec, kernel = backward(name, data.draw(st.integers(0, 1)))
    group, parts = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (8, 1)]))
    workers = data.draw(st.sampled_from([1, 2, 3, 5, 9, 16, 33, 132, 200]))
    walks.backward(kernel, drawn(spec, kernel, data, group), workers, parts, data.draw(st.integers(0, 99)))


#: What each check is for: a call in which a line counts, the line, and a wrong one in its place.
FEW, LONG = Shape(1, 2, 1, 339, 379), Shape(1, 1, 1, 300, 900)
PLANTED = {
    "a KV tile is not given back": (
        "window", LONG, 1, "self.pass_tiles(w, rings, i, n_max - live_max)", "i"
    ),
    "a run of KV tiles is lost": (
        "streaming", LONG, 1, "n_max, full_min, full_max = self.next_run(tiles, full_min)", "n_max = Int32(0)"
    ),
    "a share without a step stands in": (
        "corner", FEW, 132, "if (tile >= p.whole_tiles) & (skipped == end):", "if False:"
    ),
    "a share takes its neighbour's steps": (
        "full", FEW, 132, "count * cutlass.min(share + 1, busy) // busy", "count * (share + 2) // busy"
    ),
    "zeros come from later KV tiles": (
        "causal", Shape(1, 6, 6, 90, 300), 9, "group_heads + cute.ceil_div(workers, n_blocks)", "Int32(1)"
    ),
    "turns go against the tickets": (
        "window in turns", Shape(1, 1, 1, 130, 300), 3, "return n_max - 1 - n_block, ", "return n_block - n_min, "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str) -> None:
    mask, shape, workers, right, wrong = PLANTED[name]
    spec = load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  {MASKS[mask].format(w=1)}\n}}\n")
    if shape is LONG:
        of_forward = search.plan(spec)
        plan = of_forward.plans[0]
        text = emit(of_forward.replace(plans=(plan,), limits=())).text
    else:
        found = plan_backward(spec)
        plan = next(p for p in (*found.plans, *found.others) if p.name == "32x128")
        text = emit_backward(alone(found, plan.name)).text
    c = walks.Call.of(spec, plan.mask.form, shape, {p.name: 1 for p in spec.params}, {})

    def walk(text: str) -> None:
        kernel = walks.Kernel(plan, text)
        walks.forward(kernel, c, workers) if shape is LONG else walks.backward(kernel, c, workers)

    assert right in text
    walk(text)
    with pytest.raises(AssertionError):
        walk(text.replace(right, wrong))
