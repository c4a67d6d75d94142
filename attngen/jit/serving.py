"""Which binder, launcher and backward serve the kernel of a spec: by its layout, its tables and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from attngen.ir.spec import AttentionSpec
from attngen.jit.backward import Backward
from attngen.jit.launch import Launcher
from attngen.jit.named import Binder
from attngen.jit.tables import TableBinder, TableLauncher
from attngen.passes.epilogue import further_names


@dataclass(frozen=True)
class Serving:
    """`fill` completes the named arguments of a call that needs more than it was given; None: no call does."""

    binder: Binder
    launcher: Launcher
    backward: type[Backward]
    fill: Callable[..., Any] | None = None


def serving_of(spec: AttentionSpec, meta: Mapping[str, Any]) -> Serving:
    """What serves `spec`; `meta` is what its kernel file says of itself."""
    limits, keeps = tuple(meta.get("limits", ())), bool(meta.get("tables") or "map" in meta)
    kept = meta if keeps else None
    if spec.layout.is_ragged:
        from attngen.jit.ragged import RaggedBinder, RaggedTableBinder
        from attngen.jit.ragged_backward import RaggedBackward

        ragged = RaggedTableBinder(spec) if keeps else RaggedBinder(spec)
        return Serving(ragged, launcher_of(spec, ragged, limits, kept), RaggedBackward, ragged.filled)
    binder = TableBinder(spec) if keeps else Binder(spec)
    return Serving(binder, launcher_of(spec, binder, limits, kept), Backward)


def launcher_of(spec: AttentionSpec, binder: Binder, limits: tuple[int, ...], meta: Any) -> Launcher:
    """The launcher that makes what the spec's kernel takes beside the caller's arguments.

    `meta`: of a mask with tables or a tile map, else None.
    """
    if spec.layout.is_ragged and not further_names(spec):
        from attngen.jit.ragged import RaggedLauncher, RaggedTableLauncher

        return RaggedTableLauncher(spec, binder, limits, meta) if meta else RaggedLauncher(spec, binder, limits)
    if further_names(spec):
        from attngen.jit import further

        if meta:
            both = further.FurtherRaggedTableLauncher if spec.layout.is_ragged else further.FurtherTableLauncher
            return both(spec, binder, limits, meta)
        alone = further.FurtherRaggedLauncher if spec.layout.is_ragged else further.FurtherLauncher
        return alone(spec, binder, limits)
    return TableLauncher(spec, binder, limits, meta) if meta else Launcher(spec, binder, limits)
