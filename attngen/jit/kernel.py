"""Attention: the callable that `attngen.build` returns.

The eager GPU call is one short path: guard, bind, allocate, launch. It checks nothing that the kernel's own entry point
checks; when that refuses the arguments, `contract` finds out why. Everything else (CPU tensors, other dtypes, autocast,
empty shapes, tracing) goes the general way.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.expr import params_of
from attngen.ir.plan import KernelPlan, PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout
from attngen.jit import contract, ops
from attngen.jit.cache import KernelCache
from attngen.jit.device import SCRATCH_ELEMS, DeviceState, require_target, state_of
from attngen.jit.load import Loaded, Progress, load
from attngen.jit.named import TORCH_DTYPE, Binder
from attngen.source import KernelSource

_Tensor = torch.Tensor
_is_dynamo = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_any_autocast = torch._C._is_any_autocast_enabled
_raw_stream: Callable[[int], int] = lambda index: 0  # noqa: E731
_current_device: Callable[[], int] = lambda: -1  # noqa: E731
_capturing: Callable[[], bool] = lambda: False  # noqa: E731
if torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    # Plain integers: a torch.cuda.Stream object costs more than the rest of the path.
    _raw_stream = torch._C._cuda_getCurrentRawStream
    _current_device = torch._C._cuda_getDevice
    _capturing = torch._C._cuda_isCurrentStreamCapturing
_empty, _empty_like, _contiguous = torch.empty, torch.empty_like, torch.contiguous_format
_F32 = torch.float32
_AUTOCAST = ("cpu", "cuda")


class AttngenNotice(UserWarning):
    """Something worth knowing once, such as that CPU tensors run the reference."""


class Attention:
    """Attention as a spec says it, callable on torch tensors.

    `attn(q, k, v, **params_and_tensors)` returns o; with `return_lse=True`, (o, lse).

    Shapes: layout bshd: q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv), o (B, Sq, Hq, Dv); bhsd: the middle
    axes swapped. lse (B, Hq, Sq), fp32, natural log. New results are contiguous. Hq is a multiple of Hkv.
    Strides: head_dim contiguous, other strides multiples of 16 bytes (0 too: expanded tensors), 16-byte aligned base.
    Nothing is copied.
    Keywords: `out`, `lse` write into given tensors; `scale` overrides the spec's; `check=True` looks for NaN, broken
    `sorted` promises and indices out of range first (slow, waits for the GPU).
    Dtypes: the spec's bf16 or fp16; called with the other one, it builds that kernel too, once. Under torch.autocast
    q, k and v are converted to autocast's dtype first, as torch's own attention does.
    Devices: CUDA tensors run the kernel, CPU tensors the blockwise reference (in O(N) memory), with one AttngenNotice.
    Raises: AttnError E0516 (GPU of another kind), E06xx (arguments).
    """

    def __init__(
        self,
        spec: AttentionSpec,
        source: KernelSource,
        target: str,
        cache: KernelCache,
        *,
        plan: Callable[[], PlanSet] | None = None,
        explain: Callable[[PlanSet], str] = repr,
        rebuild: Callable[[AttentionSpec], Attention] | None = None,
        recipe: tuple[Callable[..., Attention], tuple[Any, ...]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.source = source
        self.target = target
        self._cache = cache
        self._make_plan = plan
        self._explain = explain
        self._rebuild = rebuild
        self._recipe = recipe
        self._progress = progress
        self._planned: PlanSet | None = None
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()
        self._other: Attention | None = None
        # the launch path's constants
        meta = source.meta
        self._binder = Binder(spec)
        self._bind = self._binder.bind
        self._bare = self._binder.bare
        self._dtype = TORCH_DTYPE[spec.dtype]
        self._out_dtype = TORCH_DTYPE[spec.out_dtype or spec.dtype]
        self._o_like_q = spec.head_dim_v == spec.head_dim_qk and self._out_dtype is self._dtype
        self._bhsd = spec.layout is Layout.BHSD
        self._limits: tuple[int, ...] = tuple(meta.get("limits", ()))
        self._margin = spec.schedule.sm_margin or 0
        self._scales: dict[tuple[Any, ...], float] = {}
        self._scale_reads_params = bool(params_of(spec.scale))
        self._scale = math.nan if self._scale_reads_params else self._scale_of(())
        self._functions: tuple[Any, ...] = ()
        #: GPUs that the kernel is loaded for; the launch path takes no other.
        self._devices: dict[int, tuple[DeviceState, int]] = {}
        self.handle = _handle(spec, source, target)
        ops.register(self)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def plan_set(self) -> PlanSet:
        """The plans behind the kernel, with the rejected candidates."""
        if self._planned is None:
            if self._make_plan is None:
                raise error(
                    "E0505",
                    f"`{self.spec.name}` was made from a kernel file; it has no plan",
                    helps=("build the spec",),
                )
            self._planned = self._make_plan()
        return self._planned

    @property
    def plans(self) -> tuple[KernelPlan, ...]:
        """One plan for each tile shape of the kernel file."""
        return self.plan_set.plans

    @property
    def path(self) -> Path | None:
        """The generated file in the cache; None until the kernel was compiled on this machine."""
        return self._loaded.entry.kernel if self._loaded is not None else None

    def explain(self) -> str:
        """What was planned and why, as `attngen explain` prints it."""
        return self._explain(self.plan_set)

    def __repr__(self) -> str:
        s = self.spec
        shape = f"{s.dtype.value} {s.layout.value} head_dim {s.head_dim_qk}/{s.head_dim_v}"
        return f"<attngen.Attention {s.name} {shape} {self.target}>"

    def __reduce__(self) -> tuple[Any, ...]:
        if self._recipe is None:
            raise TypeError("an Attention made from a kernel file cannot be pickled; pickle its spec")
        return self._recipe

    def compile(self, device: int | None = None) -> Attention:
        """Compile or load the kernel now and set up a GPU (default: the current one, if there is any)."""
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    loaded = load(self.source, self.target, self._cache, progress=self._progress)
                    self._functions = loaded.functions
                    self._loaded = loaded
        if device is None and torch.cuda.is_available():
            device = torch.cuda.current_device()
        if device is not None:
            self._prepare(device)
        return self

    # -- the launch path -------------------------------------------------------------------------------------------

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        return_lse: bool = False,
        out: Any = None,
        lse: Any = None,
        scale: float | None = None,
        check: bool = False,
        **named: Any,
    ) -> Any:
        """See the class."""
        if _is_dynamo():
            return self._traced(q, k, v, return_lse, out, lse, scale, named)
        try:
            if (
                type(q) is not _Tensor
                or q.dtype is not self._dtype
                or check
                or _any_autocast()
                or _dispatch_modes()
                or _functorch_level() is not None
                or (ready := self._devices.get(q.get_device())) is None
            ):
                return self._general(q, k, v, return_lse, out, lse, scale, check, named)
            if _grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad or self._captured_grad(named)
            ):
                raise ops.needs_gradients(self.spec.name)
            if self._bare and not named:
                tail: tuple[Any, ...] = ()
            else:
                tail = self._bind(named, lambda: contract.sizes_of(self.spec, q, k))
            return self._launch(ready, q, k, v, tail, scale, out, lse, return_lse)
        except (AttributeError, IndexError, TypeError, ValueError):  # not the tensors that the path takes for granted
            contract.validate(self.spec, q, k, v, self._given_tensors(named), out, lse)
            raise

    def _launch(
        self,
        ready: tuple[DeviceState, int],
        q: Any,
        k: Any,
        v: Any,
        tail: tuple[Any, ...],
        scale: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
    ) -> Any:
        """Allocate what is missing and launch, on the current stream of q's GPU."""
        state, workers = ready
        index = state.index
        if _current_device() != index:
            with torch.cuda.device(index):
                return self._launch(ready, q, k, v, tail, scale, out, lse, return_lse)
        if self._bhsd:
            batch, heads_q, seqlen_q, _ = q.shape
            _, heads_kv, seqlen_kv, _ = k.shape
        else:
            batch, seqlen_q, heads_q, _ = q.shape
            _, seqlen_kv, heads_kv, _ = k.shape
        if not (seqlen_kv and seqlen_q and batch and heads_q and heads_kv) or heads_q % heads_kv:
            return self._degenerate(q, k, v, tail, scale, out, lse, return_lse)
        if scale is None:
            scale = self._scale
            if scale != scale:
                scale = self._scale_of(tail)
        elif type(scale) is not float or scale - scale != 0.0:  # the latter: NaN or infinite
            scale = _number(scale)
        given = lse
        provided = () if out is None and lse is None else (out, lse)
        if out is None:
            if self._o_like_q:
                out = _empty_like(q, memory_format=_contiguous)
            else:
                out = _empty((*q.shape[:3], self.spec.head_dim_v), dtype=self._out_dtype, device=state.device)
        stream = _raw_stream(index)
        capturing = _capturing()
        if capturing:
            counter = state.captured_counter()
        else:
            counter = state.counters.get(stream)
            if counter is None:
                counter = state.counter(stream)
        if lse is None:
            shape = (batch, heads_q, seqlen_q)
            if capturing or batch * heads_q * seqlen_q > SCRATCH_ELEMS:
                lse = _empty(shape, dtype=_F32, device=state.device)
            else:
                # The kernel writes an LSE that nobody asked for: launches of one stream may share it.
                lse = state.scratch.get(stream)
                if lse is None or lse.shape != shape:
                    lse = state.scratch[stream] = _empty(shape, dtype=_F32, device=state.device)
                if return_lse:
                    lse = _empty_like(lse)  # faster than torch.empty with a shape
        functions = self._functions
        function = functions[0]
        if len(functions) > 1:
            longest = seqlen_q if seqlen_q > seqlen_kv else seqlen_kv
            for i, limit in enumerate(self._limits):
                if longest <= limit:
                    function = functions[i]
                    break
            else:
                function = functions[-1]
        try:
            function(q, k, v, out, lse, counter, scale, workers, *tail)
        except Exception as failure:
            self._recover(failure, function, (q, k, v, out, lse, counter, scale, workers, *tail), given)
        if provided:  # autograd must notice that a tensor it may have saved was written
            _written(*provided)
        return (out, lse) if return_lse else out

    # -- everything else -------------------------------------------------------------------------------------------

    def _general(
        self,
        q: Any,
        k: Any,
        v: Any,
        return_lse: bool,
        out: Any,
        lse: Any,
        scale: Any,
        check: bool,
        named: dict[str, Any],
    ) -> Any:
        """Calls that are not a plain eager call on a prepared GPU."""
        if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
            contract.validate(self.spec, q, k, v, self._given_tensors(named), out, lse)
        if _functorch_level() is not None:
            raise _transformed(self.spec.name)
        if q.device.type in _AUTOCAST and torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x for x in (q, k, v))
        attention = self._for(q.dtype)
        if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or self._captured_grad(named)):
            raise ops.needs_gradients(self.spec.name)
        if _dispatch_modes() or type(q) not in (_Tensor, torch.nn.Parameter) or q.device.type == "meta":
            return attention._traced(q, k, v, return_lse, out, lse, scale, named)
        return attention._run(q, k, v, return_lse, out, lse, scale, check, named)

    def _run(
        self,
        q: Any,
        k: Any,
        v: Any,
        return_lse: bool,
        out: Any,
        lse: Any,
        scale: Any,
        check: bool,
        named: dict[str, Any],
    ) -> Any:
        """A call of this dtype on real tensors."""
        if q.device.type not in ("cpu", "cuda"):
            raise error(
                "E0605",
                f"`q` is on {q.device}; attention runs on cuda (a kernel) and cpu (the reference)",
                helps=("move q, k and v to a CUDA GPU or to the CPU",),
            )
        tail = self._checked_bind(q, k, v, out, lse, named)
        if check:
            from attngen.jit.checks import check_call

            check_call(self.spec, q, k, v, *self._binder.split(tail))
        if q.device.type == "cuda":
            return self._launch(self._ready(q.device.index), q, k, v, tail, scale, out, lse, return_lse)
        _say_once(
            f"`{self.spec.name}` runs the blockwise reference: its tensors are on the CPU; CUDA tensors run the kernel"
        )
        return self._reference(q, k, v, tail, scale, out, lse, return_lse)

    def _checked_bind(self, q: Any, k: Any, v: Any, out: Any, lse: Any, named: dict[str, Any]) -> tuple[Any, ...]:
        """Bind after the checks that a kernel's entry point would make."""
        try:
            tail = self._bind(named, lambda: contract.sizes_of(self.spec, q, k))
        except (IndexError, ValueError):  # ranks are wrong: say which
            contract.validate(self.spec, q, k, v, self._given_tensors(named), out, lse)
            raise
        if q.device.type == "cpu":
            contract.validate(self.spec, q, k, v, self._binder.split(tail)[1], out, lse)
        return tail

    def _reference(
        self, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any, return_lse: bool
    ) -> Any:
        """The blockwise reference, on whatever device the tensors are."""
        from attngen.ref import blockwise

        params, tensors = self._binder.split(tail)
        value = self._scale_of(tail) if scale is None else _number(scale)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            o, rows = blockwise.attention(
                self.spec, self._bshd(q), self._bshd(k), self._bshd(v), params, tensors, value
            )
            o, rows = self._bshd(o).to(self._out_dtype).contiguous(), rows.to(_F32).contiguous()
            out = o if out is None else out.copy_(o)
            lse = rows if lse is None else lse.copy_(rows)
        return (out, lse) if return_lse else out

    def _degenerate(
        self, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any, return_lse: bool
    ) -> Any:
        """No keys or no rows: nothing to launch. O = epilogue(0) and LSE = -inf, or the sink's."""
        contract.validate(self.spec, q, k, v, self._binder.split(tail)[1], out, lse)
        return self._reference(q, k, v, tail, scale, out, lse, return_lse)

    def _recover(self, failure: Exception, function: Any, arguments: tuple[Any, ...], given_lse: Any) -> None:
        """The kernel's entry point refused its arguments: say why, or launch again with tidied strides."""
        q, k, v, out, lse, *_ = arguments
        contract.validate(self.spec, q, k, v, self._binder.split(arguments[8:])[1], out, given_lse)
        lines = str(failure).strip().splitlines() or [repr(failure)]
        tidy = [contract.normalized(x) for x in (q, k, v, out)]
        if all(new is old for new, old in zip(tidy, (q, k, v, out), strict=True)):
            raise error(
                "E0618",
                f"the kernel of `{self.spec.name}` refused to launch: {lines[0]}",
                notes=tuple(lines[1:4]),
                helps=("a CUDA error here is often an earlier kernel's: run with CUDA_LAUNCH_BLOCKING=1 to see whose",),
            ) from failure
        function(*tidy, lse, *arguments[5:])

    # -- tracing ---------------------------------------------------------------------------------------------------

    def _traced(
        self, q: Any, k: Any, v: Any, return_lse: bool, out: Any, lse: Any, scale: Any, named: dict[str, Any]
    ) -> Any:
        """The call as one operator, for torch.compile and FakeTensor modes."""
        kind = q.device.type
        if kind in _AUTOCAST and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        tensors: list[Any] = []
        ints: list[int] = []
        floats: list[float] = []
        for name, kind_, decl in self._binder.params:
            value: Any = named.get(name, decl.default)
            if kind_ is float:
                floats.append(float(value))
            else:
                ints.append(int(value))
        for name, _ in self._binder.tensors:
            tensors.append(named[name])
        for name in named:
            if name not in self._binder.names:
                self._binder._unknown(name)
        scale = None if scale is None else float(scale)
        if out is None and lse is None:
            o, rows = torch.ops.attngen.forward(self.handle, q, k, v, tensors, ints, floats, scale)
            return (o, rows) if return_lse else o
        o_shape, o_dtype, lse_shape = self.output_shapes(q)
        out = q.new_empty(o_shape, dtype=o_dtype) if out is None else out
        lse = q.new_empty(lse_shape, dtype=_F32) if lse is None else lse
        torch.ops.attngen.forward_out(self.handle, q, k, v, tensors, ints, floats, scale, out, lse)
        return (out, lse) if return_lse else out

    def output_shapes(self, q: Any) -> tuple[tuple[Any, ...], torch.dtype, tuple[Any, ...]]:
        """(shape of o, dtype of o, shape of lse) for a q."""
        a, b, c = q.shape[0], q.shape[1], q.shape[2]
        dtype = self._out_dtype if self.spec.out_dtype is not None else q.dtype
        return (a, b, c, self.spec.head_dim_v), dtype, (a, b, c) if self._bhsd else (a, c, b)

    def run_op(
        self,
        q: Any,
        k: Any,
        v: Any,
        tensors: list[Any],
        ints: list[int],
        floats: list[float],
        scale: float | None,
        out: Any,
        lse: Any,
    ) -> tuple[Any, Any]:
        """The operators' body on real tensors: names and bounds are checked here, values being known."""
        left_ints, left_floats = iter(ints), iter(floats)
        named: dict[str, Any] = {}
        for name, kind, _ in self._binder.params:
            named[name] = next(left_floats) if kind is float else kind(next(left_ints))
        named.update({name: x for (name, _), x in zip(self._binder.tensors, tensors, strict=True)})
        result: tuple[Any, Any] = self._for(q.dtype)._run(q, k, v, True, out, lse, scale, False, named)
        return result

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _for(self, dtype: torch.dtype) -> Attention:
        """This attention for a dtype: itself, or its twin in the other 16-bit type, built at the first such call."""
        if dtype == self._dtype:
            return self
        other = DType.FP16 if self.spec.dtype is DType.BF16 else DType.BF16
        if dtype != TORCH_DTYPE[other] or self._rebuild is None:
            return self  # whose checks will say what is wrong
        if self._other is None:
            with self._lock:
                if self._other is None:
                    self._other = self._rebuild(self.spec.replace(dtype=other))
        return self._other

    def _bshd(self, x: Any) -> Any:
        """From the spec's layout to bshd, or back."""
        return x.transpose(1, 2) if self._bhsd else x

    def _captured_grad(self, named: dict[str, Any]) -> bool:
        names = self._binder.grad_names
        return bool(names) and any(getattr(named.get(n), "requires_grad", False) for n in names)

    def _given_tensors(self, named: dict[str, Any]) -> dict[str, Any]:
        return {name: named.get(name) for name, _ in self._binder.tensors}

    def _ready(self, index: int) -> tuple[DeviceState, int]:
        ready = self._devices.get(index)
        if ready is None:
            self.compile(index)
            ready = self._devices[index]
        return ready

    def _prepare(self, index: int) -> None:
        if index in self._devices:
            return
        require_target(index, self.target, self.spec.name)
        state = state_of(index)
        if not _capturing():
            with torch.cuda.device(index) if index >= 0 else contextlib.nullcontext():
                state.prepare()
        self._devices[index] = (state, max(1, state.sm_count - self._margin))

    def _scale_of(self, tail: tuple[Any, ...]) -> float:
        """The spec's scale for these params (remembered: evaluating the expression takes longer than a launch)."""
        values = tail[: len(self._binder.params)]
        found = self._scales.get(values)
        if found is None:
            found = evaluate_scale(self.spec, dict(zip((p.name for p in self.spec.params), values, strict=False)))
            if len(self._scales) > 256:
                self._scales.clear()
            self._scales[values] = found
        return found


def evaluate_scale(spec: AttentionSpec, params: dict[str, Any]) -> float:
    """The scale of a call, in natural units, evaluated in float64."""
    from attngen.ref.evaluate import evaluate

    env = {n: torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for n, v in params.items()}
    value = float(evaluate(spec.scale, env, {}))
    if not math.isfinite(value):
        raise error(
            "E0603",
            f"the scale of `{spec.name}` is {value} for {params}",
            helps=("pass params that give a finite scale",),
        )
    return value


def _written(*tensors: Any) -> None:
    torch.autograd.graph.increment_version([x for x in tensors if x is not None and not x.is_inference()])


def _number(scale: Any) -> float:
    """`scale=` as a float: a number, or a tensor without axes on the CPU."""
    if isinstance(scale, torch.Tensor) and (scale.ndim or scale.device.type != "cpu"):
        raise error(
            "E0603",
            f"`scale` must be one number, found a tensor {tuple(scale.shape)} on {scale.device}",
            helps=("pass a float",),
        )
    try:
        value = float(scale)
    except (TypeError, ValueError):
        raise error(
            "E0603", f"`scale` must be a number, found {type(scale).__name__}", helps=("pass a float",)
        ) from None
    if not math.isfinite(value):
        raise error("E0603", f"`scale` is {value}", helps=("pass a finite number",))
    return value


def _transformed(name: str) -> AttnError:
    return error(
        "E0612",
        f"`{name}` was called inside a torch.func transform (vmap, grad, jvp, …), which it does not support",
        helps=("attention has a batch axis: reshape the mapped axis into it and call without vmap",),
    )


def portable_json(spec: AttentionSpec) -> str:
    """The spec as JSON that says the same on every machine: without places in source files."""
    return spec.replace(schedule=spec.schedule.replace(places=())).model_dump_json()


def _handle(spec: AttentionSpec, source: KernelSource, target: str) -> str:
    text = f"{portable_json(spec)}\n{source.sha256}\n{target}"
    return f"{source.kernel_id}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


_said = False


def _say_once(text: str) -> None:
    global _said
    if not _said:
        _said = True
        warnings.warn(text, AttngenNotice, stacklevel=5)
