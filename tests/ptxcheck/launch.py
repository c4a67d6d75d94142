"""Runs a compiled function as its host code would: every launch in order, on torch CPU tensors.

    report = check(compiled, q, k, v, o, lse, counter, scale, workers)

`attngen_call` makes the arguments that a generated module takes beside q, k and v, with poisoned outputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from attngen.ir.tables import words
from attngen.ir.tile_map import map_words
from ptxcheck.build import Program
from ptxcheck.compile import Code, code_of, compile_module
from ptxcheck.counters import Counters
from ptxcheck.global_memory import Global
from ptxcheck.hostcalls import Launch, launches
from ptxcheck.hostir import HostCode
from ptxcheck.machine import Machine
from ptxcheck.report import Report

#: Parsed host code and prepared kernels of functions seen before: (PTX text, host text) -> both.
_prepared: dict[tuple[str, str], tuple[HostCode | None, dict[str, Program]]] = {}


def forget(code: Code) -> None:
    """Drop what was prepared for a function, where many are run that differ in a line."""
    _prepared.pop((code.ptx, code.host), None)


def launches_of(code: Code, arguments: Sequence[Any]) -> list[Launch]:
    """What one call with these arguments puts on the stream."""
    host, programs = _prepared.get((code.ptx, code.host), (None, {}))

    def sizes(kernel: str) -> list[int]:
        return [p.size for p in code.module.kernels[kernel].params]

    found, host = launches(code.host, sizes, arguments, host)
    _prepared[code.ptx, code.host] = host, programs
    return found


def program_of(code: Code, kernel: str) -> Program:
    """A kernel of the function, ready to run."""
    programs = _prepared.setdefault((code.ptx, code.host), (None, {}))[1]
    if kernel not in programs:
        programs[kernel] = Program(code.module, kernel)
    return programs[kernel]


def parameter_bytes(program: Program, values: Sequence[bytes]) -> bytes:
    """A kernel's parameters laid out as its PTX declares them."""
    out = bytearray(program.kernel.param_size)
    for p, value in zip(program.kernel.params, values, strict=True):
        out[p.offset : p.offset + p.size] = value
    return bytes(out)


def check(
    compiled: Any,
    *arguments: Any,
    seed: int = 0,
    sms: int = 4,
    measure: bool = False,
    collect: int = 0,
    names: Sequence[str] = (),
    relaxed: Collection[str] = (),
) -> Report:
    """Execute all launches of `compiled(*arguments)`; tensors are read and written in place.

    compiled: what `cute.compile` returned (with --enable-tvm-ffi --keep-ptx), or a `Code`.
    seed: of the schedule. sms: CTAs that run at a time. measure: fill the report's counters.
    collect: gather up to so many faults instead of raising FaultFound at the first.
    names: of the arguments, for reports.
    relaxed: kinds of faults to ignore, and rules of the manual not to ask for. "uninitialised-register": registers
    never written hold garbage. "tcgen05.wait::ld": results of tensor memory loads may be used without it, as if whoever
    reads such a register waited for the load; hardware does that.
    """
    code = code_of(compiled)
    report = Report(collect=collect, counters=Counters() if measure else None)
    memory = Global()
    for k, value in enumerate(arguments):
        if isinstance(value, torch.Tensor) and value.numel():
            memory.register(names[k] if k < len(names) else f"argument {k}", value)
    unsafe, waited = 0, True
    for number, launch in enumerate(launches_of(code, arguments), 1):
        program = program_of(code, launch.kernel)
        # With PDL the launch before may still run, and what that one did not wait for.
        unsafe = 0 if not launch.pdl or number == 1 else unsafe if unsafe and not waited else number - 1
        required = program.kernel.reqntid
        if required is not None and required != launch.block:
            report.fault(
                "bad-operand", f"{launch.kernel} needs blocks of {required} threads, launched with {launch.block}"
            )
        machine = Machine(
            program,
            launch.grid,
            launch.block,
            parameter_bytes(program, launch.params),
            cluster=launch.cluster if launch.cluster != (1, 1, 1) else None,
            dynamic_shared=launch.shared,
            seed=seed * 1000 + number,
            sms=sms,
            global_=memory,
            report=report,
            unsafe=unsafe,
            relaxed=relaxed,
        )
        machine.run()
        waited = machine.waited_for_grid
        if collect and report.faults:
            break
    return report


def table_arguments(module: ModuleType, q: torch.Tensor, k: torch.Tensor, layout: str) -> tuple[Any, ...]:
    """The workspace of the mask's tables, poisoned, and 1: they are to be computed. Nothing where there are none."""
    if "tables" not in module.ATTN_META:
        return ()
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    sizes = {"batch": q.shape[0], "heads_q": q.shape[heads], "seqlen_q": q.shape[rows], "seqlen_kv": k.shape[rows]}
    return torch.full((words(module.ATTN_META["tables"], sizes),), -(2**31), dtype=torch.int32), 1


def map_arguments(meta: Mapping[str, Any], plan: int, q: torch.Tensor, k: torch.Tensor, layout: str) -> tuple[Any, ...]:
    """Memory for the tile map of one direction, poisoned, and 1: it is to be made. Nothing where there is none."""
    if "map" not in meta:
        return ()
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    sizes = {"batch": q.shape[0], "heads_q": q.shape[heads], "seqlen_q": q.shape[rows], "seqlen_kv": k.shape[rows]}
    return (torch.full((map_words(meta["map"], meta["plans"][plan], sizes),), 0x5A5A5A5A, dtype=torch.int32), 1)


def attngen_call(
    module: ModuleType,
    plan: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    params: Sequence[Any] = (),
    tensors: Sequence[torch.Tensor] = (),
    *,
    scale: float | None = None,
    layout: str = "bshd",
    workers: int = 3,
    code: Code | None = None,
    further: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """One call of a generated forward kernel: O and LSE, NaN where nothing was written, and the report.

    `workers` is the number of CTAs, which take tiles from a counter; the kernel must leave that at zero. `code` runs in
    place of what `module` compiles to. `further`: of what the kernel takes last (`ATTN_META["further"]`), what is not
    made here. `options` go to `check`. No launch is made for no rows or no keys, as in
    attngen.jit: such a call is an error here.
    """
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    if 0 in q.shape or 0 in k.shape:
        raise ValueError("an empty call launches nothing")
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}[module.ATTN_META["out_dtype"]]
    o = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=kind)
    lse = torch.full((q.shape[0], q.shape[heads], q.shape[rows]), math.nan)
    counter = torch.zeros(1, dtype=torch.int32)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    made = {"o_pre": o, "saves_o": 0, "max_logit": lse.clone(), **(further or {})}
    more = (made[n] for n in module.ATTN_META.get("further", ()))
    map_ = map_arguments(module.ATTN_META, plan, q, k, layout)
    extra = (*params, *tensors, *map_, *table_arguments(module, q, k, layout), *more)
    names = ["q", "k", "v", "o", "lse", "tile_counter", "softmax_scale", "workers"]
    names += [f"extra argument {n}" for n in range(len(extra))]
    code = code or compile_module(module, plan)
    report = check(code, q, k, v, o, lse, counter, scale, workers, *extra, names=names, **options)
    if counter.item() != 0 and not report.faults:
        raise AssertionError(f"the kernel leaves its tile counter at {counter.item()}: the next call would start there")
    return o, lse, report
