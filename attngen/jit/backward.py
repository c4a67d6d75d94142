"""The backward of one Attention: its launch, and on CPU tensors the reference.

The workspace lives as long as one launch, and is the only memory beside the gradients that grows with the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from attngen.diag.diagnostic import error
from attngen.ir.plan import plan_at
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import captured, contract, launch, partial, views
from attngen.jit.cache import KernelCache
from attngen.jit.launch import Ready
from attngen.jit.load import Progress
from attngen.jit.named import Binder
from attngen.jit.notice import say
from attngen.jit.scale import Scale, number
from attngen.jit.shapes import sizes_of
from attngen.jit.tables import Tables
from attngen.jit.variants import Make, Variant, Variants, Wanted
from attngen.passes import few
from attngen.passes.backward.choose import of_one_wave
from attngen.passes.epilogue import rewrites_do

_F32 = torch.float32
_empty_like = torch.empty_like
_deterministic = torch.are_deterministic_algorithms_enabled
Gradients = tuple[Any, ...]


class Given(NamedTuple):
    """What a backward is given: the forward's inputs and results, gradients of the results (None for zeros), and
    params, captured tensors and scale of the call.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    do: Any
    dlse: Any
    params: tuple[Any, ...]
    tensors: tuple[Any, ...]
    scale: float


class Backward(Variants):
    """Gradients of `names`: the launch of their variant, or the blockwise reference."""

    def __init__(
        self,
        spec: AttentionSpec,
        binder: Binder,
        scale: Scale,
        target: str,
        cache: KernelCache,
        *,
        make: Make | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(spec, target, cache, make=make, progress=progress)
        #: dq, dk and dv of eager autograd are slices of one tensor (`views.unpack`).
        self.joint = False
        self._binder = binder
        self._scale = scale
        self._bhsd = spec.layout is Layout.BHSD
        self._padded = spec.layout is Layout.PADDED
        self._rewrites_do = rewrites_do(spec)
        self._heads_axis = 1 if spec.layout in (Layout.BHSD, Layout.VARLEN) else 2

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
            return self._without_launch(wanted, Given(q, k, v, o, lse, do, dlse, params, tensors, value))
        variant = self.variants.get(wanted) or self.prepare(wanted)
        if variant.varies and _deterministic():
            self._varies()
        # Where the input is dense its strides are the gradient's: no copy on its way through a transposed view.
        made_joint = views.joint_like(q, k, v) if joint and all(wanted[:3]) else None
        dq, dk, dv = made_joint or (_empty_like(x) if on else x for x, on in zip((q, k, v), wanted, strict=False))
        sizes = self._sizes(q, k, tensors)
        tail = (*params, *self._binder.widened(tensors, sizes)) if tensors else params
        for workspace in variant.workspaces:
            tail = (*tail, *workspace.of(ready[0], q.shape, k.shape, tail, handle))
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
            made, buffers = captured.buffers(self.spec, variant.rows, by_name, sizes)
            if variant.functions:
                self._launch(*call, buffers)
            named = self._named(params)
            found = captured.gradients(self.spec, variant.rows, made, variant.learned, named, by_name, sizes)
        if in_parts:
            for part, out, on in zip(sums, (dk, dv), wanted[1:3], strict=True):
                if on:
                    partial.add_up(part, out, axis)
        if variant.referenced:
            names = frozenset(variant.referenced)
            given = Given(q, k, v, o, lse, do, dlse, params, tensors, value)
            found |= self._reference(names, given).captured
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

    def _plan(self, variant: Variant, sizes: dict[str, int], tail: tuple[Any, ...], workers: int) -> int:
        """Which plan serves a call: by lengths and how far rows reach; by the longest walk where KV tiles are few.

        `tail`: the params first; `workers`: KV tiles that are walked at a time.
        """
        if len(variant.functions) < 2:
            return 0
        params = [tail[i] for i in variant.reach.places] if variant.reach is not None else []
        key = (*sizes.values(), workers, *params)
        found = variant.chosen.get(key)
        if found is None:
            length, cycles = self._length(variant, sizes, params), variant.step_cycles
            tiles, heads = self._tiles(sizes, "seqlen_kv", variant.tile_n), (sizes["heads_q"], sizes["heads_kv"])
            if cycles and tiles * partial.heads_of_sums(tiles, *heads, workers) <= workers:
                found = of_one_wave(min(length, sizes["seqlen_q"]), variant.tile_m, cycles)
            else:
                found = plan_at(variant.limits, length)
            if len(variant.chosen) >= launch.REMEMBERED:
                variant.chosen.clear()
            variant.chosen[key] = found
        return found

    def _length(self, variant: Variant, sizes: dict[str, int], params: Sequence[Any]) -> int:
        """The length that names a plan."""
        if variant.reach is None:
            return self._longest(sizes)
        rows, keys = sizes["seqlen_q"], sizes["seqlen_kv"]
        return few.length_of_plan(rows, keys, variant.reach.keys(params, rows, keys))

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
        plan = self._plan(variant, sizes, tail, workers // variant.cluster)
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

    def _without_launch(self, wanted: Wanted, given: Given) -> Gradients:
        """The blockwise reference instead of a launch, on whatever device the tensors are: on the CPU, and where there
        are no rows, keys, heads or batch. An LSE without keys still is the sink's, whose gradient it passes on.
        """
        names = frozenset(n for n, on in zip(self.names, wanted, strict=True) if on)
        got = self._reference(names, given)
        found: dict[str, Any] = dict(got.captured)
        for name, x, wide in (("q", given.q, got.dq), ("k", given.k, got.dk), ("v", given.v, got.dv)):
            if name in names:
                found[name] = torch.empty_like(x).copy_(wide.transpose(1, 2) if self._bhsd else wide)
        return tuple(found[n] if n in names else None for n in self.names)

    def _reference(self, names: frozenset[str], given: Given) -> Any:
        """`names` by the blockwise reference, in bshd."""
        from attngen.ref.backward import attention_backward

        do = torch.zeros_like(given.o) if given.do is None else given.do
        wide = (given.q, given.k, given.v, given.o, do)
        q, k, v, o, do = (x.transpose(1, 2) for x in wide) if self._bhsd else wide
        params = self._named(given.params)
        by_name = dict(zip(self._binder.tensor_names, given.tensors, strict=True))
        with captured.autograd_allowed():
            return attention_backward(
                self.spec, q, k, v, o, given.lse, do, given.dlse, params, by_name, given.scale, names
            )

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
        say(str(fault), UserWarning)
