"""Cluster launch control: running CTAs take over those that have not started; every one's work is done once."""

from __future__ import annotations

import numpy as np
import pytest
from ptxcheck.ops_clc import encode
from ptxtext import Kernel

CTAS, THREADS = 13, 32
REQUEST = """
    mbarrier.arrive.expect_tx.shared.b64 _, [smem+16], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [smem], [smem+16];
"""
LOOP = f"""
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra END;
    mbarrier.init.shared.b64 [smem+16], 1;
    fence.mbarrier_init.release.cluster;
    ld.param.b64 %d9, [out];
    mov.u32 %r20, %ctaid.x;
    mov.b32 %r21, 0;
LOOP:
    mul.wide.u32 %d5, %r20, {4 * THREADS};
    add.s64 %d5, %d9, %d5;
    atom.global.add.u32 %r22, [%d5], 1;
    {REQUEST}
POLL:
    mbarrier.try_wait.parity.shared.b64 %p4, [smem+16], %r21;
    @!%p4 bra POLL;
    xor.b32 %r21, %r21, 1;
    ld.shared.v2.b64 {{%d6, %d7}}, [smem];
    {{
    .reg .b128 %response;
    mov.b128 %response, {{%d6, %d7}};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p5, %response;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r20, %r24, %r25, _}}, %response;
    }}
    @%p5 bra LOOP;
"""
END = "END:\n    ret;\n"


def kernel(text: str) -> Kernel:
    return Kernel(text, image=bytes(16), threads=THREADS, ctas=CTAS, out=4, shared=64, target="sm_100a")


@pytest.mark.parametrize("seed", range(5))
def test_every_cta_is_done_once(seed: int) -> None:
    out, report = kernel(LOOP + END).run(seed)
    assert not report.faults
    assert (out.view(np.uint32).reshape(CTAS, THREADS)[:, 0] == 1).all()


def test_no_request_after_one_was_seen_to_fail() -> None:
    assert kernel(LOOP + REQUEST + END).kinds(2) == {"launch-control"}


def test_the_response_has_to_be_waited_for() -> None:
    text = LOOP.replace("    @!%p4 bra POLL;\n", "").replace("mbarrier.try_wait", "mbarrier.test_wait")
    assert kernel(text + END).kinds(6) & {"race", "barrier-over-arrival", "unwaited-data", "barrier-unfinished"}


def test_the_response_lies_on_16_bytes() -> None:
    assert "misaligned" in kernel(LOOP.replace("b128 [smem], [", "b128 [smem+8], [") + END).kinds(2)


def test_responses() -> None:
    assert encode((3, 4, 5)).view(np.uint32).tolist() == [[3, 4, 5, 1]]
    assert encode(None).view(np.uint32).tolist() == [[0, 0, 0, 0]]
