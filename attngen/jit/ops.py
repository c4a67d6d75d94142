"""torch operators around compiled attention: one opaque node for torch.compile, FakeTensor tracing and export.

`attngen::forward` returns new (o, lse), `attngen::forward_whole` also O before the epilogue and the largest scores,
where the spec has them; `attngen::forward_out` writes given ones; `attngen::backward`, which autograd
makes of `forward`, returns the wanted gradients. A handle (content hash of spec, source and target) names the
Attention; int and bool params travel as SymInts, float params as floats.
Registered with torch.library.Library: a `custom_op` costs 23 us a call, these 3 us, and the eager path skips them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attngen.diag.diagnostic import error
from attngen.jit.autograd import given_output, lost_gradient, once

if TYPE_CHECKING:
    from attngen.jit.kernel import Attention

_ARGS = "str handle, Tensor q, Tensor k, Tensor v, Tensor[] tensors, SymInt[] ints, float[] floats, float? scale"
_BACKWARD_ARGS = (
    "str handle, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? grad_o, Tensor? grad_lse, "
    "Tensor[] tensors, SymInt[] ints, float[] floats, float? scale, bool[] wanted"
)
_attentions: dict[str, Attention] = {}
_library: Any = torch.library.Library("attngen", "DEF")  # type: ignore[no-untyped-call]
#: The kernels read the strides they were traced with: inductor must not change the inputs' layout.
_TAGS = (getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order), torch.Tag.pt2_compliant_tag)


def register(attention: Attention) -> str:
    """Make an Attention callable by handle from the operators. Equal content gives equal handles, in every process."""
    handle = attention.handle
    _attentions[handle] = attention
    return handle


def _find(handle: str) -> Attention:
    found = _attentions.get(handle)
    if found is None:
        raise error(
            "E0617",
            f"no attention with the handle {handle} was built in this process",
            notes=("a compiled graph of another process, or of an exported program, names it",),
            helps=("call attngen.build with the same spec and options first",),
        )
    return found


def _run(
    handle: str,
    q: Any,
    k: Any,
    v: Any,
    tensors: list[Any],
    ints: list[int],
    floats: list[float],
    scale: Any,
    out: Any = None,
    lse: Any = None,
) -> tuple[Any, Any]:
    """The body of both forward operators, on real tensors."""
    attention = _find(handle)
    named = _named(attention, tensors, ints, floats)
    result: tuple[Any, Any] = attention.in_dtype(q.dtype).run(q, k, v, True, out, lse, scale, False, named)
    return result


def _named(attention: Attention, tensors: list[Any], ints: list[int], floats: list[float]) -> dict[str, Any]:
    """The named arguments of a call, as its caller wrote them."""
    given = zip(attention.binder.tensors, tensors, strict=True)
    return {**_params(attention, ints, floats), **{name: x for (name, _), x in given}}


def _params(attention: Attention, ints: list[int], floats: list[float]) -> dict[str, Any]:
    left_ints, left_floats = iter(ints), iter(floats)
    return {
        name: next(left_floats) if kind is float else kind(next(left_ints)) for name, kind, _ in attention.binder.params
    }


def _run_backward(
    handle: str,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    grad_o: Any,
    grad_lse: Any,
    tensors: list[Any],
    ints: list[int],
    floats: list[float],
    scale: Any,
    wanted: list[bool],
) -> list[Any]:
    """The body of the backward operator, on real tensors: the wanted gradients, in order of `Backward.names`."""
    attention = _find(handle).in_dtype(q.dtype)
    params = tuple(_params(attention, ints, floats).values())
    ready = attention.ready(q.device.index) if q.device.type == "cuda" else None
    with torch.no_grad():
        found = attention.backward.run(
            ready, tuple(wanted), q, k, v, o, lse, grad_o, grad_lse, params, tuple(tensors), scale
        )
    return [x for x in found if x is not None]


def _fake_backward(
    handle: str,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    grad_o: Any,
    grad_lse: Any,
    tensors: list[Any],
    ints: list[Any],
    floats: list[float],
    scale: float | None,
    wanted: list[bool],
) -> list[Any]:
    attention = _find(handle)  # not its twin in another dtype: that cannot be built while tracing
    if q.device.type == "cuda":
        left_out = attention.backward.reduced()
        attention.backward.source_of(  # a spec that no backward serves is refused while tracing
            tuple(n for n, on in zip(attention.backward.names[3:], wanted[3:], strict=True) if on and n not in left_out)
        )
    learned = [x for x, decl in zip(tensors, attention.spec.inputs, strict=True) if decl.grad]
    made = [*(torch.empty_like(x) for x in (q, k, v)), *(x.new_empty(x.shape) for x in learned)]
    return [x for x, on in zip(made, wanted, strict=True) if on]


def _run_whole(
    handle: str,
    q: Any,
    k: Any,
    v: Any,
    tensors: list[Any],
    ints: list[int],
    floats: list[float],
    scale: Any,
    saves_o: bool,
) -> tuple[Any, Any, Any, Any]:
    """The body of `attngen::forward_whole`, on real tensors."""
    from attngen.jit.further import run_whole

    attention = _find(handle)
    named = _named(attention, tensors, ints, floats)
    with torch.no_grad():
        return run_whole(attention.in_dtype(q.dtype), q, k, v, scale, named, saves_o)


def _fake_whole(
    handle: str,
    q: Any,
    k: Any,
    v: Any,
    tensors: list[Any],
    ints: list[Any],
    floats: list[float],
    scale: float | None,
    saves_o: bool,
) -> tuple[Any, Any, Any, Any]:
    attention = _find(handle)
    o, lse = _fake_forward(handle, q, k, v, tensors, ints, floats, scale)
    pre = torch.empty_like(o) if saves_o and q.device.type != "cpu" else q.new_empty(0)
    top = torch.empty_like(lse) if attention.spec.max_logit else lse.new_empty(0)
    return o, lse, pre, top


def _run_out(*arguments: Any) -> None:
    _run(*arguments)


def _fake_forward(
    handle: str, q: Any, k: Any, v: Any, tensors: list[Any], ints: list[Any], floats: list[float], scale: float | None
) -> tuple[Any, Any]:
    o_shape, o_dtype, lse_shape = _find(handle).output_shapes(q)
    return q.new_empty(o_shape, dtype=o_dtype), q.new_empty(lse_shape, dtype=torch.float32)


def _fake_forward_out(*_: Any) -> None:
    return None


def _save_whole(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any, Any, Any]) -> None:
    """What the backward of `attngen::forward_whole` needs: O before the epilogue, where it was made."""
    o, lse, pre, top = output
    ctx.mark_non_differentiable(pre, top)
    _save(ctx, inputs[:-1], (pre if pre.numel() else o, lse))


def _differentiate_whole(ctx: Any, grad_o: Any, grad_lse: Any, *_: Any) -> tuple[Any, ...]:
    """The backward of `attngen::forward_whole`."""
    return (*_differentiate(ctx, grad_o, grad_lse), None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """What the backward of `attngen::forward` needs."""
    handle, q, k, v, tensors, ints, floats, scale = inputs
    spec = _find(handle).spec
    for decl, tensor in zip(spec.inputs, tensors, strict=True):
        if tensor.requires_grad and not decl.grad:
            raise lost_gradient(spec.name, decl.name)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.call = handle, ints, floats, scale


def _differentiate(ctx: Any, grad_o: Any, grad_lse: Any) -> tuple[Any, ...]:
    """The backward of `attngen::forward`, as one operator."""
    handle, ints, floats, scale = ctx.call
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    decls = _find(handle).spec.inputs
    needed = ctx.needs_input_grad[4]
    wanted = [*ctx.needs_input_grad[1:4], *(n for n, d in zip(needed, decls, strict=True) if d.grad)]
    # an empty list among the arguments counts as a structure of its own, any other as one value
    rest: list[Any] = [[] if x == [] else None for x in (ints, floats)]
    if grad_o is None and grad_lse is None:
        return None, None, None, None, [None] * len(tensors), *rest, None
    left = iter(
        torch.ops.attngen.backward(
            handle, q, k, v, o, lse, grad_o, grad_lse, tensors, ints, floats, scale, list(wanted)
        )
    )
    dq, dk, dv = (next(left) if on else None for on in wanted[:3])
    captured = [next(left) if on else None for on in needed]
    return None, dq, dk, dv, captured, *rest, None


def _backward_once(handle: str, *rest: Any) -> Any:
    """The Autograd kernel of `attngen::backward`: its results cannot be differentiated, and say so."""
    with torch._C._AutoDispatchBelowAutograd():
        found = torch.ops.attngen.backward(handle, *rest)
    inputs = [x for x in (*rest[:7], *rest[7]) if x is not None]
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        return found
    return list(once(_find(handle).spec.name, tuple(found), tuple(inputs)))


def _refuse_outputs(handle: str, q: Any, k: Any, v: Any, tensors: list[Any], *rest: Any) -> Any:
    """The Autograd kernel of `attngen::forward_out`: an error where a gradient would be lost, else the operator."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *tensors)):
        raise given_output(_find(handle).spec.name)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attngen.forward_out(handle, q, k, v, tensors, *rest)


for _name, _impl, _fake, _schema in (
    ("forward", _run, _fake_forward, f"({_ARGS}) -> (Tensor, Tensor)"),
    ("forward_whole", _run_whole, _fake_whole, f"({_ARGS}, bool saves_o) -> (Tensor, Tensor, Tensor, Tensor)"),
    ("forward_out", _run_out, _fake_forward_out, f"({_ARGS}, Tensor(a!) out, Tensor(b!) lse) -> ()"),
    ("backward", _run_backward, _fake_backward, f"({_BACKWARD_ARGS}) -> Tensor[]"),
):
    _library.define(_name + _schema, tags=_TAGS)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"attngen::{_name}", _fake, lib=_library)
torch.library.register_autograd("attngen::forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("attngen::forward_whole", _differentiate_whole, setup_context=_save_whole, lib=_library)
_library.impl("forward_out", _refuse_outputs, "Autograd")
_library.impl("backward", _backward_once, "Autograd")
