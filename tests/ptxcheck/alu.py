"""Steps for instructions that compute registers from registers, lane by lane.

An operation is a function of NumPy arrays of 32 to an array of 32; `alu` wraps it with operand access. The wrapper is
Python text specialised by what the sources are (register or constant) and compiled once for each such shape, since the
calls between reader, operation and writer would cost as much as the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ptxcheck.machine import FULL, Poison
from ptxcheck.ptx import Imm, Operand, Reg, Sink
from ptxcheck.table import DTYPES, Array, Build, Step, immediate, merge


@cache
def _factory(kinds: str, checked: bool) -> Callable[..., Step]:
    """`kinds`: one letter a source: r register, c constant array, x any reader."""
    n = len(kinds)
    names = ", ".join(f"s{j}, t{j}" for j in range(n))
    body = []
    for j, kind in enumerate(kinds):
        if kind == "r":
            body += [f"a{j} = R[s{j}]", f"if a{j}.dtype is not t{j}: a{j} = a{j}.view(t{j})"]
        elif kind == "x":
            body += [f"a{j} = s{j}(w)"]
    args = ", ".join(f"s{j}" if kind == "c" else f"a{j}" for j, kind in enumerate(kinds))
    if checked:
        body += ["if isinstance(R[k], Poison): w.poisoned(k, 'written')"]
    lines = "\n        ".join(body)
    text = f"""
def factory(fn, k, {names}):
    def run(w, m):
        R = w.regs
        {lines}
        if m is FULL: R[k] = fn({args})
        else: merge(w, k, fn({args}), m)
    return run
"""
    scope: dict[str, Any] = {"FULL": FULL, "Poison": Poison, "merge": merge}
    exec(compile(text, f"<alu {kinds}>", "exec"), scope)
    factory: Callable[..., Step] = scope["factory"]
    return factory


@cache
def constant(text: str, type_: str) -> Array:
    """A literal as an array of 32 that nothing may write to."""
    out = np.full(32, immediate(text, type_), DTYPES[type_])
    out.flags.writeable = False
    return out


def alu(b: Build, fn: Callable[..., Array], dst: Operand, type_: str, *sources: tuple[Operand, str]) -> Step:
    """`dst = fn(sources)`; `fn` returns a new array of 32 of the width of `type_`."""
    if isinstance(dst, Sink):
        return lambda w, m: None
    size = DTYPES[type_].itemsize
    have = 1 if type_ == "pred" else b.bits(dst) // 8
    kinds = ""
    args: list[Any] = []
    for operand, t in sources:
        if isinstance(operand, Imm):
            kinds, args = kinds + "c", [*args, constant(operand.text, t), None]
        elif isinstance(operand, Reg) and (t == "pred" or b.bits(operand) == 8 * DTYPES[t].itemsize):
            if (t == "pred") != (b.bits(operand) == 1):
                raise b.error(f"{operand.name} used as .{t}")
            kinds, args = kinds + "r", [*args, b.number(operand), DTYPES[t]]
        else:
            kinds, args = kinds + "x", [*args, b.read(operand, t), None]
    if have != size:  # a destination wider than the type, as cvt and ld allow
        write = b.write(dst, type_)
        readers = [b.read(o, t) for o, t in sources]
        return lambda w, m: write(w, m, fn(*(r(w) for r in readers)))
    assert isinstance(dst, Reg)
    return _factory(kinds, dst.name in b.program.async_registers)(fn, b.number(dst), *args)
