"""Small CuTe-DSL kernels of our own, for tests of the checker: compiled without a GPU, with TVM-FFI."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from ptxcheck.compile import OPTIONS, scratch_folder


class Scale:
    """x *= alpha in a launch of its own, then x += 1 in another with a cluster of two and PDL.

    Without `waits` the second does not wait for the first: the fault that PDL invites.
    """

    def __init__(self, waits: bool = True):
        self.waits = waits

    @cute.jit
    def __call__(self, x: cute.Tensor, alpha: cutlass.Float32, stream: Any):
        blocks = (cute.size(x) + 63) // 64
        self.multiply(x, alpha).launch(grid=[blocks, 1, 1], block=[64, 1, 1], stream=stream)
        self.increment(x).launch(
            grid=[(blocks + 1) // 2 * 2, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def multiply(self, x: cute.Tensor, alpha: cutlass.Float32):
        i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
        if i < cute.size(x):
            x[i] = x[i] * alpha

    @cute.kernel
    def increment(self, x: cute.Tensor):
        if cutlass.const_expr(self.waits):
            cute.arch.griddepcontrol_wait()
        i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
        if i < cute.size(x):
            x[i] = x[i] + 1.0


def compile_scale(arch: str = "sm_90a", waits: bool = True) -> Any:
    """`f(x, alpha)` for a vector of fp32 of any stride."""
    x = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (cute.sym_int64(),), assumed_align=4)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch} {OPTIONS} --dump-dir {scratch_folder()}"
    return cute.compile(Scale(waits), x, cutlass.Float32(1.0), stream, options=options)
