"""Blockwise execution on any device: blocks of rows times blocks of keys, online softmax, O(N) memory.

What a built callable runs on CPU tensors. Everything the dense meaning has, in fp32 (float64 for float64 inputs): the
running maximum is the reference of the exponentials, rows that have kept nothing yet use 0. Keys outside the mask
form's bounds are skipped, keys that every row keeps for sure evaluate no mask. Heads go through the matrix products
together, as many as a block of scores has room for. Differentiable: references are constants to autograd, which no
result depends on, so that running values may be updated in place.
Sources: FlashAttention-2, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
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
from attngen.ref.tables import with_tables

#: Extents of a block of scores of one head, and scores of all its heads: 8 MiB of fp32, where neither the start of a
#: torch operation nor the memory bus costs more than the arithmetic.
ROWS, KEYS, SCORES = 256, 1024, 2**21
#: Fewer keys than this between masked ones are not worth a block of their own.
_SHORT = 64
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
    o, lse, _ = _attention(spec, q, k, v, params, tensors, scale, segments)
    return o, lse


def largest(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """The largest kept score of each row, shaped as `attention`'s lse, fp32, -inf where none is kept; its arguments."""
    return _attention(spec, q, k, v, params, tensors, scale, segments)[2]


def _attention(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    params: Mapping[str, Any] | None,
    tensors: Mapping[str, Tensor] | None,
    scale: float | Tensor | None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, largest kept scores)."""
    narrow = q.dtype if isinstance(q, torch.Tensor) else q[0].dtype
    wide = torch.promote_types(narrow, torch.float32)
    bound = bind(spec, q, k, v, params, tensors, scale, segments, dtype=wide)
    out = _OUT[spec.out_dtype] if spec.out_dtype else narrow
    forms = {p.mask: _form(spec, p.mask) for s in bound.sets for p in s.parts}
    b, sq, hq, hkv = bound.sizes
    group = hq // max(hkv, 1)
    rows = max(1, min(sq, ROWS, max(16, SCORES // (max(group, 1) * KEYS))))
    room = max(1, SCORES // (max(group, 1) * rows * KEYS))
    heads = max(1, min(hkv, room))
    batch = max(1, min(b, room // heads))
    scores = bound.q.new_empty(batch * heads * group * rows * KEYS)
    blocks = [
        [
            _rows_of(_Lane(bound, forms, slice(b0, min(b0 + batch, b)), slice(h0, min(h0 + heads, hkv)), scores), rows)
            for h0 in range(0, max(hkv, 1), heads)
        ]
        for b0 in range(0, max(b, 1), batch)
    ]
    o = torch.cat([torch.cat([x[0].to(out) for x in across], dim=2) for across in blocks])
    lse, top = (
        torch.cat([torch.cat([x[n] for x in across], dim=-2) for across in blocks], dim=-3).float() for n in (1, 2)
    )
    return o, lse, top


@lru_cache(maxsize=64)
def _form(spec: AttentionSpec, mask: Expr) -> MaskForm:
    return mask_form(spec, mask)


class _Lane:
    """Batch elements `batch` and KV heads `heads` of one call, which share every block."""

    def __init__(
        self, bound: Binding, forms: Mapping[Any, MaskForm], batch: slice, heads: slice, scores: Tensor
    ) -> None:
        self.bound, self.forms, self.batch = bound, forms, batch
        _, self.seqlen_q, hq, hkv = bound.sizes
        self.group = hq // max(hkv, 1)
        #: By identity of a part: the call with the tables that the part's bounds read.
        self.tabled = {id(p): with_tables(bound, forms[p.mask], p.k.shape[1]) for s in bound.sets for p in s.parts}
        self.sizes = batch.stop - batch.start, heads.stop - heads.start
        self.heads = slice(heads.start * self.group, heads.stop * self.group)
        self.b_idx = torch.arange(batch.start, batch.stop, device=bound.q.device)
        # (batch * KV heads, seqlen, head dim) once, not in each block; a part's k and v by identity of the part
        self.q = [s.q[batch, :, self.heads].transpose(1, 2) for s in bound.sets]
        self.kv = {
            id(p): tuple(x[batch, :, heads].transpose(1, 2).flatten(0, 1).contiguous() for x in (p.k, p.v))
            for s in bound.sets
            for p in s.parts
        }
        #: The scale as a number, which a matrix product applies by itself; None where autograd or a shape forbids it.
        plain = bound.scale.numel() == 1 and not bound.scale.requires_grad
        self.scale = float(bound.scale) if plain else None
        inputs = [x for s in bound.sets for p in s.parts for x in (s.q, p.k, p.v)]
        inputs += [*bound.tensors.values(), *bound.params.values(), bound.scale]
        graph = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        #: Memory of the scores, reused in every block; autograd wants its own for each.
        self.scores = None if graph else scores

    def env(self, seqlen_kv: int, rows: Tensor, keys: Tensor | None = None) -> dict[str, Tensor]:
        """Atoms and params of a block in this lane."""
        env = self.bound.env(seqlen_kv, rows, keys, self.b_idx)
        return env | {n: env[n][:, self.heads] for n in ("h", "h_kv")}

    def blockwise_scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """scale * q k^T: q (n, rows, D), keys (n, KEYS or fewer, D); valid until the next call."""
        shape = q.shape[0], q.shape[1], keys.shape[1]
        transposed = keys.transpose(1, 2)
        if self.scale is None:
            return (q @ transposed) * self.bound.scale
        if self.scores is None:
            return torch.baddbmm(q.new_empty(()), q, transposed, beta=0, alpha=self.scale)
        s = self.scores[: shape[0] * shape[1] * shape[2]].view(shape)
        return torch.baddbmm(s, q, transposed, beta=0, alpha=self.scale, out=s)


def _rows_of(lane: _Lane, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """o (b, Sq, h, Dv), lse and largest scores of all rows of a lane, `step` rows at a time."""
    sq = lane.seqlen_q
    blocks = [_rows(lane, start, min(start + step, sq)) for start in range(0, max(sq, 1), step)]
    lse, top = (torch.cat([x[n] for x in blocks], dim=-1) for n in (1, 2))
    return torch.cat([x[0] for x in blocks], dim=1), lse, top


def _rows(lane: _Lane, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """o (b, rows, h, Dv), lse and largest scores of rows [start, stop)."""
    bound = lane.bound
    q_idx = torch.arange(start, stop, device=bound.q.device)
    env = lane.env(bound.sets[0].parts[0].k.shape[1], q_idx)
    total: Tensor | None = None
    lses, tops = [], []
    for s, q in zip(bound.sets, lane.q, strict=True):
        o, lse, top = _softmax(lane, s, q[:, :, start:stop], q_idx, env)
        term = o if s.weight is None else o * bound.value(s.weight, env)
        total = term if total is None else total + term
        lses.append(lse)
        tops.append(top)
    assert total is not None
    out = epilogue(bound, total, env, lses[0]).transpose(1, 2)
    if not bound.spec.branches:
        return out, lses[0], tops[0]
    return out, torch.stack(lses), torch.stack(tops)


@dataclass(slots=True)
class _State:
    """Running values of (n, group * rows, 1), and o (n, group * rows, Dv), relative to `top`; updated in place."""

    top: Tensor
    total: Tensor
    o: Tensor


def _safe(top: Tensor) -> Tensor:
    """A reference that keeps -inf - reference from being NaN."""
    return torch.where(top == -torch.inf, torch.zeros_like(top), top)


def _softmax(
    lane: _Lane, s: ScoreSet, q: Tensor, q_idx: Tensor, env: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """o (b, h, rows, Dv), lse and largest scores (b, h, rows) of one score set; q (b, h, rows, D)."""
    bound, rows, (b, hkv) = lane.bound, len(q_idx), lane.sizes
    n, m = b * hkv, lane.group * rows
    state = _State(q.new_full((n, m, 1), -torch.inf), q.new_zeros(n, m, 1), q.new_zeros(n, m, bound.spec.head_dim_v))
    q = q.reshape(n, m, q.shape[-1])
    for part in s.parts:
        for start, stop, full in _blocks(lane, part, q_idx):
            _step(lane, state, q, part, q_idx, start, stop, full)
    shape = (b, hkv * lane.group, rows, 1)
    top, total, o = state.top.view(shape), state.total.view(shape), state.o.view(*shape[:3], state.o.shape[-1])
    largest, softmax = top, bound.spec.normalizer is Normalizer.SOFTMAX
    if s.sink is not None:
        sink = torch.broadcast_to(bound.value(s.sink, env), shape)
        grown = torch.maximum(top, sink)
        shrink = (top - _safe(grown)).exp()
        top, total = grown, total * shrink + (sink - _safe(grown)).exp()
        o = o * shrink if softmax else o
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(safe, -torch.inf), _safe(top) + safe.log())
    return o / safe if softmax else o, lse.squeeze(-1), largest.squeeze(-1)


def _blocks(lane: _Lane, part: Part, q_idx: Tensor) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, every key kept by every row, batch element and head) of the live key blocks, KEYS keys at most.

    Blocks end where a clause's bounds do, so that no dead key is computed and few are masked that need no mask.
    """
    bound, seqlen_kv = lane.tabled[id(part)], part.k.shape[1]
    if not len(q_idx) or not seqlen_kv or not lane.sizes[0] or not lane.sizes[1]:
        return
    env = lane.env(seqlen_kv, q_idx)
    tile = {n: t for n, t in env.items() if n not in ("q_idx", "q_pos")} | {"q_lo": q_idx[0], "q_hi": q_idx[-1]}
    live, full = [], []
    for t in lane.forms[part.mask].bounds:
        low, low_max, up_min, up = (bound.bound(e, tile) for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max))
        there = low < up
        if bool(there.any()):
            live.append((int(torch.where(there, low, seqlen_kv).min()), int(torch.where(there, up, 0).max())))
            full.append((int(low_max.max()), int(up_min.min())))
    for start, stop, whole in _pieces(live, full):
        for first in range(start, stop, KEYS):
            yield first, min(first + KEYS, stop), whole


def _pieces(live: list[tuple[int, int]], full: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """The union of `live` as ascending pieces (start, stop, inside one of `full`), neighbours that are alike as one."""
    cuts = sorted({x for r in (*live, *(f for f in full if f[1] - f[0] >= _SHORT)) for x in r})
    pieces: list[tuple[int, int, bool]] = []
    for start, stop in pairwise(cuts):
        if not any(low <= start and stop <= up for low, up in live):
            continue
        whole = any(low <= start and stop <= up for low, up in full)
        if pieces and pieces[-1][1:] == (start, whole):
            start = pieces.pop()[0]
        pieces.append((start, stop, whole))
    return pieces


def _step(lane: _Lane, state: _State, q: Tensor, part: Part, q_idx: Tensor, start: int, stop: int, full: bool) -> None:
    """One block of keys: scores, mask, online softmax, P V."""
    bound, softmax = lane.bound, lane.bound.spec.normalizer is Normalizer.SOFTMAX
    k, v = lane.kv[id(part)]
    s = lane.blockwise_scores(q, k[:, start:stop])
    ours = True  # s is nobody else's operand, and may be overwritten
    plain = isinstance(part.score, Atom)
    if not (full and plain):
        b, hkv = lane.sizes
        flat, shape = s.shape, (b, hkv * lane.group, len(q_idx), stop - start)
        keys = torch.arange(start, stop, device=q.device)
        env = lane.env(part.k.shape[1], q_idx, keys)
        keep = None if full else bound.value(part.mask, env)
        s = s.view(shape)
        if not plain:
            s, ours = torch.broadcast_to(bound.value(part.score, {**env, "s": s}, active=keep), shape), False
        if keep is not None:
            s, ours = (s.masked_fill_ if ours else s.masked_fill)(~keep, -torch.inf), True
        s = s.reshape(flat)
    top = torch.maximum(state.top, s.detach().amax(-1, keepdim=True))
    reference = _safe(top)
    shrink = (state.top - reference).exp_()
    p = (s.sub_(reference) if ours and softmax else s - reference).exp_()
    state.top = top
    state.total.mul_(shrink).add_(p.sum(-1, keepdim=True))
    if softmax:
        state.o.mul_(shrink).baddbmm_(p, v[:, start:stop])
        return
    # sigmoid and relu weights do not depend on the reference
    dropped = s == -torch.inf
    finite = torch.where(dropped, torch.zeros_like(s), s)
    w = finite.sigmoid() if bound.spec.normalizer is Normalizer.SIGMOID else finite.relu()
    state.o.baddbmm_(torch.where(dropped, torch.zeros_like(w), w), v[:, start:stop])
