"""cp.async: groups, and signals to an mbarrier."""

from __future__ import annotations

import numpy as np
from kernels import Kernel, clean
from words import out

CP_ASYNC = """
mul.wide.u32 %rd5, %r0, 16;
add.s64 %rd6, %rd0, %rd5;
mov.u32 %r4, smem;
shl.b32 %r5, %r0, 4;
add.u32 %r6, %r4, %r5;
xor.b32 %r7, %r5, 512;
add.u32 %r7, %r7, %r4;
cp.async.cg.shared.global [%r6], [%rd6], 16{size};
cp.async.commit_group;
{wait}
{barrier}
ld.shared.b32 %r8, [%r7];
mul.wide.u32 %rd5, %r0, 4;
add.s64 %rd6, %rd1, %rd5;
st.global.b32 [%rd6], %r8;
cp.async.wait_all;
"""


def test_cp_async() -> None:
    src, a = np.arange(1, 257, dtype=np.uint32), out()
    good = {"size": "", "wait": "cp.async.wait_group 0;", "barrier": "bar.sync 0;"}
    clean(Kernel(CP_ASYNC.format(**good), params=2, shared=1024), src, a)
    assert (a == 1 + 4 * (np.arange(64) ^ 32)).all()
    for change in ({"wait": "cp.async.wait_group 1;"}, {"barrier": ""}):
        k = Kernel(CP_ASYNC.format(**{**good, **change}), params=2, shared=1024)
        kinds = {x for seed in range(10) for x in k.run(src, a, seed=seed).kinds()}
        assert "race" in kinds and kinds <= {"race", "uninitialised-read"}
    short = Kernel(CP_ASYNC.format(**{**good, "size": ", %r2"}), params=2, shared=1024)
    clean(short, src, a, seeds=[0])  # warp 0 copies nothing, warp 1 one byte
    assert (a[32:] == 0).all() and (a[:32] == (1 + 4 * (np.arange(64) ^ 32)[:32]) % 256).all()


def test_cp_async_signals_an_mbarrier() -> None:
    """With .noinc each lane's copies count as one of the barrier's arrivals."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 64;
bar.sync 0;
mul.wide.u32 %rd5, %r0, 16;
add.s64 %rd6, %rd0, %rd5;
shl.b32 %r5, %r0, 4;
add.u32 %r6, %r4, %r5;
cp.async.cg.shared.global [%r6+128], [%rd6], 16;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r4];
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], {parity};
@!%p2 bra W;
xor.b32 %r7, %r5, 512;
add.u32 %r7, %r7, %r4;
ld.shared.b32 %r8, [%r7+128];
cp.async.wait_all;
W2: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
@!%p2 bra W2;
"""
    src = np.arange(256, dtype=np.uint32)
    clean(Kernel(body.format(parity=0), shared=2048), src)
    kinds = {x for s in range(10) for x in Kernel(body.format(parity=1), shared=2048).run(src, seed=s).kinds()}
    assert "race" in kinds and kinds <= {"race", "uninitialised-read"}
