"""Eager autograd: the node that a call makes when one of its inputs requires a gradient.

An autograd.Function around the launch itself, not around an operator: 13 us instead of 31. It saves q, k, v, o, lse
and the captured tensors, in torch's own way: their versions are checked, and hooks see them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attngen.diag.diagnostic import AttnError, error

if TYPE_CHECKING:
    from attngen.jit.kernel import Attention
    from attngen.jit.launch import Ready

_grad_enabled = torch.is_grad_enabled
_is_batched = torch._C._functorch.is_legacy_batchedtensor
#: Arguments of `_Attend.forward` before the tensors that gradients may be for.
_FIRST = 5


class _Attend(torch.autograd.Function):
    """o, or (o, lse), of a call. An LSE that is not returned is saved all the same."""

    @staticmethod
    def forward(
        ctx: Any,
        attention: Attention,
        ready: Ready | None,
        named: dict[str, Any],
        scale: Any,
        return_lse: bool,
        q: Any,
        k: Any,
        v: Any,
        *_learned: Any,
    ) -> Any:
        binder = attention.binder
        if ready is not None:
            tail = () if binder.bare and not named else binder.bind(named, q, k)
            o, lse, kept = attention.launcher.launch_saving(ready, q, k, v, tail, scale)
        else:
            o, lse = attention.run(q, k, v, True, None, None, scale, False, named)
            kept = o
            tail = binder.bind(named, q, k)
        ctx.set_materialize_grads(False)  # an LSE that nobody uses has no gradient
        names = binder.tensor_names
        ctx.save_for_backward(q, k, v, kept, lse, *[named[n] for n in names])
        handle = tail[-1] if binder.ends_in_handle else None
        ctx.call = (attention, ready, tail[: len(binder.params)], scale, handle)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, do: Any, dlse: Any = None) -> Any:
        attention, ready, params, scale, handle = ctx.call
        wanted = ctx.needs_input_grad[_FIRST:]
        if do is None and dlse is None:
            return (None,) * (_FIRST + len(wanted))
        if _is_batched(dlse if do is None else do):  # torch.autograd.grad(is_grads_batched=True)
            raise transformed(attention.spec.name)
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        joint = attention.backward.joint
        call = (ready, wanted, q, k, v, o, lse, do, dlse, params, tuple(tensors), scale, joint, handle)
        if not _grad_enabled():
            found = attention.backward.run(*call)
        else:  # create_graph=True
            with torch.no_grad():
                found = attention.backward.run(*call)
            found = once(attention.spec.name, found, (q, k, v, *tensors))
        return (*(None,) * _FIRST, *found)


# Not `_Attend.apply`: its own checks cost 3 us and are about torch.func, which calls have been refused for.
_apply: Any = super(torch.autograd.Function, _Attend).apply


def attend(
    attention: Attention,
    ready: Ready | None,
    q: Any,
    k: Any,
    v: Any,
    named: dict[str, Any],
    scale: Any,
    return_lse: bool,
) -> Any:
    """A call with gradients: o or (o, lse), attached to the graph. `ready` None: on CPU tensors.

    Raises: AttnError as a call without gradients, and where the spec has no backward (`Backward.prepare`).
    """
    learned = attention.backward.learned
    if learned:
        return _apply(attention, ready, named, scale, return_lse, q, k, v, *[named.get(name) for name in learned])
    return _apply(attention, ready, named, scale, return_lse, q, k, v)


class _Once(torch.autograd.Function):
    """Gradients that were computed with create_graph=True: good to read, an error to differentiate."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
        ctx.name = name
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise error(
            "E0620",
            f"a gradient of `{ctx.name}` was differentiated: attention has no second derivative here",
            notes=("the first gradients were asked for with create_graph=True, and something used them",),
            helps=(
                "leave create_graph out, or detach the gradients",
                "for a gradient penalty, evaluate attention in plain torch operations",
            ),
        )


def once(name: str, found: tuple[Any, ...], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """`found` with a node behind each tensor that raises E0620; `inputs` are what they were computed from."""
    given = [x for x in found if x is not None]
    wrapped = iter(_Once.apply(name, len(given), *given, *inputs))  # type: ignore[no-untyped-call]
    return tuple(None if x is None else next(wrapped) for x in found)


def transformed(spec_name: str) -> AttnError:
    """E0612: a torch.func transform, forward-mode differentiation, or gradients of a batch of results."""
    return error(
        "E0612",
        f"`{spec_name}` was called inside a torch.func transform (vmap, grad, jvp, …) or forward-mode differentiation, "
        "which it does not support",
        helps=(
            "attention has a batch axis: reshape the mapped axis into it and call without vmap",
            "gradients come from torch.autograd: .backward() and torch.autograd.grad, one result at a time",
        ),
    )


def lost_gradient(spec_name: str, tensor: str) -> AttnError:
    """E0611: a captured tensor requires a gradient that the spec does not declare."""
    return error(
        "E0611",
        f"tensor `{tensor}` requires gradients, and `{spec_name}` does not declare it `grad`",
        notes=("its gradient would be lost, silently",),
        helps=(f"pass {tensor}.detach(), or declare `tensor {tensor}: … grad` in the spec",),
    )


def given_output(spec_name: str) -> AttnError:
    """E0619: `out` or `lse` in a call that needs gradients."""
    return error(
        "E0619",
        f"`{spec_name}` was called with `out` or `lse`, and an input requires gradients",
        notes=("torch's own functions with out= do not support automatic differentiation either",),
        helps=("leave `out` and `lse` out, or call it under torch.no_grad()",),
    )
