"""The stages composed: spec -> plan -> source -> callable. Nothing else is decided here."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attngen.diag.diagnostic import AttnError, Diagnostic, error
from attngen.ir.spec import AttentionSpec
from attngen.options import Options
from attngen.settings import DEFAULT_TARGET, settings
from attngen.source import KernelSource
from attngen.stages import staged

if TYPE_CHECKING:
    from attngen.ir.backward import BackwardPlanSet
    from attngen.ir.plan import PlanSet
    from attngen.ir.tuned import Tuned
    from attngen.jit.composed import Composed
    from attngen.jit.kernel import Attention
    from attngen.jit.selected import SelectedAttention
    from attngen.jit.several import SeveralAttention
    from attngen.jit.unserved import ReferenceAttention

    AnyAttention = Attention | Composed | SelectedAttention | SeveralAttention | ReferenceAttention

log = logging.getLogger("attngen")
SpecLike = AttentionSpec | str | os.PathLike[str]


def build(
    spec: SpecLike,
    *,
    name: str | None = None,
    target: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    backward: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    **overrides: object,
) -> AnyAttention:
    """Attention as `spec` says it, callable on torch tensors; see `attngen.jit.kernel.Attention` for the call.

    A spec with `layout = packed_qkv` or `v = k[a:b]` takes one qkv, or no v: see `attngen.jit.composed`. One with
    branches or segments takes a kernel for each: see `attngen.jit.several`.

    `spec` is a path, the text of a spec (a string with a newline or a brace is text, any other string a path), or an
    AttentionSpec. `name` picks one attention block of a file (default: the last). `overrides` are the fields of
    `attngen.options.Options`: head_dim=64, dtype="fp16", tile="128x128", …

    With a GPU of the target's kind the kernel is compiled and loaded now, every tile plan of it; from the second time
    on it comes from the cache (`cache_dir`, else ATTNGEN_CACHE_DIR, else the user's cache folder). Without one, nothing
    is compiled until a CUDA tensor arrives, and CPU tensors run the blockwise reference.
    The backward kernel is made when a call first needs gradients, or now with `backward=True` (planned and emitted, and
    compiled where there is such a GPU).
    A spec that uses what no kernel serves yet is refused on a machine with such a GPU; elsewhere it gives a callable
    for CPU tensors, with an AttngenNotice of the reasons: see `attngen.jit.unserved`.
    `progress(what, done, total)` is called while plans compile.

    Raises: AttnError E01xx-E03xx (the spec), E04xx (no plan serves it, with the reasons), E05xx (this machine).
    """
    from attngen.jit.cache import KernelCache
    from attngen.jit.unserved import ReferenceAttention

    options = Options.parse({**overrides, "target": target})
    resolved = resolve(spec, name, options)
    chosen = _target(resolved, options, here=True)
    found = settings()
    root = Path(cache_dir).expanduser().absolute() if cache_dir is not None else found.cache_dir
    cache = KernelCache(root, persistent=found.use_cache or cache_dir is not None)
    attention = _callable(resolved, chosen, cache, progress)
    if isinstance(attention, ReferenceAttention):
        return attention
    for one in getattr(attention, "kernels", [attention]) if backward else ():
        one.backward.source  # noqa: B018 - its faults are said now, also without a GPU
    if _has_gpu(chosen):
        attention.compile(backward=backward)
    return attention


def compile(
    spec: SpecLike,
    *,
    target: str | None = None,
    name: str | None = None,
    only: str | None = None,
    part: str | None = None,
    **overrides: object,
) -> KernelSource:
    """The generated kernel file of `spec`: `.text`, `.kernel_id`, `.write(path)`. Needs no GPU, torch or DSL.

    The file holds forward and backward, with the gradients of every tensor declared `grad`; `only="forward"` or
    `"backward"` leaves the other out. What of the backward no kernel serves yet is left out of a file of both, which
    says so in its docstring and in `.meta["notes"]` (the lines of a sentence each).

    A spec with branches or segments takes a kernel for each; `part` names the one.

    Takes `spec`, `name` and `overrides` as `build` does. Raises: AttnError E01xx-E04xx, among them E0404 and E0405
    (which part?); E0503 `only` is another word.
    """
    if only not in (None, "forward", "backward"):
        raise error("E0503", f"option `only` does not take {only!r}", helps=('take "forward" or "backward"',))
    options = Options.parse({**overrides, "target": target})
    resolved = resolve(spec, name, options)
    chosen = _target(resolved, options)
    return _dumped(_compiled(_part(resolved, part, chosen), chosen, only))


def _part(spec: AttentionSpec, name: str | None, target: str) -> AttentionSpec:
    """The spec of the kernel of that name, or of the only one."""
    from attngen.passes.parts import is_composed, several
    from attngen.passes.serves import served_parts

    if name is None and not is_composed(spec):
        return spec
    found = served_parts(spec, target, name)
    if len(found) > 1:
        raise several(spec)
    return found[0].spec


def _compiled(spec: AttentionSpec, target: str, only: str | None) -> KernelSource:
    """The file of one direction, or of both."""
    if only == "forward":
        return _emit(_plan(spec, target))
    from attngen.directions import plan_gradients
    from attngen.emit.both import emit_both, emit_without_backward

    plans = _plan(spec, target) if only is None else None
    gradients = plan_gradients(spec, target)
    if plans is None:
        if gradients.plans is None or gradients.refused:
            raise AttnError(*gradients.refused)
        return _emit_backward(gradients.plans)
    if gradients.plans is None:
        return emit_without_backward(plans, gradients.notes)
    return emit_both(plans, gradients.plans, gradients.notes)


def check(spec: SpecLike) -> list[Diagnostic]:
    """Every fault of a spec's text (syntax, names, types, meaning), in order; empty if there is none."""
    from attngen.syntax import check_text

    if isinstance(spec, AttentionSpec):
        return []
    try:
        return list(check_text(_source(spec)))
    except AttnError as faults:
        return list(faults.diagnostics)


def format(text: str) -> str:
    """The canonical spelling of a spec's text, comments kept. Idempotent. Raises: AttnError E01xx."""
    from attngen.syntax import format_text

    return str(format_text(text))


def explain(spec: SpecLike, *, target: str | None = None, name: str | None = None, **overrides: object) -> str:
    """Plans of `spec`, forward and backward, their budgets, and the candidates that were rejected, as text; where it
    takes several kernels, of each.
    """
    from attngen.directions import plan_gradients
    from attngen.passes.parts import describe, is_composed
    from attngen.passes.serves import served_parts
    from attngen.plan_text_backward import describe_backward

    options = Options.parse({**overrides, "target": target})
    resolved = resolve(spec, name, options)
    chosen = _target(resolved, options)
    blocks = [describe(resolved)] if is_composed(resolved) else []
    for one in served_parts(resolved, chosen):
        forward = _plan(one.spec, chosen)
        gradients = plan_gradients(one.spec, chosen)
        blocks += [explain_plan(forward), describe_backward(gradients.plans, gradients.refused)]
    return "\n\n".join(blocks)


def resolve(spec: SpecLike, name: str | None, options: Options) -> AttentionSpec:
    """The spec with every override applied."""
    if isinstance(spec, AttentionSpec) and name is None and options == Options(target=options.target):
        return spec  # as it was resolved before: no stage of its own
    return _resolve(spec, name, options)


@staged("spec")
def _resolve(spec: SpecLike, name: str | None, options: Options) -> AttentionSpec:
    settings()  # ATTNGEN_LOG counts from the first stage on
    if name is not None and not isinstance(name, str):
        raise error(
            "E0503",
            f"option `name` does not take {name!r}",
            notes=("name: which attention block of the file",),
            helps=("give the block's name as text, or leave it out for the last one of the file",),
        )
    if isinstance(spec, AttentionSpec):
        resolved = _override(spec, options)
        if name is not None and name != spec.name:
            raise error("E0504", f"the spec is `{spec.name}`, not `{name}`", helps=("leave `name` out",))
    else:
        from attngen.syntax import load_spec

        resolved = load_spec(_source(spec), name=name, overrides=options.language())
    changes = options.schedule()
    return resolved.replace(schedule=resolved.schedule.replace(**changes)) if changes else resolved


def explain_plan(plan_set: PlanSet) -> str:
    """A PlanSet as text."""
    from attngen.plan_text import describe

    return describe(plan_set)


def is_text(spec: str) -> bool:
    """The rule that tells a spec's text from a path: text has a newline or a brace."""
    return "\n" in spec or "{" in spec


def _source(spec: str | os.PathLike[str]) -> str | Path:
    """Spec text, or the path of a file that exists."""
    if not isinstance(spec, str | os.PathLike):
        raise error(
            "E0504",
            f"a spec is a path, a text or an AttentionSpec, found {type(spec).__name__}",
            helps=("pass the path of a .attn file",),
        )
    if isinstance(spec, str) and is_text(spec):
        return spec
    path = Path(spec).expanduser()
    try:
        if path.is_file():
            return path
        folder = path.is_dir()
    except (OSError, ValueError):
        folder = False
    what = f"`{path}` is a folder" if folder else f"there is no file `{path}`"
    beside = sorted(p.name for p in path.parent.glob("*.attn")) if path.parent.is_dir() else []
    close = get_close_matches(path.name, beside, n=1)
    raise error(
        "E0504",
        what,
        notes=("a string without a newline or a brace is read as a path",),
        helps=(f"did you mean `{path.parent / close[0]}`?" if close else f"paths are relative to {Path.cwd()}",),
    )


def _override(spec: AttentionSpec, options: Options) -> AttentionSpec:
    """Apply the language-level overrides to a spec that is already resolved, keeping its default scale a default."""
    changes = options.language()
    if not changes:
        return spec
    from attngen.ir.expr import const
    from attngen.ir.types import DType, Layout

    fields: dict[str, object] = {}
    if "head_dim" in changes:
        fields = {"head_dim_qk": changes["head_dim"]}
        if spec.head_dim_v == spec.head_dim_qk:
            fields["head_dim_v"] = changes["head_dim"]
        if spec.scale == const(1.0 / math.sqrt(spec.head_dim_qk)):
            fields["scale"] = const(1.0 / math.sqrt(options.head_dim or 1))
    if "head_dim_v" in changes:
        fields["head_dim_v"] = changes["head_dim_v"]
    if "dtype" in changes:
        fields["dtype"] = DType(str(changes["dtype"]))
    if "layout" in changes:
        fields["layout"] = Layout(str(changes["layout"]))
    if "deterministic" in changes:
        fields["backward"] = spec.backward.replace(deterministic=changes["deterministic"])
    return spec.replace(**fields)


def _target(spec: AttentionSpec, options: Options, *, here: bool = False) -> str:
    """The call's target, else the environment's, else the spec's first (`here`: the first that this GPU runs)."""
    named = options.target or settings().target
    if named or not spec.targets:
        return named or DEFAULT_TARGET
    if here and len(spec.targets) > 1:
        return next((t for t in spec.targets if _has_gpu(t)), spec.targets[0])
    return spec.targets[0]


def _plan(spec: AttentionSpec, target: str, tuned: Tuned | None = None) -> PlanSet:
    from attngen.search import plan

    return plan(spec, target, tuned)


def _tuned(spec: AttentionSpec, target: str) -> Tuned | None:
    """What `attngen tune` recorded for this spec on the GPU at hand. A compiled file never follows it: its text depends
    on spec, options and attngen alone.
    """
    from attngen import tuned

    if not _has_gpu(target):
        return None
    import torch

    return tuned.find(settings().cache_dir, target, torch.cuda.get_device_name(), spec)


@staged("emit")
def _emit(plan_set: PlanSet) -> KernelSource:
    from attngen.emit.module import emit

    return emit(plan_set)


def _dumped(source: KernelSource) -> KernelSource:
    """Leave a copy in ATTNGEN_DUMP_DIR, if it is set."""
    folder = settings().dump_dir
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            source.write(folder / f"{source.kernel_id}.py", force=True)
        except (OSError, AttnError) as failure:
            log.warning("cannot dump the kernel into %s: %s", folder, failure)
    return source


def _callable(
    spec: AttentionSpec, target: str, cache: Any, progress: Callable[[str, int, int], None] | None = None
) -> AnyAttention:
    """The attention of a spec: by one kernel or several, behind a front where a call's arguments are others; without a
    kernel for what it means, the reference, unless a GPU waits for a kernel.
    """
    from attngen.jit.kernel import portable_json
    from attngen.passes.parts import is_composed, kernel_spec, parts
    from attngen.passes.selected import is_selected
    from attngen.passes.serves import why_not

    reasons = why_not(spec, target)
    recipe = (_rebuild, (portable_json(spec), target, str(cache.root) if cache.persistent else None))
    if reasons:
        from attngen.ir.spec import ScheduleHints

        # a wish of the schedule that cannot be honoured is no reason to do without a kernel
        meant = why_not(spec.replace(schedule=ScheduleHints()), target)
        if not meant or meant[0].code != "E0402" or _has_gpu(target):
            raise AttnError(*reasons)
        from attngen.jit.unserved import ReferenceAttention

        return ReferenceAttention(spec, target, reasons, recipe)
    if is_selected(spec):
        from attngen.jit.selected import SelectedAttention

        return SelectedAttention(spec, _attention(kernel_spec(spec), target, cache, progress), recipe)
    whole = kernel_spec(spec)
    if whole is spec and not is_composed(spec):
        return _attention(spec, target, cache, progress)
    kernels = {p.name: _attention(p.spec, target, cache, progress) for p in parts(spec)}
    inner: Attention | SeveralAttention = kernels[next(iter(kernels))]
    if is_composed(spec):
        from attngen.jit.several import SeveralAttention

        inner = SeveralAttention(whole, kernels, recipe)
    if whole is spec:
        return inner
    from attngen.jit.composed import front

    return front(spec, inner, recipe)


def _attention(
    spec: AttentionSpec, target: str, cache: Any, progress: Callable[[str, int, int], None] | None = None
) -> Attention:
    from attngen.jit.kernel import portable_json
    from attngen.jit.sources import recall, remember
    from attngen.jit.unnormalized import kind_of

    described = portable_json(spec)
    tuned = _tuned(spec, target)
    key = described if tuned is None else f"{described}\n{tuned.model_dump_json()}"
    source, planned = recall(cache, key, target), None
    if source is None:
        planned = _plan(spec, target, tuned)
        source = _emit(planned)
        remember(cache, key, target, source)
    return kind_of(spec, lambda other: _attention(other, target, cache, progress))(
        spec,
        _dumped(source),
        target,
        cache,
        plan=lambda: planned or _plan(spec, target, tuned),
        explain=explain_plan,
        rebuild=lambda other: _twin(other, target, cache),
        backward=lambda captured: _backward(spec, target, cache, described, captured),
        recipe=(_rebuild, (described, target, str(cache.root) if cache.persistent else None)),
        progress=progress,
    )


def _backward(spec: AttentionSpec, target: str, cache: Any, described: str, captured: tuple[str, ...]) -> KernelSource:
    """The generated backward file, a file of its own for each set of `captured`, remembered like the forward's."""
    from attngen.jit.sources import recall, remember

    direction = ",".join(("backward", *captured))
    source = recall(cache, described, target, direction)
    if source is None:
        source = _emit_backward(_plan_backward(spec, target, captured))
        remember(cache, described, target, source, direction)
    return _dumped(source)


def _plan_backward(spec: AttentionSpec, target: str, captured: tuple[str, ...]) -> BackwardPlanSet:
    from attngen.search_backward import plan_backward

    return plan_backward(spec, target, captured=captured)


@staged("emit")
def _emit_backward(plan_set: BackwardPlanSet) -> KernelSource:
    from attngen.emit.backward import emit_backward

    return emit_backward(plan_set)


def _twin(spec: AttentionSpec, target: str, cache: Any) -> Attention:
    attention = _attention(spec, target, cache)
    return attention.compile() if _has_gpu(target) else attention


def _rebuild(spec: str, target: str, root: str | None) -> AnyAttention:
    """Build again from a pickle: the spec travels, the kernel comes from this machine's cache or compiler."""
    from attngen.jit.cache import KernelCache

    known = root is not None and Path(root).is_dir()
    cache = KernelCache(
        Path(root) if known and root else settings().cache_dir, persistent=settings().use_cache or known
    )
    attention = _callable(AttentionSpec.model_validate_json(spec), target, cache)
    return attention.compile() if _has_gpu(target) else attention


def _has_gpu(target: str) -> bool:
    """Whether the current GPU runs code for `target` (another kind is an error only once tensors on it arrive)."""
    import torch

    from attngen.jit.device import runs

    return torch.cuda.is_available() and runs(torch.cuda.current_device(), target)
