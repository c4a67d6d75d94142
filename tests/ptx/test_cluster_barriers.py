"""Barriers of a cluster, and signals to a peer."""

from __future__ import annotations

from kernels import Kernel, clean, found, kinds


def test_cluster_barrier_rules() -> None:
    pair = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    clean(Kernel(pair * 3, params=0, grid=4, cluster=2))
    for body in ("barrier.cluster.wait.aligned;", "barrier.cluster.arrive.aligned; " + pair):
        found(Kernel(body, params=0, grid=2, cluster=2), "barrier-misuse", every=True)
    some = "mov.u32 %r4, %cluster_ctarank; setp.eq.u32 %p1, %r4, 0; @%p1 bra W; WAIT: bra WAIT2; W: " + pair + "WAIT2:"
    clean(Kernel(some, params=0, grid=2, cluster=2))  # threads that have exited are not waited for


def test_remote_arrival_needs_the_init_to_be_seen() -> None:
    body = """
mov.u32 %r4, smem;
mov.u32 %r5, %cluster_ctarank;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
{fence}
{sync}
xor.b32 %r6, %r5, 1;
mapa.shared::cluster.u32 %r7, %r4, %r6;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r4], 0; @!%p2 bra W;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    fence = "fence.mbarrier_init.release.cluster;"

    def kernel(fence: str, sync: str) -> Kernel:
        return Kernel(body.format(fence=fence, sync=sync), params=0, shared=64, grid=2, cluster=2)

    clean(kernel(fence, relaxed))
    clean(kernel("", relaxed.replace(".relaxed", "")))
    found(kernel("", relaxed), "barrier-unsynchronised", every=True)
    assert kinds(kernel(fence, "bar.sync 0;")) & {"barrier-unsynchronised", "barrier-uninitialised"}


def test_a_remote_signal_must_be_waited_for_before_exit() -> None:
    body = """
mov.u32 %r4, smem;
mov.u32 %r5, %cluster_ctarank;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
xor.b32 %r6, %r5, 1;
mapa.shared::cluster.u32 %r7, %r4, %r6;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r7];
{wait}
"""
    wait = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r4], 0; @!%p2 bra W;"
    clean(Kernel(body.format(wait=wait), params=0, shared=64, grid=2, cluster=2))
    found(Kernel(body.format(wait=""), params=0, shared=64, grid=2, cluster=2), "exited-peer", every=True)
