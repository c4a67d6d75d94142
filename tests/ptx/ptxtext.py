"""PTX kernels written by hand, run by the checker with a memory image in shared memory: for tests of instructions.

A kernel of `Kernel` first copies the image into shared memory (at `smem`, 1024-byte aligned), fences it for the async
proxy and meets at barrier 0; then comes the test's text. Registers at hand: %r0-%r99 (b32; %r0 is tid.x, %r1 smem's
address), %d0-%d99 (b64; %d0 the thread's place in `out`), %p0-%p9, %h0-%h99 (b16).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ptxcheck.build import Program
from ptxcheck.global_memory import Global
from ptxcheck.machine import Machine
from ptxcheck.ptx import parse
from ptxcheck.report import Report

HEAD = """.version 9.0
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry kernel({params})
.reqntid {threads}, 1, 1
{{
    .reg .b16 %h<100>;
    .reg .b32 %r<600>;
    .reg .b64 %d<100>;
    .reg .pred %p<10>;
"""
COPY = """
    ld.param.b64 %d1, [image];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, smem;
    shl.b32 %r3, %r0, 4;
COPY:
    setp.ge.u32 %p0, %r3, {image};
    @%p0 bra COPIED;
    cvt.u64.u32 %d2, %r3;
    add.s64 %d2, %d1, %d2;
    ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d2];
    add.s32 %r8, %r1, %r3;
    st.shared.v4.b32 [%r8], {{%r4, %r5, %r6, %r7}};
    add.s32 %r3, %r3, {stride};
    bra COPY;
COPIED:
    {fence}
    bar.sync 0;
    ld.param.b64 %d0, [out];
    mov.u32 %r3, %ctaid.x;
    mad.lo.s32 %r3, %r3, {threads}, %r0;
    mul.wide.u32 %d2, %r3, {row};
    add.s64 %d0, %d0, %d2;
"""
FENCE = "fence.proxy.async.shared::cta;"


@dataclass
class Kernel:
    """`text` after the copy of `image`; `out`: bytes that each thread may write; `params`: (declaration, bytes)."""

    text: str
    image: bytes = b""
    out: int = 16
    threads: int = 128
    ctas: int = 1
    cluster: int = 1
    shared: int = 0
    fence: str = FENCE
    target: str = "sm_90a"
    params: Sequence[tuple[str, bytes]] = ()
    arrays: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)  # registered, passed as b64 parameters
    initial: np.ndarray[Any, Any] | None = None

    def run(self, seed: int = 0, collect: int = 0) -> tuple[np.ndarray[Any, Any], Report]:
        """Bytes written, (threads of all CTAs, out), and the report."""
        image = np.frombuffer(self.image.ljust(-(-max(len(self.image), 16) // 16) * 16, b"\0"), np.uint8).copy()
        out = np.zeros((self.ctas * self.threads, self.out), np.uint8)
        if self.initial is not None:
            out[:] = np.ascontiguousarray(self.initial).view(np.uint8).reshape(out.shape)
        memory = Global()
        declared, values = [".param .b64 image", ".param .b64 out"], []
        for name, array in {"image": image, "out": out, **self.arrays}.items():
            memory.register(name, array)
            values.append(struct.pack("<Q", array.ctypes.data))
        declared += [f".param .b64 {name}" for name in self.arrays]
        declared += [d for d, _ in self.params]
        values += [v for _, v in self.params]
        head = HEAD.format(target=self.target, params=", ".join(declared), threads=self.threads)
        copy = COPY.format(
            image=len(self.image), stride=16 * self.threads, threads=self.threads, row=self.out, fence=self.fence
        )
        program = Program(parse(f"{head}{copy}{self.text}\n}}\n"))
        params = bytearray(program.kernel.param_size)
        for p, value in zip(program.kernel.params, values, strict=True):
            params[p.offset : p.offset + p.size] = value
        report = Report(collect=collect)
        machine = Machine(
            program,
            (self.ctas, 1, 1),
            (self.threads, 1, 1),
            bytes(params),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            dynamic_shared=max(self.shared, len(self.image)),
            seed=seed,
            global_=memory,
            report=report,
        )
        machine.run()
        return out, report

    def kinds(self, seeds: int = 6) -> set[str]:
        """Kinds of the first faults under a few seeds."""
        found: set[str] = set()
        for seed in range(seeds):
            found |= self.run(seed, collect=1)[1].kinds()
        return found
