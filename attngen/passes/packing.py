"""packing: query heads of one KV head as rows of one tile, for calls with few rows a head.

A row tile then holds every head of a group for tile_m / group queries, row = query * group + head: K and V are read
once for the group, and a tile of 128 rows is full where a head has 16. It is a view of Q and O; the group's size is
compiled in.
"""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir.expr import Atom, Expr, atoms_of, tensors_of
from attngen.ir.spec import AttentionSpec


def unpackable(spec: AttentionSpec) -> str:
    """Why a kernel of this spec cannot pack query heads; empty where it can. Takes the kernel's spec."""
    return next(_reasons(spec), "")


def _reasons(spec: AttentionSpec) -> Iterator[str]:
    if spec.layout.is_ragged:
        yield f"layout {spec.layout}"
    if spec.block_sparse is not None:
        yield "block_sparse"
    for what, e in (("mask", spec.mask), ("score", spec.score), ("epilogue", spec.epilogue)):
        if not isinstance(e, Atom) and _by_head(e):
            yield f"a {what} that reads captured tensors or heads"


def _by_head(e: Expr) -> bool:
    return bool(tensors_of(e) or atoms_of(e) & {"h", "h_kv"})
