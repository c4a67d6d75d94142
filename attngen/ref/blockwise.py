"""Blockwise execution on any device: blocks of rows times blocks of keys, online softmax, O(N) memory.

What a built callable runs on CPU tensors. Everything the dense meaning has, in fp32 (float64 for float64 inputs): the
running maximum is the reference of the exponentials, rows that have kept nothing yet use 0. Blocks of keys outside the
mask form's bounds are skipped, blocks that every clause-holder keeps whole evaluate no mask.
Sources: FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from attngen.ir.expr import Atom, Expr
from attngen.ir.forms import MaskForm
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Normalizer
from attngen.passes.mask_form import mask_form
from attngen.ref.binding import Binding, Part, ScoreSet, Several, bind
from attngen.ref.dense import epilogue
from attngen.ref.evaluate import Tensor

ROWS, KEYS = 128, 256
_OUT = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.F32: torch.float32}


def attention(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Evaluate `spec` block by block.

    Shapes: as `dense.attention`: q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv); returns o (B, Sq, Hq, Dv)
    in the dtype of q (or the spec's `out_dtype`) and lse (B, Hq, Sq) fp32, with a leading axis of branches where
    there are some.
    Raises: E0650 to E0652 (indices, missing arguments, shapes).
    """
    narrow = q.dtype if isinstance(q, torch.Tensor) else q[0].dtype
    wide = torch.promote_types(narrow, torch.float32)
    bound = bind(spec, q, k, v, params, tensors, scale, segments, dtype=wide)
    forms = {p.mask: _form(spec, p.mask) for s in bound.sets for p in s.parts}
    _, sq, _, _ = bound.sizes
    blocks = [_rows(bound, forms, start, min(start + ROWS, sq)) for start in range(0, max(sq, 1), ROWS)]
    o, lse = torch.cat([x[0] for x in blocks], dim=1), torch.cat([x[1] for x in blocks], dim=-1)
    return o.to(_OUT[spec.out_dtype] if spec.out_dtype else narrow), lse.float()


@lru_cache(maxsize=64)
def _form(spec: AttentionSpec, mask: Expr) -> MaskForm:
    return mask_form(spec, mask)


def _rows(bound: Binding, forms: Mapping[Any, MaskForm], start: int, stop: int) -> tuple[Tensor, Tensor]:
    """o (B, rows, Hq, Dv) and lse of rows [start, stop)."""
    q_idx = torch.arange(start, stop, device=bound.q.device)
    env = bound.env(bound.sets[0].parts[0].k.shape[1], q_idx)
    total = bound.q.new_zeros(())
    lses = []
    for s in bound.sets:
        o, lse = _softmax(bound, s, forms, q_idx, env)
        total = total + (o if s.weight is None else o * bound.value(s.weight, env))
        lses.append(lse)
    out = epilogue(bound, total, env).transpose(1, 2)
    return out, torch.stack(lses) if bound.spec.branches else lses[0]


@dataclass(frozen=True, slots=True)
class _State:
    """Running values of (B, Hq, rows, 1), and o (B, Hq, rows, Dv), relative to `top`."""

    top: Tensor
    total: Tensor
    o: Tensor


def _safe(top: Tensor) -> Tensor:
    """A reference that keeps -inf - reference from being NaN."""
    return torch.where(top == -torch.inf, torch.zeros_like(top), top)


def _softmax(
    bound: Binding, s: ScoreSet, forms: Mapping[Any, MaskForm], q_idx: Tensor, env: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    b, _, hq, _ = bound.sizes
    rows = len(q_idx)
    shape = (b, hq, rows, 1)
    state = _State(
        top=s.q.new_full(shape, -torch.inf),
        total=s.q.new_zeros(shape),
        o=s.q.new_zeros(*shape[:3], bound.spec.head_dim_v),
    )
    q_block = s.q[:, int(q_idx[0]) : int(q_idx[0]) + rows].transpose(1, 2) if rows else s.q[:, :0].transpose(1, 2)
    for part in s.parts:
        for start, stop, full in _blocks(bound, part, forms[part.mask], q_idx):
            state = _step(bound, state, q_block, part, q_idx, start, stop, full)
    top, total, o = state.top, state.total, state.o
    if s.sink is not None:
        sink = torch.broadcast_to(bound.value(s.sink, env), shape)
        grown = torch.maximum(top, sink)
        shrink = (top - _safe(grown)).exp()
        top, total, o = grown, total * shrink + (sink - _safe(grown)).exp(), o * _weights(bound, shrink)
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(safe, -torch.inf), _safe(top) + safe.log())
    return o if bound.spec.normalizer is not Normalizer.SOFTMAX else o / safe, lse.squeeze(-1)


def _weights(bound: Binding, shrink: Tensor) -> Tensor:
    """Factor of o when the reference moves: sigmoid and relu weights do not depend on it."""
    return shrink if bound.spec.normalizer is Normalizer.SOFTMAX else torch.ones_like(shrink)


def _blocks(bound: Binding, part: Part, form: MaskForm, q_idx: Tensor) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, every key kept by every row, batch element and head) of the live key blocks."""
    seqlen_kv = part.k.shape[1]
    if not len(q_idx) or not seqlen_kv:
        return
    env = bound.env(seqlen_kv, q_idx)
    tile = {n: t for n, t in env.items() if n not in ("q_idx", "q_pos")} | {"q_lo": q_idx[0], "q_hi": q_idx[-1]}
    live, full = [], []
    for t in form.bounds:
        low, low_max, up_min, up = (bound.bound(e, tile) for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max))
        there = low < up
        if bool(there.any()):
            live.append((int(torch.where(there, low, seqlen_kv).min()), int(torch.where(there, up, 0).max())))
        full.append((int(low_max.max()), int(up_min.min())))
    for start in range(0, seqlen_kv, KEYS):
        stop = min(start + KEYS, seqlen_kv)
        if any(low < stop and start < up for low, up in live):
            yield start, stop, any(low <= start and stop <= up for low, up in full)


def _step(
    bound: Binding, state: _State, q: Tensor, part: Part, q_idx: Tensor, start: int, stop: int, full: bool
) -> _State:
    """One block of keys: scores, mask, online softmax, P V."""
    keys = torch.arange(start, stop, device=q.device)
    s = _grouped(q, part.k[:, start:stop].permute(0, 2, 3, 1)) * bound.scale
    env = bound.env(part.k.shape[1], q_idx, keys)
    keep = None if full else torch.broadcast_to(bound.value(part.mask, env), s.shape)
    if not isinstance(part.score, Atom):
        s = torch.broadcast_to(bound.value(part.score, {**env, "s": s}, active=keep), s.shape)
    if keep is not None:
        s = torch.where(keep, s, torch.full_like(s, -torch.inf))
    top = torch.maximum(state.top, s.amax(-1, keepdim=True).detach())
    reference = _safe(top)
    shrink = (state.top - reference).exp()
    p = (s - reference).exp()
    total = state.total * shrink + p.sum(-1, keepdim=True)
    if bound.spec.normalizer is Normalizer.SOFTMAX:
        w = p
    else:
        dropped = s == -torch.inf
        finite = torch.where(dropped, torch.zeros_like(s), s)
        w = finite.sigmoid() if bound.spec.normalizer is Normalizer.SIGMOID else finite.relu()
        w = torch.where(dropped, torch.zeros_like(w), w)
    o = state.o * _weights(bound, shrink) + _grouped(w, part.v[:, start:stop].transpose(1, 2))
    return replace(state, top=top, total=total, o=o)


def _grouped(a: Tensor, b: Tensor) -> Tensor:
    """a (B, Hq, rows, n) @ b (B, Hkv, n, m): the query heads of a group share b without copies of it."""
    batch, hq, rows, n = a.shape
    hkv = b.shape[1]
    if not hkv:
        return a.new_zeros(batch, hq, rows, b.shape[-1])
    return (a.reshape(batch, hkv, hq // hkv * rows, n) @ b).reshape(batch, hq, rows, b.shape[-1])
