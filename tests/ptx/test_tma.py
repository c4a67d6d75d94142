"""Bulk copies: boxes of all ranks and swizzles against NumPy, clipping, multicast, reductions, groups; their rules."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ptxcheck.tma import BadMap, decode
from ptxtext import Kernel

Array = np.ndarray[Any, Any]
CODES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
BARRIER = 16384  # offset of the mbarrier in shared memory
SHARED = 20480


def encode(array: Array, type_: str, box: Sequence[int], swizzle: int = 0) -> bytes:
    """The tensor map of an array whose last axis is innermost; `box` is innermost first."""
    rank = array.ndim
    dims, strides = array.shape[::-1], array.strides[::-1]
    w = [0] * 32
    w[0], w[1] = array.ctypes.data & 0xFFFFFFFF, array.ctypes.data >> 32
    w[2] = 2 | rank - 1 << 4 | CODES[type_] << 7 | SWIZZLES[swizzle] << 13
    for i, s in enumerate(strides[1:]):
        w[3 + i] = s >> 4 & 0xFFFFFFFF
        w[7] |= (s >> 36) << 4 * i
    for i, n in enumerate(dims):
        w[8 + i] = n - 1
    data = bytearray(struct.pack("<32I", *w))
    for i, n in enumerate(box):
        data[55 + i] = n - 1
    return bytes(data)


def box_of(array: Array, box: Sequence[int], coords: Sequence[int]) -> Array:
    """The box as the manual says, zero outside; outermost axis first."""
    out = np.zeros(box[::-1], array.dtype)
    for index in itertools.product(*(range(n) for n in box)):
        at = [c + i for c, i in zip(coords, index, strict=True)]
        if all(0 <= x < n for x, n in zip(at, array.shape[::-1], strict=True)):
            out[index[::-1]] = array[tuple(at[::-1])]
    return out


def swizzled(data: bytes, width: int, start: int) -> bytes:
    """A box's bytes as they lie from shared address `start` on: address bits 4-6 XORed with bits 7-9, byte by byte."""
    out = bytearray(len(data))
    mask = width // 16 - 1 if width else 0
    for p, byte in enumerate(data):
        at = start + p
        out[(at ^ (at >> 7 & mask) << 4) - start] = byte
    return bytes(out)


def aligned(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Random data at a multiple of 64 bytes, rows padded to a multiple of 16 bytes."""
    g = np.random.default_rng(seed)
    item = np.dtype(dtype).itemsize
    padded = -(-shape[-1] * item // 16) * 16 // item
    count = int(np.prod(shape[:-1])) * padded
    raw = np.zeros(count * item + 64, np.uint8)
    start = -raw.ctypes.data % 64
    data = raw[start : start + count * item].view(dtype)
    data[:] = g.integers(1, 100, count).astype(dtype)
    return data.reshape(*shape[:-1], padded)[..., : shape[-1]]


SETUP = f"""
    mov.u32 %r2, smem;
    add.s32 %r2, %r2, {BARRIER};
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared::cta.b64 [%r2], 1;
    mbarrier.init.shared::cta.b64 [%r2+8], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
"""
WAIT = """
WAITING:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAITING;
"""


def coordinates(coords: Sequence[int]) -> str:
    return ", ".join(map(str, coords))


def dump(nbytes: int, threads: int, offset: int = 0) -> str:
    """Each thread, while there are bytes left, writes its share of shared memory out, 16 bytes at a time."""
    share = max(nbytes // threads, 16)
    lines = [
        f"    setp.ge.u32 %p4, %r0, {nbytes // share};\n    @%p4 bra END;",
        f"    mul.lo.s32 %r9, %r0, {share};\n    add.s32 %r9, %r9, %r1;",
    ]
    for k in range(0, share, 16):
        lines.append(f"    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r9+{offset + k}];")
        lines.append(f"    st.global.v4.b32 [%d0+{k}], {{%r10, %r11, %r12, %r13}};")
    return "\n".join(lines) + "\nEND:\n    ret;\n"


def issue(rank: int, coords: Sequence[int], nbytes: int, offset: int = 0, expect: int | None = None) -> str:
    return f"""
    @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {nbytes if expect is None else expect};
    add.s32 %r20, %r1, {offset};
    mov.b64 %d20, map;
    cvta.param.u64 %d20, %d20;
    cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r20], [%d20, {{{coordinates(coords)}}}], [%r2];
ISSUED:
"""


def loader(
    array: Array, type_: str, box: Sequence[int], coords: Sequence[int], swizzle: int = 0, offset: int = 0
) -> Kernel:
    """A kernel that loads one box and writes the bytes it finds in shared memory out."""
    nbytes, threads = int(np.prod(box)) * array.itemsize, 64
    text = SETUP + issue(len(box), coords, nbytes, offset) + WAIT + dump(nbytes, threads, offset)
    params = [(".param .align 64 .b8 map[128]", encode(array, type_, box, swizzle))]
    out = max(nbytes // threads, 16)
    return Kernel(text, out=out, threads=threads, shared=SHARED, params=params, arrays={"a": array})


BOXES = [
    ((37,), (32,), (0,)),
    ((37,), (32,), (20,)),
    ((10, 40), (16, 16), (-3, -5)),
    ((5, 6, 24), (16, 4, 8), (12, 3, -2)),
    ((3, 4, 5, 16), (16, 3, 2, 4), (0, 3, -1, 1)),
    ((2, 3, 2, 4, 16), (8, 2, 2, 4, 4), (5, 3, 1, -1, 0)),
]


@pytest.mark.parametrize(("shape", "box", "coords"), BOXES)
def test_ranks_and_out_of_bounds(shape: tuple[int, ...], box: tuple[int, ...], coords: tuple[int, ...]) -> None:
    array = aligned(shape, np.uint16)
    got, _ = loader(array, "u16", box, coords).run(seed=len(shape))
    assert got.tobytes().startswith(box_of(array, box, coords).tobytes())


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("offset", [0, 128, 640])
@pytest.mark.parametrize(("type_", "dtype"), [("u8", np.uint8), ("bf16", np.uint16), ("f32", np.float32)])
def test_swizzles(swizzle: int, offset: int, type_: str, dtype: Any) -> None:
    array = aligned((40, 300), dtype)
    row = (swizzle or 256) // np.dtype(dtype).itemsize
    row = min(row, 256)
    got, _ = loader(array, type_, (row, 32), (-8, 20), swizzle, offset).run(seed=offset)
    assert got.tobytes() == swizzled(box_of(array, (row, 32), (-8, 20)).tobytes(), swizzle, offset)


def storer(array: Array, type_: str, box: Sequence[int], coords: Sequence[int], image: bytes, swizzle: int, mods: str):
    op = f"cp.reduce.async.bulk.tensor.{len(box)}d.global.shared::cta.{mods}.tile.bulk_group"
    if not mods:
        op = f"cp.async.bulk.tensor.{len(box)}d.global.shared::cta.tile.bulk_group"
    text = f"""
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra DONE;
    mov.b64 %d20, map;
    {op} [%d20, {{{coordinates(coords)}}}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
    ret;
"""
    params = [(".param .align 64 .b8 map[128]", encode(array, type_, box, swizzle))]
    return Kernel(text, image, threads=32, params=params, arrays={"a": array})


@pytest.mark.parametrize(("shape", "box", "coords"), BOXES)
@pytest.mark.parametrize("operation", ["", "add", "min", "max", "and", "or", "xor", "inc", "dec"])
def test_stores_and_reductions(
    shape: tuple[int, ...], box: tuple[int, ...], coords: tuple[int, ...], operation: str
) -> None:
    """What lies in the box changes, and nothing else."""
    shape, box, coords = (*shape[:-1], shape[-1] // 2), (box[0] // 2, *box[1:]), (coords[0] // 2, *coords[1:])
    array = aligned(shape, np.uint32)
    before = array.copy()
    new = np.random.default_rng(1).integers(1, 100, box[::-1]).astype(np.uint32)
    storer(array, "u32", box, coords, new.tobytes(), 0, operation).run()
    combine = {
        "": lambda a, b: b,
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "inc": lambda a, b: 0 if a >= b else a + 1,
        "dec": lambda a, b: b if a == 0 or a > b else a - 1,
    }[operation]
    want = before.copy()
    for index in itertools.product(*(range(n) for n in box)):
        at = tuple(c + i for c, i in zip(coords, index, strict=True))[::-1]
        if all(0 <= x < n for x, n in zip(at, shape, strict=True)):
            want[at] = combine(before[at], new[index[::-1]])
    assert np.array_equal(array, want)


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_swizzled_store(swizzle: int) -> None:
    array = aligned((20, 70), np.uint16)
    before, row = array.copy(), swizzle // 2
    new = np.arange(16 * row, dtype=np.uint16).reshape(16, row)
    storer(array, "bf16", (row, 16), (30, 9), swizzled(new.tobytes(), swizzle, 0), swizzle, "").run()
    before[9:20, 30 : 30 + row] = new[:11, : min(row, 40)]
    assert np.array_equal(array, before)


@pytest.mark.parametrize(("type_", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", np.uint16)])
def test_float_reductions(type_: str, dtype: Any) -> None:
    g = np.random.default_rng(0)

    def draw() -> Array:
        x = g.standard_normal((8, 16)).astype(np.float32)
        return (x.view(np.uint32) >> 16).astype(np.uint16) if type_ == "bf16" else x.astype(dtype)

    def wide(x: Array) -> Array:
        return (x.astype(np.uint32) << 16).view(np.float32) if type_ == "bf16" else x.astype(np.float32)

    array, new = aligned((8, 16), dtype), draw()
    array[:] = draw()
    before = array.copy()
    storer(array, type_, (16, 8), (0, 0), new.tobytes(), 0, "add").run()
    error = np.abs(wide(array) - (wide(before) + wide(new)))
    assert error.max() <= {"f32": 1e-6, "f16": 2e-3, "bf16": 1.6e-2}[type_] and not np.array_equal(array, before)


def test_multicast() -> None:
    """CTA 0 loads for itself and CTA 1, at the same offsets; each waits for its own bytes."""
    array = aligned((16, 64), np.uint16)
    text = (
        SETUP
        + f"""
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
    mov.u32 %r21, %cluster_ctarank;
    setp.ne.u32 %p3, %r21, 0;
    @%p3 bra ISSUED;
    mov.b64 %d20, map;
    mov.b16 %h1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1], [%d20, {{0, 0}}], [%r2], %h1;
ISSUED:
    {WAIT}
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    """
        + dump(2048, 128)
    )
    params = [(".param .align 64 .b8 map[128]", encode(array, "u16", (64, 16)))]
    kernel = Kernel(text, out=16, ctas=2, cluster=2, shared=SHARED, params=params, arrays={"a": array})
    for seed in range(4):
        got, _ = kernel.run(seed)
        assert got.tobytes() == array.tobytes() * 2


PAIR = f"""
    mov.u32 %r21, %cluster_ctarank;
    setp.ne.u32 %p3, %r21, 0;
    @%p1 bra MEET;
    @%p3 bra MEET;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;
MEET:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra ISSUED;
    mov.b64 %d20, map;
    shl.b32 %r22, %r21, 4;
    and.b32 %r23, %r2, 0xFEFFFFFF;
    cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%d20, {{0, %r22}}], [%r23];
ISSUED:
    @%p3 bra WAITED;
    {WAIT}
WAITED:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""


def test_pair_of_ctas() -> None:
    """With cta_group::2 both CTAs' loads signal the barrier of the even one; without it, that is a fault."""
    array = aligned((32, 64), np.uint16)
    params = [(".param .align 64 .b8 map[128]", encode(array, "u16", (64, 16)))]
    options: dict[str, Any] = {"out": 16, "ctas": 2, "cluster": 2, "shared": SHARED, "params": params}
    options |= {"arrays": {"a": array}, "target": "sm_100a"}
    text = SETUP + PAIR + dump(2048, 128)
    for seed in range(3):
        assert Kernel(text, **options).run(seed)[0].tobytes() == array.tobytes()
    assert Kernel(text.replace(".cta_group::2", ""), **options).kinds() == {"bad-operand"}


ROUND_TRIP = f"""
    mov.u32 %r21, %cluster_ctarank;
    xor.b32 %r22, %r21, 1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra DONE;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 4096;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2+8], 4096;
    ld.param.b64 %d20, [a];
    mul.wide.u32 %d22, %r21, 2048;
    add.s64 %d20, %d20, %d22;
    add.s32 %r24, %r1, 4096;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r24], [%d20], 4096, [%r2];
    {WAIT}
    mapa.shared::cluster.u32 %r25, %r1, %r22;
    add.s32 %r26, %r2, 8;
    mapa.shared::cluster.u32 %r26, %r26, %r22;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r25], [%r24], 4096, [%r26];
ARRIVING:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2+8], 0;
    @!%p2 bra ARRIVING;
    ld.param.b64 %d21, [back];
    mul.wide.u32 %d23, %r21, 4096;
    add.s64 %d21, %d21, %d23;
    cp.async.bulk.global.shared::cta.bulk_group [%d21], [%r1], 4096;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
DONE:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
"""


def round_trip(text: str) -> tuple[Kernel, Array, Array]:
    array, back = aligned((1536,), np.uint32), np.zeros((2, 1024), np.uint32)
    arrays = {"a": array, "back": back}
    return Kernel(SETUP + text, threads=64, ctas=2, cluster=2, shared=SHARED, arrays=arrays), array, back


@pytest.mark.parametrize("seed", range(4))
def test_bulk_round_trip(seed: int) -> None:
    """Global to shared, to the other CTA's shared memory, and back to global, with no tensor map."""
    kernel, array, back = round_trip(ROUND_TRIP)
    kernel.run(seed)
    assert np.array_equal(back[0], array[512:]) and np.array_equal(back[1], array[:1024])


def test_bulk_round_trip_without_a_wait() -> None:
    """A copy to the other CTA of what has not arrived yet."""
    assert {"race", "uninitialised-read"} & round_trip(ROUND_TRIP.replace(WAIT, ""))[0].kinds(8)


# ---- rules


def good() -> Kernel:
    return loader(aligned((20, 64), np.uint16), "u16", (64, 16), (0, 2))


def test_clean() -> None:
    assert good().kinds() == set()


def changed(old: str, new: str) -> Kernel:
    kernel = good()
    assert old in kernel.text
    kernel.text = kernel.text.replace(old, new)
    return kernel


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("b64 _, [%r2], 2048", "b64 _, [%r2], 2000", {"deadlock"}),
        ("b64 _, [%r2], 2048", "b64 _, [%r2], 2064", {"deadlock"}),
        ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;", "mbarrier.arrive.shared::cta.b64 _, [%r2];",
         {"race"}),
        ("fence.mbarrier_init.release.cluster;", "", {"barrier-unsynchronised"}),
        ("%r20, %r1, 0;", "%r20, %r1, 64;", {"misaligned"}),
        ("%r20, %r1, 0;", f"%r20, %r1, {SHARED - 1024};", {"out-of-bounds"}),
        (WAIT, "", {"uninitialised-read"}),
        ("{0, 2}", "{0, 2, 0}", {"bad-operand"}),
        ("cvta.param.u64 %d20, %d20;", "cvta.param.u64 %d20, %d20;\n    add.s64 %d20, %d20, 64;", {"bad-operand"}),
    ],
)  # fmt: skip
def test_broken_loads(old: str, new: str, kinds: set[str]) -> None:
    assert kinds & changed(old, new).kinds(8)


def test_a_load_over_what_is_still_read() -> None:
    """A second load into the same place, before the first one's bytes were read."""
    again = WAIT + "    bar.sync 0;\n" + issue(2, (0, 2), 2048).replace("ISSUED", "AGAIN")
    last = "DONE:\n" + WAIT.replace("WAITING", "LAST").replace("[%r2], 0", "[%r2], 1") + "    ret;\n"
    kernel = good()
    head, tail = kernel.text.split(WAIT)
    kernel.text = head + again + tail.replace("    ret;\n", last)
    assert "race" in kernel.kinds()


def test_a_tensor_that_leaves_its_array() -> None:
    array = aligned((20, 64), np.uint16)
    kernel = loader(array, "u16", (64, 16), (0, 10))
    kernel.arrays = {"a": array[:18]}
    assert kernel.kinds() == {"out-of-bounds"}


def test_a_load_from_a_map_whose_base_is_no_memory() -> None:
    """The box is all there; hardware touches the base as well."""
    array = aligned((20, 64), np.uint16)
    kernel = loader(array, "u16", (64, 8), (0, 10))
    assert kernel.kinds() == set()
    kernel.arrays = {"a": array[8:]}
    assert kernel.kinds() == {"out-of-bounds"}


STORE = """
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra DONE;
    ld.param.b64 %d20, [a];
    cp.async.bulk.global.shared::cta.bulk_group [%d20], [%r1], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    st.shared.b32 [%r1], %r0;
DONE:
    ret;
"""


#: Time for the copy to write what it has read: reads of global memory are not remembered, so it must come first.
DELAY = """mov.b32 %r31, 0;
SPIN:
    add.s32 %r31, %r31, 1;
    setp.lt.s32 %p5, %r31, 500;
    @%p5 bra SPIN;
    """


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("", "", set()),
        ("    cp.async.bulk.commit_group;\n", "", {"race"}),
        ("    cp.async.bulk.wait_group.read 0;\n", "", {"race"}),
        ("wait_group.read 0", "wait_group.read 1", {"race"}),
        ("    cp.async.bulk.wait_group.read 0;\n    st.shared.b32 [%r1], %r0;\n", "", {"async-in-flight"}),
        ("st.shared.b32 [%r1], %r0;", DELAY + "ld.global.b32 %r9, [%d20];", {"race"}),
        ("wait_group.read 0;\n    st.shared.b32 [%r1], %r0;", "wait_group 0;\n    ld.global.b32 %r9, [%d20];", set()),
        ("[%r1], 1024", "[%r1], 1000", {"bad-operand"}),
        ("[%d20], [%r1], 1024;", "[%d20+4], [%r1], 1024;", {"misaligned"}),
        ("[%d20], [%r1], 1024;", "[%d20+16], [%r1], 1024;", {"out-of-bounds"}),
        ("    ld.param.b64", "    st.shared.b32 [%r1], %r0;\n    ld.param.b64", {"missing-proxy-fence"}),
    ],
)  # fmt: skip
def test_stores_by_group(old: str, new: str, kinds: set[str]) -> None:
    assert not old or old in STORE
    text = STORE.replace(old, new) if old else STORE
    kernel = Kernel(text, bytes(range(256)) * 4, threads=32, arrays={"a": aligned((256,), np.uint32)})
    assert kernel.kinds(8) == kinds


def test_maps_that_are_refused() -> None:
    array = aligned((20, 64), np.uint16)
    good_map = encode(array, "u16", (64, 16), 128)
    assert decode(good_map).box_bytes == 2048
    for at, value, message in [
        (9, good_map[9] | 0x08, "not a tiled tensor map"),  # interleaved
        (52, 1, "element strides"),
        (55, 3, "not a multiple of 16"),
        (55, 127, "wider than the 128-byte swizzle"),
        (55, 31, "narrower"),
        (8, good_map[8] | 7 << 4, "rank 8"),
        (64, 1, "not a tiled tensor map"),
    ]:
        bad = bytearray(good_map)
        bad[at] = value
        with pytest.raises(BadMap, match=message):
            decode(bytes(bad))
