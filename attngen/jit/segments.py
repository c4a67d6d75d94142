"""The `segments` of a call: keys of their own under the call's softmax, and in ragged layouts lengths of their own;
what a segment of a ragged call reads of the call's own keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.atoms import extents_of
from attngen.jit.shapes import AXES, Sizes
from attngen.passes.parts import parts
from attngen.passes.placed import PLACES

#: How many axes k has in a layout, and which of them are heads.
_HEADS = {layout: (len(axes), axes.index("heads")) for layout, axes in AXES.items()}


class Segment(NamedTuple):
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
    rank, heads = _HEADS[spec.layout]
    own, there = (x.shape[heads] if getattr(x, "ndim", 0) == rank else 0 for x in (k, part[0]))
    if own and there and own != there:
        raise error(
            "E0607",
            f"segment `{name}` of `{spec.name}` has {there} KV heads, k has {own}",
            helps=("give all parts as many KV heads; expand what they share",),
        )
    return Segment(name, part[0], part[1], part[2] if len(part) == 3 else None)


def places_of_keys(spec: AttentionSpec, sizes: Sizes, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Where the call's own keys of each sequence begin, and how many they are: i32[batch], by the names of a kernel."""
    found = extents_of(spec, sizes, "seqlen_kv", lengths)
    return dict(zip(PLACES["seqlen_kv"], (x.to(torch.int32) for x in found), strict=True))


def check_segments(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    segments: Sequence[tuple[Any, ...]],
    params: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> None:
    """E0650 where a segment of a ragged call indexes a tensor over the call's own keys outside a sequence's: kernels
    hold the index there. `segments`: (k, v, lengths) in the spec's order; `tensors`: the lengths too.
    """
    from attngen.jit.checks import check_call
    from attngen.ref import ragged

    given = {s.name: x for s, x in zip(spec.segments, segments, strict=True)}
    for s in ragged.sequences(spec, q, k, tensors, given):
        rows, own = ragged.of_sequence(spec, q, s, s.rows), ragged.captured(spec, s, tensors)
        for part in parts(ragged.one(spec, s))[1:]:
            keys, values = (ragged.of_sequence(spec, x, s, s.segments[part.name]) for x in given[part.name][:2])
            read = {t.name: own[t.name] for t in part.spec.tensors}
            check_call(part.spec, rows, keys, values, {p.name: params[p.name] for p in part.spec.params}, read)
