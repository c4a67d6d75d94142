"""torch's functions that are no plain operator (constants, conversions, where, clamp), and what cannot be traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from attngen.diag.span import Span
from attngen.importers import ops
from attngen.importers.value import Untraceable, Value, as_bool, as_float, call, choose, literal
from attngen.ir.types import Type

if TYPE_CHECKING:
    from attngen.importers.trace import Trace

#: Methods and attributes that say something about a tensor, not about its values.
QUERIES = frozenset(
    {"dim", "ndimension", "size", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed"}
    | {"get_device", "is_contiguous", "stride"}
)
ATTRIBUTES = frozenset(("dtype", "device", "shape", "ndim", "requires_grad", "is_cuda", "is_cpu", "layout", "is_leaf"))
#: Calls by which Python asks for a value that a trace does not have.
PYTHON = frozenset(
    {
        "python bool",
        "python int",
        "python float",
        "python complex",
        "index",
        "len",
        "iter",
        "contains",
        "format",
        "repr",
    }
    | {"str", "item", "tolist", "numpy", "array", "is_nonzero", "equal", "allclose", "deepcopy", "reduce_ex"}
)
_PRINTS = ("format", "repr", "str")


def shown(name: str) -> str:
    """A function's name as the user wrote it, nearly."""
    signs = {"setitem": "tensor[…] = …", "iadd": "+=", "add_": "+= (add_)", "mul_": "*= (mul_)", "sub_": "-= (sub_)"}
    return signs.get(name, name)


def in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function changes what it is given."""
    own = name in ("setitem", "delitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "iand", "ior", "ixor")
    asked = kwargs.get("out") is not None or kwargs.get("inplace") is True
    return own or asked or (name.endswith("_") and name != "requires_grad_")


def attribute(func: Any) -> str:
    """The name of the attribute that a getter reads."""
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


def harmless(key: str, value: object) -> bool:
    """Keywords at values that change nothing here."""
    return key in ("device", "memory_format", "non_blocking", "copy", "pin_memory", "layout") or (
        value is None or (key == "inplace" and value is False)
    )


def unknown(what: str) -> Untraceable:
    """A function that the language does not have."""
    general = (
        "compute it before the call into a tensor, and index that; or write it with exp, log, sqrt, tanh, sigmoid, "
        "floor, abs, minimum, maximum, where and arithmetic"
    )
    return Untraceable("E0701", f"`{what}` has no counterpart in a spec", _MENDS.get(what, general))


_JOINED = "join conditions of one pair with `|` and `&`"
_MENDS = {
    "isin": "compare with each, `(q_idx == 1) | (q_idx == 2)`, or capture a bool tensor and index it",
    "any": _JOINED,
    "all": _JOINED,
    "gelu": "write its tanh form, 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))",
}


def data_dependent(name: str, at: Span | None) -> Untraceable:
    """Python asked for the value of what is traced."""
    text = at.source.text[at.start : at.end] if at else ""
    line = at.source.line(at.source.line_col(at.start)[0]) if at else ""
    why = "the function runs once for all pairs, so there is no value yet"
    if name in _PRINTS:
        return Untraceable("E0702", "a traced value is printed", "remove the print", notes=(why,))
    if name not in ("python bool", "is_nonzero"):
        word = name.removeprefix("python ")
        mend = "keep to tensor operations: `.to(torch.int32)` converts, torch's functions replace math's"
        if word in ("index", "array"):
            mend = "make captured lists and arrays torch tensors, which can be indexed; a loop needs a Python number"
        return Untraceable("E0702", f"`{word}` asks for the value of a traced tensor", mend, notes=(why,))
    if "min(" in text or "max(" in text:
        mend = "write torch.minimum and torch.maximum in place of min and max"
    elif any(w in f" {line} " for w in (" and ", " or ", " not ")):
        mend = "write `&`, `|` and `~` in place of and, or and not, each comparison in parentheses"
    elif " in " in text:
        mend = "compare with each: `(q_idx == 1) | (q_idx == 2)`"
    elif text.count("<") + text.count(">") > 1:
        mend = "write `(a <= b) & (b < c)` in place of a chain of comparisons"
    else:
        mend = "write torch.where(condition, a, b) in place of if; for Python's and, or, not write `&`, `|`, `~`"
    return Untraceable("E0702", "Python branches on a traced value", mend, notes=(why,))


# -- rows: (trace, arguments as torch takes them) -> Value ----------------------------------------------------------


def _where(t: Trace, condition: Any, input: Any = None, other: Any = None, **_: Any) -> Value:
    if input is None or other is None:
        raise unknown("where(condition)")
    return choose(as_bool(t.value(condition)), t.value(input), t.value(other))


def _clamp(t: Trace, x: Any, min: Any = None, max: Any = None, **_: Any) -> Value:
    return ops.clamp(t.value(x), *(None if b is None else t.value(b) for b in (min, max)))


def _extreme(two: Callable[[Value, Value], Value], name: str) -> Callable[..., Value]:
    def row(t: Trace, x: Any, other: Any = None, **more: Any) -> Value:
        if other is None or more:
            raise unknown(f"{name} over an axis")
        return two(t.value(x), t.value(other))

    return row


def _linear(combine: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """add and sub, whose `alpha` scales the second operand."""

    def row(t: Trace, x: Any, other: Any, *, alpha: Any = 1, **_: Any) -> Value:
        b = t.value(other)
        return combine(t.value(x), b if alpha == 1 else ops.mul(b, t.value(alpha)))

    return row


def _div(t: Trace, x: Any, other: Any, *, rounding_mode: str | None = None, **_: Any) -> Value:
    return ops.divided(t.value(x), t.value(other), rounding_mode)


#: From here on log(1 + exp(x)) is x in fp32.
_SOFTPLUS_IS_LINEAR = 17.0


def _softplus(t: Trace, x: Any, beta: float = 1, threshold: float = 20) -> Value:
    """log(1 + exp(beta * x)) / beta, and x itself where beta * x is above the threshold."""
    value, rate = as_float(t.value(x)), literal(float(beta))
    scaled = value if beta == 1 else ops.mul(value, rate)
    found = ops.arithmetic("softplus", scaled)
    found = found if beta == 1 else ops.div(found, rate)
    if threshold >= _SOFTPLUS_IS_LINEAR:
        return found
    return choose(call("gt", scaled, literal(float(threshold))), value, found)


_INTS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_KINDS = {torch.bool: Type.BOOL, **dict.fromkeys(_INTS, Type.INT)}
_HALF = (torch.bfloat16, torch.float16)


def cast(t: Trace, value: Value, dtype: torch.dtype) -> Value:
    """A conversion; float64 is fp32 and 64-bit ints are 32-bit in a kernel, rounding to 16 bits is left out."""
    kind = _KINDS.get(dtype, Type.FLOAT)
    if dtype in _HALF and value.type is Type.FLOAT:
        t.note(f"rounding to {str(dtype).removeprefix('torch.')} inside the function is left out: scores are fp32")
    return as_bool(value) if kind is Type.BOOL else ops.to_int(value) if kind is Type.INT else as_float(value)


def _to(t: Trace, x: Any, *args: Any, **kwargs: Any) -> Value:
    value = t.value(x)
    for a in (*args, kwargs.get("dtype"), kwargs.get("other")):
        if isinstance(a, torch.Tensor):
            return cast(t, value, a.dtype)
        if isinstance(a, torch.dtype):
            return cast(t, value, a)
    return value


def _half(dtype: torch.dtype) -> Callable[..., Value]:
    return lambda t, x, **_: cast(t, t.value(x), dtype)


def _constant(number: float | None, filler: str = "") -> Callable[..., Value]:
    """zeros_like, new_ones, full_like and their like: a number of the dtype asked for, or of the tensor's."""

    def row(t: Trace, x: Any, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Value:
        shape = kwargs.get("size", args[0] if args and filler.startswith("new") else ())
        if isinstance(shape, int) or tuple(shape):
            raise Untraceable("E0705", "a tensor with axes is made here", "make it outside and capture it")
        given = kwargs.get("fill_value", args[-1] if args and number is None else number)
        return cast(t, t.value(given), dtype or x.dtype)

    return row


def _new_tensor(t: Trace, x: Any, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Value:
    return cast(t, t.value(data), dtype) if dtype else t.value(data)


def _same(t: Trace, x: Any, *_: Any, **__: Any) -> Value:
    return t.value(x)


def _detach(t: Trace, x: Any) -> Value:
    value = t.value(x)
    if value.type is Type.FLOAT:
        raise Untraceable(
            "E0701",
            "`detach` of a float",
            "detach the captured tensor before the function captures it",
            notes=("every score is differentiated as it is written; a spec has no word that stops a gradient",),
        )
    return value


def _masked_fill(t: Trace, x: Any, mask: Any, value: Any) -> Value:
    return choose(as_bool(t.value(mask)), t.value(value), t.value(x))


def _isinf(t: Trace, *_: Any) -> Value:
    raise unknown("a test for inf or nan")


ROWS: dict[str, Callable[..., Any]] = {
    "where": _where, "clamp": _clamp, "clip": _clamp, "masked_fill": _masked_fill,
    "clamp_min": lambda t, x, min: _clamp(t, x, min), "clamp_max": lambda t, x, max: _clamp(t, x, None, max),
    "min": _extreme(ops.least, "min"), "max": _extreme(ops.most, "max"),
    "add": _linear(ops.add), "sub": _linear(ops.sub), "subtract": _linear(ops.sub),
    "div": _div, "divide": _div, "softplus": _softplus,
    "to": _to, "type": _to, "type_as": _to, "half": _half(torch.float16), "bfloat16": _half(torch.bfloat16),
    "zeros_like": _constant(0), "ones_like": _constant(1), "full_like": _constant(None),
    "new_zeros": _constant(0, "new"), "new_ones": _constant(1, "new"), "new_full": _constant(None, "new"),
    "new_tensor": _new_tensor, "tensor": lambda t, data, **k: _new_tensor(t, data, data, **k),
    "as_tensor": lambda t, data, **k: _new_tensor(t, data, data, **k),
    "clone": _same, "contiguous": _same, "squeeze": _same, "cpu": _same, "cuda": _same, "alias": _same,
    "detach": _detach, "isinf": _isinf, "isnan": _isinf, "isfinite": _isinf,
}  # fmt: skip
