"""Specs built from Python: everything is written as text first, so that one checker sees every spec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from attngen.diag.diagnostic import error
from attngen.diag.span import Source
from attngen.ir.spec import AttentionSpec
from attngen.syntax import unparse
from attngen.syntax.api import load_spec
from attngen.syntax.parser import parse_expression
from attngen.syntax.printer import print_literal

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*$")
_EXPRESSIONS = ("scale", "score", "mask", "sink", "epilogue")
_PARAM_KEYS = ("type", "default", "minimum", "maximum")
_TENSOR_KEYS = ("dtype", "dims", "grad", "sorted")


def make_spec(
    name: str,
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    doc: str | None = None,
    dtype: str = "bf16",
    layout: str = "bshd",
    scale: str | float | None = None,
    score: str | None = None,
    mask: str | None = None,
    sink: str | float | None = None,
    normalizer: str = "softmax",
    epilogue: str | None = None,
    params: Mapping[str, Mapping[str, object]] | None = None,
    tensors: Mapping[str, Mapping[str, object]] | None = None,
    lets: Mapping[str, str] | None = None,
    include: Sequence[str] = ("std.attn",),
    include_dirs: Sequence[str | Path] = (),
    **options: object,
) -> AttentionSpec:
    """A spec from Python values, checked exactly as a file is.

        make_spec("local", head_dim=64, mask="causal and window(keys)", params={"keys": {"type": "int", "minimum": 1}})

    Args:
        name: an ASCII word.
        head_dim, head_dim_v: columns of q and k, and of v where they differ.
        doc: text; its lines become the block's doc lines.
        scale, score, mask, sink, epilogue: expressions in spec spelling.
        params: by name, `type` ("int" unless given), `default`, `minimum`, `maximum`.
        tensors: by name, `dtype`, `dims` (axis names or extents), `grad`, `sorted`.
        lets: expressions by name.
        include: files whose defs the expressions may use.
        options: what `load_spec` takes as overrides: `tile_m`, `stages`, `order`, `deterministic`, `out_dtype`, …

    Raises:
        AttnError: E0112 for a Python value that no spec can hold; otherwise as load_spec.
    """
    lines = ["attn 1", *(f"include {_quoted(path, 'include')}" for path in include), ""]
    lines += [_quoted(line, "doc") for line in doc.split("\n")] if doc is not None else []
    lines += [f"attention {_name(name)} {{", f"head_dim = {_int(head_dim, 'head_dim')}"]
    if head_dim_v is not None:
        lines[-1] += f", v = {_int(head_dim_v, 'head_dim_v')}"
    lines += [
        f"{word} = {_name(value, word)}"
        for word, value in (("dtype", dtype), ("layout", layout), ("normalizer", normalizer))
    ]
    lines += [_param(n, p) for n, p in (params or {}).items()]
    lines += [_tensor(n, t) for n, t in (tensors or {}).items()]
    lines += [f"let {_name(n)} = {_expression(e, n)}" for n, e in (lets or {}).items()]
    given = dict(zip(_EXPRESSIONS, (scale, score, mask, sink, epilogue), strict=True))
    lines += [f"{word} = {_expression(value, word)}" for word, value in given.items() if value is not None]
    return load_spec("\n".join([*lines, "}"]) + "\n", overrides=options, include_dirs=include_dirs)


def _param(name: str, given: Mapping[str, object]) -> str:
    _known(given, _PARAM_KEYS, f"param `{name}`")
    text = f"param {_name(name)}: {_name(given.get('type', 'int'))}"
    for key, word in (("minimum", ">="), ("maximum", "<="), ("default", "=")):
        if given.get(key) is not None:
            text += f" {word} {_literal(given[key], f'{key} of {name}')}"
    return text


def _tensor(name: str, given: Mapping[str, object]) -> str:
    _known(given, _TENSOR_KEYS, f"tensor `{name}`")
    dims = given.get("dims")
    if not isinstance(dims, tuple | list) or not dims:
        raise _bad(f"tensor `{name}` needs `dims`", "give axis names or extents: `dims=('batch', 'seqlen_kv')`")
    axes = ", ".join(_int(d, f"an axis of `{name}`") if isinstance(d, int) else _name(d, "an axis") for d in dims)
    return (
        f"tensor {_name(name)}: {_name(given.get('dtype', 'f32'))}[{axes}]"
        + " grad" * bool(given.get("grad"))
        + " sorted" * bool(given.get("sorted"))
    )


def _expression(value: object, what: str) -> str:
    """An expression, parsed here so that no text can close its clause and open another."""
    if isinstance(value, bool | int | float):
        return _literal(value, what)
    if not isinstance(value, str):
        raise _bad(
            f"`{what}` must be a string in spec spelling, found {type(value).__name__}", "write the expression as text"
        )
    return unparse.expression(parse_expression(Source(f"<{what}>", value)))


def _literal(value: object, what: str) -> str:
    if isinstance(value, bool | int):
        return print_literal(value)
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return print_literal(value)
    raise _bad(
        f"{what} must be a finite number or a bool, found {str(value)[:40]!r}", "give a Python int, float or bool"
    )


def _int(value: object, what: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return str(value)
    raise _bad(f"{what} must be a whole number, found {str(value)[:40]!r}", "give a Python int")


def _name(value: object, what: str = "a name") -> str:
    text = str(value)
    if _NAME.match(text) and "\n" not in text:
        return text
    raise _bad(f"{what} must be an ASCII word, found {text[:40]!r}", "use letters, digits and `_`")


def _quoted(text: str, what: str) -> str:
    if any(ord(c) < 32 for c in text):
        raise _bad(f"{what} holds a control character", "remove it")
    return unparse.string(text)


def _known(given: Mapping[str, object], keys: tuple[str, ...], what: str) -> None:
    for key in given:
        if key not in keys:
            raise _bad(f"{what} has no `{str(key)[:40]}`", f"known are {', '.join(keys)}")


def _bad(message: str, mend: str) -> Exception:
    return error("E0112", message, helps=(mend,))
