"""Facts about machine code, without a GPU: registers, spills, serialised WGMMA, instruction counts of a compiled plan.

The DSL's own compiler is silent about spills and about WGMMA that it had to serialise (ptxas warnings C7510 to C7520,
each worth 20 to 50 % of the speed), so the PTX goes through ptxas once more with `-v`. Needs the development tools
(`pip install 'attngen[dev]'`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from attngen.diag.diagnostic import error

_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class MachineCode:
    """What ptxas and nvdisasm say about one kernel.

    `registers` a thread at launch, `spill_bytes` stored and loaded, `stack_bytes` a thread, `static_smem_bytes` besides
    what the launch asks for, `serialized` the C75xx
    warnings, `instructions` the SASS length, `opcodes` their counts (HGMMA: WGMMA; UTMALDG: TMA load;
    UTMASTG: TMA store).
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int
    serialized: tuple[str, ...]
    instructions: int
    opcodes: dict[str, int]

    @property
    def is_clean(self) -> bool:
        """No spill and no serialised WGMMA."""
        return self.spill_bytes == 0 and not self.serialized


def tool(name: str) -> Path | None:
    """A CUDA tool: from the pip packages of this Python, or None."""
    import importlib.util

    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        path = Path(folder) / "cu13" / "bin" / name
        if path.is_file():
            return path
    return None


def _run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tool(name)
    if path is None:
        raise error(
            "E0541", f"{name} is not installed",
            notes=("registers, spills and instructions are read with NVIDIA's command-line tools",),
            helps=("pip install 'attngen[dev]'",),
        )  # fmt: skip
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)


def inspect_ptx(ptx: str, arch: str = "sm_90a") -> MachineCode:
    """Assemble PTX and read the result. Raises AttnError E0541 without the tools, E0542 if ptxas refuses the PTX."""
    with tempfile.TemporaryDirectory(prefix="attngen-ptx-") as scratch:
        source, cubin = Path(scratch) / "kernel.ptx", Path(scratch) / "kernel.cubin"
        source.write_text(ptx.rstrip("\0"))
        made = _run("ptxas", "-v", f"-arch={arch}", str(source), "-o", str(cubin))
        if made.returncode:
            raise error("E0542", "ptxas refuses the PTX of a kernel", notes=(made.stderr.strip()[-1500:],))
        listing = _run("nvdisasm", "-c", "-ndf", str(cubin)).stdout  # no labels of indirect jumps
    return parse(made.stdout + made.stderr, listing)


def parse(report: str, listing: str) -> MachineCode:
    """Read `ptxas -v` and `nvdisasm -c`; of several kernels the largest registers and the sum of the rest."""
    opcodes = Counter(
        m[1] for m in re.finditer(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", listing, re.MULTILINE)
    )

    def total(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, report))

    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    serialized = [line.strip() for line in report.splitlines() if re.search(r"\bC75\d\d\b", line)]
    return MachineCode(
        registers=max(registers, default=0),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        static_smem_bytes=total(r"(\d+) bytes smem"),
        serialized=tuple(serialized),
        instructions=sum(opcodes.values()),
        opcodes=dict(opcodes),
    )


_COMPILE = """
import json, os, sys
from attngen.jit.worker import import_kernel
path, index, scratch, target, entry = sys.argv[1:]
os.environ["CUTE_DSL_DUMP_DIR"] = scratch
os.environ.setdefault("CUTE_DSL_ARCH", target)
function = getattr(import_kernel(path), entry)(int(index), f"--keep-ptx --dump-dir={scratch}")
open(os.path.join(scratch, "kept.ptx"), "w").write(function.__ptx__.rstrip(chr(0)))
sys.stdout.flush()
os._exit(0)
"""


def inspect_plan(kernel: Path, index: int, target: str = "sm_90a", entry: str = "compile_plan") -> MachineCode:
    """Compile plan `index` of a generated file in a process and dump folder of its own, and inspect its PTX.

    `entry`: the file's function that compiles, `compile_backward` for the three kernels of a backward plan.

    Raises: AttnError E0512 if the DSL refuses the plan, and what `inspect_ptx` raises.
    """
    with tempfile.TemporaryDirectory(prefix="attngen-dump-") as scratch:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        command = [sys.executable, "-c", _COMPILE, str(kernel), str(index), scratch, target, entry]
        made = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
        ptx = Path(scratch) / "kept.ptx"
        if made.returncode or not ptx.is_file():
            tail = "\n".join((made.stderr or made.stdout).strip().splitlines()[-12:])
            raise error("E0512", f"the CuTe DSL refused plan {index} of {kernel.name}", notes=(tail,))
        return inspect_ptx(ptx.read_text(), target)


def as_json(code: MachineCode) -> str:
    """The facts as one JSON object."""
    return json.dumps({**code.__dict__, "is_clean": code.is_clean})
