"""Generic and async proxy: what a bulk store of generic writes needs before and after it."""

from __future__ import annotations

import numpy as np
from kernels import Kernel, clean, found, kinds

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
