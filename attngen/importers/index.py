"""Indexing of captured tensors: `bias[h, q_idx, kv_idx]`, or an axis at a time, `bias[h][q_idx, kv_idx]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attngen.importers.value import Untraceable, Value, literal
from attngen.ir.expr import Apply, Atom, Const, Expr, Load
from attngen.ir.types import Type

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class View:
    """A captured tensor and what indexes each axis so far (None: nothing yet)."""

    base: torch.Tensor
    name: str
    indices: tuple[Value | None, ...]
    notes: tuple[str, ...] = ()

    @property
    def open(self) -> int:
        """Axes without an index."""
        return sum(i is None for i in self.indices)


def whole(base: torch.Tensor, name: str) -> View:
    return View(base, name, (None,) * base.dim())


def indexed(view: View, key: object, value: Callable[[object], Value], given: Mapping[str, torch.Tensor]) -> View:
    """`view[key]`; `given` holds the tensors that indices read.

    Raises: Untraceable (E0705) for what picks no single element along an axis.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if dots:
        keys[dots[0] : dots[0] + 1] = [slice(None)] * (view.open - len(keys) + 1)
    if len(keys) > view.open:
        raise Untraceable(
            "E0705",
            f"`{view.name}` has {len(view.indices)} axes, and gets {len(keys) + len(view.indices) - view.open} indices",
            f"its shape is {tuple(view.base.shape)}; give one index an axis",
        )
    filled, notes = list(view.indices), []
    free = [axis for axis, i in enumerate(view.indices) if i is None]
    for axis, k in zip(free, keys, strict=False):
        if isinstance(k, slice) and k == slice(None):
            continue
        if k is None or isinstance(k, slice | list | str):
            raise Untraceable(
                "E0705",
                f"`{view.name}` is indexed by {'a slice' if isinstance(k, slice) else type(k).__name__}",
                "index each axis with one number; slice the tensor before the function captures it",
            )
        filled[axis], note = _checked(view, axis, value(k), given)
        notes += note
    return replace(view, indices=tuple(filled), notes=tuple(notes))


def _checked(view: View, axis: int, i: Value, given: Mapping[str, torch.Tensor]) -> tuple[Value, list[str]]:
    extent = view.base.shape[axis]
    if i.type is not Type.INT:
        raise Untraceable(
            "E0705",
            f"axis {axis} of `{view.name}` is indexed by a {i.type}",
            "convert the index: `.to(torch.int32)` truncates",
        )
    number = i.constant
    if number is not None:
        if not -extent <= number < extent:
            raise Untraceable(
                "E0705",
                f"index {number} is outside axis {axis} of `{view.name}`, which has {extent} elements",
                "correct the index",
            )
        return literal(int(number) + extent * (number < 0)), []
    if not_negative(i.expr, given):
        return i, []
    from attngen.syntax import print_expr

    text = print_expr(i.expr)
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    return i, [
        f"the index `{shown}` of `{view.name}` may be negative: torch then counts from the end, a spec "
        "does not (an index that a kept pair needs must lie inside the tensor)"
    ]


def not_negative(e: Expr, given: Mapping[str, torch.Tensor]) -> bool:
    """Whether an int is at least 0 by its form and the values that captured tensors have now."""
    if isinstance(e, Const):
        return e.value >= 0
    if isinstance(e, Atom):
        return e.name != "q_pos"
    if isinstance(e, Load):
        return not bool((given[e.tensor] < 0).any())
    if not isinstance(e, Apply):
        return False
    sides = [not_negative(a, given) for a in e.args]
    if e.fn == "mod":
        by = e.args[1]
        return isinstance(by, Const) and by.value > 0
    if e.fn == "max":
        return any(sides)
    if e.fn == "clamp":
        return sides[1] and sides[2]
    if e.fn == "where":
        return sides[1] and sides[2]
    if e.fn == "abs":
        return True
    return e.fn in ("add", "mul", "floordiv", "min") and all(sides)
