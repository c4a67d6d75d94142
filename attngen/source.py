"""KernelSource: the text of one generated file, and how it is written without losing somebody's edits."""

from __future__ import annotations

import ast
import hashlib
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.diag.diagnostic import error

_META = "ATTN_META"

#: Held around everything here that turns text into Python syntax trees. CPython before 3.13 counts the depth of that
#: conversion once for all threads and raises SystemError when two of them are in it.
SYNTAX_LOCK = threading.RLock()
_PARSE_TRIES = 8


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A generated kernel file. `sha256` is the hash of `text`; `kernel_id` names the spec, target and plans."""

    text: str
    kernel_id: str
    sha256: str

    @property
    def meta(self) -> dict[str, Any]:
        """The file's `ATTN_META`, read without importing the file."""
        return read_meta(self.text)

    def write(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the text to `path`, atomically. An existing file is replaced only when it is a generated one that
        nobody edited (the hash of its body still is the one it states), or with `force`.

        Raises: AttnError E0530 (edited), E0531 (not a generated file), E0532 (cannot be written).
        """
        target = Path(path)
        if not force:
            _refuse_to_lose(target)
        try:
            write_atomic(target, self.text.encode())
        except OSError as failure:
            raise error(
                "E0532",
                f"cannot write {target}: {failure.strerror or failure}",
                helps=("name a file in an existing folder that you may write to",),
            ) from failure
        return target


def parse_python(text: str) -> ast.Module:
    """`ast.parse`, safe from any thread.

    Raises: SyntaxError, ValueError, RecursionError, as `ast.parse`.
    """
    with SYNTAX_LOCK:
        for _ in range(_PARSE_TRIES - 1):
            try:
                return ast.parse(text)
            except SystemError:  # somebody else's code is parsing, without the lock
                continue
        return ast.parse(text)


def read_meta(text: str) -> dict[str, Any]:
    """The `ATTN_META` literal of a generated file; empty when there is none."""
    return _assigned(_excerpt(text)) or _assigned(text)


def _excerpt(text: str) -> str:
    """The lines of the table alone, as generated: parsing a whole kernel takes 50 ms."""
    start = text.find(f"\n{_META} = {{\n") + 1
    end = text.find("\n}\n", start)
    return text[start : end + 3] if start > 0 and end > 0 else ""


def _assigned(text: str) -> dict[str, Any]:
    try:
        tree = parse_python(text)
    except (SyntaxError, ValueError, RecursionError):
        return {}
    for node in tree.body:
        names = [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        if _META in names and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                found = ast.literal_eval(node.value)
            except ValueError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def body_of(text: str, tree: ast.Module | None = None) -> str:
    """What `body_sha256` covers: all after the line that closes `ATTN_META`. `tree`: the text, parsed already."""
    for node in (tree or parse_python(text)).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(t, ast.Name) and t.id == _META for t in targets):
            return "".join(text.splitlines(keepends=True)[node.end_lineno :])
    return text


def body_sha256(text: str, tree: ast.Module | None = None) -> str:
    """Hash of the body, as the generator states it in `ATTN_META`."""
    return hashlib.sha256(body_of(text, tree).encode()).hexdigest()


def is_edited(text: str) -> bool:
    """A generated file whose body is no longer the one that was generated."""
    stated = read_meta(text).get("body_sha256")
    if stated is None:
        return True
    try:
        return bool(body_sha256(text) != stated)
    except SyntaxError:
        return True


def _refuse_to_lose(target: Path) -> None:
    try:
        old = target.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as failure:
        raise error("E0532", f"cannot write {target}: {failure}", helps=("name another file",)) from failure
    if not old.strip():
        return
    if _META not in old:
        raise error(
            "E0531",
            f"{target} exists and is not a generated kernel",
            notes=("it has no ATTN_META table",),
            helps=("name another file, or pass force=True (`--force`) to replace it",),
        )
    if is_edited(old):
        raise error(
            "E0530",
            f"{target} was edited after it was generated",
            notes=("the hash of its body differs from the one in its ATTN_META table",),
            helps=("write to another file to keep the edits, or pass force=True (`--force`) to replace it",),
        )


def write_atomic(path: Path, data: bytes) -> None:
    """Write `path` so that a reader sees the old bytes or the new, never a part. A device or pipe is just written."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    temporary = path.parent / f".{path.name[:80]}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
