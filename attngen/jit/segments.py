"""The `segments` of a call: keys of their own under the call's softmax, and in ragged layouts lengths of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.shapes import axes_of


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as a call gives it; `lengths` as the call's `_kv` has them, None where they are left out."""

    name: str
    k: Any
    v: Any
    lengths: Any


def segments_of(spec: AttentionSpec, given: Any, k: Any) -> list[Segment]:
    """The segments of `spec`, in its order, from `segments=given` of a call whose own keys are `k`.

    Raises: AttnError E0601 (a segment that the spec does not have), E0604 (no dict, no (k, v)), E0607 (KV heads).
    """
    if given is not None and not isinstance(given, Mapping):
        raise error(
            "E0604",
            f"`segments` of `{spec.name}` must be a dict, found {type(given).__name__}",
            helps=('pass segments={"name": (k, v)}, an entry for each segment of the spec',),
        )
    names = [s.name for s in spec.segments]
    for name in given or {}:
        if name not in names:
            listed = f"its segments: {', '.join(names)}" if names else "it has none"
            raise error("E0601", f"`{spec.name}` has no segment `{name}`", helps=(listed,))
    return [_segment(spec, name, (given or {}).get(name), k) for name in names]


def _segment(spec: AttentionSpec, name: str, part: Any, k: Any) -> Segment:
    varlen = spec.layout is Layout.VARLEN
    counts = (3,) if varlen else (2, 3) if spec.layout is Layout.PADDED else (2,)
    if not isinstance(part, tuple | list) or len(part) not in counts:
        takes = "(k, v, cu_seqlens)" if varlen else "(k, v)"
        notes = ("its keys are packed by starts of their own, i32[batch + 1]",) if varlen else ()
        mend = f'pass segments={{"{name}": {takes}}}'
        raise error("E0604", f"segment `{name}` of `{spec.name}` has no {takes}", notes=notes, helps=(mend,))
    axes = axes_of(spec)
    heads = axes.index("heads")
    own, there = (x.shape[heads] if getattr(x, "ndim", 0) == len(axes) else 0 for x in (k, part[0]))
    if own and there and own != there:
        raise error(
            "E0607",
            f"segment `{name}` of `{spec.name}` has {there} KV heads, k has {own}",
            helps=("give all parts as many KV heads; expand what they share",),
        )
    return Segment(name, part[0], part[1], part[2] if len(part) == 3 else None)
