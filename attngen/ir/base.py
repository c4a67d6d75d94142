"""Node: the frozen base of every IR value, with its place in the source kept out of its identity."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from attngen.diag.span import Span


class Node(BaseModel):
    """An immutable IR value.

    Equality and hash ignore places (fields with `exclude`): equal masks of different lines are equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    span: Span | None = Field(default=None, repr=False, exclude=True)

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        fields = type(self).model_fields
        return (type(self), *(getattr(self, n) for n, field in fields.items() if not field.exclude))

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Node) and self._hash == other._hash and self._identity == other._identity

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[Any, Any]:
        """The fields alone: a hash that is kept here is another one in the process that a pickle goes to."""
        state = super().__getstate__()
        return {**state, "__dict__": {n: v for n, v in state["__dict__"].items() if n in type(self).model_fields}}

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated again (`model_copy(update=…)` would not validate)."""
        values = {n: getattr(self, n) for n in type(self).model_fields}
        return type(self)(**{**values, **changes})
