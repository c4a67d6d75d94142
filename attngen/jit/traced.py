"""A call while torch traces it (torch.compile, FakeTensor modes, export): one operator of `jit.ops`.

It is checked as far as can be without values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attngen.jit.autograd import given_output, lost_gradient

if TYPE_CHECKING:
    from attngen.jit.kernel import Attention
    from attngen.jit.named import Binder


def traced(
    attention: Attention,
    q: Any,
    k: Any,
    v: Any,
    return_lse: bool,
    out: Any,
    lse: Any,
    scale: Any,
    named: dict[str, Any],
    *,
    whole: bool = False,
) -> Any:
    """A call as one operator, for torch.compile and FakeTensor modes. Values are checked when the operator runs.

    `whole`: (o, lse, largest scores), of a spec with a max logit.
    """
    kind = q.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if torch.compiler.is_dynamo_compiling():
        _names_under_dynamo(attention.binder, named)
    tensors: list[Any] = []
    ints: list[int] = []
    floats: list[float] = []
    for name, value_type, decl in attention.binder.params:
        value: Any = named.get(name, decl.default)
        if value is None:
            attention.binder.missing(name)
        # A fraction must not be cut off in silence. Ints may be symbolic here: their range is checked in the operator.
        if isinstance(value, float) and value_type is not float:
            attention.binder.wrong_type(name, value)
        if value_type is float:
            floats.append(float(value))
        else:
            ints.append(int(value))
    for name, _ in attention.binder.tensors:
        if name not in named:
            attention.binder.missing(name)
        tensors.append(named[name])
    for name in named:
        if name not in attention.binder.names:
            attention.binder.unknown(name)
    scale = None if scale is None else float(scale)
    needed = torch.is_grad_enabled() and _gradients_while_traced(
        attention, q, k, v, tensors, out is not None or lse is not None
    )
    if whole or (needed and attention.saves_o):
        saves = needed and attention.saves_o
        o, rows, _, top = torch.ops.attngen.forward_whole(
            attention.handle, q, k, v, tensors, ints, floats, scale, saves
        )
        return (o, rows, top) if whole else (o, rows) if return_lse else o
    if out is None and lse is None:
        o, rows = torch.ops.attngen.forward(attention.handle, q, k, v, tensors, ints, floats, scale)
        return (o, rows) if return_lse else o
    o_shape, o_dtype, lse_shape = attention.output_shapes(q)
    out = q.new_empty(o_shape, dtype=o_dtype) if out is None else out
    lse = q.new_empty(lse_shape, dtype=torch.float32) if lse is None else lse
    torch.ops.attngen.forward_out(attention.handle, q, k, v, tensors, ints, floats, scale, out, lse)
    return (out, lse) if return_lse else out


def _names_under_dynamo(binder: Binder, named: dict[str, Any]) -> None:
    """E0601, E0602 and E0603 as a TypeError with their text: Dynamo reports it, where an AttnError would end the trace
    with a message about the constructor. Without fullgraph the call then runs eagerly and raises the AttnError.
    """
    for name in named:
        if name not in binder.names:
            raise TypeError(binder.unknown_text.replace("?", name, 1))
    for name, value_type, decl in binder.params:
        value = named.get(name, decl.default)
        if value is None:
            raise TypeError(binder.missing_texts[name])
        if isinstance(value, float) and value_type is not float:
            raise TypeError(f"error[E0603]: param `{name}` is no float, found {value}\nhelp: pass int({name})")
    for name, _ in binder.tensors:
        if named.get(name) is None:
            raise TypeError(binder.missing_texts[name])


def _gradients_while_traced(attention: Attention, q: Any, k: Any, v: Any, tensors: list[Any], given: bool) -> bool:
    """Whether an input requires a gradient. E0611 and E0619, under Dynamo as a TypeError with their text."""
    needed = q.requires_grad or k.requires_grad or v.requires_grad
    for tensor, decl in zip(tensors, attention.spec.inputs, strict=True):
        if tensor.requires_grad:
            needed = True
            if not decl.grad:
                if torch.compiler.is_dynamo_compiling():
                    raise TypeError(attention.lost_texts[decl.name])
                raise lost_gradient(attention.spec.name, decl.name)
    if needed and given:
        if torch.compiler.is_dynamo_compiling():
            raise TypeError(attention.given_text)
        raise given_output(attention.spec.name)
    return bool(needed)
