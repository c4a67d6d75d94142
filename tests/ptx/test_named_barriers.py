"""Named barriers, reductions over one, and barriers of a warp."""

from __future__ import annotations

import numpy as np
from kernels import Kernel, clean, found, kinds

NAMED = """
mov.u32 %r4, smem;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra B;
st.shared.b32 [%r4], %r0;
bar.arrive 1, {a};
bra END;
B:
bar.sync {id}, {b};
ld.shared.b32 %r5, [%r4];
END:
"""


def test_named_barriers() -> None:
    clean(Kernel(NAMED.format(a=64, b=64, id=1), params=0, shared=16))
    assert "barrier-misuse" in kinds(Kernel(NAMED.format(a=64, b=96, id=1), params=0, shared=16), seeds=3)
    found(Kernel(NAMED.format(a=64, b=64, id=2), params=0, shared=16), "deadlock", every=True)
    bad = Kernel(NAMED.format(a=64, b=48, id=1), params=0, shared=16)
    assert "bad-operand" in kinds(bad, seeds=5)
    report = found(Kernel(NAMED.format(a=96, b=96, id=1), params=0, shared=16), "deadlock", every=True)
    assert "barrier 1 of cta (0, 0, 0): 64 of 96 threads have arrived" in str(report)


def test_an_arrival_left_behind_is_no_fault() -> None:
    """Ping-pong schedules end with one arrival that nobody waits for."""
    clean(Kernel("bar.arrive 1, 128;", params=0, threads=64))


def test_named_barrier_over_arrival() -> None:
    """`barrier.sync` by parts of warps: 48 threads come where 32 are waited for."""
    body = """
setp.lt.u32 %p1, %r3, 16;
setp.eq.u32 %p2, %r2, 0;
@%p2 bra FULL;
@%p1 barrier.sync 1, {n};
bra END;
FULL:
barrier.sync 1, {n};
END:
"""
    got = kinds(Kernel(body.format(n=32), params=0, threads=64))
    assert "barrier-over-arrival" in got
    arrive = "setp.eq.u32 %p1, %r2, 0; @%p1 bar.arrive 1, {n}; @%p1 bar.arrive 1, {n};"
    clean(Kernel(arrive.format(n=64), params=0, threads=64))


def test_reduction_over_a_barrier() -> None:
    a = np.zeros(3, np.uint32)
    body = """
setp.lt.u32 %p1, %r0, 40;
bar.red.popc.u32 %r4, 0, %p1;
bar.red.and.pred %p2, 0, %p1;
bar.red.or.pred %p3, 0, %p1;
selp.u32 %r5, 1, 0, %p2;
selp.u32 %r6, 1, 0, %p3;
setp.eq.u32 %p4, %r0, 63;
@%p4 st.global.b32 [%rd0], %r4;
@%p4 st.global.b32 [%rd0+4], %r5;
@%p4 st.global.b32 [%rd0+8], %r6;
"""
    clean(Kernel(body), a)
    assert a.tolist() == [40, 0, 1]


def test_diverged_lanes_at_an_aligned_barrier() -> None:
    """Lanes that branch around `bar.sync` leave the others waiting for them there."""
    body = "setp.lt.u32 %p1, %r3, 16; @%p1 bra END; {op} 0; END: {after}"
    report = found(
        Kernel(body.format(op="bar.sync", after="bar.sync 0;"), params=0, threads=32), "deadlock", every=True
    )
    assert "lanes" in str(report)
    clean(Kernel("bar.sync 0;", params=0, threads=32))


def test_warp_sync_mask() -> None:
    clean(Kernel("setp.lt.u32 %p1, %r3, 16; @%p1 bra END; bar.warp.sync 0xffff0000; END:", params=0, threads=32))
    found(
        Kernel("setp.lt.u32 %p1, %r3, 16; @%p1 bra END; bar.warp.sync 0x0000ffff; END:", params=0, threads=32),
        "divergence",
        every=True,
    )
