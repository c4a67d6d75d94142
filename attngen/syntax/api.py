"""Loading specs: the functions behind `attngen.syntax`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from attngen.diag.diagnostic import AttnError, Diagnostic, error
from attngen.diag.span import Source
from attngen.ir.spec import AttentionSpec
from attngen.syntax import ast
from attngen.syntax.collect import Faults
from attngen.syntax.defs import check_defs
from attngen.syntax.faults import closest
from attngen.syntax.overrides import overridden
from attngen.syntax.resolve import resolve
from attngen.syntax.scope import Scope, build_scope, read_source


def load_spec(
    source: str | Path,
    *,
    name: str | None = None,
    overrides: Mapping[str, object] | None = None,
    include_dirs: Sequence[str | Path] = (),
) -> AttentionSpec:
    """Read one attention block.

    Args:
        source: path of an `.attn` file, or the text of one (a str with a line break or a brace is text).
        name: which block; the last one of the file when left out.
        overrides: clauses given from outside, such as `{"head_dim": 64, "dtype": "fp16", "tile_m": 128}`.
        include_dirs: folders, besides the spec's own, that `include` may read.

    Raises:
        AttnError: E01xx for the first fault of syntax, E02xx and E03xx all together.
    """
    faults = Faults()
    scope = _scope(source, include_dirs, faults)
    block = _pick(scope, name, source)
    if overrides:
        block = overridden(block, scope, overrides, faults)
    spec = _guarded(block, scope, faults)
    faults.raise_if_any()
    assert spec is not None
    return spec


def load_all(source: str | Path, *, include_dirs: Sequence[str | Path] = ()) -> tuple[AttentionSpec, ...]:
    """Every attention block of the file itself, in order. Raises as load_spec does."""
    faults = Faults()
    scope = _scope(source, include_dirs, faults)
    _pick(scope, None, source)
    specs = [_guarded(scope.attentions[n], scope, faults) for n in scope.own]
    faults.raise_if_any()
    return tuple(s for s in specs if s is not None)


def check_text(source: str | Path, *, include_dirs: Sequence[str | Path] = ()) -> list[Diagnostic]:
    """All faults and warnings of a file, sorted by place; empty when it is good. A bad spec does not make it raise."""
    faults = Faults()
    try:
        scope = _scope(source, include_dirs, faults)
        for name in scope.own:
            _guarded(scope.attentions[name], scope, faults)
    except AttnError as fault:
        for d in fault.diagnostics:
            faults.keep(d)
    return faults.sorted()


def _guarded(block: ast.Attention, scope: Scope, faults: Faults) -> AttentionSpec | None:
    """Resolve, with the bounds that stop at once (and the interpreter's own) turned into faults like the others."""
    try:
        return resolve(block, scope, faults)
    except AttnError as fault:
        for d in fault.diagnostics:
            faults.keep(d)
    except RecursionError:
        faults.add(
            "E0108",
            f"attention `{block.name.text}` is nested too deeply for this call",
            block.head,
            "too deep here",
            helps=("call from fewer nested functions, or split its expressions with captured tensors",),
        )
    return None


def is_text(source: str | Path) -> bool:
    """A str that is a spec's text rather than a path."""
    return isinstance(source, str) and bool(
        re.search(r"[\n{]", source) or re.match(r"\s*attn[ \t]+[0-9]+\s*$", source) or not source.strip()
    )


def open_source(source: str | Path) -> tuple[Source, Path | None]:
    """The text, and the path it was read from."""
    if is_text(source):
        text = str(source)
        return Source("<text>", text.removeprefix("\ufeff")), None
    path = Path(os.fspath(source))
    return read_source(path), path


def _scope(source: str | Path, include_dirs: Sequence[str | Path], faults: Faults) -> Scope:
    opened, path = open_source(source)
    try:
        scope = build_scope(opened, path, [Path(d) for d in include_dirs], faults)
        if any(d.code in ("E0219", "E0220") for d in faults.sorted()):
            faults.raise_if_any()  # names that a missing file would define are no further faults
        check_defs(scope, faults)
    except RecursionError:
        raise error(
            "E0108", f"{opened.name} is nested too deeply for this call", helps=("split its expressions",)
        ) from None
    return scope


def _pick(scope: Scope, name: str | None, source: str | Path) -> ast.Attention:
    shown = "<text>" if is_text(source) else str(source)
    if not scope.own:
        raise error("E0222", f"{shown} declares no attention", helps=("add `attention name { head_dim = 128 }`",))
    if name is None:
        return scope.attentions[scope.own[-1]]
    if name not in scope.own:
        meant = closest(name, scope.own)
        known = ", ".join(scope.own)
        raise error(
            "E0222",
            f"{shown} declares no attention `{name}`",
            helps=(f"did you mean `{meant}`?" if meant else f"it declares {known}",),
        )
    return scope.attentions[name]
