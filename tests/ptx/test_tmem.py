"""Tensor memory: allocation, loads and stores of every shape, and what is found when they are misused."""

from __future__ import annotations

import numpy as np
import pytest
from ptxcheck import tcgen05 as tc
from ptxcheck.table import UnknownInstruction
from tmemtext import ALLOCATE, FREE, LOAD, STORE, STORED, USE, WAIT, kernel


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
def test_stores_and_loads(shape: str) -> None:
    """What a fragment stores lies where `fragment` says, seen lane by lane; a load of the same shape gives it back."""
    lanes, width, count = tc.SHAPES[shape]
    times, split = 2, 2 if shape == "16x32bx2" else 0
    registers = times * count
    columns = width * times + split
    some = ", ".join(f"%r{100 + j}" for j in range(registers))
    imm = f"{split}, " if split else ""
    text = ALLOCATE
    for half in range(32 // lanes):
        text += f"    add.u32 %r13, %r12, {half << 20};\n"
        text += "".join(f"    mad.lo.s32 %r{100 + j}, %r0, 1000, {500 * half + j};\n" for j in range(registers))
        text += f"    tcgen05.st.sync.aligned.{shape}.x{times}.b32 [%r13], {imm}{{{some}}};\n"
        text += "    tcgen05.wait::st.sync.aligned;\n"
    text += f"    tcgen05.ld.sync.aligned.{shape}.x{times}.b32 {{{some}}}, [%r13]{', 2' if split else ''};\n"
    rows = ", ".join(f"%r{200 + j}" for j in range(columns))
    text += f"    tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{rows}}}, [%r12];\n{WAIT}"
    text += "".join(f"    st.global.b32 [%d0+{4 * j}], %r{100 + j};\n" for j in range(registers))
    text += "".join(f"    st.global.b32 [%d0+{4 * (registers + j)}], %r{200 + j};\n" for j in range(columns))
    out, _ = kernel(text + FREE, out=4 * (registers + columns)).run()
    found = out.view(np.uint32)
    thread, register = np.arange(128)[:, None], np.arange(registers)
    last = 32 // lanes - 1
    assert (found[:, :registers] == thread * 1000 + 500 * last + register).all()
    at_row, at_column = tc.fragment(shape, times, split)
    cells = np.zeros((128, columns), np.uint32)
    for warp in range(4):
        for half in range(last + 1):
            values = (32 * warp + np.arange(32)) * 1000 + 500 * half + np.arange(registers)[:, None]
            cells[32 * warp + 16 * half + at_row, at_column] = values
    assert (found[:, registers:] == cells).all()


def test_packing() -> None:
    text = f"""{ALLOCATE}
    shl.b32 %r14, %r0, 16;
    or.b32 %r14, %r14, 7;
    tcgen05.st.sync.aligned.32x32b.x1.unpack::16b.b32 [%r12], {{%r14}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r20, %r21}}, [%r12];
    tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {{%r22}}, [%r12];
    {WAIT}
    st.global.v2.b32 [%d0], {{%r20, %r21}};
    st.global.b32 [%d0+8], %r22;
    {FREE}"""
    found = kernel(text).run()[0].view(np.uint32)
    assert (found[:, 0] == 7).all()
    assert (found[:, 1] == np.arange(128)).all()
    assert (found[:, 2] == np.arange(128) << 16 | 7).all()


def test_moves_of_a_loaded_register_may_precede_the_wait() -> None:
    """Compilers pack loaded registers before the wait; the pair is as much in flight as they are."""
    move = "    mov.b64 %d5, {%r20, %r21};\n"
    use = "    st.global.b64 [%d0], %d5;\n"
    out, _ = kernel(ALLOCATE + STORED + LOAD + move + WAIT + use + FREE).run()
    assert (out.view(np.uint32)[:, :2] == np.arange(128)[:, None]).all()
    assert kernel(ALLOCATE + STORED + LOAD + move + use + WAIT + FREE).kinds(1) == {"register-in-flight"}


PLANTED = {
    "no wait::ld": (STORED + LOAD + USE + WAIT, "register-in-flight"),
    "written before wait::ld": (STORED + LOAD + "    mov.b32 %r20, %r0;\n" + WAIT, "register-in-flight"),
    "no wait::st": (STORE + LOAD + WAIT + USE, "tmem-race"),
    "stored over a load": (STORED + LOAD + STORED + WAIT + USE, "tmem-race"),
    "never written": (LOAD + WAIT + USE, "uninitialised-tmem"),
    "lanes of another warp": (
        "    xor.b32 %r12, %r12, 2097152;\n" + STORED, "bad-operand",
    ),
    "columns past the allocation": ("    add.u32 %r12, %r12, 63;\n" + STORED, "tmem-allocation"),
    "lanes disagree": ("    and.b32 %r13, %r0, 1;\n    add.u32 %r12, %r12, %r13;\n" + STORED, "divergence"),
    "half a warp": (
        "    and.b32 %r13, %r0, 16;\n    setp.eq.u32 %p2, %r13, 0;\n    @%p2 bra SKIP;\n" + STORED
        + "    ret;\nSKIP:\n    bar.sync 0;\n", "deadlock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_faults(name: str) -> None:
    text, kind = PLANTED[name]
    assert kind in kernel(ALLOCATE + text + FREE).kinds(3)


@pytest.mark.parametrize("ordered", [True, False])
def test_another_warp_of_the_same_quarter(ordered: bool) -> None:
    """Warps 0-3 store, warps 4-7 load: right with a barrier between, a race without."""
    text = f"""{ALLOCATE}
    setp.lt.u32 %p2, %r10, 4;
    @%p2 bra STORE;
    {"bar.sync 1, 256;" if ordered else ""}
    {LOAD}{WAIT}{USE}
    bra MEET;
STORE:
    {STORED}
    {"bar.sync 1, 256;" if ordered else ""}
MEET:
    {FREE}"""
    found = kernel(text, threads=256).kinds(4)
    assert found == set() if ordered else found <= {"tmem-race", "uninitialised-tmem"} and found


ALLOCATIONS = {
    "not freed": (ALLOCATE + "    ret;\n", "tmem-allocation"),
    "48 columns": ((ALLOCATE + FREE).replace("[smem], 64", "[smem], 48"), "tmem-allocation"),
    "freed in part": ((ALLOCATE + FREE).replace("%r11, 64", "%r11, 32"), "tmem-allocation"),
    "freed by the other group": (
        (ALLOCATE + FREE).replace("dealloc.cta_group::1", "dealloc.cta_group::2"), "tmem-allocation",
    ),
    "after the permit": (
        ALLOCATE.replace("tcgen05.alloc", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\ntcgen05.alloc")
        + FREE, "tmem-allocation",
    ),
    "more than there is": (
        (ALLOCATE + FREE).replace(
            "[smem], 64;", "[smem], 512;\n    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+4], 32;"
        ), "deadlock",
    ),
    "freed while a warp loads": (
        ALLOCATE + STORED + LOAD + FREE.replace("    bar.sync 0;", "    bar.sync 0;\n") + WAIT, "tmem-race",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_allocation_faults(name: str) -> None:
    text, kind = ALLOCATIONS[name]
    assert kind in kernel(text).kinds(4)


def test_clean_allocation() -> None:
    assert kernel(ALLOCATE + STORED + LOAD + WAIT + USE + FREE).kinds(8) == set()


def test_forms_that_are_not_modelled_are_named() -> None:
    for text in (
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r12], %d3, %d4, %r13, 1;",
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r12], %d3, %d4, %r13, [%r14], [%r15], 1;",
        "tcgen05.cp.cta_group::1.4x256b [%r12], %d3;",
        "tcgen05.shift.cta_group::1.down [%r12];",
    ):
        with pytest.raises(UnknownInstruction, match=text.split()[0].replace(".", r"\.")):
            kernel(ALLOCATE + text + FREE).run()
