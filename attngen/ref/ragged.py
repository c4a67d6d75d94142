"""Ragged batches: packed sequences (varlen) and padded ones, each by its own call of a reference.

The meaning of a ragged call is that of one call a sequence: lengths and positions are the sequence's, `b` its number, a
segment's keys those that its own lengths give the sequence, and a packed axis `seqlen_q` or `seqlen_kv` of a captured
tensor stands for its part. Rows beyond their sequence give O = 0 and LSE = -inf, a sink or not; keys beyond it do not
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.expr import Expr, atoms_of, const, substitute
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.ref import blockwise, dense
from attngen.ref.backward import Gradients
from attngen.ref.backward import attention_backward as one_backward
from attngen.ref.binding import Several

Tensor = torch.Tensor
#: Computes (o, lse) of one call in bshd: `how(spec, q, k, v, params, tensors, scale)[:2]`, and `segments` if any.
How = Callable[..., Any]
#: k, v and the lengths of a segment, as its layout has them; without lengths (k, v).
Segment = tuple[Any, ...]


@dataclass(frozen=True)
class Sequence:
    """One sequence of a ragged call: its number, how many there are, its rows and its keys along their axes."""

    b: int
    batch: int
    rows: slice
    keys: slice
    #: Keys of each segment, by its name.
    segments: Mapping[str, slice] = field(default_factory=dict)


def sequences(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    lengths: Mapping[str, Tensor | None],
    segments: Mapping[str, Segment] | None = None,
) -> list[Sequence]:
    """The sequences of a call. Starts and lengths are held within q and k, as a kernel does.

    `lengths`: by the names of `spec.lengths`; `cu_seqlens_kv` None or missing is `cu_seqlens_q`, a missing `seqused_q`
    or `seqused_kv` is full. `segments`: as `attention`'s. Raises: E0651 without `cu_seqlens_q`.
    """
    q, k = _first(q), _first(k)
    if spec.layout is Layout.VARLEN:
        cu_q = lengths.get("cu_seqlens_q")
        if cu_q is None:
            raise error("E0651", f"`{spec.name}` takes cu_seqlens_q", helps=("pass cu_seqlens_q, i32[batch + 1]",))
        cu_kv = lengths.get("cu_seqlens_kv")
        rows, keys = _parts(cu_q, q.shape[0]), _parts(cu_q if cu_kv is None else cu_kv, k.shape[0])
    else:
        rows = _used(lengths.get("seqused_q"), q.shape[0], q.shape[1])
        keys = _used(lengths.get("seqused_kv"), k.shape[0], k.shape[1])
    there = {n: _keys_of(spec, *given) for n, given in (segments or {}).items()}
    return [
        Sequence(b, len(rows), r, n, {name: parts[b] for name, parts in there.items()})
        for b, (r, n) in enumerate(zip(rows, keys, strict=True))
    ]


def _first(x: Several) -> Tensor:
    return x if isinstance(x, Tensor) else x[0]


def _keys_of(spec: AttentionSpec, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> list[slice]:
    """The keys of each sequence in a segment."""
    if spec.layout is Layout.PADDED:
        return _used(lengths, k.shape[0], k.shape[1])
    if lengths is None:
        mend = "give it (k, v, cu_seqlens), i32[batch + 1]"
        raise error("E0651", f"a segment of `{spec.name}` has no cu_seqlens", helps=(mend,))
    return _parts(lengths, k.shape[0])


def _parts(starts: Tensor, total: int) -> list[slice]:
    held = [min(max(int(x), 0), total) for x in starts.tolist()]
    return [slice(a, max(a, b)) for a, b in pairwise(held)]


def _used(lengths: Tensor | None, batch: int, seqlen: int) -> list[slice]:
    counts = [seqlen] * batch if lengths is None else [min(max(int(n), 0), seqlen) for n in lengths.tolist()]
    return [slice(0, n) for n in counts]


def one(spec: AttentionSpec, s: Sequence) -> AttentionSpec:
    """The spec of one sequence's call in bshd: `b` and `batch` are numbers, axes of `batch` stay whole."""
    table: dict[str, Expr] = {"b": const(s.b), "batch": const(s.batch)}

    def fixed(e: Expr) -> Expr:
        return substitute(e, table) if atoms_of(e) & table.keys() else e

    tensors = tuple(
        t.replace(dims=tuple(s.batch if d == "batch" else d for d in t.dims)) if "batch" in t.dims else t
        for t in spec.tensors
    )
    return spec.replace(
        layout=Layout.BSHD,
        tensors=tensors,
        scale=fixed(spec.scale),
        score=fixed(spec.score),
        mask=fixed(spec.mask),
        sink=None if spec.sink is None else fixed(spec.sink),
        epilogue=fixed(spec.epilogue),
        branches=tuple(
            x.replace(
                weight=fixed(x.weight),
                score=fixed(x.score),
                mask=fixed(x.mask),
                sink=None if x.sink is None else fixed(x.sink),
            )
            for x in spec.branches
        ),
        segments=tuple(x.replace(score=fixed(x.score), mask=fixed(x.mask)) for x in spec.segments),
    )


def captured(spec: AttentionSpec, s: Sequence, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The captured tensors of one sequence's call, views: its part of the axes that hold rows or keys, and of given
    blocks, which count inside a sequence, those that it has.
    """
    counts = spec.block_counts(*(x.stop - x.start for x in (s.rows, s.keys)))
    parts = {"seqlen_q": s.rows, "seqlen_kv": s.keys, **{d: slice(0, n) for d, n in counts.items()}}
    found = {}
    for decl in spec.tensors:
        x = tensors[decl.name]
        for axis, dim in enumerate(decl.dims):
            if dim in parts and x.shape[axis] > 1:
                x = x[(slice(None),) * axis + (parts[str(dim)],)]
        found[decl.name] = x
    return found


def of_sequence(spec: AttentionSpec, x: Tensor, s: Sequence, part: slice) -> Tensor:
    """(1, part, heads, head_dim) of q, k, v, o or a gradient of one of them: a view."""
    return x[part].unsqueeze(0) if spec.layout is Layout.VARLEN else x[s.b, part].unsqueeze(0)


def rows_of(spec: AttentionSpec, lse: Tensor, s: Sequence) -> Tensor:
    """(1, heads_q, rows) of an LSE or its gradient: a view."""
    return lse[:, s.rows].unsqueeze(0) if spec.layout is Layout.VARLEN else lse[s.b, :, s.rows].unsqueeze(0)


def attention(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    lengths: Mapping[str, Tensor | None],
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    how: How = dense.attention,
    segments: Mapping[str, Segment] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of a ragged call, sequence by sequence.

    Shapes: varlen q (total_q, Hq, D), k (total_kv, Hkv, D), v (total_kv, Hkv, Dv), o (total_q, Hq, Dv), lse (Hq,
    total_q); padded (B, Sq, Hq, D), (B, Skv, Hkv, D), (B, Skv, Hkv, Dv), (B, Sq, Hq, Dv), (B, Hq, Sq). Branches: `q`
    and `k` are tuples, and lse has a leading axis of them. `v` is None where it is a view of k. `segments`: (k, v,
    lengths) by name, lengths as `cu_seqlens_kv` or `seqused_kv`; in padded they may be left out.
    Differentiable where `how` is. Rows that belong to no sequence give 0 and -inf.
    """
    o: Tensor | None = None
    lse: Tensor | None = None
    first, varlen = _first(q), spec.layout is Layout.VARLEN
    for s, (o_s, lse_s) in _calls(spec, q, k, v, lengths, params, tensors or {}, scale, how, segments or {}):
        if o is None or lse is None:
            o = o_s.new_zeros((*first.shape[:-1], o_s.shape[-1]))
            rows = (first.shape[1], first.shape[0]) if varlen else (first.shape[0], first.shape[2], first.shape[1])
            lse = lse_s.new_full((*lse_s.shape[:-3], *rows), -torch.inf)
        o = _placed(o, o_s[0], (s.rows,) if varlen else (s.b, s.rows))
        own: tuple[Any, ...] = (slice(None), s.rows) if varlen else (s.b, slice(None), s.rows)
        lse = _placed(lse, lse_s.select(-3, 0), (..., *own))
    if o is None or lse is None:
        raise error("E0652", f"`{spec.name}` was called without a sequence")
    return o, lse


def largest(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    lengths: Mapping[str, Tensor | None],
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    segments: Mapping[str, Segment] | None = None,
) -> Tensor:
    """The largest kept score of each row by `blockwise.largest`, shaped as `attention`'s lse; its arguments."""

    def one_call(own: AttentionSpec, q: Several, *call: Any, **more: Any) -> tuple[Tensor, Tensor]:
        first = _first(q)
        return first.new_zeros((*first.shape[:3], own.head_dim_v)), blockwise.largest(own, q, *call, **more)

    return attention(spec, q, k, v, lengths, params, tensors, scale, one_call, segments)[1]


def _placed(whole: Tensor, part: Tensor, index: tuple[Any, ...]) -> Tensor:
    """`whole` with `part` at `index`; autograd follows where there is a graph."""
    if part.requires_grad or whole.requires_grad:
        whole = whole.clone()
    whole[index] = part.to(whole.dtype)
    return whole


def _calls(
    spec: AttentionSpec, q: Several, k: Several, v: Tensor | None, lengths: Mapping[str, Tensor | None],
    params: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], scale: Any, how: How,
    segments: Mapping[str, Segment],
) -> Iterator[tuple[Sequence, tuple[Tensor, Tensor]]]:  # fmt: skip
    def cut(x: Several, s: Sequence, part: slice) -> Any:
        return of_sequence(spec, x, s, part) if isinstance(x, Tensor) else [of_sequence(spec, y, s, part) for y in x]

    for s in sequences(spec, q, k, lengths, segments):
        operands = cut(q, s, s.rows), cut(k, s, s.keys), None if v is None else cut(v, s, s.keys)
        own = {n: (cut(kv[0], s, s.segments[n]), cut(kv[1], s, s.segments[n])) for n, kv in segments.items()}
        more = {"segments": own} if own else {}
        result = how(one(spec, s), *operands, params, captured(spec, s, tensors), scale, **more)
        yield s, (result[0], result[1])


def attention_backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    lengths: Mapping[str, Tensor | None],
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    wanted: Collection[str] | None = None,
) -> Gradients:
    """Gradients of a ragged call by `backward.attention_backward`, sequence by sequence; zeros in what is of none.

    Shapes: as `attention`; o and lse are its results. Captured tensors are summed in fp32 or float64.
    """
    given = tensors or {}
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    learned = [t.name for t in spec.tensors if t.grad and (wanted is None or t.name in wanted)]
    totals = {n: torch.zeros_like(given[n], dtype=torch.promote_types(given[n].dtype, torch.float32)) for n in learned}
    for s in sequences(spec, q, k, lengths):
        rows, keys = s.rows, s.keys
        found = one_backward(
            one(spec, s),
            of_sequence(spec, q, s, rows),
            of_sequence(spec, k, s, keys),
            of_sequence(spec, v, s, keys),
            of_sequence(spec, o, s, rows),
            rows_of(spec, lse, s),
            of_sequence(spec, do, s, rows),
            None if dlse is None else rows_of(spec, dlse, s),
            params,
            captured(spec, s, given),
            scale,
            wanted,
        )
        for whole, part, x in ((dq, rows, found.dq), (dk, keys, found.dk), (dv, keys, found.dv)):
            if x is not None:
                of_sequence(spec, whole, s, part).copy_(x)
        views = captured(spec, s, {**given, **totals})
        for name in learned:
            views[name] += found.captured[name]
    asked = {"q", "k", "v"} if wanted is None else wanted
    return Gradients(
        dq=dq if "q" in asked else None,
        dk=dk if "k" in asked else None,
        dv=dv if "v" in asked else None,
        captured={n: x.to(given[n].dtype) for n, x in totals.items()},
        segments={},
    )
