"""Atomics and reductions: by value, in every order, as locks."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import Kernel, found
from words import OWN, out


def _wrap(x: int) -> int:
    return x & 0xFFFFFFFF


ATOMS = {
    "add.u32": (3, lambda old, n: _wrap(old + 3 * n)),
    "min.s32": (0xFFFFFFF0, lambda old, n: 0xFFFFFFF0),
    "max.u32": (0xFFFFFFF0, lambda old, n: 0xFFFFFFF0),
    "and.b32": (0x0F, lambda old, n: old & 0x0F),
    "or.b32": (0x80, lambda old, n: old | 0x80),
    "xor.b32": (0xFF, lambda old, n: old),  # 64 times
    "inc.u32": (9, lambda old, n: (old + n) % 10),
    "exch.b32": (5, lambda old, n: 5),
}


@pytest.mark.parametrize("name", ATOMS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(name: str, space: str) -> None:
    """All 64 lanes on one word, in global or shared memory."""
    value, expect = ATOMS[name]
    a = np.array([6], np.uint32)
    where = "%rd0" if space == "global" else "%r4"
    body = f"""
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 st.shared.b32 [%r4], 6;
bar.sync 0;
mov.u32 %r9, {value};
atom.{space}.{name} %r10, [{where}], %r9;
bar.sync 0;
@%p1 ld.{space}.b32 %r11, [{where}];
@%p1 st.global.b32 [%rd0], %r11;
"""
    k = Kernel(body, shared=16)
    for seed in range(4):
        a[0] = 6
        report = k.run(a, seed=seed)
        assert not report.faults, report
        assert a[0] == expect(6, 64)


def test_atomic_values_are_all_different() -> None:
    """What 64 lanes get from a counter is a permutation."""
    a = out(65)
    body = OWN + "atom.global.add.u32 %r9, [%rd0+256], 1; st.global.b32 [%rd8], %r9;"
    k = Kernel(body)
    for seed in range(6):
        a[:] = 0
        assert not k.run(a, seed=seed).faults
        assert sorted(a[:64]) == list(range(64)) and a[64] == 64


def test_compare_and_swap_lock() -> None:
    """A spin lock over a plain counter: clean with acquire and release, a race without."""
    body = """
and.b32 %r4, %r0, 31;
setp.ne.u32 %p1, %r4, 0;
@%p1 bra DONE;
SPIN:
atom.global{acquire}.gpu.cas.b32 %r5, [%rd0], 0, 1;
setp.ne.u32 %p2, %r5, 0;
@%p2 bra SPIN;
ld.global.b32 %r6, [%rd0+64];
add.u32 %r6, %r6, 1;
st.global.b32 [%rd0+64], %r6;
st{release}.gpu.global.b32 [%rd0], 0;
DONE:
"""
    a = out()
    good = Kernel(body.format(acquire=".acquire", release=".release"), threads=128, grid=3)
    for seed in range(10):
        a[:] = 0
        report = good.run(a, seed=seed)
        assert not report.faults, report
        assert a[16] == 12 and a[0] == 0
    bad = Kernel(body.format(acquire=".relaxed", release=".relaxed"), threads=128, grid=3)
    a[:] = 0
    found(bad, "race", a, every=True, seeds=range(5))


def test_float_and_vector_reductions() -> None:
    a = np.zeros(8, np.float32)
    body = """
mov.f32 %f1, 0f3F800000;
mov.f32 %f2, 0f40000000;
red.global.add.f32 [%rd0], %f1;
red.global.v2.f32.add [%rd0+8], {%f1, %f2};
mov.b32 %r4, 0x3f803f80;
red.global.add.noftz.bf16x2 [%rd0+16], %r4;
"""
    assert not Kernel(body).run(a).faults
    assert a[0] == 64 and a[2] == 64 and a[3] == 128
    assert (a[4:5].view(np.uint16) == 0x4280).all()  # 64 in bf16
