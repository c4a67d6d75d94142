"""The tables of a mask in a call: their workspace, and a handle by which a caller keeps them from call to call.

Only specs whose mask has tables come here; the call path of the others does not know of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import words
from attngen.jit import launch
from attngen.jit.launch import Launcher, Ready
from attngen.jit.named import Binder
from attngen.jit.shapes import sizes_of_shapes

_empty = torch.empty
_I32 = torch.int32
#: Shapes whose words are remembered.
_REMEMBERED = 64
#: The argument of a call that takes a handle.
NAME = "tables"


class Tables:
    """Tables kept between calls: `kept = attn.tables()`, then `attn(q, k, v, doc=doc, tables=kept)` in every layer.

    The first call fills them. Later ones, forward and backward, use them while they have the same captured tensors
    (the same memory, unchanged as far as torch knows), params and lengths; a call with others fills them again. So a
    handle never changes a result, with one exception: what a kernel outside torch writes into a captured tensor is not
    noticed (call `clear`). int32, O(batch * seqlen_q) memory, as long as the handle lives. Calls that share a handle
    belong on one stream, or must be ordered by the caller. A call that a CUDA graph captures uses what is kept and
    never fills it: filled inside the graph, every replay would fill it again.
    """

    __slots__ = ("_key", "_params", "_places", "_seen", "_words")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what is kept: the next call fills it."""
        self._words: Any = None
        self._key: Any = None
        self._params: tuple[Any, ...] = ()
        self._places: list[Any] = []
        self._seen: tuple[Any, ...] = ()

    def get(self, key: tuple[Any, ...], count: int, params: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
        """(workspace, 1 where it has to be filled, else 0) for a call; `key`: its device and lengths."""
        if self._key == key and self._params == params:
            for x, old, (start, version, strides) in zip(tensors, self._seen, self._places, strict=True):
                if x._version != version or x.data_ptr() != start:
                    break
                if x is not old and (x.shape != old.shape or x.stride() != strides):
                    break
            else:
                return self._words, 0
        workspace = _empty(count, dtype=_I32, device=key[0])
        if not launch._capturing():
            self._words, self._key, self._params = workspace, key, params
            self._places = [(x.data_ptr(), x._version, x.stride()) for x in tensors]
            self._seen = tensors  # their memory is not given to others as long as the key names it
        return workspace, 1


class TableBinder(Binder):
    """A Binder whose bound arguments end in the caller's handle, or None."""

    ends_in_handle = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.takes_handle = NAME not in self.names
        if self.takes_handle:
            self.names |= {NAME}

    def bind(self, named: Mapping[str, Any], q: Any, k: Any) -> tuple[Any, ...]:
        """As a Binder's, then the handle. Raises: AttnError E0604 for a handle that is none."""
        return *super().bind(named, q, k), self.handle(named)

    def handle(self, named: Mapping[str, Any]) -> Tables | None:
        """The handle among the named arguments."""
        given = named.get(NAME) if self.takes_handle else None
        if given is not None and not isinstance(given, Tables):
            raise error(
                "E0604",
                f"`{NAME}` must be what `attn.tables()` returns, found {type(given).__name__}",
                helps=(f"leave {NAME} out, or make a handle once and pass it in every call",),
            )
        return given


class TableLauncher(Launcher):
    """A Launcher of kernels that take a workspace of tables after the captured tensors."""

    def __init__(
        self, spec: AttentionSpec, binder: Binder, limits: tuple[int, ...], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        super().__init__(spec, binder, limits)
        self.workspace = Workspace(spec, rows)

    def launch(
        self, ready: Ready, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any,
        return_lse: bool, further: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        """As a Launcher's; `tail` ends in a handle or None."""
        *bound, handle = tail
        found = self.workspace.of(ready[0].device, q.shape, k.shape, bound, handle)
        return super().launch(ready, q, k, v, (*bound, *found), scale, out, lse, return_lse, further)


class Workspace:
    """Makes the two arguments that follow the captured tensors: int32 words, and whether they are to be filled."""

    def __init__(self, spec: AttentionSpec, rows: Sequence[Mapping[str, Any]]) -> None:
        self._spec = spec
        self._rows = tuple(rows)
        self._params, self._tensors = len(spec.params), len(spec.params) + len(spec.tensors)
        self._counts: dict[Any, int] = {}

    def of(
        self, device: Any, shape_q: Any, shape_k: Any, bound: Sequence[Any], handle: Tables | None
    ) -> tuple[Any, int]:
        """For a call with q and k of these shapes, and with the params and captured tensors `bound`."""
        key = (device, shape_q, shape_k)
        count = self._counts.get(key)
        if count is None:
            if len(self._counts) >= _REMEMBERED:
                self._counts.clear()
            count = self._counts[key] = words(self._rows, sizes_of_shapes(self._spec, shape_q, shape_k))
        if handle is None:
            return _empty(count, dtype=_I32, device=device), 1
        params, tensors = tuple(bound[: self._params]), tuple(bound[self._params : self._tensors])
        found: tuple[Any, int] = handle.get(key, count, params, tensors)
        return found
