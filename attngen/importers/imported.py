"""What an importer hands back: a spec, and the values that a call of it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Imported:
    """A spec with the values that its call takes.

        spec, tensors = attngen.from_flex(mask_mod=document, head_dim=64)
        o = attngen.build(spec)(q, k, v, **tensors)

    `tensors` holds the captured tensors by the names that the spec declares, in the dtypes that it declares (the very
    objects that were captured where their dtype serves, so that changes and gradients reach them). `params` holds the
    values that the params had, which are also their defaults. `notes` are sentences on what a reader should know: where
    torch and a spec may differ.
    """

    spec: AttentionSpec
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    params: Mapping[str, bool | int | float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.spec, self.tensors))

    @property
    def text(self) -> str:
        """The spec as `.attn` text; it loads back to an equal spec."""
        from attngen.syntax import print_spec

        return print_spec(self.spec)


#: Element type of a declaration by a tensor's dtype; tensors of other widths are converted.
_DTYPES = {
    "bfloat16": DType.BF16, "float16": DType.FP16, "float32": DType.F32, "float64": DType.F32,
    "int32": DType.I32, "int64": DType.I32, "int16": DType.I32, "int8": DType.I32, "uint8": DType.I32,
    "bool": DType.BOOL,
}  # fmt: skip
_INT32 = 1 << 31


def declared(name: str, tensor: torch.Tensor) -> tuple[DType, torch.Tensor]:
    """The element type that `tensor` is declared with, and the tensor in it. Raises E0705 where there is none."""
    import torch

    word = str(tensor.dtype).removeprefix("torch.")
    dtype = _DTYPES.get(word)
    if dtype is None:
        raise error(
            "E0705",
            f"captured tensor `{name}` is {word}",
            notes=(f"a spec's tensors are {', '.join(DType)}",),
            helps=("convert it before the function captures it",),
        )
    if word == "int64" and tensor.numel() and not bool(((tensor >= -_INT32) & (tensor < _INT32)).all()):
        raise error(
            "E0705",
            f"captured tensor `{name}` holds values that do not fit 32 bits",
            notes=("ints of a spec are 32-bit",),
            helps=("count from a smaller origin, or pass the values as float32",),
        )
    if dtype is DType.I32:
        return dtype, tensor.to(torch.int32)
    return dtype, tensor.to(torch.float32) if word == "float64" else tensor


def identifier(text: str, taken: Mapping[str, object], otherwise: str) -> str:
    """A word that a spec may declare, made of `text`, not in `taken`."""
    from attngen.syntax.reserved import reason

    word = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_")[:40]
    if not word or not word[0].isalpha() or not word.isascii():
        word = otherwise
    if reason(word):
        word = f"{word}_given"
    name, count = word, 2
    while name in taken:
        name, count = f"{word}{count}", count + 1
    return name


def refused(option: str, why: str, mend: str) -> AttnError:
    """E0706 for an option that has no spec, or that contradicts another."""
    return error("E0706", f"{option}: {why}", helps=(mend,))


def number(option: str, value: object, least: int | None = None) -> int:
    """A whole number from an option. Raises E0706."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        wanted = "a whole number" if least is None else f"a whole number of at least {least}"
        raise refused(option, f"must be {wanted}, found {str(value)[:40]!r}", "correct the value")
    return value
