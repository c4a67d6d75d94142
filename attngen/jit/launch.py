"""The launch: allocate what is missing, pick the plan, call the kernel's entry point on the current stream.

Every microsecond here is paid by every call. Nothing is checked that the entry point checks (dtype, rank, extents,
strides, alignment, device); when it refuses, `contract` finds out why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from attngen.ir.plan import plan_at
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import contract
from attngen.jit.device import DeviceState, require_target, state_of
from attngen.jit.named import TORCH_DTYPE, Binder
from attngen.jit.reach import Reach
from attngen.jit.scale import Scale, number
from attngen.passes import few
from attngen.passes.epilogue import further_names

_empty, _empty_like, _contiguous = torch.empty, torch.empty_like, torch.contiguous_format
_F32 = torch.float32
_INF = float("inf")
REMEMBERED = 1024
_raw_stream: Callable[[int], int] = lambda index: 0  # noqa: E731
_current_device: Callable[[], int] = lambda: -1  # noqa: E731
_capturing: Callable[[], bool] = lambda: False  # noqa: E731
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    # Plain integers: a torch.cuda.Stream object costs more than the rest of the path.
    _raw_stream = torch._C._cuda_getCurrentRawStream
    _current_device = torch._C._cuda_getDevice
    _capturing = torch._C._cuda_isCurrentStreamCapturing

#: A GPU that the kernel is ready on: its state, and how many CTAs a launch may have there.
Ready = tuple[DeviceState, int]


class Launcher:
    """The loaded plans of one kernel file and the GPUs that they are ready on."""

    def __init__(self, spec: AttentionSpec, binder: Binder, limits: tuple[int, ...]) -> None:
        self.spec = spec
        self.functions: tuple[Any, ...] = ()
        self.ready: dict[int, Ready] = {}
        self.scale = Scale(spec)
        self._binder = binder
        self._limits = limits
        #: What row tiles of the plans take, where that may choose one (`passes.few`).
        self.paces: tuple[few.Pace, ...] = ()
        #: How far a row reaches, known once a GPU is ready, and the params that it depends on.
        self.reach: Reach | None = None
        self._reach_places: tuple[int, ...] = ()
        #: The kernels of the same spec with other row tiles, and what makes the launcher of one.
        self.beside = few.Beside()
        self.sibling: Callable[[few.Sibling], Launcher] | None = None
        self._made: set[few.Sibling] = set()
        self._pack = spec.schedule.pack_gqa or 1
        self._chosen: dict[tuple[Any, ...], Any] = {}
        self._default_scale = self.scale.default
        self._dtype = TORCH_DTYPE[spec.out_dtype or spec.dtype]
        self._o_like_q = spec.head_dim_v == spec.head_dim_qk and self._dtype is TORCH_DTYPE[spec.dtype]
        self._bhsd = spec.layout is Layout.BHSD
        #: The kernel takes O before the epilogue last, and is told not to write it where nobody saves it.
        self._ends_in_o = further_names(spec) == ("o_pre", "saves_o")

    def prepare(self, index: int, target: str) -> None:
        """Make GPU `index` ready. Raises: AttnError E0516 if it is of another kind than the target."""
        if index in self.ready:
            return
        require_target(index, target, self.spec.name)
        if self.reach is None and self.paces:
            self.reach = Reach.of(self.spec)
            self._reach_places = self.reach.places if self.reach is not None else ()
            self._chosen.clear()
        state = state_of(index)
        if not _capturing():
            with torch.cuda.device(index) if index >= 0 else contextlib.nullcontext():
                state.prepare()
        self.ready[index] = (state, max(1, state.sm_count - (self.spec.schedule.sm_margin or 0)))

    def launch(
        self,
        ready: Ready,
        q: Any,
        k: Any,
        v: Any,
        tail: tuple[Any, ...],
        scale: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        further: tuple[Any, ...] = (),
    ) -> Any:
        """One call with bound arguments `tail`, and what the kernel takes last; returns o or (o, lse)."""
        state, workers = ready
        index = state.index
        if _current_device() != index:
            with torch.cuda.device(index):
                return Launcher.launch(self, ready, q, k, v, tail, scale, out, lse, return_lse, further)
        if self._bhsd:
            batch, heads_q, seqlen_q, _ = q.shape
            _, heads_kv, seqlen_kv, _ = k.shape
        else:
            batch, seqlen_q, heads_q, _ = q.shape
            _, seqlen_kv, heads_kv, _ = k.shape
        if not (seqlen_kv and seqlen_q and batch and heads_q and heads_kv) or heads_q % heads_kv:
            return self._without_launch(q, k, v, tail, scale, out, lse, return_lse)
        if scale is None:
            scale = self._default_scale
            if scale != scale:  # NaN: it depends on params
                scale = self.scale.of(tail)
        elif type(scale) is not float or not 0.0 < scale < _INF:
            scale = number(scale, self.spec)
        given = lse
        provided = () if out is None and lse is None else (out, lse)
        if out is None:
            if self._o_like_q:
                out = _empty_like(q, memory_format=_contiguous)
            else:
                out = _empty((*q.shape[:3], self.spec.head_dim_v), dtype=self._dtype, device=state.device)
        elif out is q or (start := out.data_ptr()) == q.data_ptr() or start == k.data_ptr() or start == v.data_ptr():
            raise contract.overlap(q, k, v, out)
        stream = _raw_stream(index)
        capturing = _capturing()
        if capturing:
            counter = state.captured_counter()
        else:
            counter = state.counters.get(stream)
            if counter is None:
                counter = state.counter(stream)
        if lse is None:
            # The kernel writes an LSE that nobody asked for: launches of one stream may share it.
            place = (stream, batch, heads_q, seqlen_q)
            lse = None if capturing else state.scratch.get(place)
            if lse is None:
                lse = _empty(place[1:], dtype=_F32, device=state.device)
                if not return_lse and not capturing:
                    state.keep_scratch(place, lse)
            elif return_lse:
                lse = _empty_like(lse)  # faster than torch.empty with a shape
        key: tuple[Any, ...] = (batch, heads_q, heads_kv, seqlen_q, seqlen_kv, workers)
        if self._reach_places:
            key += tuple([tail[i] for i in self._reach_places])
        function = self._chosen.get(key)
        if function is None:
            if self._pack > 1 and heads_q != self._pack * heads_kv:
                return self._without_launch(q, k, v, tail, scale, out, lse, return_lse)
            function = self.choose(key)
        if self._ends_in_o and not further:
            further = (out, 0)
        try:
            function(q, k, v, out, lse, counter, scale, workers, *tail, *further)
        except Exception as failure:
            whole = (q, k, v, out, lse, counter, scale, workers, *tail, *further)
            self._recover(failure, function, whole, given)
        if provided:  # autograd must notice that a tensor it may have saved was written
            _written(*provided)
        return (out, lse) if return_lse else out

    def choose(self, key: tuple[Any, ...]) -> Callable[..., Any]:
        """The function for a call: its plan by the lengths and, where row tiles are few, by their number; or that of a
        kernel that packs query heads or has small tiles, made at the first call that gains by it. Remembered.

        `key`: batch, heads_q, heads_kv, seqlen_q, seqlen_kv, workers, and the params of `reach`. Rows that reach fewer
        keys than there are walk as rows of a shorter sequence do.
        """
        batch, heads_q, heads_kv, seqlen_q, seqlen_kv, workers, *params = key
        heads, longest = batch * heads_q, max(seqlen_q, seqlen_kv)
        if self.reach is not None:
            keys = self.reach.keys(params, seqlen_q, seqlen_kv)
            longest, seqlen_kv = few.length_of_plan(seqlen_q, seqlen_kv, keys), keys
        usual = plan_at(self._limits, longest)
        chosen = few.pick(self.paces, usual, heads, seqlen_q, seqlen_kv, workers)
        function: Callable[..., Any] = self.functions[chosen]
        group = heads_q // heads_kv
        sibling = self.beside.sibling(self.paces, chosen, heads, group, seqlen_q, seqlen_kv, workers)
        capturing = _capturing()
        # a graph is no place to compile and load a kernel in, and what it does without is not remembered
        if sibling is not None and self.sibling is not None and (sibling in self._made or not capturing):
            self._made.add(sibling)
            function = self.sibling(sibling).choose(key)
        if capturing:
            return function
        if len(self._chosen) >= REMEMBERED:
            self._chosen.clear()
        self._chosen[key] = function
        return function

    def launch_saving(
        self, ready: Ready, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any
    ) -> tuple[Any, Any, Any]:
        """(o, lse, what a backward takes as o): the last is O before the epilogue."""
        o, lse = self.launch(ready, q, k, v, tail, scale, None, None, True)
        return o, lse, o

    def reference(
        self, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any, return_lse: bool
    ) -> Any:
        """The blockwise reference instead of a launch, on whatever device the tensors are."""
        from attngen.ref import blockwise

        params, tensors = self._binder.split(tail)
        value = self.scale.of(tail) if scale is None else number(scale, self.spec)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            wide = self._bshd(q), self._bshd(k), self._bshd(v)
            o, rows = blockwise.attention(self.spec, *wide, params, tensors, value)
            o, rows = self._bshd(o).to(self._dtype).contiguous(), rows.to(_F32).contiguous()
            out = o if out is None else out.copy_(o)
            lse = rows if lse is None else lse.copy_(rows)
        return (out, lse) if return_lse else out

    def _bshd(self, x: Any) -> Any:
        """From the spec's layout to bshd, or back."""
        return x.transpose(1, 2) if self._bhsd else x

    def _without_launch(
        self, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any, return_lse: bool
    ) -> Any:
        """No keys or no rows (or heads that do not divide, an error): O = epilogue(0), LSE = -inf or the sink's."""
        contract.validate(self.spec, q, k, v, self._binder.split(tail)[1], out, lse)
        return self.reference(q, k, v, tail, scale, out, lse, return_lse)

    def _captured(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a kernel's arguments those that the binder gave."""
        return arguments[8:]

    def _recover(self, failure: Exception, function: Any, arguments: tuple[Any, ...], given_lse: Any) -> None:
        """The entry point refused its arguments: say why, or launch again with tidied strides."""
        q, k, v, out, lse, *rest = arguments
        contract.validate(self.spec, q, k, v, self._binder.split(self._captured(arguments))[1], out, given_lse)
        tidy = [contract.normalized(x) for x in (q, k, v, out)]
        if any(new is not old for new, old in zip(tidy, (q, k, v, out), strict=True)):
            try:
                function(*tidy, lse, *rest)
                return
            except Exception as again:
                failure = again
        raise contract.refused(f"the kernel of `{self.spec.name}`", failure) from failure


def _written(*tensors: Any) -> None:
    torch.autograd.graph.increment_version([x for x in tensors if x is not None and not x.is_inference()])
