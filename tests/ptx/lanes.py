"""Run a few PTX instructions on one warp, registers in and registers out, without memory or a scheduler."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ptxcheck import build, machine, ptx

WIDTHS = {"pred": np.bool_, "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


def module(body: str, registers: Mapping[str, str], *, target: str = "sm_100a", declarations: str = "") -> ptx.Module:
    lines = [f".reg .{t} {name};" for name, t in registers.items()]
    return ptx.parse(
        f".version 9.4\n.target {target}\n.address_size 64\n{declarations}\n.visible .entry k()\n{{\n"
        + "\n".join(lines)
        + f"\n{body}\n}}\n"
    )


def warp(
    body: str,
    registers: Mapping[str, str],
    values: Mapping[str, Any] | None = None,
    *,
    threads: int = 32,
    target: str = "sm_100a",
    declarations: str = "",
) -> machine.Warp:
    """A warp at the first instruction, with registers set: a sequence of up to 32 patterns (the rest 0), or one for
    all."""
    program = build.Program(module(body, registers, target=target, declarations=declarations))
    m = machine.Machine(program, (1, 1, 1), (threads, 1, 1))
    w = machine.Cluster(m, (0, 0, 0)).ctas[0].warps[0]
    for name, v in (values or {}).items():
        dtype = WIDTHS[registers[name]]
        full = np.zeros(32, dtype)
        items = [v] * 32 if np.ndim(v) == 0 else list(v)
        full[: len(items)] = np.array(items, dtype)
        w.regs[program.numbers[name]] = full
    return w


def finish(w: machine.Warp, turns: int = 10_000) -> machine.Warp:
    for _ in range(turns):
        if w.done:
            return w
        if not w.step():
            raise AssertionError(f"the warp waits: {[(f.pc, f.mask.tolist()) for f in w.fragments]}")
    raise AssertionError("the warp does not end")


def value(w: machine.Warp, name: str) -> list[int]:
    """Bit patterns of a register, or bools of a predicate."""
    v = w.regs[w.program.numbers[name]]
    return v.tolist() if v.dtype.kind == "b" else v.view(f"u{v.dtype.itemsize}").tolist()


def run(body: str, registers: Mapping[str, str], values: Mapping[str, Any], **more: Any) -> machine.Warp:
    return finish(warp(body, registers, values, **more))


def apply(opcode: str, to: str, *sources: tuple[str, Sequence[int]] | str) -> list[int]:
    """`opcode d, a, b, ...;` on patterns. A source is (register type, values) or text put in as it stands."""
    registers, values, texts = {"%d": to}, {}, []
    n = 0
    for k, s in enumerate(sources):
        if isinstance(s, str):
            texts.append(s)
            continue
        registers[f"%s{k}"], values[f"%s{k}"] = s[0], s[1]
        texts.append(f"%s{k}")
        n = max(n, len(s[1]))
    w = run(f"{opcode} %d, {', '.join(texts)};", registers, values)
    return value(w, "%d")[:n]


def f32(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def f64(x: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def as_f32(pattern: int) -> float:
    return struct.unpack("<f", struct.pack("<I", pattern))[0]


def as_f64(pattern: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", pattern))[0]


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x
