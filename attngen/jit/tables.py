"""What a launch before the kernel's makes of a mask, its tables and its tile map: memory, and a handle that keeps it.

Only specs whose mask has tables or a map come here; the call path of the others does not know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.plan import plan_at
from attngen.ir.spec import AttentionSpec
from attngen.ir.tables import words
from attngen.ir.tile_map import map_words
from attngen.ir.types import Layout
from attngen.jit import launch
from attngen.jit.device import DeviceState
from attngen.jit.launch import Launcher, Ready
from attngen.jit.named import Binder
from attngen.jit.shapes import Sizes, sizes_of_shapes

_empty = torch.empty
_I32 = torch.int32
#: Shapes whose words are remembered.
_REMEMBERED = 64
#: The argument of a call that takes a handle.
NAME = "tables"


def version_of(x: torch.Tensor) -> object:
    """What changes with the elements of a tensor, as far as torch knows; of an inference tensor, which has no version,
    something that equals nothing.
    """
    return object() if x.is_inference() else x._version


class Tables:
    """Tables and tile maps kept between calls: `kept = attn.tables()`, then `attn(q, k, v, doc=doc, tables=kept)` in
    every layer.

    The first call fills them: a forward its own, a backward what the forward has not filled (a map has the tiles of its
    direction). Later ones use them while they have the same mask, captured tensors (the same memory, unchanged as far
    as torch knows), params and lengths; a call with others fills them again. So a handle never changes a result, with
    one exception: what a kernel outside torch writes into a captured tensor is not noticed (call `clear`). Of tensors
    made under `torch.inference_mode` torch does not know whether they changed: calls with them fill it again. int32:
    O(batch * seqlen_q) memory for tables, two or three bits a tile for a map, as long as the handle lives. Calls that
    share a handle belong on one stream, or must be ordered by the caller. A call that a CUDA graph captures uses what
    is kept and never fills it: filled inside the graph, every replay would fill it again.
    """

    __slots__ = ("_kept", "_key", "_params", "_places", "_seen")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what is kept: the next call fills it."""
        self._kept: dict[Any, Any] = {}
        self._key: Any = None
        self._params: tuple[Any, ...] = ()
        self._places: list[Any] = []
        self._seen: tuple[Any, ...] = ()

    def get(
        self, what: Any, key: tuple[Any, ...], count: int, params: tuple[Any, ...], tensors: tuple[Any, ...]
    ) -> tuple[Any, int]:
        """(memory of `what`, 1 where it has to be filled, else 0) for a call; `key`: its device, lengths and mask."""
        same = self._is_of(key, params, tensors)
        found = self._kept.get(what) if same else None
        if found is not None:
            return found, 0
        made = _empty(count, dtype=_I32, device=key[0])
        if not launch._capturing():
            if not same:
                self._kept, self._key, self._params = {}, key, params
                self._places = [(x.data_ptr(), version_of(x), x.stride()) for x in tensors]
                self._seen = tensors  # their memory is not given to others as long as the key names it
            self._kept[what] = made
        return made, 1

    def _is_of(self, key: tuple[Any, ...], params: tuple[Any, ...], tensors: tuple[Any, ...]) -> bool:
        """Whether what is kept was made of the same."""
        if self._key != key or self._params != params:
            return False
        for x, old, (start, version, strides) in zip(tensors, self._seen, self._places, strict=True):
            if x.data_ptr() != start or version_of(x) != version:
                return False
            if x is not old and (x.shape != old.shape or x.stride() != strides):
                return False
        return True


class PartTables:
    """The handle of each part of an attention by several kernels, under its name: `kept = attn.tables()`, then
    `tables=kept` as with one kernel. A part keeps what its own mask needs.
    """

    __slots__ = ("_key", "_lengths", "_places", "parts")

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.clear()

    def clear(self) -> None:
        """Forget what is kept: the next call fills it."""
        for kept in self.parts.values():
            kept.clear()
        self._key: Any = None
        self._lengths: Any = None  # its memory is not given to others as long as the key names it
        self._places: dict[str, Any] = {}

    def places(self, lengths: Any, call: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `make` says of a ragged call's `lengths`; the same tensors while those, and `call`, are unchanged, so
        that tables of them stay good. `call`: the layout and the extents.
        """
        key = (lengths.data_ptr(), version_of(lengths), lengths.shape, lengths.stride(), *call)
        if self._key == key:
            return self._places
        found = make()
        if not launch._capturing():
            self._key, self._lengths, self._places = key, lengths, found
        return found


def nothing_to_keep(spec: AttentionSpec) -> AttnError:
    """E0601 where a handle is asked for and no mask of the spec would use it."""
    return error(
        "E0601",
        f"`{spec.name}` has no tables or tile maps to keep",
        notes=(
            "tables belong to masks that compare an element of a `sorted` tensor at the key",
            "tile maps belong to masks with `block_sparse`",
        ),
        helps=(f"call it without `{NAME}`",),
    )


def no_handle(given: object) -> AttnError:
    """E0604 where something else is passed for a handle."""
    return error(
        "E0604",
        f"`{NAME}` must be what `attn.tables()` returns, found {type(given).__name__}",
        helps=(f"leave {NAME} out, or make a handle once and pass it in every call",),
    )


class TableBinder(Binder):
    """A Binder whose bound arguments end in the caller's handle, or None."""

    ends_in_handle = True

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.bare = False  # nothing captured, and a handle's place all the same
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
            raise no_handle(given)
        return given


class TableLauncher(Launcher):
    """A Launcher of kernels that take a tile map or tables after the captured tensors. `meta`: ATTN_META."""

    def __init__(self, spec: AttentionSpec, binder: Binder, limits: tuple[int, ...], meta: Mapping[str, Any]) -> None:
        super().__init__(spec, binder, limits)
        self.workspaces = workspaces_of(spec, meta, meta)

    def launch(
        self, ready: Ready, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any,
        return_lse: bool, further: tuple[Any, ...] = (),
    ) -> Any:  # fmt: skip
        """As a Launcher's; `tail` ends in a handle or None."""
        *bound, handle = tail
        for workspace in self.workspaces:
            bound += workspace.of(ready[0], q.shape, k.shape, bound, handle)
        return super().launch(ready, q, k, v, tuple(bound), scale, out, lse, return_lse, further)


#: (what it is, int32 words) of the memory that a call of these extents takes.
Counter = Callable[[Sizes], tuple[Any, int]]


class Workspace:
    """Makes two arguments that follow the captured tensors: int32 words, and whether they are to be filled."""

    def __init__(self, name: str, spec: AttentionSpec, counter: Counter) -> None:
        self._name, self._spec, self._counter = name, spec, counter
        self._params, self._tensors = len(spec.params), len(spec.params) + len(spec.inputs)
        self._varlen = spec.layout is Layout.VARLEN
        #: What the memory is made by: a handle may come from an attention whose mask is another.
        self._made_by = (spec.layout, spec.mask, spec.tensors)
        self._counts: dict[Any, tuple[Any, int]] = {}

    def of(
        self, state: DeviceState, shape_q: Any, shape_k: Any, bound: Sequence[Any], handle: Tables | None
    ) -> tuple[Any, int]:
        """For a call with q and k of these shapes, and with the params and captured tensors `bound`."""
        sequences = bound[self._params].shape[0] - 1 if self._varlen else None
        key = (state.device, shape_q, shape_k, sequences)
        found = self._counts.get(key)
        if found is None:
            if len(self._counts) >= _REMEMBERED:
                self._counts.clear()
            found = self._counts[key] = self._counter(sizes_of_shapes(self._spec, shape_q, shape_k, sequences))
        what, count = found
        if handle is None:
            if launch._capturing():
                return _empty(count, dtype=_I32, device=state.device), 1
            return state.words(launch._raw_stream(state.index), self._name, count), 1
        params, tensors = tuple(bound[: self._params]), tuple(bound[self._params : self._tensors])
        return handle.get(what, (*key, self._made_by), count, params, tensors)


def workspaces_of(spec: AttentionSpec, meta: Mapping[str, Any], direction: Mapping[str, Any]) -> tuple[Workspace, ...]:
    """What the kernels of a file take, in their order. `direction`: ATTN_META itself, or its entry `backward`."""
    found = []
    if "map" in direction:
        entry, plans, limits = direction["map"], direction["plans"], direction["limits"]

        def of_map(sizes: Sizes) -> tuple[Any, int]:
            longest = max(sizes["seqlen_q"], sizes["seqlen_kv"])
            longest = -(-longest // max(sizes["batch"], 1)) if entry.get("packed") else longest
            plan = plans[plan_at(limits, longest)]
            what = (*entry.items(), plan["tile_m"], plan["tile_n"])  # each direction has tiles of its own
            return what, map_words(entry, plan, sizes)

        found.append(Workspace("map", spec, of_map))
    if rows := meta.get("tables"):
        found.append(Workspace(NAME, spec, lambda sizes: (NAME, words(rows, sizes))))
    return tuple(found)
