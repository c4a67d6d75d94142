"""Calls of an Attention that do not take the short path of its `__call__`: other tensors, dtypes, modes; gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attngen.jit import autograd, contract
from attngen.jit.launch import Ready
from attngen.jit.modes import dispatch_modes, functorch_level, grad_enabled, is_dual, is_dynamo
from attngen.jit.traced import traced

if TYPE_CHECKING:
    from attngen.jit.kernel import Attention

_Tensor = torch.Tensor
_AUTOCAST = ("cpu", "cuda")


def general(
    attention: Attention, q: Any, k: Any, v: Any, return_lse: bool, out: Any, lse: Any, scale: Any, check: bool,
    named: dict[str, Any],
) -> Any:  # fmt: skip
    """A call that is not a plain eager one on a GPU that is ready."""
    if is_dynamo():  # traced by itself, after a graph break in `__call__`
        return traced(attention, q, k, v, return_lse, out, lse, scale, named)
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        contract.validate(attention.spec, q, k, v, attention.given_tensors(named), out, lse)
    if functorch_level() is not None or is_dual(q, k, v, *attention.given_tensors(named).values()):
        raise autograd.transformed(attention.spec.name)
    device = q.device.type
    if device in _AUTOCAST and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x for x in (q, k, v))
    twin = attention.in_dtype(q.dtype)
    if twin is not attention:
        return twin(q, k, v, return_lse=return_lse, out=out, lse=lse, scale=scale, check=check, **named)
    plain = not (dispatch_modes() or type(q) not in (_Tensor, torch.nn.Parameter) or device == "meta")
    if grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or attention.needs_grad(named)):
        if not plain:
            return traced(attention, q, k, v, return_lse, out, lse, scale, named)
        if check:
            bound(attention, q, k, v, named, out, lse, check)
        ready = attention.ready(q.device.index) if device == "cuda" else None
        return differentiable(attention, ready, q, k, v, named, scale, out, lse, return_lse)
    if not plain:
        return traced(attention, q, k, v, return_lse, out, lse, scale, named)
    return attention.run(q, k, v, return_lse, out, lse, scale, check, named)


def differentiable(
    attention: Attention, ready: Ready | None, q: Any, k: Any, v: Any, named: dict[str, Any], scale: Any, out: Any,
    lse: Any, return_lse: bool,
) -> Any:  # fmt: skip
    """A call on real tensors of the attention's dtype, one of which requires a gradient. `ready` None: no GPU."""
    if out is not None or lse is not None:
        raise autograd.given_output(attention.spec.name)
    for name in attention.unlearned:
        if getattr(named.get(name), "requires_grad", False):
            raise autograd.lost_gradient(attention.spec.name, name)
    if ready is not None:
        wanted = (q.requires_grad, k.requires_grad, v.requires_grad)
        if learned := attention.backward.learned:
            wanted += tuple(getattr(named.get(n), "requires_grad", False) for n in learned)
        if wanted not in attention.backward.variants:
            attention.backward.prepare(wanted)
    return autograd.attend(attention, ready, q, k, v, named, scale, return_lse)


def bound(
    attention: Attention, q: Any, k: Any, v: Any, named: dict[str, Any], out: Any, lse: Any, check: bool
) -> tuple[Any, ...]:
    """The named arguments in the kernel's order, and everything checked that no entry point will check."""
    binder = attention.binder
    try:
        tail = binder.bind(named, q, k)
    except (IndexError, ValueError):  # ranks are wrong: say which
        contract.validate(attention.spec, q, k, v, attention.given_tensors(named), out, lse)
        raise
    if q.device.type == "cpu" or check:
        contract.validate(attention.spec, q, k, v, binder.split(tail)[1], out, lse)
    if check:
        from attngen.jit.checks import check_call

        check_call(attention.spec, q, k, v, *binder.split(tail))
    return tail
