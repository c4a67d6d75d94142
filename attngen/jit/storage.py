"""Folders and locks below the cache, and what happens when the file system does not play along."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attngen.diag.diagnostic import AttnError, error
from attngen.jit.notice import AttngenWarning, say

log = logging.getLogger("attngen.cache")
LOCK_TIMEOUT_S = 600.0
_FAULTS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR, errno.EEXIST),
    *(errno.EIO, errno.ENAMETOOLONG, errno.ESTALE, errno.ELOOP),
    errno.ENOENT,  # somebody removed the folder meanwhile
}


class Busy(Exception):
    """The lock is held by another."""


@contextmanager
def locked(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the lock of one entry across processes and threads. The system frees it if its holder dies.

    Past `timeout_s` raises Busy; without one goes on unlocked after LOCK_TIMEOUT_S.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, thread_local=False, is_singleton=False)
    try:
        lock.acquire(timeout=LOCK_TIMEOUT_S if timeout_s is None else timeout_s)
    except Timeout:
        if timeout_s is not None:
            raise Busy from None
        log.warning("%s is held for more than %d s; compiling without it", path, LOCK_TIMEOUT_S)
        yield  # every file is replaced atomically: two writers waste work, nothing more
        return
    except NotImplementedError:  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        lock.release()


def make_folder(path: Path) -> None:
    """Create a folder that only its owner may enter, and those above it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


def remove(path: Path) -> None:
    """Remove a file or a tree, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_fault(failure: OSError) -> bool:
    """Whether a failure says that a folder cannot be written, rather than that something else went wrong."""
    return failure.errno in _FAULTS


_lock = threading.Lock()
_warned: set[Path] = set()
_temporary: dict[int, Path] = {}


def temporary_root() -> Path:
    """A folder of this process alone, removed when it ends. Raises: AttnError E0520."""
    with _lock:
        owner = os.getpid()
        if owner not in _temporary:
            try:
                root = Path(tempfile.mkdtemp(prefix="attngen-"))
            except OSError as failure:
                raise no_storage(failure) from failure

            def clean() -> None:
                if os.getpid() == owner:  # not in a child that was forked
                    shutil.rmtree(root, ignore_errors=True)

            atexit.register(clean)
            _temporary[owner] = root
        return _temporary[owner]


def warn_once(root: Path, failure: OSError) -> None:
    """Say that a cache cannot be written, once for each root."""
    with _lock:
        known = root in _warned
        _warned.add(root)
    if not known:
        say(
            f"the kernel cache {root} cannot be written ({failure.strerror or failure}); compiled kernels live in a "
            "temporary folder of this process and are compiled again next time. Free space or permissions there, or "
            "name another folder with ATTNGEN_CACHE_DIR or cache_dir=.",
            AttngenWarning,
        )


def no_storage(failure: OSError) -> AttnError:
    """E0520."""
    return error(
        "E0520",
        f"no folder can hold the compiled kernel: {failure.strerror or failure}",
        notes=("neither the cache folder nor a temporary folder can be written",),
        helps=("free some space, or point ATTNGEN_CACHE_DIR or TMPDIR to a folder with a few megabytes left",),
    )
