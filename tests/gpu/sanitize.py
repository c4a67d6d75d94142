"""Launches every gallery kernel at small odd shapes: what compute-sanitizer is run on.

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck python tests/gpu/sanitize.py

`python tests/gpu/sanitize.py causal gpt_oss` takes only files whose names start so. Objects are kept from run to run,
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
        compiled = kernel.compile_backward(index) if is_backward(path) else kernel.compile_plan(index)
        compiled.export_to_c(str(shared.with_suffix(".o")), function_name="kernel")
        subprocess.run(["cc", "-shared", "-o", str(shared), str(shared.with_suffix(".o"))], check=True)
    root = dsl_root()
    assert root is not None
    ctypes.CDLL(str(root / "cu13" / "lib" / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(shared))["kernel"]


def is_backward(path: Path) -> bool:
    return ".bwd" in path.name


def launch_forward(kernel, f, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """One launch; what it has written."""
    args = kernel.arguments(torch, *kernel.inputs(torch, *shape), 0.1)
    f(*args)
    return args[3:5]


def launch_backward(kernel, f, index: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """One launch for any O, dO and LSE: which addresses are touched, and in what order, does not depend on them."""
    q, k, v, extra = kernel.inputs(torch, *shape)
    batch, heads_q, _, seqlen_q, _ = shape
    rows = (batch, heads_q, seqlen_q) if q.ndim == 4 else (heads_q, q.shape[0])  # padded or not, or packed
    o, do = (torch.randn(*q.shape[:-1], v.shape[-1], device=q.device).to(q.dtype) for _ in range(2))
    lse, dlse = (torch.randn(*rows, device=q.device) for _ in range(2))
    args = kernel.arguments(torch, index, q, k, v, o, do, lse + 5.0, dlse, extra, 0.1)
    f(*args)
    return args[7:10]


def main() -> None:
    wanted = sys.argv[1:]
    for path in sorted(GALLERY.glob("*.sm90*.py")):
        if wanted and not path.name.startswith(tuple(wanted)):
            continue
        kernel = module(path)
        plans = kernel.ATTN_META["backward"]["plans"] if is_backward(path) else kernel.PLANS
        for index in range(len(plans)):
            f = function(kernel, path, index)
            for shape in SHAPES:
                torch.manual_seed(0)
                if is_backward(path):
                    written = launch_backward(kernel, f, index, shape)
                else:
                    written = launch_forward(kernel, f, shape)
                torch.cuda.synchronize()
                assert not any(x.isnan().any() for x in written), (path.name, index, shape)
        print(path.name, len(plans), "plans ok", flush=True)


if __name__ == "__main__":
    main()
