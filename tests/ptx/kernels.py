"""Run small kernels written as PTX text: arrays in, report out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ptxcheck import build, machine, ptx
from ptxcheck.counters import Counters
from ptxcheck.global_memory import Global
from ptxcheck.report import Report

SEEDS = range(30)


def source(body: str, *, params: int = 1, shared: int = 16, registers: str = "", target: str = "sm_90a") -> str:
    """A kernel `k` with 64-bit parameters p0, p1.. (loaded into %rd0, %rd1..) and `shared` bytes named `smem`."""
    heads = ",".join(f".param .u64 p{n}" for n in range(params))
    loads = "\n".join(f"ld.param.b64 %rd{n}, [p{n}];" for n in range(params))
    variable = f".shared .align 128 .b8 smem[{shared}];" if shared else ""
    return f"""
.version 9.0
.target {target}
.address_size 64
.visible .entry k({heads})
{{
{variable}
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %rd<32>;
.reg .f32 %f<32>;
{registers}
{loads}
mov.u32 %r0, %tid.x;
mov.u32 %r1, %ctaid.x;
shr.u32 %r2, %r0, 5;
and.b32 %r3, %r0, 31;
{body}
ret;
}}
.file 1 "kernel.py"
"""


class Kernel:
    """A parsed kernel, ready to run with many seeds."""

    def __init__(
        self, body: str, *, threads: int = 64, grid: int = 1, cluster: int = 1, sms: int = 4, **more: Any
    ) -> None:
        self.program = build.Program(ptx.parse(source(body, **more)))
        self.threads, self.grid, self.sms = threads, grid, sms
        self.cluster = (cluster, 1, 1) if cluster > 1 else None

    def run(
        self,
        *arrays: Any,
        seed: int = 0,
        collect: int = 20,
        global_: Global | None = None,
        counters: Counters | None = None,
        unsafe: int = 0,
        dynamic_shared: int = 0,
    ) -> Report:
        """One launch; `arrays` are its parameters, registered as a0, a1.."""
        g = Global() if global_ is None else global_
        params = b""
        for n, a in enumerate(arrays):
            address = a if isinstance(a, int) else a.data_ptr() if hasattr(a, "data_ptr") else a.ctypes.data
            params += int(address).to_bytes(8, "little")
            if not isinstance(a, int):
                g.register(f"a{n}", a)
        m = machine.Machine(
            self.program,
            (self.grid, 1, 1),
            (self.threads, 1, 1),
            params,
            cluster=self.cluster,
            seed=seed,
            sms=self.sms,
            global_=g,
            report=Report(collect=collect, counters=counters),
            unsafe=unsafe,
            dynamic_shared=dynamic_shared,
        )
        return m.run()


def clean(kernel: Kernel, *arrays: Any, seeds: Sequence[int] = SEEDS, **more: Any) -> None:
    """No fault under any seed."""
    for seed in seeds:
        report = kernel.run(*arrays, seed=seed, **more)
        assert not report.faults, f"seed {seed}\n{report}"


def found(
    kernel: Kernel, kind: str, *arrays: Any, seeds: Sequence[int] = SEEDS, every: bool = False, **more: Any
) -> Report:
    """The fault is found under some seed (`every`: under each), and nothing of another kind is. Returns a report."""
    reports = [kernel.run(*arrays, seed=s, **more) for s in seeds]
    others = {k for r in reports for k in r.kinds()} - {kind}
    assert not others, f"also {others}:\n" + "\n".join(str(r) for r in reports if r.kinds() & others)
    hits = [r for r in reports if kind in r.kinds()]
    assert hits, f"no {kind} under {len(seeds)} seeds"
    if every:
        assert len(hits) == len(reports), f"{kind} only under {len(hits)} of {len(reports)} seeds"
    return hits[0]


def kinds(kernel: Kernel, *arrays: Any, seeds: int = 30) -> set[str]:
    """Kinds of faults that are found under any of the seeds."""
    return {k for s in range(seeds) for k in kernel.run(*arrays, seed=s).kinds()}
