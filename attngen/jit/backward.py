"""The backward of one Attention: a kernel file of its own, made and compiled when a gradient is first needed, and its
launch; on CPU tensors the reference.

A variant is a compiled set of wanted gradients: what nobody needs is not computed. The file depends on the captured
tensors among them, the compilation on q, k and v. The workspace lives as long as one
launch, and is the only memory beside the gradients that grows with the inputs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, Diagnostic, error
from attngen.ir.gradient import GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import captured, contract, launch, partial, views
from attngen.jit.cache import KernelCache
from attngen.jit.launch import Ready
from attngen.jit.load import Loaded, Progress, load
from attngen.jit.named import Binder
from attngen.jit.scale import Scale, number
from attngen.jit.shapes import sizes_of
from attngen.jit.tables import Tables, Workspace, workspaces_of
from attngen.passes.epilogue import rewrites_do
from attngen.passes.gradient import gradient_form, reduced_tensors
from attngen.source import KernelSource

_F32 = torch.float32
_empty_like = torch.empty_like
_deterministic = torch.are_deterministic_algorithms_enabled
_QKV = ("q", "k", "v")
#: Whether each of `Backward.names` gets its gradient.
Wanted = tuple[bool, ...]
Gradients = tuple[Any, ...]


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
    loaded: Loaded | None = None


class Backward:
    """Gradients of `names`: q, k, v and the captured tensors that the spec declares `grad`, in order of declaration."""

    def __init__(
        self,
        spec: AttentionSpec,
        binder: Binder,
        scale: Scale,
        target: str,
        cache: KernelCache,
        *,
        make: Callable[[tuple[str, ...]], KernelSource] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.learned = tuple(t.name for t in spec.tensors if t.grad)
        self.names = (*_QKV, *self.learned)
        self.variants: dict[Wanted, Variant] = {}
        #: dq, dk and dv of eager autograd are slices of one tensor (`views.unpack`).
        self.joint = False
        self._binder = binder
        self._scale = scale
        self._target = target
        self._cache = cache
        self._make = make
        self._progress = progress
        self._sources: dict[tuple[str, ...], KernelSource] = {}
        self._lock = threading.RLock()
        self._bhsd = spec.layout is Layout.BHSD
        self._padded = spec.layout is Layout.PADDED
        self._rewrites_do = rewrites_do(spec)
        self._heads_axis = 1 if spec.layout in (Layout.BHSD, Layout.VARLEN) else 2

    # -- what is compiled ------------------------------------------------------------------------------------------

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
            rows=rows,
            learned=learned,
            referenced=tuple(n for n in asked if n in reduced),
            varies=not meta["deterministic"] and not added.isdisjoint(names),
            workspaces=workspaces_of(self.spec, source.meta, meta),
            loaded=loaded,
        )

    # -- calls -----------------------------------------------------------------------------------------------------

    def run(
        self,
        ready: Ready | None,
        wanted: Wanted,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        do: Any,
        dlse: Any,
        params: tuple[Any, ...],
        tensors: tuple[Any, ...],
        scale: Any,
        joint: bool = False,
        handle: Tables | None = None,
    ) -> Gradients:
        """Gradients of `names`, None where not wanted.

        Shapes: q, k, v, o as in the call, with `ready` o before the epilogue; lse (batch, heads_q, seqlen_q); `do` like
        o and `dlse` like lse, any strides, None for zeros; `params` and `tensors` in order of declaration, the caller's
        own. `ready` None: the reference.
        `handle`: tables and tile maps that the caller keeps.
        Results have their input's shape, dtype and, where it is dense, strides; with `joint`, dq, dk and dv are slices
        of one tensor where all of them are wanted.
        Raises: AttnError E0618 (the launch was refused), E0622 (deterministic algorithms were asked for).
        """
        value = self._scale.of(params) if scale is None else number(scale, self.spec)
        if ready is None or not (q.numel() and k.numel()):
            return self._without_launch(wanted, q, k, v, o, lse, do, dlse, params, tensors, value)
        variant = self.variants.get(wanted) or self.prepare(wanted)
        if variant.varies and _deterministic():
            self._varies()
        # Where the input is dense its strides are the gradient's: no copy on its way through a transposed view.
        made_joint = views.joint_like(q, k, v) if joint and all(wanted[:3]) else None
        dq, dk, dv = made_joint or (_empty_like(x) if on else x for x, on in zip((q, k, v), wanted, strict=False))
        sizes = self._sizes(q, k, tensors)
        tail = (*params, *self._binder.widened(tensors, sizes)) if tensors else params
        for workspace in variant.workspaces:
            tail = (*tail, *workspace.of(ready[0].device, q.shape, k.shape, tail, handle))
        axis, heads_kv = self._heads_axis, sizes["heads_kv"]
        kv_tiles = self._tiles(sizes, "seqlen_kv", variant.tile_n)
        heads = partial.heads_of_sums(kv_tiles, sizes["heads_q"], heads_kv, ready[1] // variant.cluster)
        in_parts = heads != heads_kv and (wanted[1] or wanted[2])
        sums = [partial.buffer_like(x, heads, axis) for x in (k, v)] if in_parts else [dk, dv]
        call = (ready, variant, (q, k, v, o), lse, do, dlse, (dq, *sums), value, sizes, tail)
        found: dict[str, Any] = {}
        if not variant.learned:
            self._launch(*call, ())
        else:
            by_name = dict(zip(self._binder.tensor_names, tensors, strict=True))
            made, given = captured.buffers(self.spec, variant.rows, by_name, sizes)
            if variant.functions:
                self._launch(*call, given)
            named = self._named(params)
            found = captured.gradients(self.spec, variant.rows, made, variant.learned, named, by_name, sizes)
        if in_parts:
            for part, out, on in zip(sums, (dk, dv), wanted[1:3], strict=True):
                if on:
                    partial.add_up(part, out, axis)
        if variant.referenced:
            names = frozenset(variant.referenced)
            found |= self._reference(names, q, k, v, o, lse, do, dlse, params, tensors, value).captured
        return (
            dq if wanted[0] else None,
            dk if wanted[1] else None,
            dv if wanted[2] else None,
            *map(found.get, self.learned),
        )

    def _sizes(self, q: Any, k: Any, tensors: tuple[Any, ...]) -> dict[str, int]:
        """Extents of a call, those that captured tensors may name."""
        return sizes_of(self.spec, q, k)

    def _tiles(self, sizes: dict[str, int], extent: str, tile: int) -> int:
        """Tiles of one head, over the batch."""
        return -(-sizes[extent] // tile) * sizes["batch"]

    def _longest(self, sizes: dict[str, int]) -> int:
        """The length by which a plan is chosen."""
        return max(sizes["seqlen_q"], sizes["seqlen_kv"])

    def reduced(self) -> frozenset[str]:
        """Captured tensors whose gradient the blockwise reference gives."""
        return reduced_tensors(gradient_form(self.spec)) if self.spec.backward.deterministic else frozenset()

    def _launch(
        self,
        ready: Ready,
        variant: Variant,
        inputs: tuple[Any, ...],
        lse: Any,
        do: Any,
        dlse: Any,
        outputs: tuple[Any, ...],
        scale: float,
        sizes: dict[str, int],
        tail: tuple[Any, ...],
        extra: Sequence[Any],
    ) -> None:
        state, workers = ready
        if launch._current_device() != state.index:
            with torch.cuda.device(state.index):
                return self._launch(ready, variant, inputs, lse, do, dlse, outputs, scale, sizes, tail, extra)
        plan = 0
        if len(variant.functions) > 1:
            longest = self._longest(sizes)
            plan = next((i for i, limit in enumerate(variant.limits) if longest <= limit), len(variant.functions) - 1)
        tiles = self._tiles(sizes, "seqlen_q", variant.tile_m[plan])
        elements = sizes["heads_q"] * tiles * variant.workspace[plan] + workers * variant.parts[plan]
        workspace = torch.empty(elements, dtype=_F32, device=state.device)
        if do is None:
            do = torch.zeros_like(inputs[3])
        elif not contract.loads_by_tma(do) or (self._padded and not contract.has_row_steps(do)):
            do = do.clone(memory_format=torch.contiguous_format)
        if dlse is None:
            dlse = state.zeros(lse.shape)
        if self._rewrites_do:  # dO as the main kernel reads it: before the epilogue, in the dtype of q
            extra = (*extra, torch.empty(inputs[3].shape, dtype=inputs[0].dtype, device=state.device))
        rest = (workspace, scale, workers, *tail, *extra)
        wide = (*inputs, do)
        function = variant.functions[plan]
        try:
            function(*wide, lse, dlse, *outputs, *rest)
        except Exception as failure:
            self._recover(failure, function, wide, lse, dlse, outputs, rest)

    def _recover(
        self,
        failure: Exception,
        function: Any,
        wide: tuple[Any, ...],
        lse: Any,
        dlse: Any,
        outputs: tuple[Any, ...],
        rest: tuple[Any, ...],
    ) -> None:
        """The entry point refused its arguments: launch again with tidied strides, or say why."""
        tidy = [contract.normalized(x) for x in (*wide, *outputs)]
        if any(new is not old for new, old in zip(tidy, (*wide, *outputs), strict=True)):
            try:
                function(*tidy[:5], lse, dlse, *tidy[5:], *rest)
                return
            except Exception as again:
                failure = again
        raise contract.refused(f"the backward kernel of `{self.spec.name}`", failure) from failure

    def _without_launch(
        self,
        wanted: Wanted,
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        do: Any,
        dlse: Any,
        params: tuple[Any, ...],
        tensors: tuple[Any, ...],
        scale: float,
    ) -> Gradients:
        """The blockwise reference instead of a launch, on whatever device the tensors are: on the CPU, and where there
        are no rows, keys, heads or batch. An LSE without keys still is the sink's, whose gradient it passes on.
        """
        names = frozenset(n for n, on in zip(self.names, wanted, strict=True) if on)
        got = self._reference(names, q, k, v, o, lse, do, dlse, params, tensors, scale)
        found: dict[str, Any] = dict(got.captured)
        results: tuple[tuple[str, Any, Any], ...] = (("q", q, got.dq), ("k", k, got.dk), ("v", v, got.dv))
        for name, x, wide in results:
            if name in names:
                found[name] = torch.empty_like(x).copy_(wide.transpose(1, 2) if self._bhsd else wide)
        return tuple(found[n] if n in names else None for n in self.names)

    def _reference(
        self,
        names: frozenset[str],
        q: Any,
        k: Any,
        v: Any,
        o: Any,
        lse: Any,
        do: Any,
        dlse: Any,
        params: tuple[Any, ...],
        tensors: tuple[Any, ...],
        scale: float,
    ) -> Any:
        """`names` by the blockwise reference, in bshd."""
        from attngen.ref.backward import attention_backward

        by_name = dict(zip(self._binder.tensor_names, tensors, strict=True))
        do = torch.zeros_like(o) if do is None else do
        q, k, v, o, do = (x.transpose(1, 2) if self._bhsd else x for x in (q, k, v, o, do))
        with captured.autograd_allowed():
            return attention_backward(self.spec, q, k, v, o, lse, do, dlse, self._named(params), by_name, scale, names)

    def _named(self, params: tuple[Any, ...]) -> dict[str, Any]:
        return {row[0]: value for row, value in zip(self._binder.params, params, strict=True)}

    def _varies(self) -> None:
        """Torch's convention for an operation that may differ from run to run: an error, or a warning if asked for."""
        fault = error(
            "E0622",
            f"the backward of `{self.spec.name}` adds in an order that differs from run to run, and "
            "torch.use_deterministic_algorithms(True) is on",
            notes=("dQ, and gradients of captured tensors indexed by the query, are reduced by atomic additions",),
            helps=(
                "write `backward { deterministic = true }` in the spec, or build it with deterministic=True",
                "or allow it: torch.use_deterministic_algorithms(True, warn_only=True)",
            ),
        )
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise fault
        warnings.warn(str(fault), UserWarning, stacklevel=2)


def _with_way_out(d: Diagnostic) -> Diagnostic:
    """A reason why no backward serves a spec whose forward is served."""
    from dataclasses import replace

    way = "without gradients the call works: use torch.no_grad(), or detach q, k, v and the captured tensors"
    return replace(d, helps=(*d.helps, way))
