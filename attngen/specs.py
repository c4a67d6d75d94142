"""A spec as a caller gives it (a path, a text, an AttentionSpec, and overrides), resolved; and the target it is for."""

from __future__ import annotations

import math
import os
from difflib import get_close_matches
from pathlib import Path

from attngen.diag.diagnostic import error
from attngen.ir.spec import AttentionSpec
from attngen.options import Options
from attngen.settings import DEFAULT_TARGET, settings
from attngen.stages import staged

SpecLike = AttentionSpec | str | os.PathLike[str]


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

        resolved = load_spec(source_of(spec), name=name, overrides=options.language())
    changes = options.schedule()
    return resolved.replace(schedule=resolved.schedule.replace(**changes)) if changes else resolved


def is_text(spec: str) -> bool:
    """The rule that tells a spec's text from a path: text has a newline or a brace."""
    return "\n" in spec or "{" in spec


def source_of(spec: str | os.PathLike[str]) -> str | Path:
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


def target_of(spec: AttentionSpec, options: Options, *, here: bool = False) -> str:
    """The call's target, else the environment's, else the spec's first (`here`: the first that this GPU runs)."""
    named = options.target or settings().target
    if named or not spec.targets:
        return named or DEFAULT_TARGET
    if here and len(spec.targets) > 1:
        from attngen.jit import device

        return next((t for t in spec.targets if device.has_gpu(t)), spec.targets[0])
    return spec.targets[0]
