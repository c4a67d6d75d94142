"""The persistent store of compiled kernels: readable folders, atomic, locked, checked on every read, healing itself.

    <root>/v1/<toolchain>/<kernel_id>-<key>/kernel.py  plan_0.so  plan_1.so  meta.json

`meta.json` lists every other file with its size and hash and is written last: a folder without it is an interrupted
compilation, which the next build of that kernel completes. A folder whose files do not match it is moved aside
(`.quarantine-…`) and built again. One process compiles a kernel, the others wait for it and load its result. Where the
folder cannot be written (read-only, full, no permission) kernels live in a temporary folder of the process, with one
warning; a compiled kernel is never lost to a cache that does not work.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from attngen.jit import storage
from attngen.jit.key import toolchain_id
from attngen.source import write_atomic

log = logging.getLogger("attngen.cache")
META = "meta.json"
#: Files of `jit.sources` beside the entries.
SOURCE_PREFIX = ".source-"


@dataclass(frozen=True, slots=True)
class Entry:
    """A complete, checked entry. `files` are the compiled plans in order; `info` is free JSON from the builder."""

    folder: Path
    kernel: Path
    files: tuple[Path, ...]
    info: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry as `attngen cache list` shows it. Size in bytes, `used` in seconds since the epoch."""

    folder: Path
    kernel_id: str
    bytes: int
    used: float
    complete: bool


#: Fills a folder: writes the plans beside `kernel.py` and returns (their names in order, info).
Builder = Callable[[Path], tuple[list[str], dict[str, object]]]


class KernelCache:
    """The store under one root folder. Safe for any number of threads and processes."""

    def __init__(self, root: Path, *, persistent: bool = True) -> None:
        self.root = root
        self.persistent = persistent

    def folder(self, kernel_id: str, key: str) -> Path:
        """Where the entry of a kernel lies, whether or not it exists."""
        return self.root / "v1" / toolchain_id() / f"{_safe(kernel_id)}-{key[:16]}"

    def get(self, kernel_id: str, key: str) -> Entry | None:
        """The entry if it is there and intact; a damaged one counts as absent."""
        return self._get(kernel_id, key, heal=False)

    def _get(self, kernel_id: str, key: str, *, heal: bool) -> Entry | None:
        folder = self.folder(kernel_id, key)
        try:
            return _read(folder, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as failure:
            if heal:  # only under the entry's lock: another process may be healing it
                log.warning("cache entry %s is damaged (%s); building it again", folder, failure)
                _quarantine(folder)
            return None

    def get_or_build(self, kernel_id: str, key: str, text: str, build: Builder) -> Entry:
        """The entry, built by `build` if it is absent. Falls back to a temporary folder if this one cannot be written.

        Raises: AttnError E0520 when no folder at all can be written; whatever `build` raises.
        """
        if self.persistent and (found := self.get(kernel_id, key)) is not None:
            return found
        if self.persistent:
            try:
                return self._build(kernel_id, key, text, build)
            except OSError as failure:
                if not storage.is_fault(failure):
                    raise
                storage.warn_once(self.root, failure)
        try:
            return KernelCache(storage.temporary_root())._build(kernel_id, key, text, build)
        except OSError as failure:
            if not storage.is_fault(failure):
                raise
            raise storage.no_storage(failure) from failure

    def _build(self, kernel_id: str, key: str, text: str, build: Builder) -> Entry:
        folder = self.folder(kernel_id, key)
        storage.make_folder(folder.parent)
        with storage.locked(folder.parent / f".{folder.name}.lock"):
            if (found := self._get(kernel_id, key, heal=True)) is not None:
                return found  # another process or thread built it while this one waited
            storage.make_folder(folder)
            for leftover in folder.glob(".*"):  # of a compilation that was killed
                storage.remove(leftover)
            write_atomic(folder / "kernel.py", text.encode())
            names, info = build(folder)
            record = {
                "key": key,
                "kernel_id": kernel_id,
                "plans": names,
                "files": {name: _stamp(folder / name) for name in ["kernel.py", *names]},
                "info": info,
            }
            write_atomic(folder / META, json.dumps(record, indent=1, sort_keys=True).encode())
            return _read(folder, key)

    def entries(self) -> list[Listed]:
        """Every entry, of every toolchain, most recently used first."""
        found = [_listed(folder) for folder in self._folders() if not folder.name.startswith(".")]
        return sorted(found, key=lambda e: -e.used)

    def size(self) -> int:
        """Bytes that the cache holds, leftovers included."""
        return sum(_bytes(folder) for folder in self._folders()) + sum(p.stat().st_size for p in self._sources())

    def sources(self) -> int:
        """How many generated texts are remembered, compiled or not."""
        return len(self._sources())

    def clear(self, older_than_s: float | None = None) -> tuple[int, int]:
        """Remove entries, or only those unused for that long; leftovers go too. Returns (entries, bytes) removed.

        A kernel that a process has loaded keeps working: its file stays open until the process ends.
        """
        now, count, freed = time.time(), 0, 0
        for path in self._sources():
            if older_than_s is None or now - path.stat().st_mtime >= older_than_s:
                freed += path.stat().st_size
                path.unlink(missing_ok=True)
        for folder in self._folders():
            if older_than_s is not None and now - _listed(folder).used < older_than_s:
                continue
            size = _bytes(folder)
            gone = folder.with_name(f".gone-{secrets.token_hex(6)}")
            try:
                with storage.locked(folder.parent / f".{folder.name}.lock", timeout_s=0.0):
                    folder.rename(gone)  # readers see it whole or not at all
                shutil.rmtree(gone)
            except storage.Busy:
                continue  # somebody is building it right now
            except OSError as failure:
                log.warning("cannot remove %s: %s", folder, failure)
                continue
            count, freed = count + (not folder.name.startswith(".")), freed + size
        return count, freed

    def _sources(self) -> list[Path]:
        return sorted((self.root / "v1").glob(f"*/{SOURCE_PREFIX}*.json"))

    def _folders(self) -> Iterator[Path]:
        for toolchain in sorted((self.root / "v1").glob("*")):
            if toolchain.is_dir():
                yield from (f for f in sorted(toolchain.iterdir()) if f.is_dir())


def _read(folder: Path, key: str) -> Entry:
    """Read and check an entry. Raises FileNotFoundError if there is none, ValueError if it is damaged."""
    record = json.loads((folder / META).read_bytes())
    if record["key"] != key:
        raise ValueError("it belongs to another key")
    for name, (size, digest) in record["files"].items():
        if "/" in name or not (folder / name).is_file() or [size, digest] != _stamp(folder / name):
            raise ValueError(f"{name} is missing or changed")
    if not all(name in record["files"] for name in record["plans"]):
        raise ValueError("a plan is not listed")
    with suppress(OSError):  # a read-only cache serves hits all the same
        os.utime(folder / META)  # last use, for `clear(older)`
    return Entry(folder, folder / "kernel.py", tuple(folder / n for n in record["plans"]), record["info"])


def _stamp(path: Path) -> list[object]:
    data = path.read_bytes()
    return [len(data), hashlib.sha256(data).hexdigest()]


def _quarantine(folder: Path) -> None:
    target = folder.with_name(f".quarantine-{folder.name[:60]}-{secrets.token_hex(4)}")
    try:
        folder.rename(target)
    except OSError as failure:
        log.warning("cannot move the damaged %s aside: %s", folder, failure)


def _safe(kernel_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", kernel_id)[:80].lstrip(".") or "kernel"


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _listed(folder: Path) -> Listed:
    meta = folder / META
    try:
        used = (meta if meta.exists() else folder).stat().st_mtime
    except OSError:
        used = 0.0
    return Listed(folder, folder.name.rpartition("-")[0] or folder.name, _bytes(folder), used, meta.exists())
