"""Launches every gallery kernel at small odd shapes: what compute-sanitizer is run on.

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck python tests/gpu/sanitize.py

`python tests/gpu/sanitize.py causal gpt_oss` takes only files whose names start so. The objects come from the cache,
so that a first plain run keeps compilation out of the tool.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from attngen.jit.load import dsl_root

GALLERY = Path(__file__).resolve().parents[2] / "generated"
OBJECTS = Path(tempfile.gettempdir()) / "attngen-sanitize"
SHAPES = ((1, 2, 1, 200, 333), (2, 1, 1, 333, 100), (1, 4, 2, 1, 129))


def module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def function(kernel, path: Path, index: int):
    """The compiled plan, from an object of an earlier run where there is one."""
    import tvm_ffi

    OBJECTS.mkdir(exist_ok=True)
    shared = OBJECTS / f"{path.stem}.{index}.so"
    if not shared.exists():
        compiled = kernel.compile_plan(index)
        compiled.export_to_c(str(shared.with_suffix(".o")), function_name="kernel")
        subprocess.run(["cc", "-shared", "-o", str(shared), str(shared.with_suffix(".o"))], check=True)
    root = dsl_root()
    assert root is not None
    ctypes.CDLL(str(root / "cu13" / "lib" / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(shared))["kernel"]


def main() -> None:
    wanted = sys.argv[1:]
    for path in sorted(GALLERY.glob("*.sm90.py")):
        if wanted and not path.name.startswith(tuple(wanted)):
            continue
        kernel = module(path)
        for index in range(len(kernel.PLANS)):
            f = function(kernel, path, index)
            for shape in SHAPES:
                torch.manual_seed(0)
                q, k, v, extra = kernel.inputs(torch, *shape)
                args = kernel.arguments(torch, q, k, v, extra, 0.1)
                f(*args)
                torch.cuda.synchronize()
                o, lse = args[3:5]
                assert not o.isnan().any() and not lse.isnan().any(), (path.name, index, shape)
        print(path.name, len(kernel.PLANS), "plans ok", flush=True)


if __name__ == "__main__":
    main()
