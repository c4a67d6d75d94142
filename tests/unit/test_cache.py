"""The kernel store: hits, damage, locks, faults of the file system, interruption, maintenance."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from attngen.diag.diagnostic import AttnError
from attngen.jit import cache as module
from attngen.jit import storage
from attngen.jit.cache import Entry, KernelCache
from attngen.jit.key import compile_variables, fingerprint, toolchain, toolchain_id
from attngen.jit.notice import AttngenWarning

KEY = "ab" * 32


class Builder:
    """Writes one plan file; counts its calls."""

    def __init__(self, data: bytes = b"machine code", wait: float = 0.0) -> None:
        self.calls, self.data, self.wait = 0, data, wait

    def __call__(self, folder: Path) -> tuple[list[str], dict[str, object]]:
        self.calls += 1
        assert (folder / "kernel.py").read_text() == "text"
        time.sleep(self.wait)
        (folder / "plan_0.so").write_bytes(self.data)
        return ["plan_0.so"], {"symbol": "s"}


def get(cache: KernelCache, build: Any, key: str = KEY) -> Entry:
    return cache.get_or_build("causal_sm_90a_1f", key, "text", build)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_warned", set())
    monkeypatch.setattr(storage, "_temporary", {})


def test_a_kernel_is_built_once_into_a_readable_folder(tmp_path: Path) -> None:
    build = Builder()
    first, second = get(KernelCache(tmp_path), build), get(KernelCache(tmp_path), build)
    assert build.calls == 1 and first == second
    assert first.folder == tmp_path / "v1" / toolchain_id() / f"causal_sm_90a_1f-{KEY[:16]}"
    assert first.kernel.read_text() == "text" and first.files[0].read_bytes() == b"machine code"
    assert first.info == {"symbol": "s"} and sorted(os.listdir(first.folder)) == ["kernel.py", "meta.json", "plan_0.so"]
    assert (tmp_path / "v1").stat().st_mode & 0o077 == 0 or tmp_path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "damage",
    {
        "truncated plan": lambda f: (f / "plan_0.so").write_bytes(b"machine"),
        "one bit": lambda f: (f / "plan_0.so").write_bytes(b"machine codf"),
        "edited kernel": lambda f: (f / "kernel.py").write_text("other"),
        "missing plan": lambda f: (f / "plan_0.so").unlink(),
        "no meta": lambda f: (f / "meta.json").unlink(),
        "half a meta": lambda f: (f / "meta.json").write_text('{"key": "ab'),
        "meta is a list": lambda f: (f / "meta.json").write_text("[]"),
        "empty meta": lambda f: (f / "meta.json").write_text(""),
        "other key": lambda f: (f / "meta.json").write_text(json.dumps({"key": "cd" * 32})),
        "meta of nothing": lambda f: (f / "meta.json").write_text(
            json.dumps({"key": KEY, "plans": ["plan_0.so"], "files": {}, "info": {}})
        ),
        "path outside": lambda f: (f / "meta.json").write_text(
            json.dumps({"key": KEY, "plans": ["../x"], "files": {"../x": [1, "00"]}, "info": {}})
        ),
        "plan is a folder": lambda f: ((f / "plan_0.so").unlink(), (f / "plan_0.so").mkdir()),
    }.items(),
    ids=lambda item: item[0].replace(" ", "-"),
)
def test_a_damaged_entry_is_a_miss_and_heals(tmp_path: Path, damage: Any) -> None:
    build = Builder()
    entry = get(KernelCache(tmp_path), build)
    damage[1](entry.folder)
    assert KernelCache(tmp_path).get("causal_sm_90a_1f", KEY) is None
    healed = get(KernelCache(tmp_path), build)
    assert build.calls == 2 and healed.files[0].read_bytes() == b"machine code"
    assert get(KernelCache(tmp_path), build) == healed and build.calls == 2
    KernelCache(tmp_path).clear()
    assert not [p for p in entry.folder.parent.iterdir() if p.is_dir()], "what was moved aside goes with clear"


def test_leftovers_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    folder = cache.folder("causal_sm_90a_1f", KEY)
    (folder / ".work-1").mkdir(parents=True)
    (folder / ".work-1" / "plan_0.o").write_bytes(b"half")
    (folder / ".kernel.py.1.tmp").write_bytes(b"half")
    (folder / "plan_0.so").write_bytes(b"half of it")
    build = Builder()
    entry = get(cache, build)
    assert build.calls == 1 and entry.files[0].read_bytes() == b"machine code"
    assert sorted(os.listdir(folder)) == ["kernel.py", "meta.json", "plan_0.so"]


def test_a_builder_that_fails_leaves_no_entry(tmp_path: Path) -> None:
    def fail(folder: Path) -> Any:
        (folder / "plan_0.so").write_bytes(b"half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        get(KernelCache(tmp_path), fail)
    assert KernelCache(tmp_path).get("causal_sm_90a_1f", KEY) is None
    build = Builder()
    get(KernelCache(tmp_path), build)
    assert build.calls == 1


def test_threads_share_one_build(tmp_path: Path) -> None:
    build = Builder(wait=0.2)
    found: list[Entry] = []
    threads = [threading.Thread(target=lambda: found.append(get(KernelCache(tmp_path), build))) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert build.calls == 1 and len(found) == 6 and len({e.folder for e in found}) == 1


_PROCESS = """
import sys, time
from pathlib import Path
from attngen.jit.cache import KernelCache
root, wait = Path(sys.argv[1]), float(sys.argv[2])
def build(folder):
    (root / f"built-{time.monotonic_ns()}").touch()
    (folder / "plan_0.so").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(wait)
    (folder / "plan_0.so").write_bytes(b"machine code")
    return ["plan_0.so"], {}
entry = KernelCache(root).get_or_build("causal_sm_90a_1f", "ab" * 32, "text", build)
print(entry.files[0].read_bytes().decode(), flush=True)
"""


def _start(root: Path, wait: float) -> subprocess.Popen[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    return subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(root), str(wait)], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_processes_share_one_build(tmp_path: Path) -> None:
    running = [_start(tmp_path, 0.5) for _ in range(4)]
    said = [p.communicate(timeout=60)[0] for p in running]
    assert [p.returncode for p in running] == [0] * 4
    assert all("machine code" in text for text in said)
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_a_process_killed_in_the_middle_blocks_nobody(tmp_path: Path) -> None:
    victim = _start(tmp_path, 600)
    assert victim.stdout is not None and victim.stdout.readline() == "building\n"
    waiting = _start(tmp_path, 0)
    time.sleep(0.5)
    assert waiting.poll() is None, "the second waits for the first"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert "machine code" in waiting.communicate(timeout=60)[0]
    assert KernelCache(tmp_path).get("causal_sm_90a_1f", KEY) is not None


def _unwritable(monkeypatch: pytest.MonkeyPatch, root: Path, number: int) -> None:
    """Writes below `root` fail (permission bits do not stop root, who may run the tests)."""
    real = module.write_atomic

    def write(path: Path, data: bytes) -> None:
        if path.is_relative_to(root):
            raise OSError(number, os.strerror(number), str(path))
        real(path, data)

    monkeypatch.setattr(module, "write_atomic", write)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_cache_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    _unwritable(monkeypatch, tmp_path, number)
    build = Builder()
    with pytest.warns(AttngenWarning, match=f"cannot be written .{os.strerror(number)}") as said:
        entry = get(KernelCache(tmp_path), build)
        again = get(KernelCache(tmp_path), build)
        get(KernelCache(tmp_path), build, key="cd" * 32)
    assert len(said) == 1 and "ATTNGEN_CACHE_DIR" in str(said[0].message)
    assert entry == again and build.calls == 2 and entry.files[0].read_bytes() == b"machine code"
    assert not entry.folder.is_relative_to(tmp_path)


def test_a_full_disk_in_the_builder_falls_back_too(tmp_path: Path) -> None:
    build = Builder()

    def full(folder: Path) -> Any:
        if folder.is_relative_to(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return build(folder)

    with pytest.warns(AttngenWarning, match="No space left"):
        assert get(KernelCache(tmp_path), full).files[0].read_bytes() == b"machine code"


@pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not stop root")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.warns(AttngenWarning):
        get(KernelCache(tmp_path / "cache"), Builder())


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.warns(AttngenWarning):
        assert get(KernelCache(tmp_path / "cache"), Builder()).files[0].read_bytes() == b"machine code"


def test_a_full_file_system(tmp_path: Path) -> None:
    """The real thing: a size limit on files, as of a full quota, in a process of its own."""
    script = (
        "import resource, signal, warnings, sys\n"
        "from pathlib import Path\n"
        "from attngen.jit.cache import KernelCache\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "def build(folder):\n"
        "    (folder / 'plan_0.so').write_bytes(b'x' * 100000)\n"
        "    return ['plan_0.so'], {}\n"
        "try:\n"
        "    KernelCache(Path(sys.argv[1])).get_or_build('a', 'ab' * 32, 'text', build)\n"
        "except Exception as failure:\n"
        "    print(getattr(failure, 'code', failure))\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout.strip() == "E0520", done.stderr
    assert "cannot be written" in done.stderr
    assert KernelCache(tmp_path).entries()[0].complete is False, "no commit marker"


def test_no_folder_at_all_is_an_error_with_its_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _unwritable(monkeypatch, Path("/"), errno.ENOSPC)
    with pytest.warns(AttngenWarning), pytest.raises(AttnError, match="TMPDIR") as caught:
        get(KernelCache(tmp_path), Builder())
    assert caught.value.code == "E0520"


def test_a_read_only_cache_serves_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    get(KernelCache(tmp_path), build)
    _unwritable(monkeypatch, tmp_path, errno.EROFS)
    monkeypatch.setattr(os, "utime", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get(KernelCache(tmp_path), build).folder.is_relative_to(tmp_path)
    assert build.calls == 1


def test_other_errors_are_not_taken_for_storage(tmp_path: Path) -> None:
    def fail(folder: Path) -> Any:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        get(KernelCache(tmp_path), fail)


def test_without_persistence_nothing_is_written_to_the_root(tmp_path: Path) -> None:
    build = Builder()
    cache = KernelCache(tmp_path, persistent=False)
    assert get(cache, build) == get(cache, build) and build.calls == 1
    assert not list(tmp_path.iterdir())


def test_list_size_and_clear(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.entries() == [] and cache.size() == 0 and cache.clear() == (0, 0)
    old, new = get(cache, Builder()), get(cache, Builder(), key="cd" * 32)
    os.utime(old.folder / "meta.json", (time.time() - 3000, time.time() - 3000))
    listed = cache.entries()
    assert [e.folder for e in listed] == [new.folder, old.folder] and all(e.complete for e in listed)
    assert listed[0].kernel_id == "causal_sm_90a_1f" and cache.size() == sum(e.bytes for e in listed) > 0
    assert cache.clear(older_than_s=1000)[0] == 1 and not old.folder.exists() and new.folder.exists()
    os.utime(new.folder / "meta.json", (0, 0))
    assert cache.get("causal_sm_90a_1f", "cd" * 32) is not None
    assert cache.clear(older_than_s=1000)[0] == 0, "a hit counts as a use"
    count, freed = cache.clear()
    assert count == 1 and freed > 0 and cache.entries() == []


def test_clear_spares_a_kernel_that_is_being_built(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)

    def build(folder: Path) -> Any:
        assert cache.clear() == (0, 0)
        return Builder()(folder)

    assert get(cache, build).files[0].exists()


def test_hostile_kernel_ids_stay_inside(tmp_path: Path) -> None:
    for name in ("../../etc", "a/b", "", ".", "..", "x" * 500, "a\nb"):
        folder = KernelCache(tmp_path).folder(name, KEY)
        assert (
            folder.parent == tmp_path / "v1" / toolchain_id()
            and len(folder.name) < 120
            and not folder.name.startswith(".")
        )


def test_the_key_moves_with_everything_that_changes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    base = fingerprint("text", "sm_90a", "", {})
    assert base == fingerprint(
        "text", "sm_90a", "", {"HOME": "/x", "CUTE_DSL_LOG_LEVEL": "1", "CUTE_DSL_DUMP_DIR": "d"}
    )
    others = {
        fingerprint("texT", "sm_90a", "", {}),
        fingerprint("text", "sm_100a", "", {}),
        fingerprint("text", "sm_90a", "--opt-level 1", {}),
        fingerprint("text", "sm_90a", "", {"CUTE_DSL_LINEINFO": "1"}),
        fingerprint("text", "sm_90a", "", {"CUTE_DSL_COMPILER_OPT": "x"}),
    }
    assert len(others | {base}) == 6
    assert compile_variables({"CUTE_DSL_ENABLE_ASSERTIONS": "1", "PATH": "p"}) == {"CUTE_DSL_ENABLE_ASSERTIONS": "1"}
    names = toolchain({})["distributions"]
    assert isinstance(names, dict) and any(n.startswith("nvidia-cutlass-dsl") for n in names)
