"""q, k and v as views of fewer tensors, and their gradients back in one: no copy on the way in, none that is not
needed on the way out.

`unpack`: one qkv; its gradient is one tensor, and where the backward kernel made dq, dk and dv as slices of it
(`joint_like`), that tensor as it is. `keys_and_values`: V is columns of K; dV is added to those of dK.
Under torch.compile both are plain slices, whose gradients the compiler fuses.
"""

from __future__ import annotations

from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import AttentionSpec
from attngen.jit.modes import grad_enabled, is_dynamo

Three = tuple[Any, Any, Any]


def unpack(spec: AttentionSpec, qkv: Any, heads_q: int | None) -> Three:
    """q (B, S, Hq, D), k and v (B, S, Hkv, D), views of qkv (B, S, 3, H, D) or (B, S, Hq + 2 Hkv, D).

    Raises: AttnError E0604 (no tensor), E0607 (shape), E0608 (heads that do not divide).
    """
    if not isinstance(qkv, torch.Tensor):
        raise error("E0604", f"`qkv` must be a torch tensor, found {type(qkv).__name__}", helps=("pass one tensor",))
    rank = qkv.dim()
    if rank == 5 and qkv.shape[2] == 3 and heads_q in (None, qkv.shape[3]):
        heads: tuple[int, ...] = ()
    elif rank == 4 and heads_q is not None and 0 < heads_q < qkv.shape[2] and not (qkv.shape[2] - heads_q) % 2:
        heads = (heads_q, *(2 * ((qkv.shape[2] - heads_q) // 2,)))
    else:
        raise _wrong_shape(spec, qkv, heads_q)
    if grad_enabled() and qkv.requires_grad and not is_dynamo():
        return _Unpack.apply(qkv, heads)  # type: ignore[no-untyped-call, no-any-return]
    return _slices(qkv, heads)


def _slices(qkv: Any, heads: tuple[int, ...]) -> Three:
    parts: Three = qkv.split(heads, 2) if heads else qkv.unbind(2)
    return parts


def _wrong_shape(spec: AttentionSpec, qkv: torch.Tensor, heads_q: int | None) -> AttnError:
    shape = tuple(qkv.shape)
    dim = spec.head_dim_qk
    axes = f"(batch, seqlen, 3, heads, {dim}), or (batch, seqlen, heads_q + 2 heads_kv, {dim})"
    if qkv.dim() == 4 and heads_q is None:
        return error(
            "E0607",
            f"`qkv` {shape} has one axis for the heads of q, k and v, and nothing says how many are q's",
            notes=(f"`{spec.name}` takes {axes}",),
            helps=("pass heads_q=; as many are k's as v's",),
        )
    if qkv.dim() == 4:
        return error(
            "E0608",
            f"`qkv` {shape} does not hold {heads_q} query heads and as many heads of k as of v",
            notes=(f"`{spec.name}` takes {axes}",),
            helps=("pass the number of query heads as heads_q=",),
        )
    return error(
        "E0607",
        f"`qkv` has the shape {shape}" + (f", and heads_q is {heads_q}" if heads_q is not None else ""),
        notes=(f"`{spec.name}` takes {axes} with heads_q=",),
        helps=("reshape it: qkv.unflatten(-1, (3, heads, head_dim)) of a (batch, seqlen, 3 heads head_dim)",),
    )


class _Unpack(torch.autograd.Function):
    """Slices of qkv, and one gradient of them."""

    @staticmethod
    def forward(ctx: Any, qkv: Any, heads: tuple[int, ...]) -> Three:
        ctx.heads = heads
        q, k, v = _slices(qkv, heads)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Any, dk: Any, dv: Any) -> tuple[Any, None]:
        whole = _whole(dq, dk, dv)
        if whole is None:
            return (torch.cat((dq, dk, dv), 2) if ctx.heads else torch.stack((dq, dk, dv), 2)), None
        return whole if ctx.heads else whole.unflatten(2, (3, dq.shape[2])), None


def joint_like(q: Any, k: Any, v: Any) -> Three | None:
    """Memory for dq, dk and dv as slices along the heads of one contiguous tensor; None where q, k and v of bshd do
    not fit together.
    """
    if q.shape[:2] != k.shape[:2] or not q.shape[3] == k.shape[3] == v.shape[3]:
        return None
    heads = (q.shape[2], k.shape[2], v.shape[2])
    whole = torch.empty((*q.shape[:2], sum(heads), q.shape[3]), dtype=q.dtype, device=q.device)
    return _slices(whole, heads)


def _whole(dq: Any, dk: Any, dv: Any) -> Any:
    """The tensor that these are the slices of along axis 2, or None. Nothing else may hold a part of it: `joint_like`
    made it for them alone.
    """
    if torch.is_grad_enabled():  # create_graph=True: a view taken by its strides has no history
        return None
    heads, stride = dq.shape[2] + dk.shape[2] + dv.shape[2], dq.stride()
    row, step = heads * dq.shape[3], dq.shape[2] * dq.shape[3]
    if not dq.numel() or stride != (row * dq.shape[1], row, dq.shape[3], 1) or not stride == dk.stride() == dv.stride():
        return None
    start, base = dq.storage_offset(), dq.untyped_storage()._cdata
    ends = (start + step, start + step + dk.shape[2] * dk.shape[3])
    if (dk.storage_offset(), dv.storage_offset()) != ends or not (
        base == dk.untyped_storage()._cdata == dv.untyped_storage()._cdata
    ):
        return None
    return dq.as_strided((*dq.shape[:2], heads, dq.shape[3]), stride, start)


def keys_and_values(spec: AttentionSpec, k: Any) -> tuple[Any, Any]:
    """k, and the columns of it that are v. Raises: AttnError E0604, E0607 (no such columns)."""
    start = spec.v_view_start
    assert start is not None
    stop = start + spec.head_dim_v
    if not isinstance(k, torch.Tensor):
        raise error("E0604", f"`k` must be a torch tensor, found {type(k).__name__}", helps=("pass k as a tensor",))
    if k.shape[-1:] != (spec.head_dim_qk,):
        raise error(
            "E0607",
            f"`k` has the shape {tuple(k.shape)}; the last axis of k in `{spec.name}` has {spec.head_dim_qk}",
            notes=(f"v is a view of it: k[..., {start}:{stop}]",),
            helps=("pass k with all its columns; v is none of the arguments",),
        )
    if grad_enabled() and k.requires_grad and not is_dynamo():
        return _KeysAndValues.apply(k, start, stop)  # type: ignore[no-untyped-call, no-any-return]
    return k, k[..., start:stop]


class _KeysAndValues(torch.autograd.Function):
    """k and v of k, and dk with dv in its columns."""

    @staticmethod
    def forward(ctx: Any, k: Any, start: int, stop: int) -> tuple[Any, Any]:
        ctx.columns = slice(start, stop)
        return k.view_as(k), k[..., start:stop]

    @staticmethod
    def backward(ctx: Any, dk: Any, dv: Any) -> tuple[Any, None, None]:
        if torch.is_grad_enabled():
            dk = dk.clone()
        dk[..., ctx.columns] += dv  # dk is nobody else's: this node is the only reader of its k
        return dk, None, None
