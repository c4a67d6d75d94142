"""Binding: the arguments of one call beside the declarations of its spec, as every reference execution needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.expr import Expr
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Type
from attngen.ref.evaluate import Tensor, evaluate

Several = Tensor | Sequence[Tensor]
_PARAM_KINDS = {Type.BOOL: torch.bool, Type.INT: torch.int64}


@dataclass(frozen=True, slots=True)
class ScoreSet:
    """One softmax of O: the branch of that name, or the whole spec. `parts` share its normaliser."""

    q: Tensor
    parts: tuple[Part, ...]
    sink: Expr | None
    weight: Expr | None


@dataclass(frozen=True, slots=True)
class Part:
    """Keys under one mask and score: the call's own, or a segment's."""

    k: Tensor
    v: Tensor
    score: Expr
    mask: Expr


@dataclass(frozen=True, slots=True)
class Binding:
    """One call. Shapes: q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv)."""

    spec: AttentionSpec
    sets: tuple[ScoreSet, ...]
    params: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    scale: Tensor
    dtype: torch.dtype

    @property
    def q(self) -> Tensor:
        return self.sets[0].q

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """batch, seqlen_q, heads_q, heads_kv."""
        b, sq, hq, _ = self.q.shape
        return b, sq, hq, self.sets[0].parts[0].k.shape[2]

    def env(
        self, seqlen_kv: int, rows: Tensor, keys: Tensor | None = None, batch: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Atoms and params for a block of rows and keys, laid out (B, Hq, rows, keys).

        `rows` and `keys` are positions (1-D int64), `batch` the batch indices (default: all).
        """
        b, sq, hq, hkv = self.sizes
        device = self.q.device

        def size(n: int) -> Tensor:
            return torch.tensor(n, device=device)

        heads = torch.arange(hq, device=device).view(1, -1, 1, 1)
        batch = torch.arange(b, device=device) if batch is None else batch
        q_idx = rows.view(1, 1, -1, 1)
        env = {
            "b": batch.view(-1, 1, 1, 1),
            "h": heads,
            "h_kv": heads // (hq // hkv) if hkv else heads,
            "q_idx": q_idx,
            "q_pos": q_idx + (seqlen_kv - sq),
            "seqlen_q": size(sq),
            "seqlen_kv": size(seqlen_kv),
            "heads_q": size(hq),
            "heads_kv": size(hkv),
            "batch": size(b),
            **self.params,
        }
        if keys is not None:
            env["kv_idx"] = keys.view(1, 1, 1, -1)
        return env

    def value(self, e: Expr, env: Mapping[str, Tensor], active: Tensor | None = None) -> Tensor:
        """`e` in this call."""
        return evaluate(e, env, self.tensors, dtype=self.dtype, active=active)

    def bound(self, e: Expr, env: Mapping[str, Tensor]) -> Tensor:
        """A bound of the mask form in this call: its indices are clamped, as in a kernel."""
        return evaluate(e, env, self.tensors, dtype=self.dtype, clamp=True)


def bind(
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
) -> Binding:
    """Match the arguments of a call with the spec, all in bshd.

    Floats become `dtype` (autograd follows), defaults fill missing params, extent-1 axes of captured tensors are
    expanded. `q` and `k` are one tensor, or one for each branch; `segments` gives (k, v) by segment name.
    Raises: E0651 missing or surplus arguments, E0652 shapes that do not fit together.
    """
    qs, ks = _several(q), _several(k)
    count = max(len(spec.branches), 1)
    if len(qs) != count or len(ks) != count:
        raise error("E0651", f"`{spec.name}` takes {count} q and {count} k, got {len(qs)} and {len(ks)}")
    ks = [x.to(dtype) for x in ks]
    if spec.v_view_start is not None:
        v = ks[0][..., spec.v_view_start : spec.v_view_start + spec.head_dim_v]
    if v is None:
        raise error("E0651", f"`{spec.name}` takes v: it is not a view of k")
    v = v.to(dtype)
    sets = [_score_set(spec, i, qs[i].to(dtype), ks[i], v) for i in range(count)]
    given = dict(segments or {})
    extra = []
    for s in spec.segments:
        if s.name not in given:
            raise error("E0651", f"segment `{s.name}` of `{spec.name}` has no k and v")
        k_s, v_s = given.pop(s.name)
        extra.append(Part(k_s.to(dtype), v_s.to(dtype), s.score, s.mask))
    if given:
        raise error("E0651", f"`{spec.name}` has no segment `{next(iter(given))}`")
    bound = Binding(
        spec=spec,
        sets=tuple(replace(s, parts=(*s.parts, *extra)) for s in sets),
        params=_params(spec, params or {}, qs[0].device, dtype),
        tensors={},
        scale=torch.ones((), dtype=dtype),
        dtype=dtype,
    )
    _check_shapes(bound)
    bound = replace(bound, tensors=_tensors(bound, tensors or {}))
    sizes = {"batch": torch.tensor(bound.sizes[0], device=qs[0].device)}
    value = (
        bound.value(spec.scale, {**bound.params, **sizes})
        if scale is None
        else torch.as_tensor(scale, device=qs[0].device, dtype=dtype)
    )
    return replace(bound, scale=value.to(dtype))


def _several(x: Several) -> list[Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)


def _score_set(spec: AttentionSpec, i: int, q: Tensor, k: Tensor, v: Tensor) -> ScoreSet:
    if not spec.branches:
        return ScoreSet(q, (Part(k, v, spec.score, spec.mask),), spec.sink, None)
    branch = spec.branches[i]
    return ScoreSet(q, (Part(k, v, branch.score, branch.mask),), branch.sink, branch.weight)


def _params(
    spec: AttentionSpec, given: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    names = [p.name for p in spec.params]
    surplus = [n for n in given if n not in names]
    if surplus:
        raise error("E0651", f"`{spec.name}` has no param `{surplus[0]}`", helps=(f"its params: {', '.join(names)}",))
    out = {}
    for p in spec.params:
        value = given.get(p.name, p.default)
        if value is None:
            raise error("E0651", f"param `{p.name}` of `{spec.name}` has no default and was not given")
        out[p.name] = torch.as_tensor(value, device=device, dtype=_PARAM_KINDS.get(p.type, dtype))
    return out


def _check_shapes(bound: Binding) -> None:
    spec, (b, sq, hq, hkv) = bound.spec, bound.sizes
    wrong: list[str] = []
    for s in bound.sets:
        if s.q.shape != (b, sq, hq, spec.head_dim_qk):
            wrong.append(f"q {tuple(s.q.shape)}")
        for p in s.parts:
            skv = p.k.shape[1]
            if p.k.shape != (b, skv, hkv, spec.head_dim_qk):
                wrong.append(f"k {tuple(p.k.shape)}")
            if p.v.shape != (b, skv, hkv, spec.head_dim_v):
                wrong.append(f"v {tuple(p.v.shape)}")
    if wrong or (hq and (not hkv or hq % hkv)):
        raise error(
            "E0652",
            f"shapes do not fit: {', '.join(wrong) or f'{hq} query heads over {hkv} KV heads'}",
            notes=(
                f"`{spec.name}` takes q (B, Sq, Hq, {spec.head_dim_qk}), k (B, Skv, Hkv, {spec.head_dim_qk}), "
                f"v (B, Skv, Hkv, {spec.head_dim_v}), Hq a multiple of Hkv",
            ),
        )


def _tensors(bound: Binding, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    spec, (b, sq, hq, hkv) = bound.spec, bound.sizes
    known = {
        "batch": b,
        "heads_q": hq,
        "heads_kv": hkv,
        "seqlen_q": sq,
        "seqlen_kv": bound.sets[0].parts[0].k.shape[1],
        "head_dim": spec.head_dim_qk,
        "head_dim_v": spec.head_dim_v,
        **spec.block_counts(sq, bound.sets[0].parts[0].k.shape[1]),
    }
    names = [t.name for t in spec.tensors]
    surplus = [n for n in given if n not in names]
    if surplus:
        raise error("E0651", f"`{spec.name}` has no tensor `{surplus[0]}`", helps=(f"its tensors: {', '.join(names)}",))
    out = {}
    for t in spec.tensors:
        if t.name not in given:
            raise error("E0651", f"tensor `{t.name}` of `{spec.name}` was not given")
        x = given[t.name]
        wanted = [known.get(d, -1) if isinstance(d, str) else d for d in t.dims]
        fits = x.dim() == len(wanted) and all(n in (-1, m) or m == 1 for n, m in zip(wanted, x.shape, strict=True))
        if not fits:
            raise error(
                "E0652", f"tensor `{t.name}` has shape {tuple(x.shape)}, declared [{', '.join(map(str, t.dims))}]"
            )
        out[t.name] = x.expand(wanted)
    return out
