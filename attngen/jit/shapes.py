"""Extents of a call: which axis is which in each layout."""

from __future__ import annotations

from typing import Any

from attngen.ir.spec import STARTS, AttentionSpec
from attngen.ir.types import Layout

Sizes = dict[str, int]
#: Names of the axes of q, k, v and o, by layout.
AXES = {
    Layout.BSHD: ("batch", "seqlen", "heads", "head_dim"),
    Layout.BHSD: ("batch", "heads", "seqlen", "head_dim"),
    Layout.PADDED: ("batch", "seqlen", "heads", "head_dim"),
    Layout.VARLEN: ("seqlen", "heads", "head_dim"),
}


def axes_of(spec: AttentionSpec) -> tuple[str, ...]:
    """Axis names of q, k, v and o in the spec's layout."""
    return AXES[spec.layout]


def sizes_of(spec: AttentionSpec, q: Any, k: Any, sequences: int | None = None) -> Sizes:
    """Extents of the axes that a captured tensor may name (`types.KNOWN_DIMS`, and those of given blocks).

    Varlen: `seqlen_q` and `seqlen_kv` are those of all sequences together, and how many there are q does not say.
    """
    return sizes_of_shapes(spec, q.shape, k.shape, sequences)


def sizes_of_shapes(spec: AttentionSpec, q: Any, k: Any, sequences: int | None = None) -> Sizes:
    """The same of the shapes of q and k."""
    if spec.layout is Layout.VARLEN:
        packed = {"heads_q": q[1], "heads_kv": k[1], "seqlen_q": q[0], "seqlen_kv": k[0]}
        counted = {} if sequences is None else {"batch": sequences, STARTS: sequences + 1}
        return {**packed, **counted, "head_dim": spec.head_dim_qk, "head_dim_v": spec.head_dim_v}
    seqlen, heads = (2, 1) if spec.layout is Layout.BHSD else (1, 2)
    return {
        "batch": q[0],
        "heads_q": q[heads],
        "heads_kv": k[heads],
        "seqlen_q": q[seqlen],
        "seqlen_kv": k[seqlen],
        "head_dim": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        **spec.block_counts(q[seqlen], k[seqlen]),
    }
