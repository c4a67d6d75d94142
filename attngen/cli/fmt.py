"""`attngen fmt`: the one canonical layout of a spec, comments kept."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from attngen.cli import common, files


def fmt(
    specs: Annotated[
        list[str],
        typer.Argument(metavar="SPEC...", help="Files, rewritten in place; - is stdin to stdout.", show_default=False),
    ],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if a file would change.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; print the changes.")] = False,
) -> None:
    """Format specs. Idempotent; keeps comments and meaning; has no options."""
    from attngen.syntax import format_text

    changed = 0
    for name in specs:
        source = files.read_source(name)
        text = source if isinstance(source, str) else read_spec(name)
        formatted = format_text(text, "<stdin>" if name == "-" else name)
        if formatted != text:
            changed += 1
            if diff:
                files.write_text("-", _diff(text, formatted, common.printable(name)))
            elif check:
                common.say(f"{common.printable(name)}: would change")
            elif name != "-":
                files.write_text(name, formatted)
                common.say(f"{common.printable(name)}: formatted")
        if name == "-" and not (check or diff):
            files.write_text("-", formatted)
    if changed and (check or diff):
        raise typer.Exit(common.SPEC)


def _diff(before: str, after: str, name: str) -> str:
    """A unified diff, each of its lines ended: a text whose last line is not says so, as `diff` does."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, f"{name} (formatted)"
    )
    return "".join(x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines)


def read_spec(name: str) -> str:
    """A spec's text, or a usage fault that says why not."""
    try:
        with open(name, "rb") as file:
            data = file.read(files.MAX_BYTES + 1)
        if len(data) > files.MAX_BYTES:
            raise common.Usage(f"{common.printable(name)} is larger than {files.MAX_BYTES // 1_000_000} MB: not a spec")
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise common.Usage(
            f"{common.printable(name)} is not UTF-8 text: {fault.reason} at byte {fault.start}"
        ) from None
    except OSError as fault:
        raise common.Usage(f"cannot read {common.printable(name)}: {fault.strerror or fault}") from None
