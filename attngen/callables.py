"""The callable of a resolved spec: by one kernel or several, or the reference; and again from a pickle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen import generate
from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import device
from attngen.settings import settings
from attngen.source import KernelSource

if TYPE_CHECKING:
    from attngen.ir.tuned import Direction, Tuned
    from attngen.jit.composed import Composed
    from attngen.jit.kernel import Attention
    from attngen.jit.selected import SelectedAttention
    from attngen.jit.several import SeveralAttention
    from attngen.jit.unserved import ReferenceAttention

    AnyAttention = Attention | Composed | SelectedAttention | SeveralAttention | ReferenceAttention


def callable_of(
    spec: AttentionSpec, target: str, cache: Any, progress: Callable[[str, int, int], None] | None = None
) -> AnyAttention:
    """The attention of a spec: by one kernel or several, behind a front where a call's arguments are others; without a
    kernel for what it means, the reference, unless a GPU waits for a kernel.
    """
    from attngen.jit.composed import front
    from attngen.jit.identity import portable_json
    from attngen.passes.parts import Part, is_composed, kernel_spec, parts
    from attngen.passes.selected import is_selected
    from attngen.passes.serves import why_not

    reasons = why_not(spec, target)
    recipe = (_rebuild, (portable_json(spec), target, str(cache.root) if cache.persistent else None))
    if reasons:
        from attngen.ir.spec import ScheduleHints

        # a wish of the schedule that cannot be honoured is no reason to do without a kernel
        meant = why_not(spec.replace(schedule=ScheduleHints()), target)
        if not meant or meant[0].code != "E0402" or device.has_gpu(target):
            raise AttnError(*reasons)
        from attngen.jit.unserved import ReferenceAttention

        return ReferenceAttention(spec, target, reasons, recipe)

    def of_part(p: Part) -> Attention | SelectedAttention:
        kernel = _attention(p.spec, target, cache, progress)
        if p.listed is None:
            return kernel
        from attngen.jit.selected import SelectedAttention

        return SelectedAttention(p.listed, kernel, (_rebuild, (portable_json(p.listed), *recipe[1][1:])))

    if is_selected(spec) and not is_composed(spec):
        three = spec.replace(layout=Layout.BSHD) if spec.layout is Layout.PACKED_QKV else spec
        selected = of_part(Part(spec.name, kernel_spec(spec), three))
        return selected if three is spec else front(spec, selected, recipe)
    whole = kernel_spec(spec)
    if whole is spec and not is_composed(spec):
        return _attention(spec, target, cache, progress)
    kernels = {p.name: of_part(p) for p in parts(spec)}
    inner: Attention | SeveralAttention | SelectedAttention = kernels[next(iter(kernels))]
    if is_composed(spec):
        from attngen.jit.several import SeveralAttention

        inner = SeveralAttention(whole, kernels, recipe, lambda s: _attention(s, target, cache, progress))
    if whole is spec:
        return inner
    return front(spec, inner, recipe)


def _attention(
    spec: AttentionSpec, target: str, cache: Any, progress: Callable[[str, int, int], None] | None = None
) -> Attention:
    from attngen.jit.identity import portable_json
    from attngen.jit.sources import recall, remember
    from attngen.jit.unnormalized import kind_of
    from attngen.plan_text import describe

    described = portable_json(spec)
    tuned = _tuned(spec, target)
    key = described if tuned is None else f"{described}\n{tuned.model_dump_json()}"
    source, planned = recall(cache, key, target), None
    if source is None:
        planned = generate.plan(spec, target, tuned)
        source = generate.emit(planned)
        remember(cache, key, target, source)
    return kind_of(spec, lambda other: _attention(other, target, cache, progress))(
        spec,
        generate.dumped(source),
        target,
        cache,
        plan=lambda: planned or generate.plan(spec, target, tuned),
        explain=describe,
        rebuild=lambda other: _twin(other, target, cache),
        backward=lambda captured: _backward(spec, target, cache, described, captured),
        recipe=(_rebuild, (described, target, str(cache.root) if cache.persistent else None)),
        progress=progress,
    )


def _backward(spec: AttentionSpec, target: str, cache: Any, described: str, captured: tuple[str, ...]) -> KernelSource:
    """The generated backward file, a file of its own for each set of `captured`, remembered like the forward's."""
    from attngen.jit.sources import recall, remember
    from attngen.search_backward import plan_backward

    direction = ",".join(("backward", *captured))
    # a record is of the gradients of q, k and v: what a step adds to captured tensors takes other registers
    tuned = None if captured else _tuned(spec, target, "backward")
    key = described if tuned is None else f"{described}\n{tuned.model_dump_json()}"
    source = recall(cache, key, target, direction)
    if source is None:
        source = generate.emit_backward(plan_backward(spec, target, captured=captured, tuned=tuned))
        remember(cache, key, target, source, direction)
    return generate.dumped(source)


def _twin(spec: AttentionSpec, target: str, cache: Any) -> Attention:
    attention = _attention(spec, target, cache)
    return attention.compile() if device.has_gpu(target) else attention


def _rebuild(spec: str, target: str, root: str | None) -> AnyAttention:
    """Build again from a pickle: the spec travels, the kernel comes from this machine's cache or compiler."""
    from attngen.jit.cache import KernelCache

    known = root is not None and Path(root).is_dir()
    cache = KernelCache(
        Path(root) if known and root else settings().cache_dir, persistent=settings().use_cache or known
    )
    attention = callable_of(AttentionSpec.model_validate_json(spec), target, cache)
    return attention.compile() if device.has_gpu(target) else attention


def _tuned(spec: AttentionSpec, target: str, direction: Direction = "forward") -> Tuned | None:
    """What `attngen tune` recorded for this spec on the GPU at hand. A compiled file never follows it: its text depends
    on spec, options and attngen alone.
    """
    from attngen import tuned

    if not device.has_gpu(target):
        return None
    import torch

    return tuned.find(settings().cache_dir, target, torch.cuda.get_device_name(), spec, direction)
