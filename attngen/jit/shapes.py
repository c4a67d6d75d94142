"""Extents of a call: which axis is which in each layout."""

from __future__ import annotations

from typing import Any

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout

Sizes = dict[str, int]
_AXES = {
    Layout.BSHD: ("batch", "seqlen", "heads", "head_dim"),
    Layout.BHSD: ("batch", "heads", "seqlen", "head_dim"),
}


def axes_of(spec: AttentionSpec) -> tuple[str, ...]:
    """Axis names of q, k, v and o in the spec's layout."""
    return _AXES[spec.layout]


def sizes_of(spec: AttentionSpec, q: Any, k: Any) -> Sizes:
    """Extents of the axes that a captured tensor may name (`types.KNOWN_DIMS`)."""
    return sizes_of_shapes(spec, q.shape, k.shape)


def sizes_of_shapes(spec: AttentionSpec, q: Any, k: Any) -> Sizes:
    """The same of the shapes of q and k."""
    seqlen, heads = (1, 2) if spec.layout is Layout.BSHD else (2, 1)
    return {
        "batch": q[0],
        "heads_q": q[heads],
        "heads_kv": k[heads],
        "seqlen_q": q[seqlen],
        "seqlen_kv": k[seqlen],
        "head_dim": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
    }
