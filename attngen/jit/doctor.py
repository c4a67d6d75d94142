"""What this machine has for compiling and running kernels, as data."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from attngen.jit import worker
from attngen.jit.cache import KernelCache
from attngen.jit.key import compile_variables, distributions, toolchain_id
from attngen.jit.load import dsl_root
from attngen.settings import DEFAULT_TARGET, settings


def report() -> dict[str, Any]:
    """Versions, GPUs, driver, linker, cache; `missing` lists what is wrong as (what, mend). JSON values only."""
    found = settings()
    facts: dict[str, Any] = {
        "attngen": _version("attngen"),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": _version("torch"),
        "toolchain": dict(distributions()),
        "toolchain_id": toolchain_id(),
        "dsl_folder": str(dsl_root()) if dsl_root() else None,
        "runtime_library": _runtime(),
        "linker": worker.linker(),
        "variables": compile_variables(os.environ),
        "driver": _driver(),
        "gpus": _gpus(),
        "target": found.target or DEFAULT_TARGET,
        "cache": _cache(KernelCache(found.cache_dir), found.use_cache),
    }
    facts["missing"] = [{"what": what, "mend": mend} for what, mend in _missing(facts)]
    return facts


def _missing(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from attngen.jit.device import capability_of

    faults = []
    if facts["dsl_folder"] is None:
        faults.append(("the CuTe DSL: kernels are written but not compiled", "pip install 'nvidia-cutlass-dsl[cu13]'"))
    elif facts["runtime_library"] is None:
        faults.append(("the CuTe DSL's runtime library", "pip install --force-reinstall 'nvidia-cutlass-dsl[cu13]'"))
    if "apache-tvm-ffi" not in facts["toolchain"]:
        faults.append(("apache-tvm-ffi: kernels are compiled but not called", "pip install apache-tvm-ffi"))
    if facts["linker"] is None:
        faults.append(
            ("a C linker: warm builds take a second longer", "install gcc or clang (Debian: apt-get install gcc)")
        )
    if not facts["gpus"]:
        why = "no NVIDIA driver" if facts["driver"] is None else "torch sees no GPU (a CPU build of torch?)"
        faults.append(
            (f"a GPU: {why}; CPU tensors run the reference", "install a CUDA build of torch and NVIDIA's driver")
        )
    else:
        need = list(capability_of(facts["target"]))
        if all(gpu["capability"] != need for gpu in facts["gpus"]):
            faults.append(
                (f"a GPU that runs {facts['target']}", f"use a GPU of compute capability {need[0]}.{need[1]}")
            )
    if not facts["cache"]["writable"]:
        faults.append(("a cache folder that can be written", "free space or permissions, or set ATTNGEN_CACHE_DIR"))
    return faults


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _runtime() -> str | None:
    root = dsl_root()
    found = sorted(root.glob("cu*/lib/libcute_dsl_runtime.so")) if root is not None else []
    return str(found[-1]) if found else None


def _driver() -> str | None:
    """Version of the kernel driver, read without starting CUDA."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in first.split() if word[0].isdigit() and "." in word), first)


def _gpus() -> list[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found.append({"index": i, "name": p.name, "capability": [p.major, p.minor], "sms": p.multi_processor_count})
    return found


def _cache(cache: KernelCache, in_use: bool) -> dict[str, Any]:
    folder = cache.root
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            writable, why = True, None
    except OSError as failure:
        writable, why = False, failure.strerror
    try:
        free: int | None = shutil.disk_usage(folder).free
    except OSError:
        free = None
    return {
        "folder": str(cache.root), "in_use": in_use, "writable": writable, "why": why, "free_bytes": free,
        "bytes": cache.size(), "entries": len(cache.entries()), "sources": cache.sources(),
    }  # fmt: skip
