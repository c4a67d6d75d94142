"""The calls that compiled host code makes (argument records, errors, kernel handles, launches), as data.

`launches` gives what one call of a compiled function would put on the stream, in order. Records follow TVM-FFI's and
DLPack's C headers (TVMFFIAny, DLTensor), the launch configuration CUDA's (cudaLaunchConfig_t, cudaLaunchAttribute).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ptxcheck.hostir import HostCode
from ptxcheck.hosttypes import HostError, Value

#: DLPack's (code, bits) of a torch dtype.
DLPACK = {
    torch.bool: (6, 8),
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
}
_NONE, _INT, _BOOL, _FLOAT, _POINTER, _DLTENSOR, _ARRAY = 0, 1, 2, 3, 4, 7, 71  # TVMFFITypeIndex
_CUDA = 2  # kDLCUDA: the code under test is compiled for tensors on the GPU

SHARED_OPT_IN = 232448  # bytes of shared memory a block may have on sm_90 and sm_100, static included
_DEVICE_ATTRIBUTES = {97: SHARED_OPT_IN, 16: 132}  # cudaDevAttrMaxSharedMemoryPerBlockOptin, MultiProcessorCount
_CLUSTER, _COOPERATIVE, _PDL = 4, 2, 6  # cudaLaunchAttributeID


class Refused(HostError):
    """The compiled function's own checks refuse the arguments, with its message."""


@dataclass(frozen=True)
class Launch:
    """One kernel on the stream: what the driver would get."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int  # dynamic shared memory, bytes
    params: tuple[bytes, ...]
    pdl: bool = False  # may start before the launch in front of it has finished (griddepcontrol)
    cooperative: bool = False


@dataclass
class _Recorder:
    """What stands for the runtime's functions: it takes notes and hands out handles."""

    param_sizes: Callable[[str], Sequence[int]]
    launches: list[Launch] = field(default_factory=list)
    error: str | None = None
    _kernels: dict[int, str] = field(default_factory=dict)

    def externals(self) -> dict[str, Callable[[HostCode, list[Value]], Value]]:
        ok = self._ok
        return {
            "TVMFFIEnvGetStream": ok,
            "TVMFFIErrorSetRaisedFromCStr": self._set_error,
            "TVMFFIErrorSetRaisedFromCStrParts": self._set_error_parts,
            "CuteDSLRT_TVMFFISetRaisedCudaError": self._cuda_error,
            "cuda_dialect_init_library_once": self._load_library,
            "_cudaLibraryLoadData": self._write_handle,
            "_cudaLibraryGetKernel": self._kernel_handle,
            "_cudaGetDevice": self._write_zero,
            "_cudaSetDevice": ok,
            "_cudaDeviceGetAttribute": self._device_attribute,
            "_cuKernelGetAttribute": self._write_zero,  # static shared memory: the machine counts it itself
            "_cudaKernelSetAttributeForDevice": ok,
            "_cudaFuncSetAttribute": ok,
            "_cudaLaunchKernelEx": self._launch_ex,
            "_cudaLaunchKernel": self._launch,
            "printf": self._print,
        }

    def _ok(self, host: HostCode, arguments: list[Value]) -> int:
        return 0

    def _write_zero(self, host: HostCode, arguments: list[Value]) -> int:
        host.memory.write(arguments[0], struct.pack("<i", 0))
        return 0

    def _write_handle(self, host: HostCode, arguments: list[Value]) -> int:
        host.memory.write(arguments[0], struct.pack("<Q", 1))
        return 0

    def _device_attribute(self, host: HostCode, arguments: list[Value]) -> int:
        if arguments[1] not in _DEVICE_ATTRIBUTES:
            raise HostError(f"the host code asks for device attribute {arguments[1]}, which has no value here")
        host.memory.write(arguments[0], struct.pack("<i", _DEVICE_ATTRIBUTES[arguments[1]]))
        return 0

    def _load_library(self, host: HostCode, arguments: list[Value]) -> int:
        state, init, load, _ = arguments
        status = host.call(host.name_at(init), [state]) or host.call(host.name_at(load), [state, 0])
        return int(status)

    def _kernel_handle(self, host: HostCode, arguments: list[Value]) -> int:
        handle = len(self._kernels) + 1
        self._kernels[handle] = host.memory.string(arguments[2])
        host.memory.write(arguments[0], struct.pack("<Q", handle))
        return 0

    def _set_error(self, host: HostCode, arguments: list[Value]) -> None:
        self.error = ": ".join(host.memory.string(x) for x in arguments[:2])

    def _set_error_parts(self, host: HostCode, arguments: list[Value]) -> None:
        kind, parts, count = arguments
        texts = struct.unpack(f"<{count}Q", host.memory.read(parts, 8 * count))
        self.error = f"{host.memory.string(kind)}: " + "".join(host.memory.string(x) for x in texts if x)

    def _cuda_error(self, host: HostCode, arguments: list[Value]) -> None:
        self.error = f"CUDA error {arguments[1]}"

    def _print(self, host: HostCode, arguments: list[Value]) -> int:
        self.error = host.memory.string(arguments[0]).strip()
        return 0

    def _kernel(self, handle: int) -> str:
        if handle not in self._kernels:
            raise HostError("a launch of a kernel that was not loaded")
        return self._kernels[handle]

    def _params(self, host: HostCode, kernel: str, pointers: int) -> tuple[bytes, ...]:
        sizes = self.param_sizes(kernel)
        at = struct.unpack(f"<{len(sizes)}Q", host.memory.read(pointers, 8 * len(sizes)))
        return tuple(host.memory.read(x, n) for x, n in zip(at, sizes, strict=True))

    def _launch(self, host: HostCode, arguments: list[Value]) -> int:
        handle, gx, gy, gz, bx, by, bz, pointers, shared, _ = arguments
        kernel = self._kernel(handle)
        params = self._params(host, kernel, pointers)
        self.launches.append(Launch(kernel, (gx, gy, gz), (bx, by, bz), (1, 1, 1), shared, params))
        return 0

    def _launch_ex(self, host: HostCode, arguments: list[Value]) -> int:
        config, handle, pointers = arguments
        kernel = self._kernel(handle)
        *sizes, shared, _, attributes, count = struct.unpack("<6IQQQI", host.memory.read(config, 52))
        cluster, pdl, cooperative = (1, 1, 1), False, False
        for i in range(count):
            number, value = struct.unpack("<I4x12s", host.memory.read(attributes + 72 * i, 20))
            words = struct.unpack("<3I", value)
            if number == _CLUSTER:
                cluster = words
            elif number == _PDL:
                pdl = bool(words[0])
            elif number == _COOPERATIVE:
                cooperative = bool(words[0])
            else:
                raise HostError(f"launch attribute {number} is not modelled")
        grid, block = (sizes[0], sizes[1], sizes[2]), (sizes[3], sizes[4], sizes[5])
        params = self._params(host, kernel, pointers)
        self.launches.append(Launch(kernel, grid, block, cluster, shared, params, pdl, cooperative))
        return 0


def _dltensor(host: HostCode, tensor: torch.Tensor) -> int:
    if tensor.dtype not in DLPACK:
        raise HostError(f"no DLPack code for {tensor.dtype}")
    code, bits = DLPACK[tensor.dtype]
    n = tensor.dim()
    shape = host.memory.place(struct.pack(f"<{n}q", *tensor.shape))
    strides = host.memory.place(struct.pack(f"<{n}q", *tensor.stride()))
    record = struct.pack("<QiiiBBHQQQ", tensor.data_ptr(), _CUDA, 0, n, code, bits, 1, shape, strides, 0)
    return host.memory.place(record)


def _any(host: HostCode, value: Any) -> bytes:
    """One TVMFFIAny: torch tensors as DLTensor (on a CUDA device), numbers, None, tuples of such as ffi.Array."""
    if isinstance(value, torch.Tensor):
        return struct.pack("<iiQ", _DLTENSOR, 0, _dltensor(host, value))
    if value is None:
        return struct.pack("<iiQ", _NONE, 0, 0)
    if isinstance(value, bool):
        return struct.pack("<iiq", _BOOL, 0, value)
    if isinstance(value, int):
        return struct.pack("<iiq", _INT, 0, value)
    if isinstance(value, float):
        return struct.pack("<iid", _FLOAT, 0, value)
    if isinstance(value, tuple | list):
        items = host.memory.place(b"".join(_any(host, x) for x in value) or bytes(16))
        # The object's header (reference count, type, deleter), then its cells: address and size.
        record = struct.pack("<qiiqQq", 1, _ARRAY, 0, 0, items, len(value))
        return struct.pack("<iiQ", _ARRAY, 0, host.memory.place(record))
    raise HostError(f"an argument of type {type(value).__name__} cannot be passed")


def packed_arguments(host: HostCode, arguments: Sequence[Any]) -> int:
    """The address of an array of TVMFFIAny."""
    return host.memory.place(b"".join(_any(host, value) for value in arguments))


def launches(
    ir_text: str, param_sizes: Callable[[str], Sequence[int]], arguments: Sequence[Any], host: HostCode | None = None
) -> tuple[list[Launch], HostCode]:
    """What one call with these arguments launches, and the parsed host code (pass it on to save the parse).

    `param_sizes(kernel)`: bytes of each PTX parameter. Raises: Refused with the function's own message.
    """
    recorder = _Recorder(param_sizes)
    if host is None:
        host = HostCode(ir_text, {})
    host.externals = recorder.externals()
    host.reset()
    entries = [x for x in host.functions if x.startswith("__tvm_ffi_") and not x.startswith("__tvm_ffi__")]
    if len(entries) != 1:
        raise HostError("the function has no TVM-FFI entry: compile it with --enable-tvm-ffi")
    at, result = packed_arguments(host, arguments), host.memory.allocate(16)
    status = host.call(entries[0], [0, at, len(arguments), result])
    if status or recorder.error:
        raise Refused(recorder.error or f"the entry point returned {status}")
    return recorder.launches, host
