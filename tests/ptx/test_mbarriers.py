"""mbarriers: a ring of stages whole, and with each of its waits, signals and counts broken."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import Kernel, clean, found, kinds

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
{meet}
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
    "meet": "bar.warp.sync -1;",
    "release": "@%p5 mbarrier.arrive.shared.b64 _, [%r8+16];",
}


def ring(**change: str) -> Kernel:
    return Kernel(RING.format(**{**RING_PARTS, **change}), params=2, shared=1024)


def data() -> tuple[np.ndarray, np.ndarray]:
    return np.arange(6 * 64, dtype=np.uint32), np.zeros(6 * 64, np.uint32)


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


def test_ring_that_one_lane_gives_back_for_all() -> None:
    """Lane 0 says that a stage is read: it cannot know that of lanes it has not met, whatever the schedule."""
    found(ring(meet=""), "race", *data(), every=True)
    clean(  # nor need it: here each lane speaks for itself
        ring(
            meet="",
            release=RING_PARTS["release"].removeprefix("@%p5 "),
            init=RING_PARTS["init"].replace("[%r4+16], 1", "[%r4+16], 32").replace("[%r4+24], 1", "[%r4+24], 32"),
        ),
        *data(),
    )


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
