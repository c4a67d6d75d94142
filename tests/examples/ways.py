"""The ways to compute a call without a GPU: the callable that `build` gives, on CPU tensors, and the execution of every
plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import attngen
from attngen.ir.spec import AttentionSpec
from attngen.jit.notice import AttngenNotice
from attngen.ref import interp
from attngen.search import plan


class Way(NamedTuple):
    """o (B, Sq, Hq, Dv) and lse (B, Hq, Sq) in float64, and the error that rounding may make of values near 1."""

    name: str
    o: torch.Tensor
    lse: torch.Tensor
    tolerance: float


def ways(spec: AttentionSpec, q: Any, k: Any, v: Any, params: Any = None, tensors: Any = None) -> Iterator[Way]:
    """q, k, v of bshd, in float64 with values that the spec's dtype holds."""
    params, tensors = params or {}, tensors or {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttngenNotice)
        narrow = [x.bfloat16() for x in (q, k, v)]
        assert all(torch.equal(x.double(), y) for x, y in zip(narrow, (q, k, v), strict=True))
        o, lse = attngen.build(spec)(*narrow, return_lse=True, **params, **tensors)
    yield Way("callable", o.double(), lse.double(), 1e-2)
    for p in plan(spec).plans:
        o, lse, _ = interp.run(p, spec, q, k, v, params, tensors)
        yield Way(f"plan {p.name}", o, lse, 1e-9)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values as bf16 holds them, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()
