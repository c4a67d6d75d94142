"""Generated text -> loaded functions, by way of the cache: compile what is missing, load what is there.

A hit loads a shared library in under a millisecond and imports neither cutlass nor its compiler. Compilation happens in
worker processes, one a plan, side by side; without a usable Python to start, in this process under one lock.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.diag.diagnostic import AttnError, error
from attngen.jit import worker
from attngen.jit.cache import Entry, KernelCache
from attngen.jit.key import fingerprint
from attngen.source import SYNTAX_LOCK, KernelSource
from attngen.stages import staged

log = logging.getLogger("attngen.jit")
#: Called as (what, done, total) while plans compile.
Progress = Callable[[str, int, int], None]
#: The DSL's compiler ends the process when two threads use it at once.
_compile_lock = threading.Lock()
_load_lock = threading.Lock()
_loaded: dict[Path, Any] = {}
WORKER_TIMEOUT_S = 900.0
#: False compiles in this process, as where no worker can be started.
use_workers = True


@dataclass(frozen=True, slots=True)
class Loaded:
    """The functions of one generated file, in the order of its plans, and where they came from."""

    functions: tuple[Any, ...]
    entry: Entry
    seconds: float


def plan_count(source: KernelSource) -> int:
    """How many tile plans the file holds, of its one direction."""
    meta = source.meta
    return max(1, len(meta["backward"]["plans"] if meta.get("direction") == "backward" else meta.get("plans", ())))


@staged("load")
def load(
    source: KernelSource,
    target: str,
    cache: KernelCache,
    *,
    options: str = "",
    wanted: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Loaded:
    """Compile (or find) and load every plan of `source`; of a backward, those that compute the `wanted` gradients.

    Raises: AttnError E0510 (no DSL), E0511 (no FFI), E0512 (the DSL refused the file), E0513 (its compiler died),
    E0514 (a compiled plan cannot be loaded), E0520 (no storage).
    """
    started = time.perf_counter()
    count = plan_count(source)
    key = fingerprint(source.text, target, options, wanted=wanted)

    def build(folder: Path) -> tuple[list[str], dict[str, object]]:
        return compile_all(folder, range(count), target, options, progress, wanted)

    entry = cache.get_or_build(source.kernel_id, key, source.text, build)
    functions = tuple(_function(path, entry) for path in entry.files)
    return Loaded(functions, entry, time.perf_counter() - started)


def write_objects(
    source: KernelSource,
    folder: Path,
    target: str,
    *,
    options: str = "",
    wanted: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> list[Path]:
    """Compile every plan into `folder`, without cache or GPU: `<kernel_id>_plan_<i>.so` (`.o` without a linker).

    `wanted`: the gradients that a backward computes.
    """
    work = folder / f".{source.kernel_id[:60]}-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        (work / "kernel.py").write_text(source.text, encoding="utf-8")
        names, _ = compile_all(work, range(plan_count(source)), target, options, progress, wanted)
        targets = [folder / f"{source.kernel_id}_{name}" for name in names]
        for name, path in zip(names, targets, strict=True):
            os.replace(work / name, path)
        return targets
    finally:
        shutil.rmtree(work, ignore_errors=True)


def compile_all(
    folder: Path,
    indices: Sequence[int],
    target: str,
    options: str,
    progress: Progress | None,
    wanted: tuple[str, ...] = (),
) -> tuple[list[str], dict[str, object]]:
    """Compile plans of `folder`/kernel.py into `folder`; returns their file names and what loading them needs."""
    require_dsl()
    work = folder / f".work-{os.getpid()}-{threading.get_ident():x}"
    work.mkdir(exist_ok=True)
    done = 0
    if progress is not None:
        progress("compile", 0, len(indices))
    names: list[str] = []
    runtime = ""
    try:
        running = [_start(folder / "kernel.py", i, work / f"plan_{i}", target, options, wanted) for i in indices]
        try:
            for index, process in zip(indices, running, strict=True):
                result = _finish(process, folder / "kernel.py", index, work / f"plan_{index}", options, wanted)
                os.replace(result["file"], folder / Path(result["file"]).name)
                names.append(Path(result["file"]).name)
                runtime = result["runtime"]
                done += 1
                if progress is not None:
                    progress("compile", done, len(indices))
        finally:
            for process in running:
                if process is not None and process.poll() is None:
                    process.kill()
                    process.communicate()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return names, {"runtime": _relative_runtime(runtime), "symbol": worker.SYMBOL, "target": target, "options": options}


def _start(
    kernel: Path, index: int, stem: Path, target: str, options: str, wanted: tuple[str, ...]
) -> subprocess.Popen[str] | None:
    """A worker process, or None where none can be started (an embedded interpreter, say)."""
    if not sys.executable or not use_workers:
        return None
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = [sys.executable, "-P", worker.__file__, str(kernel), str(index), str(stem), target, options]
    command += [",".join(wanted)] if wanted else []
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as failure:
        log.info("no worker process (%s); compiling in this one", failure)
        return None


def _finish(
    process: subprocess.Popen[str] | None, kernel: Path, index: int, stem: Path, options: str, wanted: tuple[str, ...]
) -> dict[str, str]:
    if process is None:
        return _compile_here(kernel, index, stem, options, wanted)
    try:
        out, err = process.communicate(timeout=WORKER_TIMEOUT_S)
    except subprocess.TimeoutExpired as failure:
        process.kill()
        raise error(
            "E0513", f"compiling plan {index} took more than {WORKER_TIMEOUT_S:.0f} s and was stopped", helps=_REPORT
        ) from failure
    try:
        result: dict[str, Any] = json.loads(out.strip().rsplit("\n", 1)[-1])
    except ValueError:
        raise error(
            "E0513",
            f"the compiler's process ended with status {process.returncode} while compiling plan {index} of {kernel}",
            notes=(_tail(err) or "it printed nothing",),
            helps=("out of memory and a killed process look like this; try again", *_REPORT),
        ) from None
    if "error" in result:
        _raise_compile_error(result, kernel, index, err)
    return {"file": str(result["file"]), "runtime": str(result["runtime"])}


_REPORT = ("if it happens again, report it with the output of `attngen doctor` and the kernel file",)


def _raise_compile_error(result: dict[str, Any], kernel: Path, index: int, err: str) -> None:
    if result.get("errno"):
        raise OSError(int(result["errno"]), result["error"])
    if result["error"].startswith(("ImportError", "ModuleNotFoundError")):
        raise error(
            "E0510",
            f"the CuTe DSL cannot be imported: {result['error']}",
            notes=(_tail(err),),
            helps=("install it again: `pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]'`",),
        )
    place = f"{result['filename']}:{result['line']}" if "line" in result else str(kernel)
    raise error(
        "E0512",
        f"the CuTe DSL refused plan {index} of {place}: {result['error']}",
        notes=(_tail(err),),
        helps=(
            "a generated kernel that does not compile is a fault of attngen; of an edited one, of the edit",
            *_REPORT,
        ),
    )


def _compile_here(kernel: Path, index: int, stem: Path, options: str, wanted: tuple[str, ...] = ()) -> dict[str, str]:
    with _compile_lock, SYNTAX_LOCK:  # the DSL reads the kernel's syntax tree
        try:
            return worker.compile_plan(str(kernel), index, str(stem), options, wanted)
        except (AttnError, OSError):
            raise
        except Exception as failure:
            _raise_compile_error({"error": f"{type(failure).__name__}: {failure}"}, kernel, index, "")
            raise


def _function(path: Path, entry: Entry) -> Any:
    """The entry point of a compiled plan, loaded once a process."""
    with _load_lock:
        if path not in _loaded:
            symbol = str(entry.info["symbol"])
            try:
                _preload(str(entry.info["runtime"]))
                _loaded[path] = _open(path)[symbol]
            except AttnError:
                raise
            except Exception as failure:
                raise error(
                    "E0514",
                    f"the compiled plan {path} cannot be loaded: {failure}",
                    helps=("remove the entry with `attngen cache clear` and build again", *_REPORT),
                ) from failure
        return _loaded[path]


def _open(path: Path) -> Any:
    if path.suffix == ".so":
        tvm_ffi = require_ffi()
        return tvm_ffi.load_module(str(path))
    require_dsl()
    with _compile_lock:  # the DSL links the object in memory
        from cutlass.cute.runtime import load_module

        return load_module(str(path), enable_tvm_ffi=True)


def require_ffi() -> Any:
    """`tvm_ffi`, or AttnError E0511."""
    try:
        import tvm_ffi
    except ImportError as failure:
        raise error(
            "E0511",
            f"apache-tvm-ffi, which calls compiled kernels, cannot be imported: {failure}",
            helps=("`pip install apache-tvm-ffi`",),
        ) from failure
    return tvm_ffi


def dsl_root() -> Path | None:
    """Folder of the installed CuTe DSL, found without importing it."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def require_dsl() -> Path:
    """Folder of the CuTe DSL, or AttnError E0510."""
    root = dsl_root()
    if root is None:
        raise error(
            "E0510",
            "the CuTe DSL is not installed, so kernels cannot be compiled",
            notes=("attngen emits source; NVIDIA's nvidia-cutlass-dsl compiles it on this machine",),
            helps=("`pip install 'nvidia-cutlass-dsl[cu13]'`", "`attngen compile` writes the source without it"),
        )
    return root


def _relative_runtime(path: str) -> str:
    root = dsl_root()
    if root is not None and Path(path).is_relative_to(root):
        return str(Path(path).relative_to(root))
    return path


def _preload(relative: str) -> None:
    """Make the DSL's runtime library visible to kernels that are loaded after it."""
    if not relative:
        return
    path = Path(relative) if os.path.isabs(relative) else require_dsl() / relative
    require_ffi()  # the runtime resolves the FFI's symbols, which its package loads globally
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def _tail(text: str, lines: int = 8) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
