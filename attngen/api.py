"""What attngen does, as functions: each composes the stages, and decides nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attngen.diag.diagnostic import AttnError, Diagnostic, error
from attngen.generate import dumped, generate, part_of, plan
from attngen.ir.spec import AttentionSpec
from attngen.options import Options
from attngen.settings import settings
from attngen.source import KernelSource
from attngen.specs import SpecLike, resolve, source_of, target_of

if TYPE_CHECKING:
    from attngen.callables import AnyAttention


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
    No length, param or tensor is in a kernel. What calls may make besides, each once: its siblings (query heads that
    share row tiles, small tiles), by the first call that gains by one or by `compile(group=…)` of what is returned, and
    none with a `tile` and `pack_gqa=1`; a twin for the other 16-bit dtype, or for the LSE of weights that are no
    softmax, by the first call for it; the backward kernel, by the first call that needs gradients, one for each set of
    them, or now with `backward=True` (planned and emitted, and compiled where there is such a GPU).
    A spec that uses what no kernel serves yet is refused on a machine with such a GPU; elsewhere it gives a callable
    for CPU tensors, with an AttngenNotice of the reasons: see `attngen.jit.unserved`.
    `progress(what, done, total)` is called while plans compile.

    Raises: AttnError E01xx-E03xx (the spec), E04xx (no plan serves it, with the reasons), E05xx (this machine).
    """
    from attngen.callables import callable_of
    from attngen.jit import device
    from attngen.jit.cache import KernelCache
    from attngen.jit.unserved import ReferenceAttention

    options = Options.parse({**overrides, "target": target})
    resolved = resolve(spec, name, options)
    chosen = target_of(resolved, options, here=True)
    found = settings()
    root = Path(cache_dir).expanduser().absolute() if cache_dir is not None else found.cache_dir
    cache = KernelCache(root, persistent=found.use_cache or cache_dir is not None)
    attention = callable_of(resolved, chosen, cache, progress)
    if isinstance(attention, ReferenceAttention):
        return attention
    for one in getattr(attention, "kernels", [attention]) if backward else ():
        one.backward.source  # noqa: B018 - its faults are said now, also without a GPU
    if device.has_gpu(chosen):
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
    chosen = target_of(resolved, options)
    return dumped(generate(part_of(resolved, part, chosen), chosen, only))


def check(spec: SpecLike) -> list[Diagnostic]:
    """Every fault of a spec's text (syntax, names, types, meaning), in order; empty if there is none."""
    from attngen.syntax import check_text

    if isinstance(spec, AttentionSpec):
        return []
    try:
        return list(check_text(source_of(spec)))
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
    from attngen.passes.selected import is_selected
    from attngen.passes.serves import served_parts
    from attngen.plan_text import describe as describe_forward
    from attngen.plan_text_backward import describe_backward

    options = Options.parse({**overrides, "target": target})
    resolved = resolve(spec, name, options)
    chosen = target_of(resolved, options)
    blocks = [describe(resolved)] if is_composed(resolved) or is_selected(resolved) else []
    for one in served_parts(resolved, chosen):
        forward = plan(one.spec, chosen)
        gradients = plan_gradients(one.spec, chosen)
        blocks += [describe_forward(forward), describe_backward(gradients.plans, gradients.refused)]
    return "\n\n".join(blocks)
