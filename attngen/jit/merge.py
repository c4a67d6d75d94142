"""Attention over parts of the keys, put together: O = sum of w_i O_i, with w_i = exp(LSE_i - LSE) for one softmax.

For cascade decoding, steps of a ring, KV segments. Plain torch operations, O(N): differentiable, traceable, on any
device. Numerics: weights and sums in fp32 (float64 for float64 parts), rounded once; a part or a row without keys
(LSE = -inf) weighs nothing, and nothing is NaN.
Source: FlashAttention-2, section 3.1; FlashDecoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngen.diag.diagnostic import error

Tensor = torch.Tensor
#: Axes of an o that its lse has, in the lse's order, by layout.
_ROWS = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "varlen": (1, 0)}


def merge(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *more: Tensor, layout: str = "bshd", dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """(o, lse) of one softmax over keys that were attended to in parts.

        o, lse = attngen.merge(*prefix(q, k1, v1, return_lse=True), *suffix(q, k2, v2, return_lse=True))

    Shapes: each o (batch, seqlen_q, heads_q, head_dim_v), or (batch, heads_q, seqlen_q, head_dim_v) with
    layout="bhsd"; each lse (batch, heads_q, seqlen_q), natural logarithm. layout="varlen": o (total_q, heads_q,
    head_dim_v), lse (heads_q, total_q). `more`: further o, lse, in turn.
    `dtype` of the result: that of o1 unless given. Where lse_i is -inf, o_i must be finite (attngen's is 0).
    Gradients reach every o and lse; they are exact, and so are those of the calls that made them.
    Raises: AttnError E0604, E0605, E0606 for what are no float tensors of one device, E0607 for shapes that do not fit
    together, E0503 for another layout or dtype.
    """
    if layout not in _ROWS:
        raise error("E0503", f"option `layout` does not take {layout!r}", helps=(f"take {_listed(_ROWS)}",))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise error("E0503", f"option `dtype` does not take {dtype!r}", helps=("take a torch dtype of floats",))
    os, lses = [o1, o2, *more[::2]], [lse1, lse2, *more[1::2]]
    _are_floats(os, lses)
    _fit(os, lses, layout)
    weights, lse = softmax_weights(lses)
    return weighted_sum(os, weights, layout == "bhsd", dtype or o1.dtype), lse


def softmax_weights(lses: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
    """(w_i, lse) of parts, w_i = exp(lse_i - lse): 0 where a part has no key, all of them where no part has one."""
    stacked = torch.stack([x if x.dtype is torch.float64 else x.float() for x in lses])
    top = stacked.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    p = (stacked - top).exp()
    total = p.sum(0)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    return list((p / safe).unbind(0)), torch.where(empty, -torch.inf, top + safe.log())


def weighted_sum(os: Sequence[Tensor], weights: Sequence[Tensor | float], bhsd: bool, dtype: Any = None) -> Tensor:
    """Sum of w_i o_i, contiguous, in fp32 or float64, rounded to `dtype` where given. A weight is a number, or (batch,
    heads_q, seqlen_q) with extents of 1 allowed; packed rows have no axis of batch, in o either. `bhsd`: heads stand
    before rows in an o.

    Of the parts only o_i is saved, in its own dtype.
    """
    count, tensors = len(os), [w for w in weights if isinstance(w, Tensor)]
    places = tuple(None if isinstance(w, Tensor) else float(w) for w in weights)
    total: Tensor = _WeightedSum.apply(count, places, bhsd, dtype, *os, *tensors)  # type: ignore[no-untyped-call]
    return total


class _WeightedSum(torch.autograd.Function):
    """dO_i = w_i dO;  dw_i = rowsum(dO * O_i)."""

    @staticmethod
    def forward(
        ctx: Any, count: int, places: tuple[float | None, ...], bhsd: bool, dtype: Any, *given: Tensor
    ) -> Tensor:
        ctx.places, ctx.bhsd = places, bhsd
        ctx.save_for_backward(*given)
        os, weights = given[:count], _columns(given[count:], places, bhsd)
        kind = torch.promote_types(os[0].dtype, torch.float32)
        total = torch.empty(os[0].shape, dtype=kind, device=os[0].device)
        for i, (o, w) in enumerate(zip(os, weights, strict=True)):  # one pass over memory for each
            if i == 0:
                torch.mul(o.to(kind) if isinstance(w, float) else o, w, out=total)
            elif isinstance(w, float):
                total.add_(o, alpha=w)
            else:
                total.addcmul_(o, w)
        rounded: Tensor = total if dtype is None else total.to(dtype)
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        given, places = ctx.saved_tensors, ctx.places
        os, tensors = given[: len(places)], given[len(places) :]
        weights = _columns(tensors, places, ctx.bhsd)
        dos = [_rounded_product(grad, w, o) for o, w in zip(os, weights, strict=True)]
        kind = torch.promote_types(os[0].dtype, torch.float32)
        dws = []
        left = iter(tensors)
        for o, place in zip(os, places, strict=True):
            if place is None:
                rows = (grad.to(kind) * o).sum(-1)
                w = next(left)
                dws.append((rows if ctx.bhsd else rows.transpose(-2, -1)).sum_to_size(w.shape).to(w.dtype))
        return None, None, None, None, *dos, *dws


def _rounded_product(grad: Tensor, w: Any, o: Tensor) -> Tensor:
    """grad * w in the dtype of o, computed in fp32 or wider."""
    product: Tensor = grad
    if isinstance(w, float):
        kind = torch.promote_types(grad.dtype, torch.float32)
        return grad.to(o.dtype) if w == 1.0 else (grad.to(kind) * w).to(o.dtype)
    if torch.is_grad_enabled():  # create_graph=True
        product = grad * w
        return product.to(o.dtype)
    product = torch.mul(grad, w, out=torch.empty(grad.shape, dtype=o.dtype, device=o.device))
    return product


def _columns(tensors: Sequence[Tensor], places: Sequence[float | None], bhsd: bool) -> list[Any]:
    """Weights as they multiply an o of the layout."""
    left = iter(tensors)
    return [p if p is not None else _along_rows(next(left), bhsd) for p in places]


def _along_rows(w: Tensor, bhsd: bool) -> Tensor:
    return (w if bhsd else w.transpose(-2, -1)).unsqueeze(-1)


def _are_floats(os: Sequence[Any], lses: Sequence[Any]) -> None:
    """E0604 to E0606 for what torch would refuse in the middle, or round."""
    named = [*((f"o{i}", x) for i, x in enumerate(os, 1)), *((f"lse{i}", x) for i, x in enumerate(lses, 1))]
    for name, x in named:
        if not isinstance(x, torch.Tensor):
            found = type(x).__name__
            raise error("E0604", f"`{name}` must be a torch tensor, found {found}", helps=("pass o and lse in turn",))
        if not x.is_floating_point():
            raise error("E0606", f"`{name}` is {x.dtype}; parts are floats", helps=("pass what attention returned",))
        if x.device != os[0].device:
            where = f"`{name}` is on {x.device}, o1 is on {os[0].device}"
            raise error("E0605", where, helps=(f"move it: {name}.to({str(os[0].device)!r})",))


def _fit(os: Sequence[Any], lses: Sequence[Any], layout: str) -> None:
    """E0607 where an o has no lse, or shapes differ."""
    if len(os) != len(lses):
        raise error("E0607", f"`merge` got {len(os)} o and {len(lses)} lse", helps=("pass o and lse in turn",))
    axes = _ROWS[layout]
    whole = len(os[0].shape) == len(axes) + 1
    rows = tuple(os[0].shape[a] for a in axes) if whole else None
    for i, (o, lse) in enumerate(zip(os, lses, strict=True), 1):
        if o.shape != os[0].shape or tuple(lse.shape) != rows:
            fits = f"o {tuple(os[0].shape)} and lse {rows} were expected" if whole else f"o has {len(axes) + 1} axes"
            raise error(
                "E0607",
                f"part {i} has o {tuple(o.shape)} and lse {tuple(lse.shape)}; {fits}",
                notes=(f"axes are read as {layout}",),
                helps=(f"the order of the axes is chosen with layout={_listed(_ROWS)}",),
            )


def _listed(names: Mapping[str, Any]) -> str:
    *first, last = (f'"{n}"' for n in names)
    return f"{', '.join(first)} or {last}"
