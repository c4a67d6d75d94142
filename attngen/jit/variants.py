"""The kernel files of one backward, made and compiled when a gradient is first needed.

A variant is a compiled set of wanted gradients: what nobody needs is not computed. The file depends on the captured
tensors among them, the compilation on q, k and v.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attngen.diag.diagnostic import AttnError, Diagnostic, error
from attngen.ir.gradient import GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.jit import launch
from attngen.jit.cache import KernelCache
from attngen.jit.load import Loaded, Progress, load
from attngen.jit.reach import Reach
from attngen.jit.tables import Workspace, workspaces_of
from attngen.passes.gradient import gradient_form, reduced_tensors
from attngen.source import KernelSource

_QKV = ("q", "k", "v")
#: Whether each of `Variants.names` gets its gradient.
Wanted = tuple[bool, ...]
#: Makes the file with the gradients of these captured tensors.
Make = Callable[[tuple[str, ...]], KernelSource]


@dataclass(frozen=True, slots=True)
class Variant:
    """The functions of one wanted set, a plan each, and what the file says of them."""

    functions: tuple[Any, ...]
    tile_m: tuple[int, ...]
    #: Of the last plan, which serves any length: keys of a KV tile, and how many CTAs take it together.
    tile_n: int
    cluster: int
    workspace: tuple[int, ...]
    #: Words of workspace for each worker beside those of query tiles: of dK and dV of a share of a walk.
    parts: tuple[int, ...]
    limits: tuple[int, ...]
    #: Entries of the file's `gradients`.
    rows: tuple[Mapping[str, Any], ...]
    #: Wanted captured tensors whose gradient the kernel gives.
    learned: tuple[str, ...]
    #: Those that the blockwise reference gives: deterministic sums that the kernel would make by atomic additions.
    referenced: tuple[str, ...]
    #: Two runs may differ in their last bits.
    varies: bool
    #: Of the mask's tile map and tables, where it has them.
    workspaces: tuple[Workspace, ...] = ()
    #: Estimated cycles of a step, where there are several plans.
    step_cycles: tuple[int, ...] = ()
    #: How far a row reaches, where that may choose a plan; and what it chose.
    reach: Reach | None = None
    chosen: dict[tuple[Any, ...], int] = field(default_factory=dict)
    loaded: Loaded | None = None


class Variants:
    """Variants of `names`: q, k, v and the captured tensors that the spec declares `grad`, in order of declaration."""

    def __init__(
        self,
        spec: AttentionSpec,
        target: str,
        cache: KernelCache,
        *,
        make: Make | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.learned = tuple(t.name for t in spec.tensors if t.grad)
        self.names = (*_QKV, *self.learned)
        self.variants: dict[Wanted, Variant] = {}
        self._target = target
        self._cache = cache
        self._make = make
        self._progress = progress
        self._sources: dict[tuple[str, ...], KernelSource] = {}
        self._lock = threading.RLock()

    @property
    def source(self) -> KernelSource:
        """The generated backward file of all gradients; see `source_of`."""
        return self.source_of(self.learned)

    def source_of(self, learned: tuple[str, ...]) -> KernelSource:
        """The generated backward file with the gradients of these captured tensors, planned and emitted at first use.

        Raises: AttnError E04xx where no backward kernel serves the spec, E0505 for an Attention without a plan.
        """
        with self._lock:
            if learned not in self._sources:
                if self._make is None:
                    raise error(
                        "E0505",
                        f"`{self.spec.name}` was made from a kernel file, which has no backward",
                        helps=("build the spec", "call it under torch.no_grad(), or detach its inputs"),
                    )
                try:
                    self._sources[learned] = self._make(learned)
                except AttnError as reasons:
                    raise AttnError(*(_with_way_out(d) for d in reasons.diagnostics)) from reasons
            return self._sources[learned]

    def wanted(self, names: Any) -> Wanted:
        """A wanted set by names; True means all of them. Raises: AttnError E0601 for a name without a gradient."""
        if names is True:
            return (True,) * len(self.names)
        chosen = [names] if isinstance(names, str) else list(names)
        for name in chosen:
            if name not in self.names:
                raise error(
                    "E0601",
                    f"`{self.spec.name}` has no gradient of {name!r}",
                    helps=(f"name some of {', '.join(self.names)}",),
                )
        return tuple(n in chosen for n in self.names)

    def prepare(self, wanted: Wanted) -> Variant:
        """The variant of a wanted set, compiled or loaded from the cache at first use.

        Raises: as `source`; AttnError E0510 to E0520 (toolchain, cache), E0621 while a CUDA graph is captured.
        """
        found = self.variants.get(wanted)
        if found is not None:
            return found
        if launch._capturing():
            names = ", ".join(n for n, on in zip(self.names, wanted, strict=True) if on)
            raise error(
                "E0621",
                f"the backward of `{self.spec.name}` for {names} is not compiled, and a CUDA graph is being captured",
                notes=("compiling and loading code is no work of a stream: a graph cannot hold it",),
                helps=("run forward and backward once before the capture, or call attn.compile(backward=True)",),
            )
        with self._lock:
            if wanted not in self.variants:
                self.variants[wanted] = self._variant(wanted)
            return self.variants[wanted]

    def _variant(self, wanted: Wanted) -> Variant:
        asked = tuple(n for n, on in zip(self.learned, wanted[len(_QKV) :], strict=True) if on)
        reduced = self.reduced()
        learned = tuple(n for n in asked if n not in reduced)
        source = self.source_of(learned)
        meta = source.meta["backward"]
        rows = tuple(meta["gradients"])
        reached = {row["tensor"] for row in rows}
        names = tuple(n for n, on in zip(self.names, wanted, strict=True) if on and (n in _QKV or n in reached))
        loaded = None
        if names:
            loaded = load(source, self._target, self._cache, wanted=names, progress=self._progress)
        added = {r["tensor"] for r in rows if r["kind"] in (GradientKind.ROW, GradientKind.ELEMENT)} | {"q"}
        return Variant(
            functions=loaded.functions if loaded is not None else (),
            tile_m=tuple(int(p["tile_m"]) for p in meta["plans"]),
            tile_n=int(meta["plans"][-1]["tile_n"]),
            cluster=int(meta["plans"][-1].get("cluster", 1)),
            workspace=tuple(int(p["workspace_per_tile"]) for p in meta["plans"]),
            parts=tuple(int(p.get("part_words", 0)) for p in meta["plans"]),
            limits=tuple(meta["limits"]),
            step_cycles=tuple(meta.get("step_cycles", ())),
            rows=rows,
            learned=learned,
            referenced=tuple(n for n in asked if n in reduced),
            varies=not meta["deterministic"] and not added.isdisjoint(names),
            workspaces=workspaces_of(self.spec, source.meta, meta),
            reach=Reach.of(self.spec) if meta["limits"] and not self.spec.layout.is_ragged else None,
            loaded=loaded,
        )

    def reduced(self) -> frozenset[str]:
        """Captured tensors whose gradient the blockwise reference gives."""
        return reduced_tensors(gradient_form(self.spec)) if self.spec.backward.deterministic else frozenset()


def _with_way_out(d: Diagnostic) -> Diagnostic:
    """A reason why no backward serves a spec whose forward is served."""
    from dataclasses import replace

    way = "without gradients the call works: use torch.no_grad(), or detach q, k, v and the captured tensors"
    return replace(d, helps=(*d.helps, way))
