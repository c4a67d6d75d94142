"""Attention: the callable that `attngen.build` returns.

An eager call on a GPU that the kernel is ready on takes one short path: guard, bind, launch. Everything else (CPU
tensors, other dtypes, autocast, tracing, `check`) goes the general way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.plan import KernelPlan, PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import autograd, calls, contract, ops
from attngen.jit.cache import KernelCache
from attngen.jit.device import has_gpu
from attngen.jit.identity import handle_of
from attngen.jit.launch import Launcher, Ready
from attngen.jit.load import Loaded, Progress, load
from attngen.jit.modes import (
    any_autocast,
    dispatch_modes,
    forward_ad,
    functorch_level,
    grad_enabled,
    is_dynamo,
)
from attngen.jit.named import TORCH_DTYPE
from attngen.jit.notice import say_once
from attngen.jit.recipe import Made, Recipe
from attngen.jit.relatives import Relatives
from attngen.jit.serving import serving_of
from attngen.jit.tables import TableBinder, Tables, nothing_to_keep
from attngen.jit.traced import traced
from attngen.passes.epilogue import further_names
from attngen.passes.few import Beside, Pace, Sibling
from attngen.passes.packing import unpackable
from attngen.source import KernelSource

_Tensor = torch.Tensor


class Attention(Made):
    """Attention as a spec says it, callable on torch tensors.

    `attn(q, k, v, **params_and_tensors)` returns o; with `return_lse=True`, (o, lse); of a spec with a max logit,
    `return_max_logit=True` appends it (see `attngen.jit.further.MaxLogit`).

    Shapes: layout bshd: q (B, Sq, Hq, D), k (B, Skv, Hkv, D), v (B, Skv, Hkv, Dv), o (B, Sq, Hq, Dv); bhsd: the middle
    axes swapped. lse (B, Hq, Sq), fp32, natural log. New results are contiguous. Hq is a multiple of Hkv.
    Strides: head_dim contiguous, other strides multiples of 16 bytes (0 too: expanded tensors), 16-byte aligned base.
    Nothing is copied.
    Keywords: `out`, `lse` write into given tensors; `scale` overrides the spec's; `check=True` looks for NaN, broken
    `sorted` promises and indices out of range first (slow, waits for the GPU; not under torch.compile).
    Dtypes: the spec's bf16 or fp16; called with the other one, it builds that kernel too, once. Under torch.autocast
    q, k and v are converted to autocast's dtype first, as torch's own attention does.
    Gradients: of q, k, v and the tensors that the spec declares `grad`, through o and lse. The backward kernel is made
    and compiled at the first call that needs one, for just the gradients that are needed; q, k, v, o, lse and captured
    tensors are saved, O(N) memory. A gradient has its input's dtype and extents. There is no second derivative.
    Devices: CUDA tensors run the kernel, CPU tensors the blockwise reference (in O(N) memory), with one AttngenNotice.
    Raises: AttnError E0516 (GPU of another kind), E06xx (arguments), E04xx (a gradient that no backward serves).
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
        recipe: Recipe | None = None,
        backward: Callable[[tuple[str, ...]], KernelSource] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.spec = spec
        self.source = source
        self.target = target
        self.handle = handle_of(spec, source, target)
        serving = serving_of(spec, source.meta)
        self.binder, self.launcher, self._fill = serving.binder, serving.launcher, serving.fill
        self.launcher.paces = tuple(Pace(**p) for p in source.meta.get("paces", ()))
        self.relatives = Relatives(spec, rebuild)
        if rebuild is not None:
            small, packs = source.meta.get("small"), spec.schedule.pack_gqa is None and not unpackable(spec)
            self.launcher.beside, self.launcher.sibling = Beside(small and Pace(**small), packs), self.sibling
        self.saves_o = "o_pre" in further_names(spec)
        self.backward = serving.backward(
            spec, self.binder, self.launcher.scale, target, cache, make=backward, progress=progress
        )
        self._cache = cache
        self._make_plan = plan
        self._explain = explain
        self._recipe = recipe
        self._progress = progress
        self._planned: PlanSet | None = None
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()
        # what the short path reads
        self._dtype = TORCH_DTYPE[spec.dtype]
        self._bare = self.binder.bare
        self._bind = self.binder.bind
        self._launch = self.launcher.launch
        self._ready_on = self.launcher.ready
        self.unlearned = tuple(t.name for t in spec.tensors if not t.grad)
        # Dynamo traces no AttnError: what it may have to say is written beforehand.
        self.lost_texts = {name: str(autograd.lost_gradient(spec.name, name)) for name in self.unlearned}
        self.given_text = str(autograd.given_output(spec.name))
        ops.register(self)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """Itself."""
        return (self,)

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

    def compile(
        self, device: int | None = None, *, backward: bool | Sequence[str] = False, group: int | None = None
    ) -> Attention:
        """Compile or load the kernel now and set up a GPU (default: the current one, if it is of the target's kind).

        `backward`: the backward kernel as well, for all gradients, or for those named ("q", "k", "v", captured
        tensors): the set that training needs, which is the set of tensors that require gradients in a call.
        `group`: the kernels with other row tiles as well, those that calls with so many query heads a KV head may take;
        without it the first call that gains by one makes it.
        Raises: AttnError E0503 (no such group), E0510 to E0520 (toolchain, cache), E0516 (GPU of another kind), E04xx
        (no backward).
        """
        if group is not None and (type(group) is not int or group < 1):
            raise error(
                "E0503",
                f"option `group` does not take {group!r}",
                helps=("take query heads a KV head, an int of at least 1",),
            )
        with self._lock:
            if self._loaded is None:
                self._loaded = load(self.source, self.target, self._cache, progress=self._progress)
                self.launcher.functions = self._loaded.functions
        if backward is not False:
            self.backward.prepare(self.backward.wanted(backward))
        if device is None and has_gpu(self.target):
            device = torch.cuda.current_device()
        if device is not None:
            self.launcher.prepare(device, self.target)
        for which in self.launcher.beside.siblings(self.launcher.paces, group) if group is not None else ():
            self.relatives.sibling(which).compile(device, group=group)
        return self

    def alone(self) -> Attention:
        """This attention, from now on by the plans of its file alone: who checks those has no use for a sibling."""
        self.launcher.beside = Beside()
        return self

    @property
    def keeps_tables(self) -> bool:
        """Whether calls take `tables=`, a handle."""
        return isinstance(self.binder, TableBinder) and self.binder.takes_handle

    def tables(self) -> Tables:
        """A handle that keeps tables and tile maps of the mask from call to call; see `attngen.jit.tables.Tables`.

        Raises: AttnError E0601 where the mask has neither.
        """
        if not self.keeps_tables:
            raise nothing_to_keep(self.spec)
        return Tables()

    # -- calls -----------------------------------------------------------------------------------------------------

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
        if self._fill is not None:
            named = self._fill(named, q, k)
        if is_dynamo():
            return traced(self, q, k, v, return_lse, out, lse, scale, named)
        try:
            if (
                type(q) is not _Tensor
                or q.dtype is not self._dtype
                or check
                or any_autocast()
                or dispatch_modes()
                or functorch_level() is not None
                or forward_ad._current_level >= 0
                or (ready := self._ready_on.get(q.get_device())) is None
            ):
                return calls.general(self, q, k, v, return_lse, out, lse, scale, check, named)
            if grad_enabled() and (
                q.requires_grad or k.requires_grad or v.requires_grad or (named and self.needs_grad(named))
            ):
                return calls.differentiable(self, ready, q, k, v, named, scale, out, lse, return_lse)
            tail = () if self._bare and not named else self._bind(named, q, k)
            return self._launch(ready, q, k, v, tail, scale, out, lse, return_lse)
        except (AttributeError, IndexError, TypeError, ValueError):  # not the tensors that the path takes for granted
            contract.validate(self.spec, q, k, v, self.given_tensors(named), out, lse)
            raise

    def run(
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
        """A call on real tensors of this attention's dtype, no gradient needed; the operators' body too."""
        device = q.device.type
        if device not in ("cpu", "cuda"):
            raise error(
                "E0605",
                f"`q` is on {q.device}; attention runs on cuda (a kernel) and cpu (the reference)",
                helps=("move q, k and v to a CUDA GPU or to the CPU",),
            )
        tail = calls.bound(self, q, k, v, named, out, lse, check)
        if device == "cuda":
            return self._launch(self.ready(q.device.index), q, k, v, tail, scale, out, lse, return_lse)
        say_once("cpu", f"`{self.spec.name}` runs the blockwise reference: its tensors are on the CPU")
        return self.launcher.reference(q, k, v, tail, scale, out, lse, return_lse)

    def bound(self, q: Any, k: Any, v: Any, named: dict[str, Any], *, check: bool = False) -> tuple[Any, ...]:
        """The named arguments of a call in the kernel's order, checked as no entry point will check them."""
        return calls.bound(self, q, k, v, named, None, None, check)

    def output_shapes(self, q: Any) -> tuple[tuple[Any, ...], torch.dtype, tuple[Any, ...]]:
        """(shape of o, dtype of o, shape of lse) for a q."""
        dtype = TORCH_DTYPE[self.spec.out_dtype] if self.spec.out_dtype is not None else q.dtype
        if self.spec.layout is Layout.VARLEN:
            return (q.shape[0], q.shape[1], self.spec.head_dim_v), dtype, (q.shape[1], q.shape[0])
        a, b, c = q.shape[0], q.shape[1], q.shape[2]
        return (a, b, c, self.spec.head_dim_v), dtype, (a, b, c) if self.spec.layout is Layout.BHSD else (a, c, b)

    def in_dtype(self, dtype: torch.dtype) -> Attention:
        """This attention for a dtype: itself, or its twin in the other 16-bit type, built at the first such call."""
        if dtype == self._dtype:
            return self
        twin = self.relatives.twin(dtype, joint=self.backward.joint)
        return self if twin is None else twin  # a wrong dtype: the checks will say so

    def sibling(self, which: Sibling) -> Launcher:
        """The launcher of this attention's kernel with other row tiles, compiled at the first such call."""
        return self.relatives.sibling(which).launcher

    def needs_grad(self, named: dict[str, Any]) -> bool:
        """Whether a captured tensor requires a gradient."""
        names = self.binder.tensor_names
        return bool(names) and any(getattr(named.get(n), "requires_grad", False) for n in names)

    def given_tensors(self, named: dict[str, Any]) -> dict[str, Any]:
        """Captured tensors by name, None where one is missing."""
        return {name: named.get(name) for name, _ in self.binder.tensors}

    def ready(self, index: int) -> Ready:
        """What launches on GPU `index` need, compiled and set up at first use."""
        if index not in self._ready_on:
            self.compile(index)
        return self._ready_on[index]
