"""What a launch asks for: the wait for the grid before it, and registers of an SM."""

from __future__ import annotations

import numpy as np
from kernels import Kernel, clean, found
from ptxcheck.global_memory import Global


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
