"""Compile one plan of a generated kernel to an object and, with a linker, to a shared library. Run as a script:

    python -P worker.py kernel.py INDEX OUT_STEM TARGET OPTIONS [WANTED]

WANTED, names with commas between, compiles a backward of those gradients.

A process of its own because the DSL's compiler is not thread-safe and can end the process it runs in, because several
plans compile side by side, and because this one does without torch, whose import takes longer than a compilation.
Imports nothing of attngen. The last line of stdout is JSON: {"file", "runtime"} or {"error", ...}.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from typing import Any

#: Name under which a plan's entry point is exported.
SYMBOL = "attngen_plan"


def linker() -> str | None:
    """A C compiler driver that can link: $CC, cc, gcc or clang."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name.split()[0])):
            return path
    return None


def import_kernel(path: str) -> Any:
    """Import a generated file from where it lies: the DSL reads its source again when it compiles."""
    folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
    name = "attngen_kernel_" + "".join(c if c.isalnum() else "_" for c in folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def compile_plan(path: str, index: int, stem: str, options: str = "", wanted: tuple[str, ...] = ()) -> dict[str, str]:
    """Compile plan `index`, or the backward of the `wanted` gradients, into `stem`.o and, with a linker, `stem`.so.

    Not safe in two threads at once.
    """
    from cutlass.cute.runtime import find_runtime_libraries

    module = import_kernel(path)
    function = module.compile_backward(index, options, wanted=wanted) if wanted else module.compile_plan(index, options)
    function.export_to_c(stem + ".o", function_name=SYMBOL)
    runtime = next((str(p) for p in find_runtime_libraries() if "cute_dsl_runtime" in str(p)), "")
    return {"file": link(stem), "runtime": runtime}


def link(stem: str) -> str:
    """Link `stem`.o to `stem`.so and drop the object; without a linker, or if linking fails, keep the object."""
    tool = linker()
    if tool is not None:
        done = subprocess.run([tool, "-shared", "-o", stem + ".so", stem + ".o"], capture_output=True, text=True)
        if done.returncode == 0:
            os.unlink(stem + ".o")
            return stem + ".so"
        print(f"linking with {tool} failed: {done.stderr.strip()[-500:]}", file=sys.stderr)
    return stem + ".o"


def _without_torch(path: str) -> None:
    """Let the FFI's optional `import torch` fail, unless the kernel file itself imports torch at its top."""
    with open(path, encoding="utf-8") as file:
        if not any(line.startswith(("import torch", "from torch")) for line in file):
            sys.modules["torch"] = None  # type: ignore[assignment]


def _end_with_parent() -> None:
    """Ask Linux to end this process when the one that waits for it is gone."""
    pr_set_pdeathsig, sigkill = 1, 9
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, sigkill)


def main(argv: list[str]) -> int:
    path, index, stem, target, options, *rest = argv
    _end_with_parent()
    os.environ.setdefault("CUTE_DSL_ARCH", target)
    result: dict[str, Any]
    try:
        _without_torch(path)
        with tempfile.TemporaryDirectory(prefix="attngen-dump-") as scratch:
            os.environ["CUTE_DSL_DUMP_DIR"] = scratch
            result = compile_plan(path, int(index), stem, options, tuple(rest[0].split(",")) if rest else ())
    except OSError as failure:
        result = {"error": str(failure), "errno": failure.errno or 0}
    except BaseException as failure:
        traceback.print_exc()
        message = getattr(failure, "message", None) or str(failure)
        result = {"error": f"{type(failure).__name__}: {message}"}
        for name in ("filename", "line"):
            if (value := getattr(failure, name, None)) is not None:
                result[name] = str(value)
    sys.stdout.write("\n" + json.dumps(result) + "\n")
    sys.stdout.flush()
    return 1 if "error" in result else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # the DSL's own teardown takes a while and has nothing left to do
