"""`attngen cache`: where compiled kernels are kept, what is there, and how to be rid of it."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli import common
from attngen.diag.words import counted

if TYPE_CHECKING:
    from attngen.jit.cache import KernelCache

app = typer.Typer(help="Where compiled kernels are kept: path, list, size, clear.", no_args_is_help=True)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def _cache() -> KernelCache:
    from attngen.jit.cache import KernelCache
    from attngen.settings import settings

    return KernelCache(settings().cache_dir)


@app.command("path")
@common.command
def path() -> None:
    """Print the cache folder."""
    print(_cache().root)


@app.command("list")
@common.command
def list_(as_json: Annotated[bool, typer.Option("--json", help="Entries as JSON.")] = False) -> None:
    """List compiled kernels, most recently used first."""
    entries = _cache().entries()
    if as_json:
        found = [
            {
                "kernel_id": e.kernel_id,
                "bytes": e.bytes,
                "used": round(e.used),
                "complete": e.complete,
                "folder": str(e.folder),
            }
            for e in entries
        ]
        print(json.dumps({"schema": 1, "entries": found}, indent=1))
    elif entries:
        rows = [
            [e.kernel_id, _size(e.bytes), f"{_age(time.time() - e.used)} ago", "yes" if e.complete else "no"]
            for e in entries
        ]
        common.table(["kernel", "size", "used", "complete"], rows)
    else:
        texts = _cache().sources()
        common.say(f"no compiled kernel, {counted(texts, 'generated text')}" if texts else "the cache is empty")


@app.command("size")
@common.command
def size() -> None:
    """Print the bytes that the cache holds."""
    total = _cache().size()
    print(total)
    common.say(_size(total))


@app.command("clear")
@common.command
def clear(
    older: Annotated[
        str | None, typer.Option("--older", help="Only kernels unused for this long, e.g. 30d or 12h.")
    ] = None,
) -> None:
    """Remove compiled kernels; running processes keep theirs."""
    count, freed = _cache().clear(None if older is None else _seconds(older))
    common.say(f"removed {counted(count, 'kernel')}, {_size(freed)}")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text.strip())
    if match is None:
        raise common.Usage(
            f"--older takes a number and one of s, m, h, d, w, such as 30d; found {common.printable(text)!r}"
        )
    return float(match[1]) * _UNITS[match[2]]


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def _age(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
