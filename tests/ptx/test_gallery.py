"""Every forward of the gallery, all its tile plans, executed by the checker without a fault.

Outputs are compared with the dense meaning in float64, by the rule of the GPU tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ptxcheck.compile import compile_file
from ptxcheck.launch import attngen_call
from ragged_calls import Call

from attngen import samples
from attngen.cli.numeric import self_attention
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.scale import Scale
from attngen.ref.compare import assert_close
from attngen.samples import Shape
from attngen.syntax import load_all

pytestmark = pytest.mark.dsl
ROOT = Path(__file__).resolve().parents[2]
SPECS = {s.name: s for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)}
#: Of the gallery, those whose sequences have lengths of their own.
RAGGED = {s.name: s for s in load_all(ROOT / "examples" / "calls" / "unpadded.attn")}
FILES = sorted((ROOT / "generated").glob("*.sm90.py"))
PLANS = [(f, i) for f in FILES for i in range(f.read_text().count("    TilePlan(\n"))]
#: Values small enough that a mask bites at these lengths.
SMALL: dict[str, dict[str, Any]] = {
    "gemma2_local": {"keys": 50, "cap": 2.0},
    "gpt_oss_local": {"window": 29},
    "longformer": {"half": 16},
    "mistral": {"window": 37},
    "block_causal": {"block": 24},
    "llama4_local": {"chunk": 48},
    "modernbert_local": {"half": 21},
    "ring_step": {"q_offset": 80, "kv_offset": 57},
    "gemma3_local": {"keys": 33},
    "streaming": {"keys": 19, "sinks": 3},
    "bd3lm": {"half": 35, "size": 8},
    "dinat": {"height": 11, "width": 12, "dilation": 2},
    "swin_shifted": {"across": 2, "down": 1},
    "evoformer_row": {"rows": 2},
    "decode_local": {"keys": 9},
    "modernbert_unpadded": {"half": 21},
}
#: Square past a tile's end, with grouped heads; more keys than rows, two batch elements; rows that may see no key.
SHAPES = [Shape(1, 2, 1, 131, 131), Shape(2, 1, 1, 60, 203), Shape(1, 1, 1, 200, 77)]


def verify(
    spec: AttentionSpec, module: ModuleType, plan: int, shape: Shape, seed: int,
    given: Mapping[str, Any] | None = None, lse: bool = True, **options: object,
) -> None:  # fmt: skip
    """One call, no fault, and the error rule that the GPU tests use too. Params: as `given`, else small ones."""
    q, k, v = samples.qkv(spec, shape, seed=seed)
    given = SMALL.get(spec.name, {}) if given is None else given
    params, tensors = samples.params(spec, given), samples.tensors(spec, shape, seed=seed)
    tail = (*params.values(), *tensors.values())
    bhsd = spec.layout is Layout.BHSD
    operands = [x.transpose(1, 2).contiguous() if bhsd else x for x in (q, k, v)]
    scale = Scale(spec)
    value = scale.default if scale.default == scale.default else scale.of(tail)
    o, rows, report = attngen_call(
        module, plan, *operands, params=tuple(params.values()), tensors=tuple(tensors.values()), scale=value,
        layout="bhsd" if bhsd else "bshd", seed=seed, **options,
    )  # fmt: skip
    assert not report.faults
    o, rows = (o.transpose(1, 2) if bhsd else o), (rows if lse and spec.normalizer == "softmax" else None)
    assert_close(o, spec, q, k, v, lse=rows, params=params, tensors=tensors)


def spec_of(file: Path) -> AttentionSpec:
    """What a file of the gallery was made from."""
    name = file.name.split(".")[0]
    return RAGGED[name] if name in RAGGED else SPECS[name]


@pytest.mark.parametrize(("file", "plan"), PLANS, ids=[f"{f.name.split('.')[0]}-{i}" for f, i in PLANS])
def test_gallery(file: Path, plan: int) -> None:
    spec = spec_of(file)
    module, _ = compile_file(file, plan)
    if spec.layout.is_ragged:
        call = Call(spec, [(131, 131), (0, 9), (60, 203), (200, 77)], tail=3, given=SMALL.get(spec.name))
        call.verify(module, plan)
        return
    for seed, shape in enumerate(SHAPES):
        if shape.seqlen_q > shape.seqlen_kv and self_attention(spec):
            continue
        verify(spec, module, plan, shape, seed)


def test_every_gallery_kernel_is_here() -> None:
    assert len(FILES) == 13 and len(PLANS) >= 20 and all(spec_of(f) for f in FILES)


@pytest.mark.parametrize("workers", [1, 9])
def test_workers(workers: int) -> None:
    """One CTA that takes all tiles, and more CTAs than tiles."""
    module, _ = compile_file(ROOT / "generated" / "causal.sm90.py", 0)
    verify(SPECS["causal"], module, 0, Shape(1, 2, 1, 300, 300), 5, workers=workers)


def test_strides() -> None:
    """Rows of q, k, v inside wider rows, and one KV head for all (stride 0)."""
    module, _ = compile_file(ROOT / "generated" / "causal.sm90.py", 0)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(1, 90, 3, 256, generator=g).bfloat16()[..., 64:192]
    k = torch.randn(1, 90, 1, 128, generator=g).bfloat16().expand(1, 90, 3, 128)
    v = torch.randn(1, 90, 3, 136, generator=g).bfloat16()[..., :128]
    o, lse, _ = attngen_call(module, 0, q, k, v)
    assert_close(o, SPECS["causal"], q, k, v, lse=lse)
