"""Clauses from outside the file, `overrides={"head_dim": 64, "tile_m": 128}`: a block that extends the chosen one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from attngen.diag.diagnostic import error
from attngen.diag.span import Source
from attngen.syntax import ast, hints
from attngen.syntax.collect import Faults
from attngen.syntax.faults import closest, quoted
from attngen.syntax.merge import merged
from attngen.syntax.parser import parse_file
from attngen.syntax.scope import Scope

#: Option name -> (block or None for a clause, entry or clause word).
OPTIONS: dict[str, tuple[str | None, str]] = {
    **{word: (None, word) for word in ("head_dim", "head_dim_v", "dtype", "layout", "normalizer", "target")},
    "out_dtype": ("output", "dtype"),
    "max_logit": ("output", "max_logit"),
    "deterministic": ("backward", "deterministic"),
    **{name: ("schedule", name) for name in hints.SCHEDULE},
}
_VALUE = re.compile(r"[A-Za-z0-9_]{1,64}( ?x ?[A-Za-z0-9_]{1,16})?(, ?[A-Za-z0-9_]{1,64})*$")


def overridden(block: ast.Attention, scope: Scope, overrides: Mapping[str, object], faults: Faults) -> ast.Attention:
    """`block` with the clauses that `overrides` stands for merged over it. None as a value leaves an option alone.

    Raises AttnError E0223 for an option or a value that cannot be one.
    """
    given = {name: _text(name, value) for name, value in overrides.items() if value is not None}
    if not given:
        return block
    whole = merged(block, scope, faults)
    if whole is None:
        return block
    lines = [f"attention {block.name.text} {{"]
    lines += _head_dims(whole, given)
    lines += [
        f"  {word} = {given[name]}"
        for name, (part, word) in OPTIONS.items()
        if part is None and name in given and not name.startswith("head_dim")
    ]
    for part in ("output", "schedule", "backward"):
        entries = [
            f"{word} = {given[name]}" for name, (owner, word) in OPTIONS.items() if owner == part and name in given
        ]
        if entries:
            lines.append(f"  {part} {{ {', '.join(entries)} }}")
    file = parse_file(Source("<overrides>", "\n".join(["attn 1", *lines, "}"]) + "\n"))
    child = next(i for i in file.items if isinstance(i, ast.Attention))
    both = Scope(scope.defs, {**scope.attentions, "": whole}, [])
    result = merged(replace(child, base=ast.Word("", block.name.span)), both, faults)
    assert result is not None
    return replace(result, name=block.name, base=None, doc=block.doc or whole.doc, head=block.head, span=block.span)


def _head_dims(whole: ast.Attention, given: Mapping[str, str]) -> list[str]:
    if not {"head_dim", "head_dim_v"} & set(given):
        return []
    old = next((c for c in whole.clauses if isinstance(c, ast.HeadDim)), None)
    qk = given.get("head_dim") or (old.qk.text if old else "")
    v = given.get("head_dim_v") or (old.v.text if old and old.v else "")
    if not qk:
        raise error("E0223", "option `head_dim_v` needs `head_dim` too", helps=("give both",))
    for name, text in (("head_dim", qk), ("head_dim_v", v)):
        if text and not text.isdigit():
            raise error(
                "E0223",
                f"option `{name}` must be a whole number, found {text}",
                helps=("give the columns of one head, such as 128",),
            )
    return [f"  head_dim = {qk}" + (f", v = {v}" if v else "")]


def _text(name: str, value: object) -> str:
    """An option's value as a spec writes it; only words and numbers pass, so no option can add clauses."""
    if name not in OPTIONS:
        meant = closest(str(name), OPTIONS)
        raise error(
            "E0223",
            f"unknown option `{str(name)[:40]}`",
            helps=(f"did you mean `{meant}`?" if meant else f"options are {quoted(OPTIONS)}",),
        )
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        parts = [_text(name, v) for v in value]
        return (" x " if name in ("tile", "cluster") else ", ").join(parts)
    text = str(value)
    if (isinstance(value, int) and value >= 0) or (isinstance(value, str) and _VALUE.match(text)):
        return text
    raise error(
        "E0223",
        f"option `{name}` cannot be {text[:40]!r}",
        helps=("give a word, a whole number of at least 0, or a bool",),
    )
