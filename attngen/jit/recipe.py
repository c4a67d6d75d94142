"""Callables that pickle as what made them, and that copies of a model share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

#: A function that makes the callable again, here or on another machine, and its arguments.
Recipe = tuple[Callable[..., Any], tuple[Any, ...]]


class Made:
    """What `attngen.build` returns, of any kind: nothing of it changes, so a copy is itself."""

    _recipe: Recipe | None

    def __reduce__(self) -> Recipe:
        if self._recipe is None:
            raise TypeError("an Attention made from a kernel file cannot be pickled; pickle its spec")
        return self._recipe

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
