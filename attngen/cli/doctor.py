"""`attngen doctor`: what this machine can do with attngen, and the mend where it cannot."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from attngen.cli import common

GOOD, LIMIT, BAD = "ok", "limit", "fault"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what it means, the mend."""

    what: str
    state: str
    detail: str
    mend: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on stdout.")] = False) -> None:
    """Report on this machine. Exit 3 if something that compiling needs is missing; no GPU is a limit, not a fault."""
    found: list[Finding] = []
    for probe in (_python, _resources, _language, _torch, _dsl, _ffi, _tools, _gpu, _cache, _environment):
        found += _safely(probe)
    if as_json:
        print(json.dumps({"schema": 1, "findings": [asdict(f) for f in found]}, indent=1))
    else:
        for f in found:
            mark = {GOOD: "ok   ", LIMIT: "limit", BAD: "FAULT"}[f.state]
            print(f"{mark}  {f.what}: {f.detail}")
            if f.mend:
                print(f"       {f.mend}")
    if any(f.state == BAD for f in found):
        raise typer.Exit(common.ENVIRONMENT)


def _safely(probe: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return probe()
    except Exception as fault:  # a probe looks at broken machines: whatever it meets is a finding
        return [Finding(probe.__name__.strip("_"), BAD, f"{type(fault).__name__}: {str(fault)[:300]}")]


def _python() -> list[Finding]:
    import attngen

    where = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    state = GOOD if sys.version_info >= (3, 11) else BAD
    return [Finding("attngen", state, f"{attngen.__version__}, {where}", "" if state == GOOD else "attngen needs Python 3.11 or newer")]


def _resources() -> list[Finding]:
    from attngen import resources

    missing = [n for n in ("grammar/attn.lark", "grammar/std.attn", "templates") if not (resources.root() / n).exists()]
    if missing:
        return [Finding("grammar and templates", BAD, f"missing: {', '.join(missing)}", "install attngen again")]
    return [Finding("grammar and templates", GOOD, str(resources.root()))]


def _language() -> list[Finding]:
    from attngen import resources
    from attngen.search import plan
    from attngen.syntax import load_spec

    plans = plan(load_spec(resources.read("examples/causal.attn")), "sm_90a").plans
    return [Finding("compiler", GOOD, f"examples/causal.attn gives plans {', '.join(p.name for p in plans)}")]


def _torch() -> list[Finding]:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return [Finding("torch", GOOD, f"{torch.__version__} ({built})")]


def _dsl() -> list[Finding]:
    version = _version("nvidia-cutlass-dsl")
    if version is None:
        mend = "pip install 'nvidia-cutlass-dsl[cu13]'"
        return [Finding("CuTe DSL", BAD, "not installed: kernels can be written but not compiled", mend)]
    import cutlass.cute  # noqa: F401

    return [Finding("CuTe DSL", GOOD, version)]


def _ffi() -> list[Finding]:
    version = _version("apache-tvm-ffi")
    if version is None:
        return [Finding("TVM FFI", BAD, "not installed: compiled kernels cannot be called", "pip install apache-tvm-ffi")]
    return [Finding("TVM FFI", GOOD, version)]


def _tools() -> list[Finding]:
    from attngen.verify import machine

    missing = [t for t in ("ptxas", "nvdisasm", "cuobjdump") if machine.tool(t) is None]
    if missing:
        mend = "for development only: pip install 'attngen[dev]'"
        return [Finding("machine-code tools", LIMIT, f"no {', '.join(missing)}: registers and spills cannot be read", mend)]
    return [Finding("machine-code tools", GOOD, "ptxas, nvdisasm, cuobjdump")]


def _gpu() -> list[Finding]:
    import torch

    if not torch.cuda.is_available():
        return [Finding("GPU", LIMIT, "torch sees none: compile, check and explain work; build() runs the CPU reference")]
    found = []
    for i in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(i)
        name = f"{i}: {torch.cuda.get_device_name(i)}, compute capability {major}.{minor}"
        if (major, minor) == (9, 0):
            found.append(Finding("GPU", GOOD, name))
        else:
            found.append(Finding("GPU", LIMIT, name, "kernels for sm_90a run on compute capability 9.0 only"))
    return found


def _cache() -> list[Finding]:
    from attngen.settings import settings

    folder = settings().cache_dir
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as fault:
        mend = "free space or permissions there, or name another folder in ATTNGEN_CACHE_DIR"
        return [Finding("kernel cache", LIMIT, f"{folder} cannot be written ({fault.strerror}): kernels are compiled in every process", mend)]
    return [Finding("kernel cache", GOOD, str(folder))]


def _environment() -> list[Finding]:
    from attngen.settings import VARIABLES

    known = [f"{n}={common.printable(os.environ[n])}" for n in VARIABLES if n in os.environ]
    findings = [Finding("environment", GOOD, ", ".join(known) or "no ATTNGEN_ variable is set")]
    unknown = sorted(n for n in os.environ if n.startswith("ATTNGEN_") and n not in VARIABLES)
    if unknown:
        findings.append(Finding("environment", LIMIT, f"unknown: {', '.join(unknown)}", f"attngen reads {', '.join(VARIABLES)}"))
    return findings


def _version(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
