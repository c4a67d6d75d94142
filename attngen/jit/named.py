"""The named arguments of a call: params and captured tensors of the spec, in the order in which a kernel takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import STARTS, AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Type
from attngen.jit.shapes import Sizes, sizes_of

TORCH_DTYPE: dict[DType, torch.dtype] = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.F32: torch.float32,
    DType.I32: torch.int32,
    DType.BOOL: torch.bool,
}
_INT32 = (-(2**31), 2**31 - 1)
_PYTHON = {Type.INT: int, Type.FLOAT: float, Type.BOOL: bool}
_Tensor = torch.Tensor
#: Stands for the name in `Binder.unknown_text`; close to no name.
_ANY = "?"


class Binder:
    """Turns `window=128, doc=…` into the tail of a kernel's argument list."""

    #: What `bind` returns ends in the caller's tables, or None (`jit.tables`).
    ends_in_handle = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.params = tuple((p.name, _PYTHON[p.type], p) for p in spec.params)
        self.tensors = tuple((t.name, t) for t in spec.inputs)
        self.names = frozenset(p.name for p in spec.params) | frozenset(t.name for t in spec.inputs)
        self.bare = not self.names
        self.tensor_names = tuple(t.name for t in spec.inputs)
        # Dynamo traces neither AttnError nor difflib: what it may have to say is written beforehand.
        self.missing_texts = {name: str(self._missing(name)) for name in sorted(self.names)}
        self.unknown_text = str(self._unknown(_ANY))
        self._widths: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self._rows = tuple((p.name, p.default, _PYTHON[p.type], *_range(p), p) for p in spec.params)

    def bind(self, named: Mapping[str, Any], q: Any, k: Any) -> tuple[Any, ...]:
        """Values in the kernel's order; q and k give the extents for tensors that broadcast.

        Raises: AttnError E0601 (unknown name), E0602 (missing), E0603 (a param's type or range), E0604 (not a tensor).
        """
        if not named.keys() <= self.names:
            self.unknown(next(n for n in named if n not in self.names))
        values = []
        for name, default, kind, low, high, decl in self._rows:
            value = named.get(name, default)
            if type(value) is not kind:
                if value is None:
                    self.missing(name)
                value = _converted(value, kind, decl)
            if not low <= value <= high:  # NaN too
                _out_of_range(value, decl)
            values.append(value)
        for name, tensor_decl in self.tensors:
            tensor: Any = named.get(name)
            if not isinstance(tensor, _Tensor):
                self._not_a_tensor(tensor_decl, tensor)
            shape = tensor.shape
            if 0 in shape and q.numel() and k.numel():
                self._without_elements(tensor_decl, tensor, self.sizes(named, q, k))
            if 1 in shape:
                tensor = self._wide(tensor, tensor_decl, named, q, k)
            values.append(tensor)
        return tuple(values)

    def _wide(self, tensor: Any, decl: TensorDecl, named: Mapping[str, Any], q: Any, k: Any) -> Any:
        """`broadcast` in this call; what it came to in the last one is remembered with the shapes that decide it."""
        key = (tensor.shape, q.shape, k.shape, self.counted(named))
        last = self._widths.get(decl.name)
        if last is None or last[0] != key:
            wide = broadcast(tensor, decl, self.sizes(named, q, k))
            self._widths[decl.name] = key, None if wide is tensor else tuple(wide.shape)
            return wide
        return tensor if last[1] is None else tensor.expand(*last[1])  # numbers are read faster than a size

    def counted(self, named: Mapping[str, Any]) -> int | None:
        """How many sequences a call has, where the shapes of q and k do not say it."""
        return None

    def sizes(self, named: Mapping[str, Any], q: Any, k: Any) -> Sizes:
        """Extents that captured tensors broadcast to."""
        return sizes_of(self.spec, q, k)

    def widened(self, tensors: tuple[Any, ...], sizes: Sizes) -> tuple[Any, ...]:
        """Captured tensors as a kernel takes them, of a call that was bound before."""
        return tuple(
            broadcast(x, decl, sizes) if 1 in x.shape else x for x, (_, decl) in zip(tensors, self.tensors, strict=True)
        )

    def split(self, bound: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(params, tensors) by name, as the reference takes them."""
        count = len(self.params)
        return (
            {row[0]: value for row, value in zip(self.params, bound, strict=False)},
            {row[0]: value for row, value in zip(self.tensors, bound[count : count + len(self.tensors)], strict=True)},
        )

    def missing(self, name: str) -> NoReturn:
        """E0602."""
        raise self._missing(name)

    def _missing(self, name: str) -> AttnError:
        tensor = next((t for t in self.spec.inputs if t.name == name), None)
        if tensor is not None:
            kind, declared = "tensor", f"`tensor {_declared(tensor)}`"
        else:
            decl = self.spec.param(name)
            default = ", without a default" if decl.default is None else f" with the default {decl.default}, found None"
            kind, declared = "param", f"`param {name}: {decl.type.value}`{default}"
        return error(
            "E0602",
            f"`{self.spec.name}` needs the {kind} `{name}`",
            notes=(f"the spec declares {declared}",),
            helps=(f"pass {name}=…",),
        )

    def wrong_type(self, name: str, value: Any) -> NoReturn:
        """E0603."""
        decl = self.spec.param(name)
        _converted(value, _PYTHON[decl.type], decl)
        raise AssertionError("a value of the right type")

    def unknown(self, name: str) -> NoReturn:
        """E0601."""
        raise self._unknown(name)

    def _unknown(self, name: str) -> AttnError:
        if name.startswith("max_seqlen"):
            return error(
                "E0601",
                f"`{self.spec.name}` takes no `{name}`",
                notes=("a launch is bounded by the extents of its tensors; no length is read on the host",),
                helps=("leave it out",),
            )
        close = get_close_matches(name, sorted(self.names), n=1)
        listed = ", ".join(sorted(self.names)) or "none"
        if name == "return_max_logit":
            listed += "; for the largest scores declare `output { max_logit = true }` in the spec"
        return error(
            "E0601",
            f"`{self.spec.name}` has no param or tensor `{name}`",
            helps=(f"did you mean `{close[0]}`?" if close else f"its params and tensors: {listed}",),
        )

    def _without_elements(self, decl: TensorDecl, tensor: Any, sizes: Sizes) -> None:
        """E0607 for an axis of extent 0 that a call with rows and keys has elements of: an index past the end reads the
        last one, which there is none of.
        """
        if decl in self.spec.lengths or tensor.ndim != len(decl.dims):
            return
        for axis, (dim, extent) in enumerate(zip(decl.dims, tensor.shape, strict=True)):
            if not extent and (isinstance(dim, int) or sizes.get(dim, 1)):
                raise error(
                    "E0607",
                    f"`{decl.name}` has no elements along {dim} (axis {axis})",
                    notes=(f"the spec declares `{_declared(decl)}`, found {tuple(tensor.shape)}",),
                    helps=("give the axis as many elements as the call reads, or 1 to broadcast",),
                )

    def _not_a_tensor(self, decl: TensorDecl, value: object) -> NoReturn:
        if value is None:
            self.missing(decl.name)
        raise error(
            "E0604",
            f"`{decl.name}` must be a tensor, declared `{_declared(decl)}`, found {type(value).__name__}",
            helps=("make it a torch tensor on the device of q",),
        )


def _declared(decl: TensorDecl) -> str:
    return f"{decl.name}: {decl.dtype.value}[{', '.join(map(str, decl.dims))}]"


def _range(decl: ParamDecl) -> tuple[Any, Any]:
    """The bounds that every value of a param keeps."""
    if decl.type is Type.BOOL:
        return False, True
    low, high = _INT32 if decl.type is Type.INT else (-math.inf, math.inf)
    return (
        low if decl.minimum is None else max(low, decl.minimum),
        high if decl.maximum is None else min(high, decl.maximum),
    )


def _converted(value: Any, kind: type, decl: ParamDecl) -> Any:
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
        try:
            return float(value)
        except OverflowError:
            raise error(
                "E0603",
                f"param `{decl.name}` is a whole number that no float can hold ({value.bit_length()} bits)",
                helps=("pass a finite number",),
            ) from None
    raise error(
        "E0603",
        f"param `{decl.name}` is {_article(decl.type.value)}, found {given!r} ({type(given).__name__})",
        helps=(f"pass {'True or False' if kind is bool else f'{kind.__name__}({decl.name})'}",),
    )


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _out_of_range(value: Any, decl: ParamDecl) -> NoReturn:
    if value != value:
        raise error("E0603", f"param `{decl.name}` is NaN", helps=("pass a number",))
    low, high = _range(decl)
    declared = (decl.minimum, decl.maximum) != (None, None)
    raise error(
        "E0603",
        f"param `{decl.name}` is {value}, outside [{low}, {high}]",
        notes=("the spec declares these bounds" if declared else "an int is 32 bits wide",),
        helps=(f"pass a value from {low} to {high}",),
    )


def broadcast(tensor: torch.Tensor, decl: TensorDecl, sizes: Sizes) -> torch.Tensor:
    """Expand axes of extent 1 to the declared extent: stride 0, no copy. The kernel's checks see other mismatches."""
    if tensor.ndim != len(decl.dims):
        return tensor
    wanted = []
    for dim, extent in zip(decl.dims, tensor.shape, strict=True):
        known = dim if isinstance(dim, int) else sizes.get(dim, extent)
        wanted.append(known if extent == 1 and dim != STARTS else extent)
    return tensor.expand(wanted) if tuple(wanted) != tuple(tensor.shape) else tensor
