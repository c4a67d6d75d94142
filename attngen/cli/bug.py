"""The report behind "this is a bug in attngen": what a developer needs to see it happen again."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path

_DISTRIBUTIONS = ("attngen", "lark", "pydantic", "jinja2", "typer", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi")
_TEXT_LIMIT = 200_000


def versions() -> dict[str, str | None]:
    """Installed version of everything attngen stands on; None where it is missing."""
    found: dict[str, str | None] = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def write_bundle(bug: BaseException) -> str:
    """Write command line, versions, traceback and the named specs to one JSON file; returns its path."""
    specs = {}
    for argument in sys.argv[1:]:
        try:
            path = Path(argument)
            if path.suffix in {".attn", ".py"} and path.is_file():
                specs[argument] = path.read_text(errors="replace")[:_TEXT_LIMIT]
        except (OSError, ValueError):
            continue
    report = {
        "schema": 1,
        "argv": sys.argv[1:],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "traceback": traceback.format_exception(bug),
        "specs": specs,
    }
    try:
        handle, name = tempfile.mkstemp(prefix="attngen-bug-", suffix=".json")
        with os.fdopen(handle, "w") as file:
            json.dump(report, file, indent=1)
    except OSError as fault:
        traceback.print_exception(bug)
        return f"(no report could be written: {fault})"
    return name
