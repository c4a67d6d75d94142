"""mbarriers, named and cluster barriers, proxies, fences, dependent launches, registers: each rule kept and broken."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import Kernel, clean, found
from ptxcheck.global_memory import Global

# Two warps: warp 0 loads 256 bytes a stage through the async proxy into a ring of two stages, warp 1 reads them.
# Barriers: full at smem, smem+8; empty at smem+16, smem+24; data at smem+128.
RING = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
{init}
{fence}
{sync}
mov.u32 %r5, 0;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra CONSUMER;
PRODUCE:
and.b32 %r6, %r5, 1;
shl.b32 %r7, %r6, 3;
add.u32 %r8, %r4, %r7;
shr.u32 %r9, %r5, 1;
and.b32 %r9, %r9, 1;
xor.b32 %r10, %r9, 1;
{wait_empty}
shl.b32 %r11, %r6, 8;
add.u32 %r11, %r11, %r4;
mul.wide.u32 %rd4, %r5, 256;
add.s64 %rd5, %rd0, %rd4;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {expect};
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11+128], [%rd5], 256, [%r8];
add.u32 %r5, %r5, 1;
setp.lt.u32 %p4, %r5, 6;
@%p4 bra PRODUCE;
bra END;
CONSUMER:
and.b32 %r6, %r5, 1;
shl.b32 %r7, %r6, 3;
add.u32 %r8, %r4, %r7;
shr.u32 %r9, %r5, 1;
and.b32 %r9, %r9, 1;
{wait_full}
shl.b32 %r11, %r6, 8;
add.u32 %r11, %r11, %r4;
shl.b32 %r12, %r3, 3;
add.u32 %r12, %r12, %r11;
ld.shared.v2.b32 {{%r13, %r14}}, [%r12+128];
mul.wide.u32 %rd4, %r5, 256;
add.s64 %rd5, %rd1, %rd4;
mul.wide.u32 %rd6, %r3, 8;
add.s64 %rd5, %rd5, %rd6;
st.global.v2.b32 [%rd5], {{%r13, %r14}};
setp.eq.u32 %p5, %r3, 0;
bar.warp.sync -1;
{release}
add.u32 %r5, %r5, 1;
setp.lt.u32 %p4, %r5, 6;
@%p4 bra CONSUMER;
END:
"""
RING_PARTS = {
    "init": "\n".join(f"@%p1 mbarrier.init.shared.b64 [%r4+{8 * k}], 1;" for k in range(4)),
    "fence": "fence.mbarrier_init.release.cluster;",
    "sync": "bar.sync 0;",
    "wait_empty": "E: mbarrier.try_wait.parity.shared.b64 %p3, [%r8+16], %r10; @!%p3 bra E;",
    "wait_full": "F: mbarrier.try_wait.parity.shared.b64 %p3, [%r8], %r9; @!%p3 bra F;",
    "expect": "256",
    "release": "@%p5 mbarrier.arrive.shared.b64 _, [%r8+16];",
}


def ring(**change: str) -> Kernel:
    return Kernel(RING.format(**{**RING_PARTS, **change}), params=2, shared=1024)


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(6 * 64, dtype=np.uint32), np.zeros(6 * 64, np.uint32)


def kinds(kernel: Kernel, *arrays: np.ndarray, seeds: int = 30) -> set[str]:
    return {k for s in range(seeds) for k in kernel.run(*arrays, seed=s).kinds()}


def test_ring_is_clean() -> None:
    src, dst = data()
    clean(ring(), src, dst, seeds=range(60))
    assert (src == dst).all()
    # test_wait polls, try_wait suspends
    polled = RING_PARTS["wait_full"].replace("try_wait", "test_wait")
    clean(ring(wait_full=polled), src, dst)


def test_ring_without_a_wait_on_full() -> None:
    assert "race" in kinds(ring(wait_full=""), *data())


def test_ring_without_a_wait_on_empty() -> None:
    """The copy overwrites a stage that is still read: found under every seed in which it gets that far."""
    src, dst = data()
    k = ring(wait_empty="")
    got = [k.run(src, dst, seed=s).kinds() for s in range(30)]
    assert all(g & {"race", "barrier-over-arrival", "barrier-transaction"} for g in got)
    assert any("race" in g for g in got)


def test_ring_without_release_deadlocks() -> None:
    src, dst = data()
    report = found(ring(release=""), "deadlock", src, dst, every=True)
    text = str(report)
    assert "warp 0: waits for mbarrier at 0x410 (smem+16) of cta (0, 0, 0), parity 0; " in text
    assert "mbarrier at 0x408 (smem+8) of cta (0, 0, 0): phase 1 (parity 1), 1 of 1 arrivals pending, 0 bytes" in text
    assert "mbarrier.try_wait" in text


@pytest.mark.parametrize(("expect", "also"), [("512", "deadlock"), ("128", "barrier-transaction")])
def test_wrong_transaction_count(expect: str, also: str) -> None:
    src, dst = data()
    got = [ring(expect=expect).run(src, dst, seed=s).kinds() for s in range(10)]
    assert all(also in g or "deadlock" in g for g in got)


def test_first_empty_wait_with_the_wrong_parity() -> None:
    """Waiting for parity 0 of a fresh barrier waits for a phase that nobody completes."""
    wrong = RING_PARTS["wait_empty"].replace("%r10;", "%r9;")
    found(ring(wait_empty=wrong), "deadlock", *data(), every=True)


def test_a_parity_that_does_not_flip_passes_by_the_phase_before() -> None:
    """A consumer that always waits for parity 0 gets through the second round on the first round's phase, or hangs."""
    stuck = RING_PARTS["wait_full"].replace("%r9;", "0;")
    got = kinds(ring(wait_full=stuck), *data())
    assert got & {"race", "deadlock"}


def test_init_must_be_seen() -> None:
    src, dst = data()
    got = kinds(ring(sync=""), src, dst)
    assert got <= {"barrier-uninitialised", "barrier-unsynchronised", "deadlock", "race", "uninitialised-read"}
    assert "barrier-unsynchronised" in got and "barrier-uninitialised" in got
    none = ring(init="")
    assert "barrier-uninitialised" in kinds(none, src, dst, seeds=3)


def test_init_must_be_visible_to_the_async_proxy() -> None:
    src, dst = data()
    report = found(ring(fence=""), "barrier-unsynchronised", src, dst, every=True)
    assert "async proxy" in report.faults[0].message
    clean(ring(fence="fence.proxy.async.shared::cta;"), src, dst)


def test_a_stage_released_twice_ends_two_phases() -> None:
    """With a count of one that is no over-arrival, and leaves the producer waiting for the wrong parity."""
    found(ring(release=RING_PARTS["release"] * 2), "deadlock", *data(), every=True)


def test_over_arrival() -> None:
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], {count};
bar.sync 0;
mbarrier.arrive.shared.b64 %rd1, [%r4];
"""
    clean(Kernel(body.format(count=64), params=0, shared=64))
    report = found(Kernel(body.format(count=48), params=0, shared=64), "barrier-over-arrival", every=True)
    assert "32 arrival(s)" in report.faults[0].message and "16 of 48 are pending" in report.faults[0].message


def test_stage_released_by_some_only() -> None:
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], {count};
bar.sync 0;
mbarrier.arrive.shared.b64 %rd1, [%r4];
"""
    report = found(Kernel(body.format(count=96), params=0, shared=64), "barrier-unfinished", every=True)
    assert "64 of 96 arrivals of phase 0" in report.faults[0].message


@pytest.mark.parametrize("late", [False, True])
def test_bytes_that_nothing_announced(late: bool) -> None:
    """complete_tx may come before its expect_tx, but not without one."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4+128], [%rd0], 256, [%r4];
{announce}
@%p1 mbarrier.arrive.shared.b64 _, [%r4];
{wait}
"""
    src, _ = data()
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra W;"
    announce = "@%p1 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r4], 256;" if late else ""
    k = Kernel(body.format(announce=announce, wait=wait if late else ""), shared=1024, threads=32)
    if late:
        clean(k, src)
    else:
        got = [k.run(src, seed=s).kinds() for s in range(20)]
        assert all(g & {"barrier-unfinished", "barrier-transaction"} for g in got)


def test_a_producer_may_acquire_stages_once_more() -> None:
    """Its last expect_tx announces bytes that never come and that nobody waits for."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 512;
"""
    clean(Kernel(body, params=0, shared=64, threads=32))


def test_all_lanes_may_initialise_a_barrier_alike() -> None:
    body = "mov.u32 %r4, smem; mbarrier.init.shared.b64 [%r4], {count};"
    clean(Kernel(body.format(count=1), params=0, shared=64, threads=32))
    other = "add.u32 %r5, %r3, 1;" + body.format(count="%r5")
    found(Kernel(other, params=0, shared=64, threads=32), "barrier-misuse", every=True)


def test_data_that_no_one_waits_for() -> None:
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4+128], [%rd0], 256, [%r4];
{wait}
"""
    src, _ = data()
    found(Kernel(body.format(wait=""), shared=1024, threads=32), "unwaited-data", src, every=True)
    wait = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra W;"
    clean(Kernel(body.format(wait=wait), shared=1024, threads=32), src)


def test_state_tokens_and_counts() -> None:
    """mbarrier.arrive gives the phase that test_wait without parity asks for; arrive takes a count; drop lowers it."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 4;
bar.sync 0;
setp.eq.u32 %p2, %r3, 0;
@!%p2 bra END;
mbarrier.arrive.shared.b64 %rd4, [%r4], 2;
W: mbarrier.test_wait.shared.b64 %p3, [%r4], %rd4; @!%p3 bra W;
mbarrier.arrive_drop.shared.b64 %rd4, [%r4];
mbarrier.arrive.shared.b64 %rd4, [%r4];
V: mbarrier.try_wait.shared.b64 %p3, [%r4], %rd4; @!%p3 bra V;
mbarrier.arrive.shared.b64 %rd4, [%r4];
X: mbarrier.try_wait.shared.b64 %p3, [%r4], %rd4; @!%p3 bra X;
END:
"""
    clean(Kernel(body, params=0, shared=64))


def test_reuse_of_a_barriers_bytes() -> None:
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
{inval}
@%p1 {use};
"""
    inval = "@%p1 mbarrier.inval.shared.b64 [%r4];"
    for use in ("st.shared.b32 [%r4+4], %r0", "mbarrier.init.shared.b64 [%r4], 2"):
        clean(Kernel(body.format(inval=inval, use=use), params=0, shared=64))
        found(Kernel(body.format(inval="", use=use), params=0, shared=64), "barrier-misuse", every=True)


# ------------------------------------------------------------------------------------------------------------ proxies
STORE = """
mov.u32 %r4, smem;
shl.b32 %r5, %r0, 2;
add.u32 %r6, %r4, %r5;
st.shared.b32 [%r6], %r0;
{fence}
{sync}
{fence2}
setp.ne.u32 %p1, %r0, 0;
@%p1 bra WAIT;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r4], 256;
cp.async.bulk.commit_group;
{wait}
WAIT:
{after}
"""
STORE_PARTS = {
    "fence": "fence.proxy.async.shared::cta;",
    "sync": "bar.sync 0;",
    "fence2": "",
    "wait": "cp.async.bulk.wait_group.read 0;",
    "after": "",
}


def store(**change: str) -> Kernel:
    return Kernel(STORE.format(**{**STORE_PARTS, **change}), shared=256)


def test_generic_writes_need_a_proxy_fence_before_a_bulk_store() -> None:
    a = np.zeros(64, np.uint32)
    clean(store(), a)
    assert (a == np.arange(64)).all()
    clean(store(fence="", fence2="fence.proxy.async.shared::cta;"), a)  # by who has acquired them
    report = found(store(fence=""), "missing-proxy-fence", a, every=True)
    assert "cp.async.bulk" in report.faults[0].where and "st.shared" in report.faults[0].other_where
    # A fence before the writes, or by a warp that is not ordered after them, helps nothing.
    early = STORE.replace("st.shared", "{fence} st.shared", 1).replace("{fence}\n{sync}", "{sync}")
    found(Kernel(early.format(**STORE_PARTS), shared=256), "missing-proxy-fence", a, every=True)


def test_bulk_store_needs_a_barrier_after_the_writes() -> None:
    a = np.zeros(64, np.uint32)
    got = kinds(store(sync=""), a)
    assert "race" in got and got <= {"race", "uninitialised-read"}


def test_bulk_store_must_be_waited_for() -> None:
    a = np.zeros(64, np.uint32)
    found(store(wait=""), "async-in-flight", a, every=True)
    again = "bar.sync 0; st.shared.b32 [%r6], %r3;"
    clean(store(after=again), a)
    report = found(store(after="st.shared.b32 [%r6], %r3;"), "race", a, every=True)
    assert "still reads" in str(report)


# ---------------------------------------------------------------------------------------------------- named barriers
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


# ----------------------------------------------------------------------------------------------------------- clusters
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


# ------------------------------------------------------------------------------------------- launches and registers
def test_dependent_launch_must_wait() -> None:
    a, b = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    first = Kernel("mul.wide.u32 %rd5, %r0, 4; add.s64 %rd6, %rd0, %rd5; st.global.b32 [%rd6], %r0;")
    body = """
mul.wide.u32 %rd5, %r0, 4;
{before}
add.s64 %rd6, %rd0, %rd5;
add.s64 %rd7, %rd1, %rd5;
ld.global.b32 %r4, [%rd6];
st.global.b32 [%rd7], %r4;
{after}
"""

    def run(before: str, after: str, pdl: bool) -> set[str]:
        g = Global()
        first.run(a, global_=g)
        k = Kernel(body.format(before=before, after=after), params=2)
        return k.run(a, b, global_=g, unsafe=1 if pdl else 0).kinds()

    wait = "griddepcontrol.wait;"
    assert run(wait, "", True) == set()
    assert run("", "", False) == set()
    assert run("", wait, True) == {"missing-grid-dependency"}
    # One warp waits for all of the CTA, and a barrier passes it on.
    guarded = "setp.eq.u32 %p1, %r2, 0; @!%p1 bra S; griddepcontrol.wait; S: bar.sync 0;"
    assert run(guarded, "", True) == set()
    assert run(guarded.replace("bar.sync 0;", ""), "", True) == {"missing-grid-dependency"}


def test_setmaxnreg_moves_registers() -> None:
    """512 threads have 128 registers each; three warpgroups of 160 need what the fourth gives up."""
    body = """
setp.lt.u32 %p1, %r2, 4;
@!%p1 bra CONSUMER;
setmaxnreg.dec.sync.aligned.u32 {low};
bra END;
CONSUMER:
setmaxnreg.inc.sync.aligned.u32 {high};
END:
"""

    def kernel(low: int, high: int) -> Kernel:
        return Kernel(body.format(low=low, high=high), params=0, threads=512)

    clean(kernel(32, 160), seeds=range(10))
    for low, high in ((40, 160), (32, 168), (32, 164), (136, 160), (32, 120)):
        found(kernel(low, high), "register-over-budget", every=True, seeds=range(3))
