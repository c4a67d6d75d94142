"""torch operators around compiled attention: one opaque node for torch.compile, FakeTensor tracing and export.

`attngen::forward` returns new (o, lse); `attngen::forward_out` writes given ones. A handle (content hash of spec,
source and target) names the Attention; int and bool params travel as SymInts, float params as floats.
Registered with torch.library.Library: a `custom_op` costs 23 us a call, these 3 us, and the eager path skips them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attngen.diag.diagnostic import error

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec
    from attngen.jit.kernel import Attention
    from attngen.jit.named import Binder

_ARGS = "str handle, Tensor q, Tensor k, Tensor v, Tensor[] tensors, SymInt[] ints, float[] floats, float? scale"
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
) -> Any:
    """A call as one operator, for torch.compile and FakeTensor modes. Values are checked when the operator runs."""
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
    """The body of both operators, on real tensors."""
    attention = _find(handle)
    left_ints, left_floats = iter(ints), iter(floats)
    named: dict[str, Any] = {}
    for name, kind, _ in attention.binder.params:
        named[name] = next(left_floats) if kind is float else kind(next(left_ints))
    named.update({name: x for (name, _), x in zip(attention.binder.tensors, tensors, strict=True)})
    result: tuple[Any, Any] = attention.in_dtype(q.dtype).run(q, k, v, True, out, lse, scale, False, named)
    return result


def _run_out(*arguments: Any) -> None:
    _run(*arguments)


def _fake_forward(
    handle: str, q: Any, k: Any, v: Any, tensors: list[Any], ints: list[Any], floats: list[float], scale: float | None
) -> tuple[Any, Any]:
    o_shape, o_dtype, lse_shape = _find(handle).output_shapes(q)
    return q.new_empty(o_shape, dtype=o_dtype), q.new_empty(lse_shape, dtype=torch.float32)


def _fake_forward_out(*_: Any) -> None:
    return None


def _refuse_gradients(name: str) -> Any:
    """The Autograd kernel: an error where a gradient would be lost, else the operator itself."""
    op = getattr(torch.ops.attngen, name).default

    def autograd(handle: str, q: Any, k: Any, v: Any, tensors: list[Any], *rest: Any) -> Any:
        if torch.is_grad_enabled():
            spec = _find(handle).spec
            if any(x.requires_grad for x in (q, k, v, *tensors)):
                named = {t.name: x for x, t in zip(tensors, spec.tensors, strict=True)}
                raise needs_gradients(spec, (q, k, v), named)
        with torch._C._AutoDispatchBelowAutograd():
            return op(handle, q, k, v, tensors, *rest)

    return autograd


def needs_gradients(spec: AttentionSpec, qkv: tuple[Any, ...], named: Mapping[str, Any]) -> Exception:
    """E0611: a call would lose a gradient, of q, k, v, a tensor declared `grad`, or one that ought to be."""
    wanted = [t for t in spec.tensors if getattr(named.get(t.name), "requires_grad", False)]
    if wanted and not any(x.requires_grad for x in qkv) and not any(t.grad for t in wanted):
        name = wanted[0].name
        return error(
            "E0611",
            f"tensor `{name}` requires gradients, and `{spec.name}` does not declare it `grad`",
            notes=("its gradient would be lost, silently",),
            helps=(f"pass {name}.detach(), or declare `tensor {name}: … grad` in the spec",),
        )
    return error(
        "E0611",
        f"`{spec.name}` was called with tensors that require gradients, and it has no backward kernel yet",
        notes=("a result without gradients would train nothing, silently",),
        helps=("call it under torch.no_grad() or torch.inference_mode(), or pass tensors that were .detach()ed",),
    )


for _name, _impl, _fake, _schema in (
    ("forward", _run, _fake_forward, f"({_ARGS}) -> (Tensor, Tensor)"),
    ("forward_out", _run_out, _fake_forward_out, f"({_ARGS}, Tensor(a!) out, Tensor(b!) lse) -> ()"),
):
    _library.define(_name + _schema, tags=_TAGS)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _impl, _key)
    torch.library.register_fake(f"attngen::{_name}", _fake, lib=_library)
    _library.impl(_name, _refuse_gradients(_name), "Autograd")
