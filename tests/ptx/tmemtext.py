"""Pieces of PTX kernels that use tensor memory, for tests: allocation, an access of each kind, release.

Registers, beside those of `ptxtext`: %r10 the warp, %r11 the allocation's address, %r12 the same in this warp's lanes;
%p1 marks the warps that do not allocate.
"""

from __future__ import annotations

from typing import Any

from ptxtext import Kernel

ALLOCATE = """
    shr.u32 %r10, %r0, 5;
    setp.ne.u32 %p1, %r10, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 64;
ALLOCATED:
    bar.sync 0;
    ld.shared.b32 %r11, [smem];
    and.b32 %r12, %r10, 3;
    shl.b32 %r12, %r12, 21;
    add.u32 %r12, %r12, %r11;
"""
FREE = """
    bar.sync 0;
    @%p1 bra FREED;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 64;
FREED:
    ret;
"""
STORE = "    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r12], {%r0, %r0};\n"
STORED = STORE + "    tcgen05.wait::st.sync.aligned;\n"
LOAD = "    tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r20, %r21}, [%r12];\n"
WAIT = "    tcgen05.wait::ld.sync.aligned;\n"
USE = "    add.u32 %r22, %r20, %r21;\n    st.global.b32 [%d0], %r22;\n"


def kernel(text: str, **options: Any) -> Kernel:
    return Kernel(text, target="sm_100a", image=bytes(16), **options)
