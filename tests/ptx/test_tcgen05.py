"""tcgen05: products of every kind and placement, fragments as CuTe has them, and the faults of tensor memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cutlass.cute as cute
import kernels_sm100
import numpy as np
import pytest
import torch
from cutlass import BFloat16, Float8E4M3FN, Float8E5M2, Float16, Float32, Int8, Int32, TFloat32
from cutlass.cute.nvgpu import tcgen05
from ptxcheck import launch
from ptxcheck import tcgen05 as tc
from ptxcheck.compile import Code, code_of
from ptxcheck.table import UnknownInstruction
from ptxtext import Kernel

TORCH = {
    BFloat16: torch.bfloat16, Float16: torch.float16, TFloat32: torch.float32, Float8E4M3FN: torch.float8_e4m3fn,
    Float8E5M2: torch.float8_e5m2, Int8: torch.int8,
}  # fmt: skip
X = tcgen05.Repetition
ROWS = tcgen05.Ld32x32bOp
K, MN = (False, False), (True, True)
BF16, F16 = (BFloat16, BFloat16, Float32), (Float16, Float16, Float32)
PACKED = ROWS(X.x16, tcgen05.Pack.PACK_16b_IN_32b)
PRODUCTS = {
    "bf16": ((128, 64, 64), BF16, K, 1, ROWS(X.x32)),
    "mn-major": ((128, 64, 32), BF16, MN, 1, ROWS(X.x16)),
    "swizzle-64": ((128, 32, 32), BF16, K, 1, ROWS(X.x32)),
    "swizzle-32": ((128, 16, 16), BF16, K, 1, ROWS(X.x8)),
    "m64-16x256b": ((64, 64, 64), F16, K, 1, tcgen05.Ld16x256bOp(X.x4)),
    "m64-16x128b": ((64, 64, 64), F16, K, 1, tcgen05.Ld16x128bOp(X.x4)),
    "m64-16x64b": ((64, 64, 64), F16, K, 1, tcgen05.Ld16x64bOp(X.x8)),
    "f16-accumulator": ((128, 64, 64), (Float16, Float16, Float16), K, 1, PACKED),
    "tf32": ((128, 64, 32), (TFloat32, TFloat32, Float32), K, 1, ROWS(X.x16)),
    "fp8": ((128, 64, 64), (Float8E4M3FN, Float8E5M2, Float32), K, 1, ROWS(X.x16)),
    "i8": ((128, 64, 64), (Int8, Int8, Int32), K, 1, ROWS(X.x16)),
    "pair-256": ((256, 128, 64), BF16, K, 2, ROWS(X.x32)),
    "pair-128": ((128, 128, 64), BF16, K, 2, ROWS(X.x32)),
    "pair-mn-major": ((256, 128, 64), BF16, MN, 2, ROWS(X.x32)),
}


def draw(rows: int, columns: int, type_: Any, mn: bool) -> torch.Tensor:
    values = torch.randint(-9, 9, (rows, columns)) if type_ is Int8 else torch.randn(rows, columns)
    found = values.to(TORCH[type_])
    return found.T.contiguous().T if mn else found


def exact(x: torch.Tensor, type_: Any) -> torch.Tensor:
    if type_ is TFloat32:
        x = (x.contiguous().view(torch.int32) & -8192).view(torch.float32)
    return x.double()


def product(code: Any, name: str, seed: int = 0, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """D, what it should be, and the report."""
    (m, n, k), (a_type, b_type, _), mn, _, _ = PRODUCTS[name]
    torch.manual_seed(1)
    a, b = draw(m, k, a_type, mn[0]), draw(n, k, b_type, mn[1])
    d = torch.full((m, n), float("nan"))
    report = launch.check(code, a, b, d, seed=seed, **options)
    return d, exact(a, a_type) @ exact(b, b_type).T, report


@pytest.mark.dsl
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, tmp_path: Path) -> None:
    tile, types, _, group, _ = PRODUCTS[name]
    d, reference, report = product(kernels_sm100.compile_product(*PRODUCTS[name], tmp_path), name, measure=True)
    allowed = 2e-3 if types[2] is Float16 else 2e-6
    assert float((d - reference).abs().max()) <= allowed * float(reference.abs().max())
    (counted,) = report.counters.mma
    assert counted.startswith(f"tcgen05 cta_group::{group} m{tile[0]}n{tile[1]}k")


# ---------------------------------------------------------------------------------------------- against CuTe's layouts
ATOMS = {
    "32x32b": tcgen05.Ld32x32bOp,
    "16x64b": tcgen05.Ld16x64bOp,
    "16x128b": tcgen05.Ld16x128bOp,
    "16x256b": tcgen05.Ld16x256bOp,
}


def index(coordinate: int, shape: Any, stride: Any) -> int:
    """A layout's value at a coordinate, first mode fastest."""
    if isinstance(shape, int):
        return coordinate % shape * stride
    total = 0
    for s, d in zip(shape, stride, strict=True):
        size = int(np.prod(np.array(flat(s))))
        total += index(coordinate % size, s, d)
        coordinate //= size
    return total


def flat(x: Any) -> list[int]:
    return [x] if isinstance(x, int) else [z for y in x for z in flat(y)]


@pytest.mark.dsl
def test_fragments_are_those_of_cute(tmp_path: Path) -> None:
    layouts: dict[tuple[str, int], Any] = {}

    @cute.jit
    def read() -> None:
        for shape, atom in ATOMS.items():
            for times in (1, 4):
                tv = cute.make_copy_atom(atom(getattr(X, f"x{times}")), Float32).layout_dst_tv
                layouts[shape, times] = tv.shape, tv.stride

    cute.compile(read, options=f"--gpu-arch sm_100a --dump-dir {tmp_path}")
    assert len(layouts) == 8
    for (shape, times), ((threads, values), (by_thread, by_value)) in layouts.items():
        rows, columns = tc.fragment(shape, times)
        width = tc.SHAPES[shape][1] * times
        for r in range(rows.shape[0]):
            for t in range(32):
                at = index(t, threads, by_thread) + index(r, values, by_value)
                assert (rows[r, t], columns[r, t]) == divmod(at, width)


def test_descriptors_that_the_manual_forbids() -> None:
    good = 1 << 46 | 2 << 61
    assert tc.descriptor(good | 0x40 << 32 | 0x12).start == 0x120
    for bad in (2 << 61, good | 1 << 61, good | 1 << 52, good | 1 << 14):
        with pytest.raises(tc.BadDescriptor):
            tc.descriptor(bad)
    word = 1 << 4 | 1 << 7 | 1 << 10 | 8 << 17
    assert str(tc.instruction(word | 8 << 24, "f16", 1)) == "m128n64k16.f32.bf16.bf16"
    for bad, kind, group in (
        (word | 8 << 24 | 4, "f16", 1),
        (word | 16 << 24, "f16", 1),
        (word | 4 << 24, "f16", 2),
        (word | 8 << 24, "tf32", 1),
        ((word & ~(63 << 17)) | 1 << 17 | 8 << 24, "f16", 1),
    ):
        with pytest.raises(tc.BadDescriptor):
            tc.instruction(bad, kind, group)


# ----------------------------------------------------------------------------------------------- tensor memory in PTX
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


OTHER_WARPS = "    setp.lt.u32 %p2, %r10, 4;\n"
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


# ----------------------------------------------------------------------------------------- A from tensor memory, in PTX
B_ROWS, LBO, SBO = 16, 256, 128
CORE = """
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra READY;
    mbarrier.init.shared.b64 [smem+520], 1;
    fence.mbarrier_init.release.cluster;
READY:
    shl.b32 %r14, %r0, 8;
    mad.lo.s32 %r30, %r0, 3, 1;
    and.b32 %r30, %r30, 7;
    cvt.rn.f32.u32 %r31, %r30;
    cvt.rn.bf16x2.f32 %r30, %r31, %r31;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12], {%r30, %r30, %r30, %r30, %r30, %r30, %r30, %r30};
    tcgen05.wait::st.sync.aligned;
    bar.sync 0;
    @%p3 bra ISSUED;
    mov.b64 %d3, DESCRIPTOR;
    cvt.u64.u32 %d4, %r1;
    shr.u64 %d4, %d4, 4;
    or.b64 %d3, %d3, %d4;
    mov.b32 %r15, INSTRUCTION;
    add.u32 %r16, %r11, 16;
    tcgen05.mma.cta_group::1.kind::f16 [%r16], [%r11], %d3, %r15, 0;
    tcgen05.mma.cta_group::1.kind::f16 [%r16], [%r11], %d3, %r15, 1;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+520];
ISSUED:
"""
WAIT_CORE = """
POLL:
    mbarrier.try_wait.parity.shared.b64 %p4, [smem+520], 0;
    @!%p4 bra POLL;
"""
RESULT = """
    add.u32 %r17, %r12, 16;
    tcgen05.ld.sync.aligned.32x32b.x16.b32 {VALUES}, [%r17];
    tcgen05.wait::ld.sync.aligned;
    STORES
"""
OVERWRITE = "    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r12], {%r0};\n    tcgen05.wait::st.sync.aligned;\n"


def core(text: str) -> Kernel:
    """D = 2 A B^T, A of tensor memory, B without swizzle, by hand."""
    b = np.arange(B_ROWS * 16).reshape(B_ROWS, 16) % 5 - 2
    raw = torch.tensor(b).bfloat16().view(torch.uint8).numpy().reshape(B_ROWS, 2, 16)
    image = np.zeros(512, np.uint8)
    for row in range(B_ROWS):
        for unit in range(2):
            at = row % 8 * 16 + row // 8 * SBO + unit * LBO
            image[at : at + 16] = raw[row, unit]
    word = LBO >> 4 << 16 | SBO >> 4 << 32 | 1 << 46
    kind = 1 << 4 | 1 << 7 | 1 << 10 | B_ROWS >> 3 << 17 | 128 >> 4 << 24
    text = (ALLOCATE + text + FREE).replace("[smem]", "[smem+512]")
    text = text.replace("DESCRIPTOR", str(word)).replace("INSTRUCTION", str(kind))
    text = text.replace("VALUES", ", ".join(f"%r{40 + j}" for j in range(16)))
    text = text.replace("STORES", "\n".join(f"st.global.b32 [%d0+{4 * j}], %r{40 + j};" for j in range(16)))
    return Kernel(text, image=image.tobytes(), target="sm_100a", out=64, shared=1024)


def test_a_from_tensor_memory() -> None:
    for seed in range(8):
        out, _ = core(CORE + WAIT_CORE + RESULT).run(seed)
        b = np.arange(B_ROWS * 16).reshape(B_ROWS, 16) % 5 - 2
        a = ((3 * np.arange(128) + 1) % 8)[:, None] * np.ones(16)
        assert (out.view(np.float32) == 2 * a @ b.T).all()


CORE_FAULTS = {
    "result not waited for": (CORE + RESULT, {"tmem-race", "uninitialised-tmem"}),
    "A overwritten while it is read": (CORE + OVERWRITE + WAIT_CORE + RESULT, {"tmem-race"}),
    "A not waited for": (
        CORE.replace("    tcgen05.wait::st.sync.aligned;\n", "") + WAIT_CORE + RESULT,
        {"tmem-race", "uninitialised-tmem"},
    ),
    "A not announced": (
        CORE.replace("    bar.sync 0;\n    @%p3 bra ISSUED", "    @%p3 bra ISSUED") + WAIT_CORE + RESULT,
        {"tmem-race", "uninitialised-tmem", "barrier-uninitialised", "barrier-unsynchronised"},
    ),
    "accumulates into nothing": (CORE.replace("%r15, 0;", "%r15, 1;") + WAIT_CORE + RESULT, {"uninitialised-tmem"}),
    "D past the allocation": (
        CORE.replace("%r16, %r11, 16", "%r16, %r11, 56") + WAIT_CORE + RESULT, {"tmem-allocation"},
    ),
    "D in other lanes than A": (
        CORE.replace("%r16, %r11, 16", "%r16, %r11, 2097168") + WAIT_CORE + RESULT, {"bad-operand"},
    ),
    "a pair that is none": (
        CORE.replace("mma.cta_group::1", "mma.cta_group::2") + WAIT_CORE + RESULT, {"bad-operand"},
    ),
    "no commit": (re.sub(r"    tcgen05\.commit.*\n", "", CORE) + WAIT_CORE + RESULT, {"deadlock"}),
    "freed while the product runs": (CORE, {"tmem-race", "async-in-flight", "tmem-allocation"}),
    "B overwritten while it is read": (
        CORE + "    st.shared.b32 [smem+16], %r0;\n" + WAIT_CORE + RESULT, {"race"},
    ),
    "B without a proxy fence": (
        CORE.replace("@%p3 bra ISSUED;", "@%p3 bra ISSUED;\n    st.shared.b32 [smem+16], %r0;") + WAIT_CORE + RESULT,
        {"missing-proxy-fence"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORE_FAULTS)
def test_faults_of_products(name: str) -> None:
    text, kinds = CORE_FAULTS[name]
    assert core(text).kinds(8) & kinds


COPIES = {
    "128x128b": (128, lambda lane: lane),
    "64x128b.warpx2::02_13": (64, lambda lane: lane % 64),
    "64x128b.warpx2::01_23": (64, lambda lane: lane // 64 * 32 + lane % 32),
    "32x128b.warpx4": (32, lambda lane: lane % 32),
}


@pytest.mark.parametrize("waited", [True, False])
@pytest.mark.parametrize("shape", COPIES)
def test_copies_from_shared_memory(shape: str, waited: bool) -> None:
    """Rows of 16 bytes to the lanes of four columns; a load before the commit's barrier is a race."""
    rows, source = COPIES[shape]
    image = np.arange(512, dtype=np.uint32)
    text = f"""{ALLOCATE}
    setp.ne.u32 %p3, %r0, 0;
    @%p3 bra COPIED_ALL;
    mbarrier.init.shared.b64 [smem+2056], 1;
    fence.mbarrier_init.release.cluster;
    mov.b64 %d3, {128 >> 4 << 32 | 1 << 46};
    cvt.u64.u32 %d4, %r1;
    shr.u64 %d4, %d4, 4;
    or.b64 %d3, %d3, %d4;
    tcgen05.cp.cta_group::1.{shape} [%r11], %d3;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+2056];
COPIED_ALL:
    bar.sync 0;
    {WAIT_CORE.replace("520", "2056") if waited else ""}
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r20, %r21, %r22, %r23}}, [%r12];
    {WAIT}
    {"" if waited else WAIT_CORE.replace("520", "2056")}
    st.global.v4.b32 [%d0], {{%r20, %r21, %r22, %r23}};
    {FREE}""".replace("[smem]", "[smem+2048]")
    one = Kernel(text, image=image.tobytes(), target="sm_100a", out=16, shared=4096)
    if not waited:
        assert one.kinds(6) & {"tmem-race", "uninitialised-tmem"}
        return
    found = one.run()[0].view(np.uint32)
    expected = image[: 4 * rows].reshape(rows, 4)[[source(lane) for lane in range(128)]]
    assert (found == expected).all()


# ------------------------------------------------------------------------------------- faults planted in a whole kernel
def nth(text: str, pattern: str, by: str, n: int) -> str:
    """The text with the n-th match replaced; n < 0 counts from the end."""
    found = list(re.finditer(pattern, text))
    at = found[n]
    return text[: at.start()] + by + text[at.end() :]


TRY_WAIT = r"mbarrier\.try_wait[^;]*;"
KERNEL_FAULTS = {
    "no wait::ld": (lambda t: re.sub(r"tcgen05\.wait::ld[^;]*;", "", t), {"register-in-flight"}),
    "no commit": (lambda t: nth(t, r"tcgen05\.commit[^;]*;", "", -1), {"deadlock"}),
    "not freed": (lambda t: re.sub(r"tcgen05\.dealloc[^;]*;", "", t), {"tmem-allocation"}),
    "result not waited for": (
        lambda t: nth(t, TRY_WAIT, "setp.eq.u32 P1, 0, 0;", -1), {"tmem-race", "uninitialised-tmem"},
    ),
    "operands not waited for": (
        lambda t: nth(t, TRY_WAIT, "setp.eq.u32 P1, 0, 0;", -3), {"race", "uninitialised-read"},
    ),
    "a barrier expects too little": (
        lambda t: re.sub(r"(mbarrier\.arrive\.expect_tx[^;]*), (%r\d+);", r"\1, 4096;", t),
        {"barrier-transaction", "deadlock"},
    ),
    "operands of the wrong kind": (lambda t: t.replace("kind::f16", "kind::tf32"), {"bad-operand"}),
    "every lane issues": (
        lambda t: re.sub(r"elect\.sync\s+(%r\d+)\|(%p\d+), -1;", r"setp.eq.u32 \2, 0, 0;", t),
        {"barrier-over-arrival", "barrier-misuse", "barrier-transaction", "race"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Code:
    return code_of(kernels_sm100.compile_product(*PRODUCTS["bf16"], tmp_path_factory.mktemp("dump")))


@pytest.mark.dsl
def test_clean_kernel(code: Code) -> None:
    for seed in range(20):
        product(code, "bf16", seed)


@pytest.mark.dsl
@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_faults_in_a_kernel(name: str, code: Code) -> None:
    edit, kinds = KERNEL_FAULTS[name]
    broken = Code(edit(code.ptx), code.host)
    assert broken.ptx != code.ptx
    found = set()
    for seed in range(12):
        _, _, report = product(broken, "bf16", seed, collect=1)
        found |= report.kinds()
    assert found & kinds, found
