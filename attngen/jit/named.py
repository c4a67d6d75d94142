"""The named arguments of a call: params and captured tensors of the spec, in the order in which a kernel takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Type

TORCH_DTYPE: dict[DType, torch.dtype] = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.F32: torch.float32,
    DType.I32: torch.int32,
    DType.BOOL: torch.bool,
}
_INT32 = (-(2**31), 2**31 - 1)
_PYTHON = {Type.INT: int, Type.FLOAT: float, Type.BOOL: bool}
Sizes = dict[str, int]


class Binder:
    """Turns `window=128, doc=…` into the tail of a kernel's argument list."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.params = tuple((p.name, _PYTHON[p.type], p) for p in spec.params)
        self.tensors = tuple((t.name, t) for t in spec.tensors)
        self.names = frozenset(p.name for p in spec.params) | frozenset(t.name for t in spec.tensors)
        self.bare = not self.names
        self.grad_names = tuple(t.name for t in spec.tensors if t.grad)
        plain = not spec.tensors and all(p.default is not None for p in spec.params)
        #: The whole tail when nothing is given and everything has a default.
        self.defaults = tuple(self._param({}, *row) for row in self.params) if plain else None

    def bind(self, named: Mapping[str, Any], sizes: Callable[[], Sizes]) -> tuple[Any, ...]:
        """Values in the kernel's order. `sizes` gives the known axes' extents, asked for only when a tensor broadcasts.

        Raises: AttnError E0601 (unknown name), E0602 (missing), E0603 (a param's type or range), E0604 (not a tensor),
        E0607 (shape).
        """
        if not named and self.defaults is not None:
            return self.defaults
        values = [self._param(named, *row) for row in self.params]
        for name, decl in self.tensors:
            tensor: Any = named.get(name)
            if not isinstance(tensor, torch.Tensor):
                self._not_a_tensor(name, decl, tensor, name in named)
            if 1 in tensor.shape:
                tensor = _broadcast(tensor, decl, sizes())
            values.append(tensor)
        for name in named:
            if name not in self.names:
                self._unknown(name)
        return tuple(values)

    def split(self, bound: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(params, tensors) by name, as the reference takes them."""
        count = len(self.params)
        return (
            {row[0]: value for row, value in zip(self.params, bound, strict=False)},
            {row[0]: value for row, value in zip(self.tensors, bound[count:], strict=True)},
        )

    def _param(self, named: Mapping[str, Any], name: str, kind: type, decl: ParamDecl) -> Any:
        value = named.get(name, decl.default)
        if type(value) is not kind:
            value = _converted(value, kind, decl, self.spec)
        if kind is not bool and (
            (decl.minimum is not None and value < decl.minimum)
            or (decl.maximum is not None and value > decl.maximum)
            or (kind is int and not _INT32[0] <= value <= _INT32[1])
            or value != value
        ):
            _out_of_range(value, decl)
        return value

    def _not_a_tensor(self, name: str, decl: TensorDecl, value: object, given: bool) -> None:
        declared = f"{decl.dtype.value}[{', '.join(map(str, decl.dims))}]"
        if not given:
            raise error(
                "E0602",
                f"`{self.spec.name}` needs the tensor `{name}`",
                notes=(f"the spec declares `tensor {name}: {declared}`",),
                helps=(f"pass {name}=…",),
            )
        raise error(
            "E0604",
            f"`{name}` must be a tensor {declared}, found {type(value).__name__}",
            helps=("make it a torch tensor on the device of q",),
        )

    def _unknown(self, name: str) -> None:
        close = get_close_matches(name, sorted(self.names), n=1)
        listed = ", ".join(sorted(self.names)) or "none"
        raise error(
            "E0601",
            f"`{self.spec.name}` has no param or tensor `{name}`",
            helps=(f"did you mean `{close[0]}`?" if close else f"its params and tensors: {listed}",),
        )


def _converted(value: Any, kind: type, decl: ParamDecl, spec: AttentionSpec) -> Any:
    if value is None:
        raise error(
            "E0602",
            f"`{spec.name}` needs the param `{decl.name}`",
            notes=(f"the spec declares `param {decl.name}: {decl.type.value}` without a default",),
            helps=(f"pass {decl.name}=…",),
        )
    given = value
    if isinstance(value, torch.Tensor):
        if value.ndim or value.device.type != "cpu":
            what = "a tensor with axes" if value.ndim else f"a tensor on {value.device}"
            raise error(
                "E0603",
                f"param `{decl.name}` must be one {decl.type.value}, found {what}",
                notes=("a param is read on the host before the launch",),
                helps=("pass a Python number (`.item()` waits for the GPU), or declare a captured tensor in the spec",),
            )
        value = value.item()
    elif hasattr(value, "dtype") and hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()  # a NumPy scalar
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    raise error(
        "E0603",
        f"param `{decl.name}` is {_article(decl.type.value)}, found {given!r} ({type(given).__name__})",
        helps=(f"pass {'True or False' if kind is bool else f'{kind.__name__}({decl.name})'}",),
    )


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _out_of_range(value: Any, decl: ParamDecl) -> None:
    if value != value:
        raise error("E0603", f"param `{decl.name}` is NaN", helps=("pass a number",))
    low = decl.minimum if decl.minimum is not None else (_INT32[0] if decl.type is Type.INT else "-inf")
    high = decl.maximum if decl.maximum is not None else (_INT32[1] if decl.type is Type.INT else "inf")
    why = "the spec declares these bounds" if (decl.minimum, decl.maximum) != (None, None) else "an int is 32 bits wide"
    raise error(
        "E0603",
        f"param `{decl.name}` is {value}, outside [{low}, {high}]",
        notes=(why,),
        helps=(f"pass a value from {low} to {high}",),
    )


def _broadcast(tensor: torch.Tensor, decl: TensorDecl, sizes: Sizes) -> torch.Tensor:
    """Expand axes of extent 1 to the declared extent: stride 0, no copy. The kernel's checks see other mismatches."""
    if tensor.ndim != len(decl.dims):
        return tensor
    wanted = []
    for dim, extent in zip(decl.dims, tensor.shape, strict=True):
        known = dim if isinstance(dim, int) else sizes.get(dim, extent)
        wanted.append(known if extent == 1 else extent)
    return tensor.expand(wanted) if tuple(wanted) != tuple(tensor.shape) else tensor
