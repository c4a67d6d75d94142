"""Kernels as they are generated, under 24 seeds each: schedules and orders of completion without one report.

Twice the seeds under which test_faults.py finds whatever is planted in these kernels.
Sizes are the least at which every ring turns and every branch of the mask is taken; each seed also checks the numbers.
"""

from __future__ import annotations

from functools import cache, partial

import inject
import pytest
from inject import Kernel, product

from attngen.samples import Shape
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl
SEEDS = 24
#: Compiled as other tests do: only planted faults have to name their places (--source-lines).
forward, backward = partial(inject.forward, lines=False), partial(inject.backward, lines=False)
CAUSAL = "mask = kv_idx <= q_pos"


def spec(d: int, clauses: str):
    return load_spec(f"attn 1\nattention causal {{\n  head_dim = {d}\n  {clauses}\n}}\n")


MAKE = {
    "forward-128x128": lambda: forward("causal", 0, Shape(1, 2, 1, 40, 150), workers=1),
    "forward-192x80": lambda: forward("causal", 1, Shape(1, 2, 1, 40, 100), workers=1),
    "forward-window-sink": lambda: forward("gpt_oss_local", 0, Shape(1, 2, 1, 40, 150), workers=1, window=40),
    "backward-d128": lambda: backward(spec(128, CAUSAL), Shape(1, 1, 1, 90, 140), 2, 1),  # two KV tiles, one CTA
    "backward-d256": lambda: backward(spec(256, CAUSAL), Shape(1, 1, 1, 40, 140), 2, 2),  # two KV tiles, one cluster
    "backward-deterministic": lambda: backward(
        spec(64, "backward { deterministic = true }\n  " + CAUSAL), Shape(1, 1, 1, 70, 270), 3, 2
    ),
    "product-sm100": lambda: product(1),
    "product-sm100-pair": lambda: product(2),
}


@cache
def kernel(name: str) -> Kernel:
    return MAKE[name]()


@pytest.mark.parametrize("first", range(0, SEEDS, 12))
@pytest.mark.parametrize("name", MAKE)
def test_clean(name: str, first: int) -> None:
    made = kernel(name)
    for seed in range(first, first + 12):
        assert made.call(made.code, seed), f"seed {seed}: wrong numbers"
