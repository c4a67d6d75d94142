"""Schedules: replayable, far apart, complete; deadlock and livelock."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import Kernel, clean, found
from ptxcheck.report import FaultFound

TICKETS = """
and.b32 %r4, %r0, 31;
setp.eq.u32 %p1, %r4, 0;
@%p1 atom.global.add.u32 %r5, [%rd0], 1;
@%p1 mul.wide.u32 %rd5, %r5, 4;
@%p1 add.s64 %rd6, %rd0, %rd5;
@%p1 mad.lo.u32 %r6, %r1, 100, %r2;
@%p1 st.global.b32 [%rd6+4], %r6;
"""


def orders(kernel: Kernel, n: int, seeds: range) -> list[tuple[int, ...]]:
    out = []
    for seed in seeds:
        a = np.zeros(n + 1, np.uint32)
        assert not kernel.run(a, seed=seed).faults
        assert a[0] == n
        out.append(tuple(a[1:]))
    return out


def test_a_seed_is_a_schedule() -> None:
    k = Kernel(TICKETS, threads=128, grid=5, sms=3)
    once, again = orders(k, 20, range(12)), orders(k, 20, range(12))
    assert once == again
    assert len(set(once)) > 8
    everyone = sorted(100 * c + w for c in range(5) for w in range(4))
    assert all(sorted(o) == everyone for o in once)


def test_ctas_wait_for_a_place() -> None:
    """With one SM the CTAs run one after another, whatever the seed."""
    for o in orders(Kernel(TICKETS, threads=64, grid=6, sms=1), 12, range(10)):
        assert [x // 100 for x in o] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_warps_come_in_any_order() -> None:
    firsts = {o[0] for o in orders(Kernel(TICKETS, threads=128), 4, range(40))}
    assert firsts == {0, 1, 2, 3}


def test_copies_land_early_and_late() -> None:
    """Warp 0 issues a copy; warp 1 looks whether its phase is complete: under some seeds yes, under some no."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 256;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4+128], [%rd0], 256, [%r4];
bar.sync 0;
mbarrier.test_wait.parity.shared.b64 %p2, [%r4], 0;
setp.eq.u32 %p4, %r0, 32;
selp.u32 %r5, 1, 2, %p2;
W: mbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0; @!%p3 bra W;
@%p4 st.global.b32 [%rd0], %r5;
"""
    k = Kernel(body, shared=1024)
    seen = set()
    for seed in range(30):
        a = np.zeros(64, np.uint32)
        report = k.run(a, seed=seed)
        assert not report.faults, report
        seen.add(int(a[0]))
    assert seen == {1, 2}


SPIN = """
setp.ne.u32 %p1, %r2, {writer};
@%p1 bra READ;
{store}
bra END;
READ:
ld.acquire.gpu.global.b32 %r4, [%rd0];
setp.eq.u32 %p2, %r4, 0;
@%p2 bra READ;
END:
"""


def test_spinning_on_a_flag_is_no_livelock_while_others_work() -> None:
    work = "\n".join(f"add.u32 %r{5 + k % 20}, %r0, {k};" for k in range(800))
    k = Kernel(SPIN.format(writer=3, store=work + "st.release.gpu.global.b32 [%rd0], 1;"), threads=128)
    for seed in range(20):
        report = k.run(np.zeros(1, np.uint32), seed=seed)
        assert not report.faults, report


def test_spinning_for_ever_is_a_livelock() -> None:
    k = Kernel(SPIN.format(writer=3, store=""), threads=128)
    report = found(k, "livelock", np.zeros(1, np.uint32), seeds=range(2), every=True)
    assert "ld.acquire" in str(report)


def test_polling_a_barrier_that_never_completes_is_found() -> None:
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
bar.sync 0;
W: mbarrier.{kind}.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra W;
"""
    found(Kernel(body.format(kind="try_wait"), params=0, shared=64), "deadlock", seeds=range(5), every=True)
    found(Kernel(body.format(kind="test_wait"), params=0, shared=64), "livelock", seeds=range(2), every=True)


def test_try_wait_may_give_up() -> None:
    """A kernel that does something else when try_wait fails is not stuck in it."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 1;
bar.sync 0;
mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0;
bar.sync 0;
@%p1 mbarrier.arrive.shared.b64 _, [%r4];
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r4], 0; @!%p2 bra W;
"""
    clean(Kernel(body, params=0, shared=64))


def test_lanes_of_a_warp_wait_for_each_other() -> None:
    """Independent thread scheduling: half a warp waits for the other half's arrival."""
    body = """
mov.u32 %r4, smem;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared.b64 [%r4], 16;
bar.warp.sync -1;
setp.lt.u32 %p2, %r3, 16;
@%p2 bra WAIT;
mbarrier.arrive.shared.b64 _, [%r4];
bra END;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r4], 0; @!%p3 bra WAIT;
END:
"""
    clean(Kernel(body, params=0, shared=64, threads=32))


def test_deadlock_report_says_who_waits_where() -> None:
    body = """
setp.eq.u32 %p1, %r2, 1;
@%p1 bra B;
bar.sync 1, 64;
bra END;
B:
bar.sync 2, 64;
END:
"""
    with pytest.raises(FaultFound) as e:
        Kernel(body, params=0).run(collect=0)
    text = str(e.value)
    for part in (
        "deadlock: no warp can go on",
        "cta (0, 0, 0) warp 0: waits at barrier 1 for 64 threads",
        "cta (0, 0, 0) warp 1: waits at barrier 2 for 64 threads",
        "barrier 1 of cta (0, 0, 0): 32 of 64 threads have arrived",
        "bar.sync 2, 64;",
    ):
        assert part in text


def test_a_fault_that_stops_a_warp_is_not_followed_by_a_deadlock() -> None:
    body = "setp.eq.u32 %p1, %r2, 0; @%p1 trap; bar.sync 0;"
    found(Kernel(body, params=0), "trap", every=True)
