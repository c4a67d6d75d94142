"""Loads, stores and matrices by value, and the faults of plain memory: bounds, alignment, races."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernels import Kernel, clean, found
from words import OWN, out

EXCHANGE = """
st.shared.b32 [%r6], %r0;
{barrier}
xor.b32 %r7, %r5, 128;
add.u32 %r7, %r7, %r4;
ld.shared.b32 %r8, [%r7];
st.global.b32 [%rd8], %r8;
"""


def test_exchange_through_shared_memory_needs_a_barrier() -> None:
    a = out()
    clean(Kernel(OWN + EXCHANGE.format(barrier="bar.sync 0;"), shared=256), a)
    assert (a == np.arange(64) ^ 32).all()
    broken = Kernel(OWN + EXCHANGE.format(barrier=""), shared=256)
    for seed in range(30):
        kinds = broken.run(a, seed=seed).kinds()
        assert "race" in kinds and kinds <= {"race", "uninitialised-read"}


def test_write_after_read_needs_a_barrier() -> None:
    body = OWN + EXCHANGE.format(barrier="bar.sync 0;") + "{barrier} st.shared.b32 [%r6], %r8;"
    clean(Kernel(body.format(barrier="bar.sync 0;"), shared=256), out())
    report = found(Kernel(body.format(barrier=""), shared=256), "race", out(), every=True)
    fault = report.faults[0]
    assert "pc 1" in fault.where and "warp" in fault.other_where and "smem+" in fault.message


def test_write_after_write_is_a_race() -> None:
    body = OWN + "{barrier} st.shared.b32 [%r4], %r2; {barrier2}"
    found(Kernel(body.format(barrier="", barrier2=""), shared=256), "race", out(), every=True)
    first = "setp.eq.u32 %p1, %r2, 0; @%p1 st.shared.b32 [%r4], %r2; bar.sync 0; @!%p1 st.shared.b32 [%r4], %r2;"
    clean(Kernel(OWN + first, shared=256), out())


@pytest.mark.parametrize(("type_", "shift"), [("b8", 0), ("b16", 1)])
def test_neighbours_in_a_word_are_no_race(type_: str, shift: int) -> None:
    """Lanes of both warps write alternating bytes or halves of the same words."""
    body = f"""
mov.u32 %r4, smem;
shl.b32 %r5, %r3, 1;
add.u32 %r5, %r5, %r2;
shl.b32 %r5, %r5, {shift};
add.u32 %r6, %r4, %r5;
cvt.u16.u32 %h1, %r0;
st.shared.{type_} [%r6], %h1;
"""
    clean(Kernel(body, shared=256, params=0))


def test_reading_what_nothing_wrote() -> None:
    body = OWN + "{store} bar.sync 0; ld.shared.v2.b32 {{%r7, %r8}}, [%r4+8]; st.global.b32 [%rd8], %r8;"
    clean(Kernel(body.format(store="st.shared.b32 [%r6], %r0;"), shared=256), out())
    short = "setp.lt.u32 %p1, %r0, 3; @%p1 st.shared.b32 [%r6], %r0;"
    report = found(Kernel(body.format(store=short), shared=256), "uninitialised-read", out(), every=True)
    assert "smem+12" in report.faults[0].message


def test_global_bounds_name_array_and_index() -> None:
    body = OWN + "st.global.b32 [%rd8+4], %r0;"
    clean(Kernel(body), out(65))
    report = found(Kernel(body), "out-of-bounds", out(64), every=True)
    assert "0 bytes past the end of a0 (64,)" in report.faults[0].message
    report = found(Kernel(OWN + "ld.global.b32 %r9, [%rd8-4];"), "out-of-bounds", out(64), every=True)
    assert "4 bytes before a0" in report.faults[0].message


def test_between_the_rows_of_a_strided_tensor() -> None:
    whole = torch.zeros(8, 16, dtype=torch.int32)
    view = whole[:, :8]
    body = """
mul.wide.u32 %rd5, %r0, {stride};
add.s64 %rd6, %rd0, %rd5;
setp.lt.u32 %p1, %r0, 8;
@%p1 ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd6];
"""
    clean(Kernel(body.format(stride=64), threads=32), view)
    report = found(Kernel(body.format(stride=48), threads=32), "out-of-bounds", view, every=True)
    assert "between the rows of a0 (8, 8), at a0[0, 12]" in report.faults[0].message


def test_alignment() -> None:
    body = OWN + "ld.global.v2.b32 {%r7, %r8}, [%rd0+4];"
    found(Kernel(body), "misaligned", out(), every=True)
    clean(Kernel(body.replace("+4", "+8")), out())
    body = OWN + "st.shared.v4.b32 [%r4+{0}], {{%r0, %r0, %r0, %r0}};"
    report = found(Kernel(body.format(8), shared=256, threads=32), "misaligned", out(), every=True)
    assert "no multiple of 16" in report.faults[0].message
    clean(Kernel(body.format(16), shared=256, threads=32), out())


def test_shared_bounds_and_budget() -> None:
    found(Kernel(OWN + "st.shared.b32 [%r6+4], %r0;", shared=256), "out-of-bounds", out(), every=True)
    clean(Kernel(OWN + "st.shared.b32 [%r6], %r0;", shared=256), out())
    k = Kernel("", params=0, shared=0)
    clean(k, seeds=[0], dynamic_shared=227 * 1024)
    report = found(k, "shared-over-budget", seeds=[0], dynamic_shared=227 * 1024 + 1)
    assert str(227 * 1024 + 1) in report.faults[0].message


def test_vectors_signs_and_narrow_types() -> None:
    src = np.arange(-128, 128, dtype=np.int8)
    a = out(128)
    body = """
mul.wide.u32 %rd5, %r0, 4;
add.s64 %rd6, %rd0, %rd5;
add.s64 %rd7, %rd1, %rd5;
ld.global.v4.s8 {%r4, %r5, %r6, %r7}, [%rd6];
ld.global.u8 %r8, [%rd6];
add.s32 %r9, %r4, %r7;
st.global.b32 [%rd7], %r9;
st.global.b32 [%rd7+256], %r8;
"""
    clean(Kernel(body, params=2), src, a)
    v = src.astype(np.int32).reshape(64, 4)
    assert (a[:64].view(np.int32) == v[:, 0] + v[:, 3]).all()
    assert (a[64:] == src.view(np.uint8)[::4]).all()


def test_partial_masks_leave_other_lanes_alone() -> None:
    a = out()
    body = (
        OWN
        + """
mov.u32 %r9, 7;
and.b32 %r10, %r0, 1;
setp.eq.u32 %p1, %r10, 1;
@%p1 ld.global.b32 %r9, [%rd8];
st.global.b32 [%rd8], %r9;
"""
    )
    a[:] = 1000 + np.arange(64)
    clean(Kernel(body), a, seeds=[0])
    assert (a == np.where(np.arange(64) % 2, 1000 + np.arange(64), 7)).all()


def test_generic_addresses_find_their_space() -> None:
    a = out()
    body = (
        OWN
        + """
cvta.shared.u64 %rd9, %rd10;
st.u32 [%rd9], %r0;
ld.u32 %r9, [%rd9];
st.u32 [%rd8], %r9;
"""
    )
    body = body.replace("cvta.shared", "cvt.u64.u32 %rd10, %r6;\ncvta.shared")
    clean(Kernel(body, shared=256), a)
    assert (a == np.arange(64)).all()


def test_local_memory_is_each_lanes_own() -> None:
    a = out()
    body = (
        OWN
        + """
mov.u32 %r9, depot;
st.local.b32 [%r9+4], %r0;
ld.local.b32 %r10, [%r9+4];
st.global.b32 [%rd8], %r10;
"""
    )
    k = Kernel(body, registers=".local .align 4 .b8 depot[8];")
    clean(k, a)
    assert (a == np.arange(64)).all()
    bad = Kernel(body.replace("[%r9+4], %r0", "[%r9+8], %r0"), registers=".local .align 4 .b8 depot[8];")
    assert bad.run(a).kinds() == {"out-of-bounds"}


def test_race_between_ctas_in_global_memory() -> None:
    """CTA 1 reads what CTA 0 writes: through a flag with release and acquire, or without them."""
    body = """
setp.ne.u32 %p1, %r0, 0;
setp.eq.u32 %p2, %r1, 1;
@%p1 bra DONE;
@%p2 bra READER;
st.global.b32 [%rd0], 42;
{fence}
st{release}.gpu.global.b32 [%rd0+64], 1;
bra DONE;
READER:
ld{acquire}.gpu.global.b32 %r4, [%rd0+64];
setp.eq.u32 %p3, %r4, 0;
@%p3 bra READER;
{fence}
ld.global.b32 %r5, [%rd0];
st.global.b32 [%rd0+128], %r5;
DONE:
"""

    def kernel(release: str, acquire: str, fence: str = "") -> Kernel:
        return Kernel(body.format(release=release, acquire=acquire, fence=fence), threads=32, grid=2)

    a = out()
    for k in (kernel(".release", ".acquire"), kernel(".relaxed", ".relaxed", "fence.acq_rel.gpu;")):
        for seed in range(30):
            a[:] = 0
            report = k.run(a, seed=seed)
            assert not report.faults, report
            assert a[32] == 42
    for k in (kernel(".relaxed", ".acquire"), kernel(".release", ".relaxed")):
        for seed in range(10):
            a[:] = 0
            assert k.run(a, seed=seed).kinds() == {"race"}


def test_ctas_may_write_the_same_value() -> None:
    """As kernels pad: the same bytes from several CTAs. Other bytes are a race."""
    clean(Kernel(OWN + "st.global.b32 [%rd8], %r0;", grid=3), out())
    found(Kernel(OWN + "st.global.b32 [%rd8], %r1;", grid=3), "race", out(), seeds=range(5), every=True)


def test_halves_of_a_word_from_two_ctas() -> None:
    body = """
shl.b32 %r5, %r0, 2;
mad.lo.u32 %r5, %r1, 2, %r5;
cvt.u64.u32 %rd7, %r5;
add.s64 %rd8, %rd0, %rd7;
mad.lo.u32 %r6, %r0, 2, %r1;
cvt.u16.u32 %h1, %r6;
st.global.b16 [%rd8], %h1;
"""
    a = np.zeros(128, np.uint16)
    clean(Kernel(body, grid=2), a)
    assert (a == np.arange(128)).all()


def test_stmatrix_and_ldmatrix() -> None:
    """stmatrix of four matrices, read back plain; ldmatrix.trans of them gives the transposed fragments."""
    a = np.zeros(4 * 64 + 128 * 2, np.uint16)
    body = """
mov.u32 %r4, smem;
shl.b32 %r5, %r3, 4;
add.u32 %r6, %r4, %r5;
shl.b32 %r7, %r3, 17;
shl.b32 %r8, %r3, 1;
add.u32 %r8, %r8, %r7;
add.u32 %r8, %r8, 65536;
add.u32 %r9, %r8, 0x00400040;
add.u32 %r10, %r9, 0x00400040;
add.u32 %r11, %r10, 0x00400040;
stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6], {%r8, %r9, %r10, %r11};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r12, %r13, %r14, %r15}, [%r6];
ld.shared.v4.b32 {%r16, %r17, %r18, %r19}, [%r6];
mul.wide.u32 %rd2, %r3, 16;
add.s64 %rd3, %rd0, %rd2;
st.global.v4.b32 [%rd3], {%r16, %r17, %r18, %r19};
st.global.v4.b32 [%rd3+512], {%r12, %r13, %r14, %r15};
"""
    clean(Kernel(body, threads=32, shared=512), a, seeds=[0, 1])
    rows = a[:256].reshape(4, 8, 8)
    assert (rows == np.arange(256).reshape(4, 8, 8)).all()
    trans = a[256:].view(np.uint32).reshape(32, 4)
    lane = np.arange(32)
    for k in range(4):
        low, high = rows[k].T.reshape(32, 2).T.astype(np.uint32)
        assert (trans[lane, k] == low | high << 16).all()


def test_unknown_forms_are_named() -> None:
    from ptxcheck.table import UnknownInstruction

    with pytest.raises(UnknownInstruction, match="ldmatrix"):
        Kernel("ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.b6x16_p32 {%r1}, [%r2];")


def test_the_non_coherent_path_is_for_read_only_data() -> None:
    body = OWN + "{store} bar.sync 0; ld.global.nc.b32 %r9, [%rd8]; st.global.b32 [%rd8+256], %r9;"
    clean(Kernel(body.format(store="")), out(128))
    report = found(Kernel(body.format(store="st.global.b32 [%rd8], %r0;")), "race", out(128), every=True)
    assert "non-coherent" in report.faults[0].message
