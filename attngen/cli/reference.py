"""attngen/docs/reference.md: the tables of the code as a page. Written and checked by `attngen regen`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_HEAD = """# Reference

Written by `attngen regen` from the tables of the code; CI compares it byte for byte.
"""


def render() -> str:
    """The whole page."""
    blocks = [_HEAD, *_commands(), *_options(), *_variables(), *_functions(), *_codes()]
    return "\n".join(blocks).rstrip() + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(*header)
    yield "|" + "---|" * len(header)
    for row in rows:
        yield _row(*row)
    yield ""


def _commands() -> Iterator[str]:
    from attngen.cli.main import COMMANDS, app

    yield "## Commands\n"
    yield "Exit codes: 0 done, 1 the spec is at fault, 2 usage, 3 this machine is, 70 a bug in attngen. The product"
    yield "goes to stdout, everything else to stderr. `NO_COLOR` and `FORCE_COLOR` are honoured.\n"
    for name, function in COMMANDS.items():
        yield f"### attngen {name}\n"
        yield inspect.cleandoc(function.__doc__ or "").replace("\n\n", "\n\n") + "\n"
        yield from _parameters(function)
    yield "### attngen cache\n"
    for group in app.registered_groups:
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            assert command.callback is not None
            yield f"`attngen cache {command.name}`: {inspect.cleandoc(command.callback.__doc__ or '')}\n"
            yield from _parameters(inspect.unwrap(command.callback))


def _parameters(function: Any) -> Iterator[str]:
    rows = []
    for name, hint in get_type_hints(function, include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        info = next(a for a in get_args(hint)[1:] if hasattr(a, "help"))
        # In an Annotated declaration typer keeps the first flag in `default`.
        flags = [f for f in (info.default, *(info.param_decls or ())) if isinstance(f, str) and f.startswith("-")]
        words = ", ".join(f"`{f}`" for f in flags) or f"`{info.metavar or name.upper()}`"
        rows.append((words, info.help or ""))
    if rows:
        yield from _table(("argument", "meaning"), rows)


def _options() -> Iterator[str]:
    from attngen.options import table

    yield "## Options of build() and compile()\n"
    yield "Keywords besides the spec; each overrides what the spec says.\n"
    yield from _table(("option", "meaning"), [(f"`{n}`", text) for n, text in table()])


def _variables() -> Iterator[str]:
    from attngen.settings import VARIABLES

    yield "## Environment variables\n"
    yield from _table(("variable", "meaning"), [(f"`{n}`", text) for n, text in VARIABLES.items()])


def _functions() -> Iterator[str]:
    from attngen.ir.functions import FUNCTIONS

    yield "## Functions and operators of the language\n"
    yield "An int argument converts to float where only a float fits.\n"
    rows = []
    for f in FUNCTIONS.values():
        written = (
            f"`a {f.infix} b`"
            if f.infix and len(f.signatures[0][0]) == 2
            else f"`{f.infix} a`"
            if f.infix
            else f"`{f.name}`"
        )
        if f.name == "where":
            written = "`a if c else b`"
        types = "; ".join(f"({', '.join(a)}) -> {r}" for a, r in f.signatures)
        rows.append((written, types, f.doc, "yes" if f.derivative else "no"))
    yield from _table(("function", "types", "meaning", "differentiable"), rows)


def _codes() -> Iterator[str]:
    from attngen.diag.codes import CODES

    yield "## Diagnostics\n"
    yield "`attngen explain E0302` prints the full text of a row.\n"
    yield from _table(
        ("code", "name", "meaning"), [(c.code, c.slug, c.summary) for c in sorted(CODES.values(), key=lambda c: c.code)]
    )
