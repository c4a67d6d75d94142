"""What the checker measures, beside what the plans predict: products, exponentials, bytes, bank conflicts.

The plans' arithmetic (passes/cost.py, passes/backward/cost.py, rooflines.py) is for full tiles: lengths are
multiples of the tiles here. A warpgroup whose rows all lie past the end repeats the last row's tiles, which no
prediction counts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from backward_calls import call, kernels, run
from ptxcheck.compile import compile_file
from ptxcheck.counters import Counters
from ptxcheck.launch import attngen_call
from ptxcheck.report import Report
from ragged_calls import Call, Gradients
from test_gallery import FILES, PLANS, RAGGED, SMALL, SPECS, spec_of

import attngen.search as search
from attngen import samples
from attngen.draw.tiles import tiling
from attngen.ir.plan import KernelPlan
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.scale import Scale
from attngen.rooflines import roofline_backward
from attngen.samples import Shape
from attngen.targets import sm90

pytestmark = pytest.mark.dsl


def products(counters: Counters) -> int:
    """Floating-point operations of all wgmma."""
    total = 0
    for shape, count in counters.mma.items():
        found = re.fullmatch(r"wgmma m(\d+)n(\d+)k(\d+)\..*", shape)
        assert found, shape
        m, n, k = map(int, found.groups())
        total += 2 * m * n * k * count
    return total


def walked(plan: KernelPlan, shape: Shape, params: Any, tensors: Any) -> tuple[float, int, int]:
    """Tiles of tile_m x tile_n that warpgroups visit, KV tiles that CTAs load, and query tiles, over all heads."""
    visited, loaded, row_tiles = 0.0, 0, 0
    for b in range(shape.batch):
        for h in range(shape.heads_q):
            loop = tiling(plan, shape, batch=b, head=h, params=params, tensors=tensors)
            count = loop.count()
            visited += (count["full"] + count["partial"]) * loop.tile_m / plan.compute.tile_m
            seen: dict[int, set[int]] = {}
            for row in loop.rows:
                mine = seen.setdefault(row.start // plan.compute.tile_m, set())
                mine |= {n for s in row.segments for n in range(s.last, s.first + 1)}
            loaded += sum(map(len, seen.values()))
            row_tiles += len(seen)
    return visited, loaded, row_tiles


def measured(file: Path, index: int, spec: AttentionSpec, shape: Shape) -> tuple[Any, Any, Report]:
    """Params and captured tensors of one call, and the report; of a ragged layout one sequence."""
    given = {n: x for n, x in SMALL.get(spec.name, {}).items() if n in {p.name for p in spec.params}}
    module, _ = compile_file(file, index)
    if spec.layout.is_ragged:
        packed = Call(spec, [(shape.seqlen_q, shape.seqlen_kv)], (shape.heads_q, shape.heads_kv), seed=3, given=given)
        return packed.params, packed.tensors, packed.run(module, index, measure=True)[2]
    q, k, v = samples.qkv(spec, shape, seed=3)
    params, tensors = samples.params(spec, given), samples.tensors(spec, shape, seed=3)
    bhsd = spec.layout is Layout.BHSD
    scale = Scale(spec)
    extra = (*params.values(), *tensors.values())
    _, _, report = attngen_call(
        module, index, *(x.transpose(1, 2).contiguous() if bhsd else x for x in (q, k, v)),
        params=tuple(params.values()), tensors=tuple(tensors.values()), layout="bhsd" if bhsd else "bshd",
        scale=scale.default if scale.default == scale.default else scale.of(extra), measure=True,
    )  # fmt: skip
    return params, tensors, report


@pytest.mark.parametrize(("file", "index"), PLANS, ids=[f"{f.name.split('.')[0]}-{i}" for f, i in PLANS])
def test_forward(file: Path, index: int) -> None:
    spec = spec_of(file)
    plan = search.plan(spec).plans[index]
    c = plan.compute
    shape = Shape(1, 2, 1, 2 * c.tile_m, 2 * c.tile_m)
    params, tensors, report = measured(file, index, spec, shape)
    counters = report.counters
    visited, loaded, row_tiles = walked(plan, shape, params, tensors)

    assert products(counters) == visited * plan.cost.mma_cycles * sm90.MMA_FLOP_PER_CYCLE
    assert counters.operands == visited * plan.cost.smem_cycles * sm90.SMEM_BYTES_PER_CYCLE
    # One exponential an element; beside it a rescaling factor for a row, at most once a tile and thread, and the sink.
    elements, threads = visited * c.tile_m * c.tile_n, 2 * c.tile_m
    assert elements <= counters.exponentials <= elements + (visited + 2 * row_tiles) * 2 * threads
    assert counters.copied == {
        "q": row_tiles * c.tile_m * plan.memory.columns_qk * 2,
        "k": loaded * c.tile_n * plan.memory.columns_qk * 2,
        "v": loaded * c.tile_n * plan.memory.columns_v * 2,
        "o": row_tiles * c.tile_m * plan.memory.columns_v * 2,
    }
    assert not counters.conflicts(), str(counters)


#: Plans whose query and KV tiles both divide the length.
BACKWARDS = [
    ("causal", (), 640),
    ("gpt_oss_local", ("sinks",), 256),
    ("gemma2_local", (), 128),
    ("mla_prefill", (), 384),
    ("bigbird_lists", (), 256),
    ("modernbert_unpadded", (), 256),
]


def backward(name: str, captured: tuple[str, ...], length: int) -> tuple[Any, Any, Counters]:
    """The plan, its predictions for a call, and the counts of that call."""
    spec, shape = RAGGED.get(name) or SPECS[name], Shape(1, 2, 1, length, length)
    c: Any
    if spec.layout.is_ragged:
        packed = Gradients(spec)
        plans, c = packed.plans, Call(spec, [(length, length)], given=SMALL.get(name), seed=2)
        report = packed.report(c, measure=True)
        assert not report.faults
    else:
        made = kernels(spec, captured=captured)
        plans, c = made.plans, call(spec, shape, params=SMALL.get(name), seed=2)
        _, report = run(made, c, measure=True)
    plan = plans.plans[0]
    assert length % plan.compute.tile_m == 0 and length % plan.compute.tile_n == 0
    return plan, roofline_backward(plans, shape, dict(c.params), dict(c.tensors)), report.counters


@pytest.mark.parametrize(("name", "captured", "length"), BACKWARDS, ids=[x[0] for x in BACKWARDS])
def test_backward(name: str, captured: tuple[str, ...], length: int) -> None:
    plan, predicted, counters = backward(name, captured, length)
    c, visited = plan.compute, predicted.visited
    assert products(counters) == visited * plan.cost.mma_cycles * sm90.MMA_FLOP_PER_CYCLE
    elements = visited * c.tile_m * c.tile_n
    assert elements <= counters.exponentials <= elements + 2 * length  # and the sink's rows
    # What a cost counts beside operands: dS written once, dQ (fp32) or P (16 bits) written and read once, dS sent.
    m, n, qk, v = c.tile_m, c.tile_n, c.head_dim_qk_padded, c.head_dim_v_padded
    through = 2 * m * n + (8 * m * n if c.splits_operands else 8 * m * qk)
    operands = plan.cost.smem_cycles * sm90.SMEM_BYTES_PER_CYCLE - through
    assert counters.operands == visited * operands
    # Each CTA of a cluster loads Q, dO and their statistics, and half of the columns of the other's K.
    steps = visited * c.cluster
    statistics = steps * 2 * m * 4
    assert counters.copied == {
        "q": steps * m * qk * 2,
        "do": steps * m * v * 2,
        "k": length * qk * (1 + c.cluster),
        "dk": length * qk * 2,
        **{x: length * v * 2 for x in ("v", "dv")},
        "workspace": statistics + (0 if c.splits_operands else predicted.reduced_bytes),
    }
    assert not counters.conflicts(), str(counters)


def test_every_gallery_kernel_is_measured() -> None:
    assert {f for f, _ in PLANS} == set(FILES)
    backwards = {f.name.split(".")[0] for f in FILES[0].parent.glob("*.bwd*.py")}
    assert {name for name, _, _ in BACKWARDS} == backwards
