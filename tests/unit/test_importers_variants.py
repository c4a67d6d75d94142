"""Masks of real models as people write them for FlexAttention, traced: the pairs that a head keeps are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

import attngen
from attngen import samples
from attngen.bench.flex import mods
from attngen.ir.expr import atom
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.ref.dense import attention
from attngen.ref.evaluate import evaluate
from attngen.syntax import load_all

Mask = Callable[[Any, Any, Any, Any], Any]


def count(mask: Mask, seqlen_q: int = 1000, seqlen_kv: int = 1000) -> int:
    """Pairs that batch element 0, head 0 keeps."""
    spec, tensors = attngen.from_flex(mask_mod=mask, head_dim=64)
    rows, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)[None, :]
    env = {"b": torch.tensor(0), "h": torch.tensor(0), "q_idx": rows, "kv_idx": keys}
    assert {p.name for p in spec.params} == set()
    kept = evaluate(spec.mask, env, {n: t for n, t in tensors.items()})
    return int(kept.expand(seqlen_q, seqlen_kv).sum())


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def shifted(offset: int) -> Mask:
    return lambda b, h, q, k: q + offset >= k


def window(keys: int) -> Mask:
    return lambda b, h, q, k: (q >= k) & (q - k < keys)


def two_sided(half: int) -> Mask:
    return lambda b, h, q, k: torch.abs(q - k) <= half


def chunk(size: int) -> Mask:
    return lambda b, h, q, k: (k // size == q // size) & (k <= q)


def prefix(n: int) -> Mask:
    return lambda b, h, q, k: k < n


LENGTHS = torch.tensor([1, 127, 128, 200, 300, 244])
IDS = torch.repeat_interleave(torch.arange(6), LENGTHS)[None]
STARTS = torch.repeat_interleave(LENGTHS.cumsum(0) - LENGTHS, LENGTHS)


def document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return IDS[b, q] == IDS[b, k]


def block_causal(size: int) -> Mask:
    return lambda b, h, q, k: k // size <= q // size


def block_diffusion(half: int, size: int) -> Mask:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        clean_q, clean_k = q >= half, k >= half
        block_q = torch.where(clean_q, (q - half) // size, q // size)
        block_k = torch.where(clean_k, (k - half) // size, k // size)
        diagonal = (block_q == block_k) & (clean_q == clean_k)
        return diagonal | ((block_q > block_k) & clean_k & ~clean_q) | ((block_q >= block_k) & clean_k & clean_q)

    return mask


GLOBAL = torch.zeros(1000, dtype=torch.bool)
GLOBAL[[0, 1, 2, 500]] = True


def longformer(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (torch.abs(q - k) <= 64) | GLOBAL[q] | GLOBAL[k]


def bigbird(b: Any, h: Any, q: Any, k: Any) -> Any:
    row, column = q // 64, k // 64
    edge = (row == 0) | (row == 15) | (column == 0) | (column == 15)
    return (torch.abs(row - column) <= 1) | edge


SIDE = 14
REGIONS = torch.tensor(
    [[3 * ((y >= 7) + (y >= 11)) + (x >= 7) + (x >= 11) for x in range(SIDE)] for y in range(SIDE)]
).flatten()


def swin(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Windows of 7 x 7 of the shifted picture; pixels of one region see each other."""
    same = (q // SIDE // 7 == k // SIDE // 7) & (q % SIDE // 7 == k % SIDE // 7)
    return same & (REGIONS[q] == REGIONS[k])


def natten(b: Any, h: Any, q: Any, k: Any) -> Any:
    center_x = (q % 16).clamp(2, 13)
    center_y = (q // 16).clamp(2, 13)
    return ((k % 16 - center_x).abs() <= 2) & ((k // 16 - center_y).abs() <= 2)


PARENTS = [-1, 0, 0, 1, 1, 2, 5]
ANCESTORS = torch.eye(7, dtype=torch.bool)
for node, parent in enumerate(PARENTS):
    if parent >= 0:
        ANCESTORS[node] |= ANCESTORS[parent]


def tree(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < 100) | ANCESTORS[q, torch.clamp(k - 100, min=0)]


PAD = torch.tensor([100])
CASES: dict[str, tuple[int, Mask, int, int]] = {
    "causal": (500500, causal, 1000, 1000),
    "bottom-right": (255150, shifted(700), 300, 1000),
    "top-left": (45150, causal, 300, 1000),
    "bottom-right, empty rows": (45150, shifted(-700), 1000, 300),
    "window": (119872, window(128), 1000, 1000),
    "FlashAttention's window": (120744, window(129), 1000, 1000),
    "two-sided": (124840, two_sided(64), 1000, 1000),
    "chunk": (125716, chunk(256), 1000, 1000),
    "prefix": (533396, or_masks(causal, prefix(257)), 1000, 1000),
    "documents": (111525, and_masks(causal, document), 1000, 1000),
    "documents by start": (111525, lambda b, h, q, k: (k <= q) & (k >= STARTS[q]), 1000, 1000),
    "documents, both ways": (222050, document, 1000, 1000),
    "block-causal": (515904, block_causal(32), 1000, 1000),
    "block diffusion": (69632, block_diffusion(256, 16), 512, 512),
    "Longformer": (132180, longformer, 1000, 1000),
    "BigBird without random blocks": (409600, bigbird, 1024, 1024),
    "Swin, shifted": (5476, swin, 196, 196),
    "NATTEN": (6400, natten, 256, 256),
    "tree": (718, tree, 7, 107),
    "left padding": (405450, lambda b, h, q, k: (k <= q) & (k >= PAD[b]), 1000, 1000),
}


@pytest.mark.parametrize("name", CASES)
def test_kept_pairs(name: str) -> None:
    pairs, mask, seqlen_q, seqlen_kv = CASES[name]
    assert count(mask, seqlen_q, seqlen_kv) == pairs


# -- examples, through FlexAttention and back --------------------------------------------------------------------------

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPE = samples.Shape(batch=2, heads_q=4, heads_kv=2, seqlen_q=21, seqlen_kv=40)


def scored(spec: AttentionSpec) -> AttentionSpec:
    """What FlexAttention has words for: mask and score."""
    return spec.replace(sink=None, epilogue=atom("o"), normalizer=Normalizer.SOFTMAX, head_dim_qk=8, head_dim_v=8)


SPECS = [
    scored(spec)
    for path in sorted(EXAMPLES.glob("*.attn"))
    for spec in load_all(path)
    if not spec.branches and not spec.segments and spec.v_view_start is None and spec.block_sparse is None
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_examples_come_back(spec: AttentionSpec) -> None:
    """A spec printed as FlexAttention's functions and traced again means the same."""
    params, tensors = samples.params(spec), samples.tensors(spec, SHAPE)
    cell = SimpleNamespace(spec=spec, **vars_of(SHAPE))
    mask, score = mods(SimpleNamespace(cell=cell, params=params, tensors=tensors))  # type: ignore[arg-type]
    numbers = [f"p_{n}" for n in params if f"p_{n}" in read_by(mask) | read_by(score)]
    found = attngen.from_flex(score, mask, head_dim=8, params=numbers)
    q, k, v = samples.qkv(spec, SHAPE, dtype=torch.float64)
    want = attention(spec, q, k, v, params, {t.name: tensors[t.name] for t in spec.tensors}, scale=0.3)
    got = attention(found.spec, q, k, v, tensors=found.tensors, scale=0.3)
    torch.testing.assert_close(got.o, want.o, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-7)
    assert len(found.spec.params) == len(numbers)


def vars_of(shape: samples.Shape) -> dict[str, int]:
    return {n: getattr(shape, n) for n in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv")}


def read_by(function: Any) -> set[str]:
    return set() if function is None else set(function.__code__.co_names)
