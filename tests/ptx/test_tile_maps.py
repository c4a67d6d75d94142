"""Kernels that walk by a tile map, executed by the checker: the map, forward, backward, turns.

Blocks that tiles cut and blocks that hold tiles; lists that are empty for some rows, and for all; documents in no
order; floats of either sign, NaN and flags; masks by coordinates. Memory of the map is poisoned before a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backward_calls
import pytest
import torch
from ptxcheck.compile import compile_module, compile_spec
from ptxcheck.launch import attngen_call, check, map_arguments

from attngen import samples
from attngen.ir.spec import AttentionSpec
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
DETERMINISTIC = "  backward { deterministic = true }\n"


def written(name: str, body: str) -> AttentionSpec:
    return load_spec(f'attn 1\ninclude "std.attn"\nattention {name} {{\n  head_dim = 64\n{body}}}\n')


def blocks(spec: AttentionSpec, shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Two in five listed; in call 0 a row of blocks lists nothing, in call 1 no row does."""
    counts = spec.block_counts(shape.seqlen_q, shape.seqlen_kv)
    g = torch.Generator().manual_seed(seed)
    listed = torch.rand(shape.batch, shape.heads_q, counts["blocks_q"], counts["blocks_kv"], generator=g) < 0.4
    listed[:, :, -1] &= seed != 0
    return {"blocks": listed & (seed != 1)}


def documents(spec: AttentionSpec, shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Runs of ids that come again: no order to rely on."""
    g = torch.Generator().manual_seed(seed)
    runs = torch.randint(0, 3, (shape.batch, -(-shape.seqlen_kv // 40)), generator=g, dtype=torch.int32)
    return {"doc": runs.repeat_interleave(40, 1)[:, : shape.seqlen_kv].contiguous()}


def times(spec: AttentionSpec, shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Runs longer than tiles, of either sign and NaN; few flags."""
    g = torch.Generator().manual_seed(seed)
    runs = torch.randint(-3, 4, (shape.batch, -(-shape.seqlen_kv // 150)), generator=g).float() * 0.5
    runs[:, 1] = torch.nan if seed else -0.0
    when = runs.repeat_interleave(150, 1)[:, : shape.seqlen_kv].contiguous()
    flag = torch.zeros(shape.batch, shape.seqlen_kv, dtype=torch.bool)
    flag[:, 70::200] = True
    return {"when": when, "flag": flag}


def nothing(spec: AttentionSpec, shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    return {}


Maker = Callable[[AttentionSpec, Shape, int], dict[str, Any]]
BIGBIRD = """  let row    = q_pos // 64
  let column = kv_idx // 64
  let last   = (seqlen_kv - 1) // 64
  mask = abs(row - column) <= 1 or column == 0 or column == last or row == 0 or row == last
  block_sparse { q = 64, kv = 64 }
"""
CASES: dict[str, tuple[str, Maker, list[Shape]]] = {
    "cut": (
        "  mask = causal\n  block_sparse { q = 48, kv = 48, lists = given }\n", blocks,
        [Shape(1, 2, 1, 231, 231), Shape(1, 1, 1, 100, 177)],
    ),
    "whole": (
        "  mask = causal\n  block_sparse { q = 128, kv = 128, lists = given }\n  layout = bhsd\n", blocks,
        [Shape(1, 4, 2, 300, 300), Shape(1, 1, 1, 140, 200), Shape(2, 1, 1, 150, 290)],
    ),
    "documents": (
        "  tensor doc: i32[batch, seqlen_kv]\n  mask = causal and document(doc)\n  score = softcap(s, 5.0)\n"
        "  block_sparse { q = 128, kv = 128 }\n", documents, [Shape(2, 1, 1, 200, 260)],
    ),
    "times": (
        "  tensor when: f32[batch, seqlen_kv]\n  tensor flag: bool[batch, seqlen_kv]\n"
        "  mask = flag[b, kv_idx] or (causal and when[b, kv_idx] < when[b, q_pos])\n"
        "  block_sparse { q = 128, kv = 128 }\n", times, [Shape(2, 1, 1, 420, 431), Shape(1, 1, 1, 300, 460)],
    ),
    "bigbird": (BIGBIRD, nothing, [Shape(1, 1, 1, 100, 640)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_forward(name: str) -> None:
    body, make, shapes = CASES[name]
    spec = written(name, body)
    module, _ = compile_spec(spec)
    bhsd = spec.layout.value == "bhsd"
    for seed, shape in enumerate(shapes):
        q, k, v = samples.qkv(spec, shape, seed=seed)
        tensors = make(spec, shape, seed)
        big = [x.transpose(1, 2).contiguous() if bhsd else x for x in (q, k, v)]
        o, lse, report = attngen_call(
            module, 0, *big, tensors=tuple(tensors.values()), layout=spec.layout.value, seed=seed
        )
        assert not report.faults
        assert_close(o.transpose(1, 2) if bhsd else o, spec, q, k, v, lse=lse, tensors=tensors)


def test_a_kept_map_is_not_made_again() -> None:
    """With build_map = 0 nothing is made, and what the memory holds is used: of other lists, here."""
    body, make, shapes = CASES["cut"]
    spec, shape = written("cut", body), shapes[0]
    module, _ = compile_spec(spec)
    q, k, v = samples.qkv(spec, shape, seed=0)
    first, second = (make(spec, shape, seed)["blocks"] for seed in (0, 2))
    (memory, made) = map_arguments(module.ATTN_META, 0, q, k, "bshd")
    assert made == 1

    def call(blocks: torch.Tensor, build: int) -> torch.Tensor:
        o, lse = torch.full_like(q, torch.nan), torch.full((1, shape.heads_q, shape.seqlen_q), torch.nan)
        counter = torch.zeros(1, dtype=torch.int32)
        report = check(compile_module(module, 0), q, k, v, o, lse, counter, 0.125, 3, blocks, memory, build)
        assert not report.faults
        return o

    o = call(first, 1)
    before = memory.clone()
    assert_close(o, spec, q, k, v, tensors={"blocks": first})
    assert torch.equal(call(first, 0), o) and torch.equal(memory, before)
    call(second, 0)
    assert torch.equal(memory, before)
    call(second, 1)
    assert not torch.equal(memory, before)


@pytest.mark.parametrize("turns", ["", DETERMINISTIC], ids=["", "deterministic"])
@pytest.mark.parametrize("name", CASES)
def test_backward(name: str, turns: str) -> None:
    body, make, shapes = CASES[name]
    spec = written(name, body + turns)
    made = backward_calls.kernels(spec)
    for seed, shape in enumerate(shapes):
        backward_calls.verify(made, backward_calls.call(spec, shape, seed=seed, tensors=make(spec, shape, seed)))


def test_split_operands() -> None:
    """Wide heads: clusters of two CTAs walk by one map, and count turns by it."""
    spec = load_spec(f"attn 1\nattention wide {{\n  head_dim = 256\n{BIGBIRD}{DETERMINISTIC}}}\n")
    made = backward_calls.kernels(spec)
    assert made.plans.plans[0].compute.splits_operands
    backward_calls.verify(made, backward_calls.call(spec, Shape(1, 2, 1, 70, 300)))
