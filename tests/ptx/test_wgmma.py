"""wgmma against float64 products: every layout and type, registers dumped as the manual draws them; and its rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ptxtext import Kernel

Array = np.ndarray[Any, Any]
TORCH = {
    "bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8,
}  # fmt: skip
MODE = {128: 1, 64: 2, 32: 3, 16: 0}


def draw(rows: int, k: int, type_: str, seed: int) -> tuple[Array, Array]:
    """A random matrix that the type holds exactly: its values in float64, and its bytes (rows, bytes)."""
    g = torch.Generator().manual_seed(seed)
    if type_ in ("s8", "u8"):
        x = torch.randint(-128 if type_ == "s8" else 0, 128 if type_ == "s8" else 256, (rows, k), generator=g)
        x = x.to(TORCH[type_])
    else:
        x = torch.randn(rows, k, generator=g).to(TORCH[type_])
    if type_ == "tf32":
        x = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    raw = x.contiguous().view(torch.uint8).numpy().reshape(rows, -1)
    return x.double().numpy(), raw


def place(raw: Array, width: int, mn_major: bool) -> tuple[bytes, int]:
    """A matrix (rows, 32 * steps bytes of K) laid out with a swizzle of `width` bytes (16: none), and LBO and SBO.

    The manual's canonical layouts, unit by unit: 16 bytes of K of one row or, MN-major, 8 rows at one k.
    """
    if mn_major:
        raw = np.ascontiguousarray(raw.view(np.uint16).T).view(np.uint8)  # (k, 2 * rows): "rows" are now along K
        k_count, row_bytes = raw.shape
        if width == 16:
            leading, stride = 8 * row_bytes, 128
        else:
            leading, stride = 16 * width + 128 * 8, 8 * width  # chunks of `width` bytes, apart by more than they need
        size = leading * (row_bytes // width + 2) + stride * 4
        out = bytearray(-(-size // 1024) * 1024)
        for k in range(k_count):
            for unit in range(row_bytes // 16):
                if width == 16:
                    at = (k % 8) * 16 + (k // 8) * leading + unit * stride
                else:
                    chunk, within = divmod(unit * 16, width)
                    at = chunk * leading + (k // 8) * stride + (k % 8) * width + within
                    at ^= (at >> 7 & width // 16 - 1) << 4
                out[at : at + 16] = raw[k, unit * 16 : unit * 16 + 16].tobytes()
        return bytes(out), leading >> 4 << 16 | stride >> 4 << 32 | MODE[width] << 62
    rows, k_bytes = raw.shape
    if width == 16:
        leading, stride = rows * 16, 128
    else:
        leading, stride = 16, 8 * width
    out = bytearray(max(rows * k_bytes, rows // 8 * stride))
    for r in range(rows):
        for unit in range(k_bytes // 16):
            if width == 16:
                at = (r % 8) * 16 + (r // 8) * stride + unit * leading
            else:
                at = (r // 8) * stride + (r % 8) * width + unit * 16
                at ^= (at >> 7 & width // 16 - 1) << 4
            out[at : at + 16] = raw[r, unit * 16 : unit * 16 + 16].tobytes()
    return bytes(out), leading >> 4 << 16 | stride >> 4 << 32 | MODE[width] << 62


def registers(matrix: Array, d: str) -> Array:
    """A (64, n) accumulator as the manual draws it: (128 threads, registers) of 32 bits."""
    n = matrix.shape[1]
    out = np.zeros((128, n // 4 if d == "f16" else n // 2), np.uint32)
    for thread in range(128):
        warp, group, member = thread // 32, thread % 32 // 4, thread % 4
        for i in range(n // 2):
            row = 16 * warp + group + (8 if i % 4 >= 2 else 0)
            column = 8 * (i // 4) + 2 * member + i % 2
            if d == "f16":
                bits = int(np.float16(matrix[row, column]).view(np.uint16))
                out[thread, i // 2] |= np.uint32(bits << 16 * (i % 2))
            else:
                kind = np.int32 if d == "s32" else np.float32
                out[thread, i] = np.array(matrix[row, column], kind).view(np.uint32)
    return out


def fragment(raw: Array) -> Array:
    """A (64, 32 bytes) as the manual's registers of A: (128 threads, 4) of 32 bits."""
    out = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, group, member = thread // 32, thread % 32 // 4, thread % 4
        for j in range(4):
            row, at = 16 * warp + group + 8 * (j % 2), 16 * (j // 2) + 4 * member
            out[thread, j] = raw[row, at : at + 4].copy().view(np.uint32)[0]
    return out


def names(count: int, first: int = 100) -> str:
    return ", ".join(f"%r{first + i}" for i in range(count))


def loads(count: int, first: int = 100, offset: int = 0) -> str:
    return "\n".join(f"    ld.global.b32 %r{first + i}, [%d0+{offset + 4 * i}];" for i in range(count))


def stores(count: int, first: int = 100) -> str:
    return "\n".join(f"    st.global.b32 [%d0+{4 * i}], %r{first + i};" for i in range(count))


def descriptor(register: str, word: int, offset: int) -> str:
    """A descriptor register: the layout's word and the address of smem + offset."""
    return f"""    cvt.u64.u32 {register}, %r1;
    shr.u64 {register}, {register}, 4;
    add.s64 {register}, {register}, {offset // 16};
    or.b64 {register}, {register}, {word};"""


def product(
    n: int,
    d: str,
    a: str,
    b: str,
    *,
    width: int = 128,
    steps: int = 1,
    majors: tuple[bool, bool] = (False, False),
    from_registers: bool = False,
    accumulate: bool = True,
    signs: tuple[int, int] = (1, 1),
    seed: int = 0,
) -> None:
    """Run `steps` wgmmas along K and compare all accumulators with A B^T + C in float64."""
    size = TORCH[a].itemsize
    k = 32 // size
    a_values, a_raw = draw(64, k * steps, a, 1)
    b_values, b_raw = draw(n, k * steps, b, 2)
    a_image, a_word = place(a_raw, width, majors[0])
    b_image, b_word = place(b_raw, width, majors[1])
    a_image = a_image.ljust(-(-len(a_image) // 1024) * 1024, b"\0")
    count = n // 4 if d == "f16" else n // 2
    g = np.random.default_rng(3)
    c = g.integers(-1000, 1000, (64, n)) if d == "s32" else g.standard_normal((64, n)).astype(np.float16)
    start = registers(c, d)
    if from_registers:
        start = np.concatenate([start, fragment(a_raw)], 1)
    shape = f"m64n{n}k{k}.{d}.{a}.{b}"
    scales = "" if d == "s32" else f", {signs[0]}, {signs[1]}"
    if size == 2:
        scales += f", {int(majors[1])}" if from_registers else f", {int(majors[0])}, {int(majors[1])}"
    lines = [loads(count), descriptor("%d10", a_word, 0), descriptor("%d11", b_word, len(a_image))]
    if from_registers:
        lines.append(loads(4, 400, 4 * count))
    lines.append(f"    setp.ne.b32 %p1, {int(accumulate)}, 0;\n    wgmma.fence.sync.aligned;")
    # One step along K: 32 bytes, two 16-byte units; in the layout without swizzle, two core matrices.
    a_step, b_step = (2, 2) if width > 16 else (2 * 64, 2 * n)
    for step in range(steps):
        operand = f"{{{names(4, 400)}}}" if from_registers else "%d10"
        p = "%p1" if step == 0 else "1"
        lines.append(f"    wgmma.mma_async.sync.aligned.{shape} {{{names(count)}}}, {operand}, %d11, {p}{scales};")
        lines.append(f"    add.s64 %d10, %d10, {a_step};\n    add.s64 %d11, %d11, {b_step};")
    lines.append("    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;")
    lines += [stores(count), "    ret;"]
    kernel = Kernel("\n".join(lines), a_image + b_image, out=4 * start.shape[1], initial=start)
    got = kernel.run(seed)[0].view(np.uint32)[:, :count]
    want = signs[0] * signs[1] * (a_values @ b_values.T) + (c.astype(np.float64) if accumulate else 0)
    if d == "s32":
        assert np.array_equal(got, registers(want.astype(np.int64), d))
        return
    if d == "f16":
        close(got.copy().view(np.float16), registers(want, d).view(np.float16), 2e-3)
    else:
        close(got.copy().view(np.float32), registers(want, d).view(np.float32), 1e-5)


def close(got: Array, want: Array, tolerance: float) -> None:
    assert np.isfinite(got).all()
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max() / np.abs(want.astype(np.float64)).max()
    assert error < tolerance, error


@pytest.mark.parametrize("n", [8, 16, 24, 64, 80, 128, 176, 256])
def test_widths(n: int) -> None:
    product(n, "f32", "bf16", "bf16")


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("majors", [(False, False), (True, False), (False, True), (True, True)])
def test_layouts(width: int, majors: tuple[bool, bool]) -> None:
    """Both operands from shared memory, every swizzle and major; n covers several chunks of the widest swizzle."""
    product(192, "f32", "bf16", "bf16", width=width, majors=majors)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("major", [False, True])
def test_a_from_registers(width: int, major: bool) -> None:
    product(64, "f32", "f16", "f16", width=width, majors=(False, major), from_registers=True)


@pytest.mark.parametrize(("width", "steps"), [(128, 4), (64, 2), (16, 3)])
@pytest.mark.parametrize("from_type", ["bf16", "tf32", "e4m3"])
def test_steps_along_k(width: int, steps: int, from_type: str) -> None:
    """Start addresses inside the swizzle's atom; the accumulators stay in flight from step to step."""
    product(40, "f32", from_type, from_type, width=width, steps=steps)


@pytest.mark.parametrize(
    ("d", "a", "b"),
    [
        ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "tf32", "tf32"), ("f32", "e4m3", "e4m3"),
        ("f32", "e4m3", "e5m2"), ("f32", "e5m2", "e4m3"), ("f16", "e5m2", "e5m2"), ("s32", "s8", "s8"),
        ("s32", "u8", "s8"), ("s32", "s8", "u8"), ("s32", "u8", "u8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("from_registers", [False, True])
def test_types(d: str, a: str, b: str, from_registers: bool) -> None:
    product(32, d, a, b, from_registers=from_registers)


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
def test_signs(signs: tuple[int, int]) -> None:
    product(16, "f32", "bf16", "bf16", signs=signs)


def test_scale_d() -> None:
    """With scale-d false the accumulators' old values do not count."""
    product(16, "f32", "bf16", "bf16", accumulate=False)


@pytest.mark.parametrize("seed", range(10))
def test_any_schedule(seed: int) -> None:
    product(64, "f32", "bf16", "bf16", steps=4, seed=seed)


# ---- rules

WGMMA = f"    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{names(4)}}}, %d10, %d11, %p1, 1, 1, 0, 0;\n"
FROM_REGISTERS = WGMMA.replace("%d10", f"{{{names(4, 400)}}}").replace("1, 1, 0, 0", "1, 1, 0")
WGMMA_FENCE = "    wgmma.fence.sync.aligned;\n"
COMMIT = "    wgmma.commit_group.sync.aligned;\n"
WAIT = "    wgmma.wait_group.sync.aligned 0;\n"
TO_OUT = stores(4) + "\n    ret;\n"
ZERO = "".join(f"    mov.b32 %r{100 + i}, 0;\n" for i in range(4))
WORD = 1 << 16 | 64 << 32 | 1 << 62
SETUP = (
    f"    setp.ne.b32 %p1, 1, 0;\n{descriptor('%d10', WORD, 0)}\n{descriptor('%d11', WORD, 8192)}\n{ZERO}"
    + "".join(f"    mov.b32 %r{400 + i}, 0;\n" for i in range(4))
    + "    mov.b32 %r50, 7;\n"
)


STORE = "    setp.eq.u32 %p2, %r0, 0;\n    @%p2 st.shared.b32 [%r1+8192], %r50;\n"
THREE_WARPS = "    setp.lt.u32 %p2, %r0, 96;\n    @%p2 bra MMA;\n    ret;\nMMA:\n"


def kinds(text: str, **options: Any) -> set[str]:
    return Kernel(SETUP + text, bytes(9216), **options).kinds()


def test_clean() -> None:
    assert kinds(WGMMA_FENCE + WGMMA + WGMMA + COMMIT + WAIT + TO_OUT) == set()
    assert kinds(WGMMA_FENCE + FROM_REGISTERS + COMMIT + WAIT + "    mov.b32 %r400, 1;\n" + TO_OUT) == set()
    read = "    st.global.b32 [%d0], %r400;\n"
    assert kinds(WGMMA_FENCE + FROM_REGISTERS + COMMIT + read + WAIT + TO_OUT) == set()
    two = WGMMA_FENCE + WGMMA + COMMIT + WGMMA.replace("%r10", "%r20") + COMMIT
    two += "    wgmma.wait_group.sync.aligned 1;\n" + stores(4) + "\n" + WAIT + stores(4, 200) + "\n    ret;\n"
    assert kinds("".join(f"    mov.b32 %r{200 + i}, 0;\n" for i in range(4)) + two) == set()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (WGMMA + COMMIT + WAIT + TO_OUT, "wgmma-order"),
        (WGMMA_FENCE + "    mov.b32 %r101, %r50;\n" + WGMMA + COMMIT + WAIT + TO_OUT, "wgmma-order"),
        (WGMMA_FENCE + "    mov.b32 %r401, %r50;\n" + FROM_REGISTERS + COMMIT + WAIT + TO_OUT, "wgmma-order"),
        (WGMMA_FENCE + WGMMA + COMMIT + WAIT + ZERO + WGMMA + COMMIT + WAIT + TO_OUT, "wgmma-order"),
        (WGMMA_FENCE + WGMMA + COMMIT + TO_OUT, "register-in-flight"),
        (WGMMA_FENCE + WGMMA + WAIT + TO_OUT, "register-in-flight"),
        (WGMMA_FENCE + WGMMA + COMMIT + "    wgmma.wait_group.sync.aligned 1;\n" + TO_OUT, "register-in-flight"),
        (WGMMA_FENCE + WGMMA + COMMIT + "    mov.b32 %r102, 0;\n" + WAIT + TO_OUT, "register-in-flight"),
        (WGMMA_FENCE + FROM_REGISTERS + COMMIT + "    mov.b32 %r402, %r50;\n" + WAIT + TO_OUT, "register-in-flight"),
        (WGMMA_FENCE + WGMMA + COMMIT + "    ret;\n", "async-in-flight"),
        (WGMMA_FENCE + WGMMA + "    ret;\n", "async-in-flight"),
        (WGMMA_FENCE + WGMMA.replace("n8k", "n16k").replace("%r103}", f"%r103, {names(4, 104)}}}")
         + COMMIT + WAIT + TO_OUT, "uninitialised-register"),
        (WGMMA_FENCE + WGMMA + WGMMA.replace("%r103}", "%r104}") + COMMIT + WAIT + TO_OUT, "register-in-flight"),
        (WGMMA_FENCE + WGMMA + FROM_REGISTERS.replace("%r400", "%r100") + COMMIT + WAIT + TO_OUT, None),
        (THREE_WARPS + WGMMA_FENCE + WGMMA + COMMIT + TO_OUT,
         "register-in-flight"),
        (THREE_WARPS + WGMMA_FENCE + WGMMA + COMMIT + "    ret;",
         "wgmma-order"),
        (THREE_WARPS + WGMMA_FENCE + WGMMA + COMMIT + WAIT
         + TO_OUT, "deadlock"),
        ("    setp.lt.u32 %p2, %r0, 32;\n    @%p2 add.s64 %d11, %d11, 8;\n" + WGMMA_FENCE + WGMMA + COMMIT + WAIT
         + TO_OUT, "divergence"),
        ("    setp.lt.u32 %p2, %r0, 5;\n    @%p2 add.s64 %d11, %d11, 8;\n" + WGMMA_FENCE + WGMMA + COMMIT + WAIT
         + TO_OUT, "divergence"),
        ("    or.b64 %d11, %d11, 0x8000;\n" + WGMMA_FENCE + WGMMA + COMMIT + WAIT + TO_OUT, "bad-operand"),
        ("    add.s64 %d10, %d10, 1024;\n" + WGMMA_FENCE + WGMMA + COMMIT + WAIT + TO_OUT, "out-of-bounds"),
        (WGMMA_FENCE + WGMMA + COMMIT + STORE + WAIT + TO_OUT, "race"),
        (STORE + WGMMA_FENCE + WGMMA + COMMIT + WAIT + TO_OUT, "race"),
    ],
)  # fmt: skip
def test_broken_rules(text: str, kind: str | None) -> None:
    if kind is None:
        assert kinds(text)
    else:
        assert kind in kinds(text)


def test_missing_proxy_fence() -> None:
    text = WGMMA_FENCE + WGMMA + COMMIT + WAIT + TO_OUT
    assert kinds(text, fence="") == {"missing-proxy-fence"}


def test_a_warp_too_few() -> None:
    assert kinds(WGMMA_FENCE + WGMMA + COMMIT + WAIT + TO_OUT, threads=96) == {"wgmma-order"}


def test_a_fault_names_both_places() -> None:
    """The report of an overwritten operand says who still reads it."""
    text = WGMMA_FENCE + WGMMA + COMMIT + STORE + WAIT + TO_OUT
    reports = [Kernel(SETUP + text, bytes(9216)).run(seed, collect=1)[1] for seed in range(6)]
    faults = [f for r in reports for f in r.faults]
    assert faults and all("wgmma" in f.where + f.other_where and "st.shared" in f.where + f.other_where for f in faults)
