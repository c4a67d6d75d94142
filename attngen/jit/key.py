"""Fingerprint of a compiled kernel: its text, and everything on this machine that changes the code made from it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import lru_cache

#: Format of an entry's folder; a change makes every older entry invisible.
CACHE_FORMAT = 1
#: Variables of the DSL that steer where it writes and what it prints, not what it compiles.
_HARMLESS = (
    "CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_DUMP_DIR",
    "CUTE_DSL_NO_CACHE",
    "CUTE_DSL_FILE_CACHING",
    "CUTE_DSL_DISABLE_FILE_CACHING",
    "CUTE_DSL_SHOW_STACKTRACE",
    "CUTE_DSL_FILTER_STACKTRACE",
    "CUTE_DSL_LOG_",
    "CUTE_DSL_PRINT_",
    "CUTE_DSL_KEEP",
    "CUTE_DSL_JIT_TIME_PROFILING",
    "CUTE_DSL_ARCH",  # the target is always given
)
_COMPILE_VARIABLES = ("CUDA_TOOLKIT_PATH", "NVVM_APPEND_OPTIONS", "PTXAS_OPTIONS")


@lru_cache(maxsize=1)
def distributions() -> tuple[tuple[str, str], ...]:
    """Every installed `nvidia-cutlass-dsl*` distribution and the FFI, as (name, version), sorted."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in names:  # `name-version.dist-info`; importlib.metadata would read every package's METADATA
            stem, _, kind = entry.rpartition(".")
            if kind in ("dist-info", "egg-info") and entry.lower().startswith(("nvidia_cutlass_dsl", "apache_tvm_ffi")):
                name, _, version = stem.partition("-")
                # the first on sys.path is the one that is imported
                found.setdefault(name.lower().replace("_", "-"), version.partition("-py")[0])
    return tuple(sorted(found.items()))


@lru_cache(maxsize=1)
def host() -> str:
    """Hash of the host CPU's kind: host code is compiled for this machine's vector units."""
    flags = platform.processor()
    try:
        with open("/proc/cpuinfo") as lines:  # the first CPU's: reading all of many CPUs takes the kernel a while
            flags = next((x.partition(":")[2] for x in lines if x.startswith(("flags", "Features"))), flags)
    except OSError:
        pass
    text = f"{platform.system()} {platform.machine()} {' '.join(sorted(flags.split()))}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compile_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that change what the DSL compiles."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith("CUTE_DSL_") and not name.startswith(_HARMLESS)) or name in _COMPILE_VARIABLES
    }


def toolchain(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """What, besides the text and the target, decides the machine code. JSON values only."""
    return {
        "format": CACHE_FORMAT,
        "distributions": dict(distributions()),
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "host": host(),
        "variables": compile_variables(os.environ if environ is None else environ),
    }


def toolchain_id(environ: Mapping[str, str] | None = None) -> str:
    """12 hex digits that name the toolchain's folder in the cache."""
    return _digest(toolchain(environ))[:12]


def fingerprint(
    text: str,
    target: str,
    options: str = "",
    environ: Mapping[str, str] | None = None,
    *,
    wanted: tuple[str, ...] = (),
) -> str:
    """64 hex digits: the key of the machine code of `text` for `target` on this machine, compiled with `options`, and
    for a backward with the gradients it computes.
    """
    parts = {
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "target": target,
        "options": options,
        "toolchain": toolchain(environ),
        **({"wanted": list(wanted)} if wanted else {}),
    }
    return _digest(parts)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
