"""The meaning of a spec, straight from the mathematics: O(Sq * Skv) torch code, the oracle of every test.

For one row:  s = score(scale * <q, k>),  w = normaliser over the kept keys,  O = epilogue(sum w v),
LSE = log(sum exp(s) over the kept keys, and exp(sink)).

Numerics: float64 by default. Differentiable in q, k, v and captured tensors; a key that is masked, or whose score is
-inf, does not exist: its score is computed on nothing and no gradient passes through it, so an empty row gives O = 0,
LSE = -inf (or the sink) and zero gradients, never NaN.
Sources: language.md's formula; FlashAttention-2, section 2.1 for LSE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attngen.ir.expr import Atom, atoms_of
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.ref.binding import Binding, Part, ScoreSet, Several, bind
from attngen.ref.evaluate import Tensor

# torch's float64 exp comes from MKL: its first call in a process, made by two threads at once, now and then is good to
# half the digits only (2e-9 here, in one process of a hundred). A first call of one thread settles it.
torch.zeros(2, dtype=torch.float64).exp()

#: Scores held at once; larger calls go by batch elements and blocks of rows.
CHUNK_ELEMENTS = 2**25


class Result(NamedTuple):
    """o (B, Sq, Hq, Dv); lse and max_logit (B, Hq, Sq), with a leading axis of branches where the spec has branches.

    `max_logit` (the largest kept score, -inf where none, the sink apart) is None unless the spec asks for it.
    """

    o: Tensor
    lse: Tensor
    max_logit: Tensor | None


def attention(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    matmul_dtype: torch.dtype | None = None,
) -> Result:
    """Evaluate `spec` densely in `dtype`; operands and results of the two matrix products in `matmul_dtype`, where
    given.

    Shapes: bshd whatever the spec's layout: q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv). `q` and `k` are
    tuples for a spec with branches; `v` is None for one whose V is a view of K. `scale` (natural units) replaces the
    spec's.
    Raises: E0650 to E0652 (indices, missing arguments, shapes).
    """
    bound = bind(spec, q, k, v, params, tensors, scale, segments, dtype=dtype)
    products = _Products(matmul_dtype or dtype, dtype)
    b, sq, hq, _ = bound.sizes
    longest = max(p.k.shape[1] for s in bound.sets for p in s.parts)
    rows = max(1, min(sq, CHUNK_ELEMENTS // max(1, hq * longest)))
    batch = max(1, min(b, CHUNK_ELEMENTS // max(1, hq * longest * rows)))
    columns = []
    for b0 in range(0, max(b, 1), batch):
        blocks = [
            _block(bound, products, slice(b0, b0 + batch), slice(m, m + rows)) for m in range(0, max(sq, 1), rows)
        ]
        columns.append(
            [torch.cat(parts, dim=axis) for parts, axis in zip(zip(*blocks, strict=True), (1, -1, -1), strict=True)]
        )
    o, lse, top = (torch.cat(x, dim=axis) for x, axis in zip(zip(*columns, strict=True), (0, -3, -3), strict=True))
    return Result(o, lse, top if spec.max_logit else None)


def attention_bhsd(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Result:
    """`attention` for q, k, v and o in (B, H, S, D)."""
    out = attention(spec, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **arguments)
    return out._replace(o=out.o.transpose(1, 2))


def same_dtype(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Result:
    """`attention` as plain torch code in the dtype of q computes it: both matrix products and the output rounded to it,
    score expressions and softmax in fp32 between (the output still is fp32 then, holding values of that dtype).

    The yardstick of the error rule: a kernel may err twice as much as this (see `compare.error_ratio`).
    """
    narrow = q.dtype if isinstance(q, torch.Tensor) else q[0].dtype
    wide = torch.promote_types(narrow, torch.float32)
    out = attention(spec, q, k, v, params, tensors, scale, segments, dtype=wide, matmul_dtype=narrow)
    return out._replace(o=out.o.to(narrow).to(wide))


class _Products(NamedTuple):
    """Matrix products in one dtype amid code in another."""

    inner: torch.dtype
    outer: torch.dtype

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.to(self.inner) @ b.to(self.inner)).to(self.outer)


def _block(bound: Binding, matmul: _Products, batch: slice, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    b, sq, _, _ = bound.sizes
    q_idx = torch.arange(sq, device=bound.q.device)[rows]
    b_idx = torch.arange(b, device=bound.q.device)[batch]
    outs = [_softmax(bound, matmul, s, b_idx, q_idx) for s in bound.sets]
    seqlen_kv = bound.sets[0].parts[0].k.shape[1]
    env = bound.env(seqlen_kv, q_idx, batch=b_idx)
    total: Tensor | None = None
    for s, (o, _, _) in zip(bound.sets, outs, strict=True):
        term = o if s.weight is None else o * bound.value(s.weight, env)
        total = term if total is None else total + term
    assert total is not None
    final = epilogue(bound, total, env, outs[0][1]).transpose(1, 2)
    if not bound.spec.branches:
        return final, outs[0][1], outs[0][2]
    return final, torch.stack([x[1] for x in outs]), torch.stack([x[2] for x in outs])


def epilogue(bound: Binding, o: Tensor, env: Mapping[str, Tensor], lse: Tensor | None = None) -> Tensor:
    """The spec's epilogue on o (B, Hq, rows, Dv); `lse` (B, Hq, rows) of one softmax, for what its sink has of it."""
    e = bound.spec.epilogue
    if isinstance(e, Atom):
        return o
    if "sink_weight" in atoms_of(e):
        (s,) = bound.sets
        assert s.sink is not None and lse is not None
        safe = torch.where(lse == -torch.inf, torch.zeros_like(lse), lse).unsqueeze(-1)
        env = {**env, "sink_weight": (bound.value(s.sink, env) - safe).exp()}
    columns = torch.arange(o.shape[-1], device=o.device).view(1, 1, 1, -1)
    return torch.broadcast_to(bound.value(e, {**env, "o": o, "d": columns}), o.shape)


def _softmax(
    bound: Binding, matmul: _Products, s: ScoreSet, b_idx: Tensor, q_idx: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(o (B, H, rows, Dv), lse (B, H, rows), largest score (B, H, rows)) of one score set."""
    pairs = [_scores(bound, matmul, s.q, p, b_idx, q_idx) for p in s.parts]
    scores, kept = (torch.cat(x, dim=-1) for x in zip(*pairs, strict=True))
    group = bound.sizes[2] // max(bound.sizes[3], 1)
    values = torch.cat([_heads(p.v[b_idx], group) for p in s.parts], dim=2)
    top = (
        scores.detach().amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    )
    reference, extra = top, None
    if s.sink is not None:
        env = bound.env(s.parts[0].k.shape[1], q_idx, batch=b_idx)
        sink = torch.broadcast_to(bound.value(s.sink, env), top.shape)
        reference = torch.maximum(top, sink.detach())
    reference = torch.where(reference == -torch.inf, torch.zeros_like(reference), reference)
    # a dropped key has score -inf as a constant: exp gives 0, and no gradient
    p = (scores - reference).exp()
    total = p.sum(-1, keepdim=True)
    if s.sink is not None:
        extra = (sink - reference).exp()
        total = total + extra
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(safe, -torch.inf), reference + safe.log())
    if bound.spec.normalizer is Normalizer.SOFTMAX:
        w = p / safe
    else:
        finite = torch.where(kept, scores, torch.zeros_like(scores))
        w = finite.sigmoid() if bound.spec.normalizer is Normalizer.SIGMOID else finite.relu()
        w = torch.where(kept, w, torch.zeros_like(w))
    return matmul(w, values), lse.squeeze(-1), top.squeeze(-1)


def _heads(x: Tensor, group: int) -> Tensor:
    """(B, S, Hkv, D) to (B, Hq, S, D)."""
    return x.transpose(1, 2).repeat_interleave(group, dim=1)


def _scores(
    bound: Binding, matmul: _Products, q: Tensor, part: Part, b_idx: Tensor, q_idx: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores (B, H, rows, Skv), -inf where dropped, and which keys are kept with a score above -inf."""
    group = bound.sizes[2] // max(bound.sizes[3], 1)
    rows, keys = q[b_idx][:, q_idx].transpose(1, 2), _heads(part.k[b_idx], group)
    s = matmul(rows, keys.transpose(-1, -2)) * bound.scale
    seqlen_kv = part.k.shape[1]
    env = bound.env(seqlen_kv, q_idx, torch.arange(seqlen_kv, device=q.device), b_idx)
    keep = torch.broadcast_to(bound.value(part.mask, env), s.shape)
    with torch.no_grad():
        value = torch.broadcast_to(bound.value(part.score, {**env, "s": s}, active=keep), s.shape)
        keep = keep & (value != -torch.inf)
    if s.requires_grad or any(t.requires_grad for t in (*bound.tensors.values(), *bound.params.values())):
        # again with gradients, on the kept elements alone: 0 * inf cannot arise elsewhere
        flat = {n: torch.broadcast_to(x, s.shape)[keep] if x.dim() else x for n, x in env.items()}
        kept_values = torch.broadcast_to(bound.value(part.score, {**flat, "s": s[keep]}), s[keep].shape)
        value = torch.zeros_like(s).masked_scatter(keep, kept_values)
    return torch.where(keep, value, torch.full_like(value, -torch.inf)), keep
