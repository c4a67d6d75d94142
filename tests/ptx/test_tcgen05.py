"""tcgen05: products of every kind and placement, fragments as CuTe has them, copies, and planted faults."""

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
from ptxtext import Kernel
from tmemtext import ALLOCATE, FREE, WAIT

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
