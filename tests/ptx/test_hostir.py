"""The host code of compiled functions is read right: by hand-written text, and against what launches must be."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
from ptxcheck.compile import Code, code_of, compile_file
from ptxcheck.hostcalls import Launch, Refused, launches
from ptxcheck.hostir import HostCode
from ptxcheck.hosttypes import HostError, decode, encode, parse_type
from ptxcheck.tma import decode as decode_map

GENERATED = Path(__file__).resolve().parents[2] / "generated"


def run(body: str, *arguments, externals=None):
    """Evaluate one function @f whose arguments are %arg0, %arg1, ..."""
    names = ", ".join(f"%arg{i}: i32" for i in range(len(arguments)))
    lines = "\n".join(line if line.startswith("  ^") else f"    {line}" for line in body.strip().splitlines())
    text = (
        f'module {{\n  llvm.mlir.global internal constant @"a\\0A"("hi\\00") : x\n  llvm.func @f({names}) -> i32 {{\n'
    )
    return HostCode(text + lines + "\n  }\n}\n", externals or {}).call("f", list(arguments))


@pytest.mark.parametrize(
    ("operation", "a", "b", "expected"),
    [
        ("add", 2**32 - 1, 2, 1),
        ("sub", 1, 2, 2**32 - 1),
        ("mul", 2**31, 2, 0),
        ("sdiv", 2**32 - 7, 2, 2**32 - 3),
        ("srem", 2**32 - 7, 2, 2**32 - 1),
        ("udiv", 2**32 - 7, 2, 2**31 - 4),
        ("urem", 2**32 - 7, 4, 1),
        ("ashr", 2**32 - 8, 1, 2**32 - 4),
        ("lshr", 2**32 - 8, 1, 2**31 - 4),
        ("shl", 3, 31, 2**31),
    ],
)
def test_integers(operation: str, a: int, b: int, expected: int) -> None:
    assert run(f"%0 = llvm.{operation} %arg0, %arg1 : i32\nllvm.return %0 : i32", a, b) == expected


@pytest.mark.parametrize(
    ("predicate", "expected"), [("eq", 0), ("ne", 1), ("slt", 1), ("sge", 0), ("ult", 0), ("uge", 1), ("ugt", 1)]
)
def test_comparisons(predicate: str, expected: int) -> None:
    text = f'%0 = llvm.icmp "{predicate}" %arg0, %arg1 : i32\n%1 = llvm.zext %0 : i1 to i32\nllvm.return %1 : i32'
    assert run(text, 2**32 - 1, 1) == expected


def test_loop_with_block_arguments() -> None:
    """Sum of 0..n-1; the two arguments of the loop block are swapped at once, not one after the other."""
    text = """
%0 = llvm.mlir.constant(0 : i32) : i32
%1 = llvm.mlir.constant(1 : i32) : i32
llvm.br ^bb1(%0, %0 : i32, i32)
  ^bb1(%2: i32, %3: i32):  // 2 preds: ^bb0, ^bb2
%4 = llvm.icmp "slt" %2, %arg0 : i32
llvm.cond_br %4 weights([2000, 1]), ^bb2, ^bb3(%3 : i32)
  ^bb2:  // pred: ^bb1
%5 = llvm.add %2, %1 : i32
%6 = llvm.add %3, %2 overflow<nsw> : i32
llvm.br ^bb1(%5, %6 : i32, i32)
  ^bb3(%7: i32):  // pred: ^bb1
llvm.return %7 : i32"""
    assert run(text, 10) == 45


def test_memory_and_aggregates() -> None:
    """A struct is built member by member, stored, and read back through an element pointer."""
    kind = "!llvm.struct<(i8, struct<(i32, f32)>, array<3 x i16>)>"
    text = f"""
%0 = llvm.mlir.constant(1 : i32) : i32
%1 = llvm.alloca %0 x {kind} {{alignment = 64 : i64}} : (i32) -> !llvm.ptr
%2 = llvm.mlir.poison : {kind}
%3 = llvm.insertvalue %arg0, %2[1, 0] : {kind}
llvm.store %3, %1 : {kind}, !llvm.ptr
%4 = llvm.getelementptr inbounds %1[0, 1, 0] : (!llvm.ptr) -> !llvm.ptr, {kind}
%5 = llvm.load %4 {{alignment = 4 : i64}} : !llvm.ptr -> i32
llvm.return %5 : i32"""
    assert run(text, 77) == 77


def test_layout_of_types() -> None:
    kind = parse_type(
        '!llvm.struct<"DLTensor.1", (ptr, struct<(i32, i32)>, i32, struct<(i8, i8, i16)>, ptr, ptr, i64)>'
    )
    assert (kind.offsets, kind.size, kind.align) == ((0, 8, 16, 20, 24, 32, 40), 48, 8)
    packed = parse_type("!llvm.struct<packed (i8, i64)>")
    assert (packed.offsets, packed.size) == ((0, 1), 9)
    value = (1, (2, 3), 4, (5, 6, 7), 8, 9, 10)
    assert decode(kind, encode(kind, value)) == value


def test_faults_name_the_operation() -> None:
    with pytest.raises(HostError, match=r"llvm\.frobnicate"):
        run("%0 = llvm.frobnicate %arg0 : i32\nllvm.return %0 : i32", 1)
    with pytest.raises(HostError, match="@nobody, which this checker does not know"):
        run("%0 = llvm.call @nobody(%arg0) : (i32) -> i32\nllvm.return %0 : i32", 1)
    with pytest.raises(HostError, match="outside its own allocations"):
        run(
            "%0 = llvm.inttoptr %arg0 : i32 to !llvm.ptr\n%1 = llvm.load %0 : !llvm.ptr -> i32\nllvm.return %1 : i32", 4
        )
    with pytest.raises(HostError, match="division by zero"):
        run("%0 = llvm.sdiv %arg0, %arg1 : i32\nllvm.return %0 : i32", 1, 0)


def test_strings() -> None:
    seen = []
    externals = {"puts": lambda host, arguments: seen.append(host.memory.string(arguments[0])) or 3}
    text = '%0 = llvm.mlir.addressof @"a\\0A" : !llvm.ptr\n%1 = llvm.call @puts(%0) : (!llvm.ptr) -> i32'
    assert run(f"{text}\nllvm.return %1 : i32", externals=externals) == 3
    assert seen == ["hi"]


def of(code: Code, *arguments) -> list[Launch]:
    return launches(code.host, lambda name: [p.size for p in code.module.kernels[name].params], arguments)[0]


@pytest.mark.dsl
def test_two_launches_in_a_row() -> None:
    """A vector with a stride: grid, cluster, PDL and the bytes of both launches' parameters."""
    from dslkernels import compile_scale

    x = torch.arange(300.0)[::2]
    first, second = of(code_of(compile_scale()), x, 2.5)
    assert (first.grid, first.block, first.cluster, first.pdl) == ((3, 1, 1), (64, 1, 1), (1, 1, 1), False)
    assert (second.grid, second.cluster, second.pdl) == ((4, 1, 1), (2, 1, 1), True)
    tensor = struct.pack("<QixxxxQ", x.data_ptr(), 150, 2)
    assert first.params == (tensor, struct.pack("<f", 2.5)) and second.params == (tensor,)
    assert "multiply" in first.kernel and "increment" in second.kernel


@pytest.fixture(scope="module")
def causal() -> Code:
    return compile_file(GENERATED / "causal.sm90.py")[1]


def operands(b: int, sq: int, skv: int, h: int, hkv: int) -> list[torch.Tensor]:
    shapes = ((b, sq, h, 128), (b, skv, hkv, 128), (b, skv, hkv, 128), (b, sq, h, 128))
    tensors = [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]
    return [*tensors, torch.zeros(b, h, sq), torch.zeros(1, dtype=torch.int32)]


@pytest.mark.dsl
def test_launch_of_a_gallery_kernel(causal: Code) -> None:
    """Tensor maps, scalars and grid of `causal`, plan 0 (128 x 128), from tensors with strides of their own."""
    q, k, v, o, lse, counter = operands(2, 300, 200, 4, 2)
    k = torch.zeros(2, 200, 2, 256, dtype=torch.bfloat16)[..., :128]  # rows 512 bytes apart
    (launch,) = of(causal, q, k, v, o, lse, counter, 0.125, 7)
    assert (launch.grid, launch.block, launch.shared) == ((7, 1, 1), (384, 1, 1), 197632)
    for tensor, bytes_, rows in ((q, launch.params[0], 64), (k, launch.params[2], 128), (o, launch.params[6], 64)):
        m = decode_map(bytes_)
        b, s, h, d = tensor.shape
        assert (m.base, m.type, m.swizzle) == (tensor.data_ptr(), "bf16", 128)
        assert (m.dims, m.box) == ((d, s, h, b), (64, rows, 1, 1))
        assert m.strides == (2, *(2 * tensor.stride(i) for i in (1, 2, 0)))
    assert struct.unpack("<3i", launch.params[1]) == (300, 4, 2)
    assert launch.params[8] == struct.pack("<Qiiixxxxqqq", lse.data_ptr(), 2, 4, 300, 1200, 300, 1)
    assert launch.params[12:14] == (struct.pack("<f", 0.125), struct.pack("<i", math.ceil(300 / 128)))


@pytest.mark.dsl
def test_fewer_tiles_than_workers(causal: Code) -> None:
    (launch,) = of(causal, *operands(1, 130, 40, 2, 1), 1.0, 132)
    assert launch.grid == (4, 1, 1)


@pytest.mark.dsl
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.__setitem__(4, t[4].half()), r"argument #4 .*lse.*dtype"),
        (lambda t: t.__setitem__(1, t[1][:, :, :, :64]), r"argument #1 .*expected to be 128"),
        (lambda t: t.__setitem__(2, t[2][:, :50]), r"argument #2 .*match k.shape\[1\]"),
        (lambda t: t.__setitem__(0, t[0].transpose(2, 3)), r"argument #0"),
        (lambda t: t.append(torch.zeros(1)), r"Expects 8 parameters|num_args|arguments"),
        (lambda t: t.__setitem__(0, torch.zeros(2 * 64 * 2 * 128 + 4).bfloat16()[4:].view(2, 64, 2, 128)), "align"),
    ],
)
def test_refusals_are_the_functions_own(causal: Code, change, message: str) -> None:
    tensors = operands(2, 64, 60, 2, 1)
    change(tensors)
    with pytest.raises(Refused, match=message):
        of(causal, *tensors, 1.0, 4)
