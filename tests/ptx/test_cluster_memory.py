"""Distributed shared memory: loads, stores and st.async to a peer, and a peer that has exited."""

from __future__ import annotations

import numpy as np
from kernels import Kernel, clean, found
from words import out

CLUSTER = """
mov.u32 %r4, smem;
mov.u32 %r5, %cluster_ctarank;
xor.b32 %r6, %r5, 1;
mapa.shared::cluster.u32 %r7, %r4, %r6;
shl.b32 %r8, %r0, 2;
add.u32 %r9, %r7, %r8;
add.u32 %r10, %r4, %r8;
add.u32 %r11, %r0, 100;
add.u32 %r11, %r11, %r5;
{first}
st.shared::cluster.b32 [%r9], %r11;
{barrier}
ld.shared.b32 %r12, [%r10];
mul.wide.u32 %rd5, %r8, 1;
mul.wide.u32 %rd6, %r5, 256;
add.s64 %rd7, %rd0, %rd5;
add.s64 %rd7, %rd7, %rd6;
st.global.b32 [%rd7], %r12;
"""
BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def test_distributed_shared_memory() -> None:
    a = out(128)
    clean(Kernel(CLUSTER.format(first="", barrier=BARRIER), grid=2, cluster=2, shared=256), a)
    assert (a == np.concatenate([np.arange(101, 165), np.arange(100, 164)])).all()
    for barrier in ("", "bar.sync 0;", BARRIER.replace("arrive", "arrive.relaxed")):
        k = Kernel(CLUSTER.format(first="", barrier=barrier), grid=2, cluster=2, shared=256)
        kinds = {x for seed in range(20) for x in k.run(a, seed=seed).kinds()}
        assert "race" in kinds and kinds <= {"race", "uninitialised-read", "exited-peer"}


def test_a_peer_that_has_exited() -> None:
    """CTA 0 leaves at once; CTA 1 writes to it."""
    body = """
mov.u32 %r4, smem;
mov.u32 %r5, %cluster_ctarank;
setp.eq.u32 %p1, %r5, 0;
@%p1 bra END;
mapa.shared::cluster.u32 %r7, %r4, 0;
st.shared::cluster.b32 [%r7], %r5;
END:
{tail}
"""
    found(Kernel(body.format(tail=""), grid=2, cluster=2, shared=64, params=0, threads=32), "exited-peer", every=True)
    clean(Kernel(body.format(tail=BARRIER), grid=2, cluster=2, shared=64, params=0, threads=32))


def test_st_async_completes_on_the_peers_barrier() -> None:
    body = """
mov.u32 %r4, smem;
mov.u32 %r5, %cluster_ctarank;
xor.b32 %r6, %r5, 1;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {bytes};
fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r7, %r4, %r6;
shl.b32 %r8, %r0, 2;
add.u32 %r9, %r7, %r8;
st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r9+64], %r0, [%r7];
{wait}
add.u32 %r10, %r4, %r8;
ld.shared.b32 %r12, [%r10+64];
mul.wide.u32 %rd5, %r8, 1;
add.s64 %rd7, %rd0, %rd5;
setp.eq.u32 %p3, %r5, 0;
@%p3 st.global.b32 [%rd7], %r12;
"""
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra W;"
    a = out()
    clean(Kernel(body.format(bytes=256, wait=wait), grid=2, cluster=2, shared=512), a)
    assert (a == np.arange(64)).all()
    few = Kernel(body.format(bytes=128, wait=wait), grid=2, cluster=2, shared=512)
    kinds = {x for seed in range(10) for x in few.run(a, seed=seed).kinds()}
    assert "barrier-transaction" in kinds
    none = Kernel(body.format(bytes=256, wait=""), grid=2, cluster=2, shared=512)
    kinds = {x for seed in range(10) for x in none.run(a, seed=seed).kinds()}
    assert "race" in kinds or "unwaited-data" in kinds
