"""Launches kernels at small odd shapes under compute-sanitizer, each tool and each kernel in a process of its own.

    python tests/gpu/sanitize.py                        the gallery, and forwards in clusters
    python tests/gpu/sanitize.py causal gpt_oss         files whose names start so
    python tests/gpu/sanitize.py some/kernel.sm90.py    a generated file of one direction
    python tests/gpu/sanitize.py --tool racecheck --jobs 4 --objects FOLDER --compile-only

Prints a table, and then the reports that `sanitizer_known` has no entry for; exit 1 if there are any. Kernels are
compiled first, without a tool; their objects are kept in FOLDER by the file's text. README.md: what the tools see.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from sanitizer_known import known_kind  # noqa: E402
from sanitizer_log import verdict  # noqa: E402

TOOLS = ("memcheck", "synccheck", "racecheck")
SHAPES = ((1, 2, 1, 200, 333), (2, 1, 1, 333, 100), (1, 4, 2, 1, 129))  # batch, heads_q, heads_kv, seqlen_q and _kv
#: Where a launch's arguments say how many CTAs there are at most. Each shape is launched with as many as the GPU has
#: SMs, and with FEW, so that a CTA takes tile after tile.
WORKERS_FORWARD, WORKERS_BACKWARD, FEW = 7, 12, 2
#: Forwards of these examples with `cluster` 2x1, which no kernel of the gallery has.
CLUSTERED: dict[str, dict[str, Any]] = {"causal": {}, "full": {"head_dim": 256}}
DONE = "all plans done"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", help="starts of names, or paths of generated files")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="one of them (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side")
    parser.add_argument("--objects", type=Path, default=Path(tempfile.gettempdir()) / "attngen-sanitize")
    parser.add_argument("--compile-only", action="store_true", help="compile, and stop: needs no GPU")
    parser.add_argument("--launch", choices=("plain", *TOOLS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.objects.mkdir(parents=True, exist_ok=True)
    if given.launch:
        run(Path(given.kernels[0]), given.objects, given.launch, compile_only=given.compile_only)
        return
    paths = list(wanted(given.kernels, given.objects))
    if not paths:
        sys.exit(f"no kernel's name starts with any of: {', '.join(given.kernels)}")
    columns = ("plain", *(given.tool or TOOLS))
    sys.exit(0 if check(paths, columns, given.objects, given.jobs, compile_only=given.compile_only) else 1)


def wanted(names: list[str], objects: Path) -> Iterator[Path]:
    """The files that the command line means."""
    yield from (Path(name) for name in names if name.endswith(".py"))
    starts = tuple(name for name in names if not name.endswith(".py"))
    if starts or not names:
        for path in [*sorted((ROOT / "generated").glob("*.sm90*.py")), *clustered(objects)]:
            if path.name.startswith(starts or ""):
                yield path


def clustered(folder: Path) -> Iterator[Path]:
    """Writes the forwards in clusters of two CTAs."""
    import attngen

    for name, overrides in CLUSTERED.items():
        path = folder / f"{name}.sm90.cluster.py"
        kernel = attngen.compile(ROOT / "examples" / f"{name}.attn", only="forward", cluster="2x1", **overrides)
        path.write_text(kernel.text, encoding="utf-8")
        yield path


# ---- side by side: a process for each tool and kernel ----------------------------------------------------------------


def check(paths: list[Path], columns: tuple[str, ...], objects: Path, jobs: int, *, compile_only: bool) -> bool:
    """Runs every kernel plainly, then under each tool; prints the table and the reports."""
    clean = True
    cells: dict[tuple[Path, str], str] = {}
    said: list[str] = []

    def one(path: Path, column: str) -> tuple[str, int]:
        tool = [] if column == "plain" else ["compute-sanitizer", "--tool", column, "--print-limit", "10000"]
        command = [*tool, sys.executable, "-W", "ignore", __file__, str(path), "--objects", str(objects)]
        more = ["--launch", column, *(["--compile-only"] if compile_only else [])]
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        log = done.stdout + done.stderr
        (objects / f"{path.stem}.{column}.log").write_text(log, encoding="utf-8")
        return log, done.returncode

    with ThreadPoolExecutor(jobs) as pool:
        for together in (columns[:1], () if compile_only else columns[1:]):  # objects are there before a tool starts
            todo = [(path, column) for column in together for path in paths]
            for (path, column), (log, code) in zip(todo, pool.map(lambda c: one(*c), todo), strict=True):
                good, cells[path, column], unknown = verdict(log, code, DONE, partial(known_kind, path=path))
                clean &= good
                said += [f"{path.name}, {column}: {report}" for report in unknown]
                if not good and not unknown:
                    said += [f"{path.name}, {column}: {line}" for line in log.splitlines()[-3:]]
    width = max(len(path.name) for path in paths)
    print(" " * width, *(f"{column:14}" for column in columns))
    for path in paths:
        print(f"{path.name:{width}}", *(f"{cells.get((path, column), '-'):14}" for column in columns))
    print("\n".join(said))
    return clean


# ---- in a process of its own: one kernel -----------------------------------------------------------------------------


def run(path: Path, objects: Path, column: str, *, compile_only: bool) -> None:
    """Launches every plan of a kernel at every shape."""
    kernel = module(path)
    backward = kernel.ATTN_META["direction"] == "backward"
    plans = kernel.ATTN_META["backward"]["plans"] if backward else kernel.PLANS
    for index in range(len(plans)):
        shared = compiled(kernel, path, index, objects)
        if not compile_only:
            launch(kernel, loaded(shared), index, backward)
    print(DONE, flush=True)


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def compiled(kernel: ModuleType, path: Path, index: int, objects: Path) -> Path:
    """A plan's shared object, from an earlier run where there is one; with places in the source, for the reports."""
    name = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    shared = objects / f"{path.stem}.{name}.{index}.so"
    if not shared.exists():
        compile_one = kernel.compile_plan if hasattr(kernel, "compile_plan") else kernel.compile_backward
        function = compile_one(index, "--generate-line-info")
        function.export_to_c(str(shared.with_suffix(".o")), function_name="kernel")
        subprocess.run(["cc", "-shared", "-o", str(shared), str(shared.with_suffix(".o"))], check=True)
        shared.with_suffix(".o").unlink()
    return shared


def loaded(shared: Path) -> Any:
    import tvm_ffi

    from attngen.jit.load import dsl_root

    root = dsl_root()
    assert root is not None
    ctypes.CDLL(str(root / "cu13" / "lib" / "libcute_dsl_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    return tvm_ffi.load_module(str(shared))["kernel"]


def launch(kernel: ModuleType, f: Any, index: int, backward: bool) -> None:
    """One plan at every shape; fails where an output has not been written."""
    import torch

    at, outputs = (WORKERS_BACKWARD, slice(7, 10)) if backward else (WORKERS_FORWARD, slice(3, 5))
    for shape in SHAPES:
        for few in (False, True):
            torch.manual_seed(0)
            args = list(backward_arguments(kernel, index, shape) if backward else forward_arguments(kernel, shape))
            args[at] = FEW if few else args[at]
            f(*args)
            torch.cuda.synchronize()
            assert not any(x.isnan().any() for x in args[outputs]), (kernel.__name__, index, shape, few)


def forward_arguments(kernel: ModuleType, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Of one launch; outputs are NaN."""
    import torch

    return tuple(kernel.arguments(torch, *kernel.inputs(torch, *shape), 0.1))


def backward_arguments(kernel: ModuleType, index: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Of one launch for any O, dO and LSE: which addresses are touched, and in what order, does not depend on them."""
    import torch

    q, k, v, extra = kernel.inputs(torch, *shape)
    batch, heads_q, _, seqlen_q, _ = shape
    rows = (batch, heads_q, seqlen_q) if q.ndim == 4 else (heads_q, q.shape[0])  # padded or not, or packed
    o, do = (torch.randn(*q.shape[:-1], v.shape[-1], device=q.device).to(q.dtype) for _ in range(2))
    lse, dlse = (torch.randn(*rows, device=q.device) for _ in range(2))
    return tuple(kernel.arguments(torch, index, q, k, v, o, do, lse + 5.0, dlse, extra, 0.1))


if __name__ == "__main__":
    main()
