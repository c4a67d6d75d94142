"""Compiling with the real DSL (no GPU): workers, cache hits, missing tools, processes at once, interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jit_standin as standin
import pytest
import torch

from attngen.diag.diagnostic import AttnError
from attngen.jit import load as module
from attngen.jit import worker
from attngen.jit.cache import KernelCache
from attngen.jit.kernel import Attention
from attngen.jit.load import load, write_objects

pytestmark = pytest.mark.dsl
HERE = Path(__file__).parent
ENVIRONMENT = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), *(p for p in sys.path if p)]))


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_loaded", {})


def refuses_cpu_tensors(function: Any) -> bool:
    """The entry point is alive: it checks its arguments."""
    q = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(Exception, match="device_type=cuda"):
        function(q, q, q, q, torch.zeros(1, 2, 8), torch.zeros(1, dtype=torch.int32), 1.0, 1)
    return True


def test_compile_load_and_hit(tmp_path: Path) -> None:
    source = standin.source(standin.plain(), plans=2, limits=(64,))
    steps: list[tuple[str, int, int]] = []
    first = load(source, "sm_90a", KernelCache(tmp_path), progress=lambda *a: steps.append(a))
    assert steps == [("compile", 0, 2), ("compile", 1, 2), ("compile", 2, 2)]
    assert len(first.functions) == 2 and all(refuses_cpu_tensors(f) for f in first.functions)
    names = sorted(os.listdir(first.entry.folder))
    assert names == ["kernel.py", "meta.json", "plan_0.so", "plan_1.so"]
    again = load(source, "sm_90a", KernelCache(tmp_path), progress=lambda *a: steps.append(a))
    assert again.functions == first.functions and len(steps) == 3  # nothing was compiled


def test_a_hit_imports_no_compiler(tmp_path: Path) -> None:
    """And starts no process: what would make it slow."""
    load(standin.source(standin.plain()), "sm_90a", KernelCache(tmp_path))
    script = (
        "import sys, attngen.jit.kernel, attngen.jit.load\n"
        "from pathlib import Path\n"
        "import jit_standin as standin\n"
        "from attngen.jit.cache import KernelCache\n"
        "attngen.jit.load._start = None\n"
        "spec = standin.plain()\n"
        "cache = KernelCache(Path(sys.argv[1]))\n"
        "attn = attngen.jit.kernel.Attention(spec, standin.source(spec), 'sm_90a', cache).compile()\n"
        "print('cutlass' in sys.modules, attn.path)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    cutlass, path = done.stdout.split()
    assert cutlass == "False" and Path(path).name == "kernel.py"


def test_without_a_linker_the_object_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CC", raising=False)
    assert worker.linker() is None
    source = standin.source(standin.plain(), body="NO_LINKER = True")
    found = load(source, "sm_90a", KernelCache(tmp_path))
    assert [p.suffix for p in found.entry.files] == [".o"]
    assert refuses_cpu_tensors(found.functions[0])


def test_a_linker_that_fails_is_no_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    assert worker.linker() == str(broken)
    found = load(standin.source(standin.plain(), body="BAD_LINKER = True"), "sm_90a", KernelCache(tmp_path))
    assert [p.suffix for p in found.entry.files] == [".o"]


def test_in_process_under_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no worker can be started; two threads at once would end the process without the lock."""
    monkeypatch.setattr(module, "use_workers", False)
    found: list[Any] = []

    def one(i: int) -> None:
        source = standin.source(standin.plain(), body=f"THREAD = {i}")
        found.append(load(source, "sm_90a", KernelCache(tmp_path)))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 3 and all(refuses_cpu_tensors(x.functions[0]) for x in found)


def test_no_dsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "dsl_root", lambda: None)
    with pytest.raises(AttnError, match="pip install 'nvidia-cutlass-dsl") as caught:
        load(standin.source(standin.plain()), "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0510"
    assert KernelCache(tmp_path).get("plain", "00") is None


def test_a_broken_dsl(tmp_path: Path) -> None:
    source = standin.source(standin.plain(), body="import cutlass.no_such_module")
    with pytest.raises(AttnError, match="no_such_module") as caught:
        load(source, "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0510" and "pip install" in str(caught.value)


def test_no_ffi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = standin.source(standin.plain())
    load(source, "sm_90a", KernelCache(tmp_path))
    monkeypatch.setattr(module, "_loaded", {})
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(AttnError, match="pip install apache-tvm-ffi") as caught:
        load(source, "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0511"


@pytest.mark.parametrize("workers", [True, False])
def test_a_kernel_that_the_dsl_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: bool) -> None:
    monkeypatch.setattr(module, "use_workers", workers)
    source = standin.source(standin.plain(), body="raise ValueError('edited badly')")
    with pytest.raises(AttnError, match="edited badly") as caught:
        load(source, "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0512" and "kernel.py" in str(caught.value)
    assert [e.complete for e in KernelCache(tmp_path).entries()] == [False]


@pytest.mark.parametrize(
    "body", ["import os; os.abort()", "import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_compiler_that_dies_does_not_take_the_caller_along(tmp_path: Path, body: str) -> None:
    with pytest.raises(AttnError, match="ended with status") as caught:
        load(standin.source(standin.plain(), body=body), "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0513"


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKER_TIMEOUT_S", 1.0)
    with pytest.raises(AttnError, match="more than 1 s") as caught:
        load(standin.source(standin.plain(), body="import time; time.sleep(60)"), "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0513"


def test_what_the_kernel_prints_does_not_confuse(tmp_path: Path) -> None:
    source = standin.source(standin.plain(), body="print('{\"file\": 3}'); print('noise', end='')")
    assert refuses_cpu_tensors(load(source, "sm_90a", KernelCache(tmp_path)).functions[0])


def test_a_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intact by its hash, yet unusable: named, not looped over."""

    def build(folder: Path, *_: Any) -> Any:
        (folder / "plan_0.so").write_bytes(b"\x7fELF not really")
        return ["plan_0.so"], {"runtime": "", "symbol": worker.SYMBOL}

    monkeypatch.setattr(module, "compile_all", build)
    with pytest.raises(AttnError, match="attngen cache clear") as caught:
        load(standin.source(standin.plain()), "sm_90a", KernelCache(tmp_path))
    assert caught.value.code == "E0514"


_BUILD = """
import sys
from pathlib import Path
import jit_standin as standin
from attngen.jit.cache import KernelCache
from attngen.jit.load import load
body = "import os, time\\nif os.environ.get('SLOW'):\\n    time.sleep(600)"
source = standin.source(standin.plain(), body=body)
print("start", flush=True)
found = load(source, "sm_90a", KernelCache(Path(sys.argv[1])), progress=lambda *a: print(*a, flush=True))
print("loaded", found.functions[0], flush=True)
"""


def _process(root: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, **environment},
    )


def test_two_processes_compile_once(tmp_path: Path) -> None:
    running = [_process(tmp_path) for _ in range(2)]
    said = [p.communicate(timeout=120)[0] for p in running]
    assert all("loaded" in text for text in said)
    assert sum("compile 1 1" in text for text in said) == 1


def test_kill_in_the_middle_of_a_compilation(tmp_path: Path) -> None:
    victim = _process(tmp_path, SLOW="1")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "start\n" and victim.stdout.readline() == "compile 0 1\n"
    time.sleep(1.0)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    (entry,) = KernelCache(tmp_path).entries()
    assert not entry.complete
    said = _process(tmp_path).communicate(timeout=120)[0]
    assert "compile 1 1" in said and "loaded" in said
    (entry,) = KernelCache(tmp_path).entries()
    assert entry.complete and sorted(os.listdir(entry.folder)) == ["kernel.py", "meta.json", "plan_0.so"]


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """A worker whose parent was killed must not compile on for nobody."""
    victim = _process(tmp_path, SLOW="1")
    assert victim.stdout is not None
    victim.stdout.readline(), victim.stdout.readline()
    time.sleep(0.5)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(victim.pid)], capture_output=True, text=True
    ).stdout.split()
    assert children
    victim.kill()
    victim.communicate()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in children):
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_write_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a worker for each plan, all of them started before the first is waited for."""
    source = standin.source(standin.plain(), plans=2)
    order: list[str] = []
    for step in (module._start, module._finish):
        monkeypatch.setattr(module, step.__name__, lambda *a, step=step: order.append(step.__name__) or step(*a))
    paths = write_objects(source, tmp_path, "sm_90a")
    assert order == ["_start", "_start", "_finish", "_finish"]
    assert [p.name for p in paths] == [f"{source.kernel_id}_plan_{i}.so" for i in range(2)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)


def test_compile_sets_the_path(tmp_path: Path) -> None:
    spec = standin.plain()
    attn = Attention(spec, standin.source(spec), "sm_90a", KernelCache(tmp_path))
    assert attn.path is None and attn.compile() is attn
    assert attn.path is not None and attn.path.read_text() == attn.source.text
