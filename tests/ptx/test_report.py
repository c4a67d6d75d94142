"""Reports: kinds, deduplication, places, counters."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import ptxcheck
import pytest
from kernels import Kernel
from ptxcheck.counters import Counters, wavefronts
from ptxcheck.report import KINDS, Abandoned, Fault, FaultFound, Report


def test_kinds_are_a_closed_set() -> None:
    with pytest.raises(ValueError, match="unknown kind"):
        Fault("odd", "")
    used: dict[str, str] = {}
    for path in Path(ptxcheck.__file__).parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for m in re.finditer(r"\b(?:fault|note|_note|fatal|_report|found)\(\s*\"([^\"]+)\"", text):
            used[m[1]] = path.name
    assert len(used) > 15
    assert not {k: v for k, v in used.items() if k not in KINDS}


def test_faults_are_gathered_once_for_a_pair_of_places() -> None:
    r = Report(collect=3)
    for _ in range(5):
        r.fault("race", "m", "warp 0, pc 1", "warp 1, pc 2", key=("1", "2"))
        r.fault("race", "m", "warp 3, pc 1", "warp 4, pc 2", key=("1", "2"))
    assert len(r.faults) == 1
    r.fault("race", "m", "x", "y", key=("1", "3"))
    with pytest.raises(Abandoned):
        r.fault("deadlock", "m")
    assert r.kinds() == {"race", "deadlock"} and len(r.faults) == 3
    with pytest.raises(Abandoned):
        Report(collect=10).fatal("trap", "m")


def test_the_first_fault_raises_when_not_gathering() -> None:
    with pytest.raises(FaultFound, match="uninitialised-read") as e:
        Kernel("mov.u32 %r4, smem; ld.shared.b32 %r5, [%r4];", params=0, threads=32).run(collect=0)
    assert len(e.value.faults) == 1
    assert e.value.faults[0].where.startswith("cta (0, 0, 0) warp 0, pc ")


def test_places_name_source_lines() -> None:
    body = """
.loc 1 42 7
mov.u32 %r4, smem;
.loc 1 43 7
ld.shared.b32 %r5, [%r4];
"""
    k = Kernel(body, params=0, threads=32)
    assert "kernel.py:43, pc " in k.run().faults[0].where


@pytest.mark.parametrize(
    ("stride", "nbytes", "expect"),
    [
        (4, 4, (1, 1)),
        (8, 4, (2, 1)),
        (128, 4, (32, 1)),
        (0, 4, (1, 1)),  # one word for all
        (16, 16, (4, 4)),
        (32, 16, (8, 4)),
        (128, 16, (32, 4)),
        (144, 16, (4, 4)),  # padded rows
        (8, 8, (2, 2)),
        (16, 8, (4, 2)),
        (2, 2, (1, 1)),
    ],
)
def test_wavefronts(stride: int, nbytes: int, expect: tuple[int, int]) -> None:
    assert wavefronts(np.arange(32, dtype=np.int64) * stride, nbytes) == expect


def test_bank_conflicts_of_a_kernel() -> None:
    body = """
mov.u32 %r4, smem;
shl.b32 %r5, %r3, {shift};
add.u32 %r6, %r4, %r5;
st.shared.b32 [%r6], %r0;
shl.b32 %r7, %r3, 4;
add.u32 %r7, %r4, %r7;
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r7], {{%r0, %r0, %r0, %r0}};
"""
    c = Counters()
    Kernel(body.format(shift=2), params=0, threads=32, shared=4096).run(counters=c)
    assert c.conflicts() == [] and len(c.sites) == 2
    c = Counters()
    Kernel(body.format(shift=7), params=0, threads=32, grid=3, shared=4096).run(counters=c)
    (worst,) = c.conflicts()
    assert (worst.executed, worst.wavefronts, worst.minimum) == (3, 96, 3)
    assert "st.shared.b32" in worst.where and "96 wavefronts for 3" in str(c)


def test_counts() -> None:
    c = Counters()
    body = """
mov.f32 %f1, 0f3F800000;
ex2.approx.ftz.f32 %f2, %f1;
setp.lt.u32 %p1, %r3, 8;
@%p1 ex2.approx.ftz.f32 %f2, %f1;
@!%p1 ex2.approx.ftz.bf16x2 %r5, %r4;
"""
    Kernel("mov.b32 %r4, 0;" + body, params=0, threads=64, grid=2).run(counters=c)
    assert c.exponentials == 4 * (32 + 8 + 2 * 24)
    assert c.tiles == 2
    assert c.instructions == 4 * (5 + 5 + 1)
    assert c.per_tile()["instructions"] == c.instructions / 2


def test_counting_is_off_by_default() -> None:
    assert Kernel("", params=0).run().counters is None
