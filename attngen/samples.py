"""Sample arguments for a spec: values for its params and captured tensors, so that it can be run, measured or drawn.

Everything is drawn from a seed: two runs see the same numbers. Values respect what a spec promises: `sorted` tensors
never decrease (documents of uneven lengths), ints that index nothing stay within the sequence, bools are rarely true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attngen.diag.diagnostic import error

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl

#: Extent of an axis that neither the spec nor the shapes fix.
FREE_EXTENT = 64
#: Growth of `rising` scores from a key to the one before it: more than 2^8 over the narrowest usual KV tile, 64 keys.
RISE = 0.15


@dataclass(frozen=True)
class Shape:
    """Extents of one call."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int


def params(spec: AttentionSpec, given: Mapping[str, str | int | float | bool] | None = None) -> dict[str, Any]:
    """Values of all params: `given` (text is converted), else the default, else a small value inside the bounds.

    Raises: AttnError E0601 for an unknown name, E0603 for a value that does not fit.
    """
    given = dict(given or {})
    known = {p.name for p in spec.params}
    for name in given:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise error("E0601", f"`{spec.name}` has no param `{name[:60]}`", helps=(f"its params: {listed}",))
    return {p.name: _convert(p, given[p.name]) if p.name in given else _default(p) for p in spec.params}


def _default(p: ParamDecl) -> Any:
    if p.default is not None:
        return p.default
    low = p.minimum if p.minimum is not None else 0
    value = max(low, 1) if p.maximum is None else min(max(low, 1), p.maximum)
    return {"bool": bool, "int": int, "float": float}[p.type.value](value)


def _convert(p: ParamDecl, value: str | int | float | bool) -> Any:
    text = str(value).strip().lower()
    try:
        converted: Any
        if p.type.value == "bool":
            converted = {"true": True, "1": True, "false": False, "0": False}[text]
        else:
            converted = int(text) if p.type.value == "int" else float(text)
    except (KeyError, ValueError):
        example = {"bool": "true", "int": "128"}.get(p.type.value, "0.5")
        raise error(
            "E0603",
            f"param `{p.name}` takes a value of type {p.type.value}, found {text[:60]!r}",
            helps=(f"give it as {p.name}={example}",),
        ) from None
    low, high = (-(2**31), 2**31 - 1) if p.type.value == "int" else (-math.inf, math.inf)
    low = low if p.minimum is None else max(low, p.minimum)
    high = high if p.maximum is None else min(high, p.maximum)
    if not low <= converted <= high:  # NaN too
        raise error(
            "E0603",
            f"param `{p.name}` is {text[:60]}, outside [{low}, {high}]",
            helps=(f"give a value from {low} to {high}",),
        )
    return converted


def qkv(
    spec: AttentionSpec, shape: Shape, *, device: str = "cpu", dtype: Any = None, seed: int = 0
) -> tuple[Any, Any, Any]:
    """Normal q (batch, seqlen_q, heads_q, d), k and v (batch, seqlen_kv, heads_kv, d or d_v), in the spec's dtype.

    With branches q and k are tuples, one of each for each branch; v is None where V is a view of K.
    """
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    kind = dtype or {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}[spec.dtype.value]

    def draw(seqlen: int, heads: int, dim: int) -> Any:
        return torch.randn(shape.batch, seqlen, heads, dim, generator=generator, device=device).to(kind)

    def queries() -> Any:
        return draw(shape.seqlen_q, shape.heads_q, spec.head_dim_qk)

    def keys() -> Any:
        return draw(shape.seqlen_kv, shape.heads_kv, spec.head_dim_qk)

    if spec.branches:
        q, k = tuple(queries() for _ in spec.branches), tuple(keys() for _ in spec.branches)
    else:
        q, k = queries(), keys()
    v = draw(shape.seqlen_kv, shape.heads_kv, spec.head_dim_v) if spec.v_view_start is None else None
    return q, k, v


def rising(q: Any, k: Any) -> tuple[Any, Any]:
    """q and k (bshd) whose scores at the usual scale grow by RISE a key, from the last key to the first.

    Kernels here walk from the last KV tile to the first: the maximum of every row grows at every tile.
    """
    import torch

    q, k = q.clone(), k.clone()
    steps = torch.arange(k.shape[1], 0, -1, device=k.device, dtype=torch.float32) * RISE
    q[..., 0] = math.sqrt(q.shape[-1])
    k[..., 0] = steps.to(k.dtype)[:, None]
    return q, k


def call_arguments(
    spec: AttentionSpec, q: Any, k: Any, v: Any, segments: Mapping[str, tuple[Any, Any]] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a built callable takes for these bshd q, k and v of `qkv`: its positional arguments, and keywords."""
    import torch

    def laid_out(x: Any) -> Any:
        if spec.layout.value != "bhsd":
            return x
        return tuple(map(laid_out, x)) if isinstance(x, tuple) else x.transpose(1, 2).contiguous()

    more = {"segments": {n: laid_out(tuple(pair)) for n, pair in segments.items()}} if segments else {}
    if spec.layout.value == "packed_qkv":
        return (torch.cat((q, k, v), 2),), {"heads_q": q.shape[2], **more}
    return tuple(laid_out(x) for x in (q, k, v) if x is not None), more


def segments(
    spec: AttentionSpec, shape: Shape, *, device: str = "cpu", dtype: Any = None, seed: int = 0
) -> dict[str, tuple[Any, Any]]:
    """Normal (k, v) of every KV segment, by name: about half as long as the call's own keys, so that an index by
    `kv_idx` that is good for those is good for these.
    """
    plain = spec.replace(branches=(), v_view_start=None)
    shorter = replace(shape, seqlen_kv=(shape.seqlen_kv + 1) // 2)
    made = (qkv(plain, shorter, device=device, dtype=dtype, seed=seed + 1000 + i) for i in range(len(spec.segments)))
    return {s.name: (k, v) for s, (_, k, v) in zip(spec.segments, made, strict=True)}


def tensors(spec: AttentionSpec, shape: Shape, *, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """A value for every captured tensor."""
    return {t.name: _tensor(spec, t, shape, device, seed + 1 + i) for i, t in enumerate(spec.tensors)}


def extents(spec: AttentionSpec, decl: TensorDecl, shape: Shape) -> tuple[int, ...]:
    """The shape that `decl` has in a call of this shape."""
    known = {
        "batch": shape.batch, "heads_q": shape.heads_q, "heads_kv": shape.heads_kv, "seqlen_q": shape.seqlen_q,
        "seqlen_kv": shape.seqlen_kv, "head_dim": spec.head_dim_qk, "head_dim_v": spec.head_dim_v,
        **spec.block_counts(shape.seqlen_q, shape.seqlen_kv),
    }  # fmt: skip
    return tuple(d if isinstance(d, int) else known.get(d, FREE_EXTENT) for d in decl.dims)


def _tensor(spec: AttentionSpec, decl: TensorDecl, shape: Shape, device: str, seed: int) -> Any:
    import torch

    size = extents(spec, decl, shape)
    generator = torch.Generator().manual_seed(seed)
    kind = decl.dtype.value
    if kind == "bool":
        made = torch.rand(size, generator=generator) < (0.5 if "blocks_kv" in decl.dims else 0.05)
    elif kind == "i32" and decl.sorted:
        # About eight runs of uneven length on the last axis, each element holding the start of its run: as good for ids
        # of documents as for their starts.
        starts = torch.rand(size, generator=generator) < min(0.5, 8 / max(size[-1], 1))
        places = torch.arange(size[-1], dtype=torch.int32).expand(size)
        made = torch.where(starts, places, 0).cummax(-1).values.to(torch.int32)
    elif kind == "i32":
        made = torch.randint(
            0, max(1, min(shape.seqlen_q, shape.seqlen_kv) // 3 + 1), size, generator=generator, dtype=torch.int32
        )
    else:
        made = torch.randn(size, generator=generator) * 0.5
        made = made.sort(-1).values if decl.sorted else made
        made = made.to({"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}[kind])
    return made.to(device)
