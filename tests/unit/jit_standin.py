"""A stand-in for generated modules in the tests of jit: the module API of an emitted kernel around a naive CuTe kernel.

One CTA per (row, head, batch), one thread per output column, every thread computing every score: slow and plainly
right, so that the host path can be tested without the real templates, and compiled in well under a second.
"""

from __future__ import annotations

import hashlib
from typing import Any

from attngen.ir.expr import Load, Param, atom, const
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Layout, Type
from attngen.source import KernelSource, body_sha256

WINDOW = ParamDecl(name="window", type=Type.INT, default=64, minimum=1)
GAIN = ParamDecl(name="gain", type=Type.FLOAT, default=1.0)
FLIP = ParamDecl(name="flip", type=Type.BOOL, default=False)
BIAS = TensorDecl(name="bias", dtype=DType.F32, dims=("batch", "heads_q"))


def plain(head_dim: int = 64, head_dim_v: int | None = None, **changes: Any) -> AttentionSpec:
    """Full attention."""
    spec = AttentionSpec(
        name="plain",
        head_dim_qk=head_dim,
        head_dim_v=head_dim_v or head_dim,
        scale=const(head_dim**-0.5),
        score=atom("s"),
        mask=const(True),
        epilogue=atom("o"),
    )
    return spec.replace(**changes) if changes else spec


def rich(head_dim: int = 64, *, tensor: bool = True, **changes: Any) -> AttentionSpec:
    """Causal window or, with `flip`, everything; s * gain, plus a bias for each batch and head."""
    window, gain, flip = (Param(type=p.type, name=p.name) for p in (WINDOW, GAIN, FLIP))
    distance = apply("sub", atom("q_pos"), atom("kv_idx"))
    causal = apply("le", atom("kv_idx"), atom("q_pos"))
    score = apply("mul", atom("s"), gain)
    if tensor:
        score = apply(
            "add", score, Load(type=Type.FLOAT, tensor="bias", dtype=DType.F32, indices=(atom("b"), atom("h")))
        )
    return plain(
        head_dim,
        name="rich",
        params=(WINDOW, GAIN, FLIP),
        tensors=(BIAS,) if tensor else (),
        score=score,
        mask=apply("or", apply("and", causal, apply("lt", distance, window)), flip),
        **changes,
    )


def source(spec: AttentionSpec, *, plans: int = 1, limits: tuple[int, ...] = (), body: str = "") -> KernelSource:
    """The stand-in's file for `plain` or `rich` specs, with `plans` copies of the one plan."""
    has_params, has_bias = bool(spec.params), bool(spec.tensors)
    bhsd = spec.layout is Layout.BHSD
    fields = {
        "ELEMENT": "BFloat16" if spec.dtype is DType.BF16 else "Float16",
        "D": str(spec.head_dim_qk),
        "DV": str(spec.head_dim_v),
        "Q_SHAPE": "batch, heads_q, seqlen_q, D" if bhsd else "batch, seqlen_q, heads_q, D",
        "K_SHAPE": "batch, heads_kv, seqlen_kv, D" if bhsd else "batch, seqlen_kv, heads_kv, D",
        "Q_AT": "b, h, row" if bhsd else "b, row, h",
        "K_AT": "b, h_kv, key" if bhsd else "b, key, h_kv",
        "ROWS": "2" if bhsd else "1",
        "HEADS": "1" if bhsd else "2",
        "EXTRA_DECL": (", window: Int32, gain: Float32, flip: Boolean" if has_params else "")
        + (", bias: cute.Tensor" if has_bias else ""),
        "EXTRA": (", window, gain, flip" if has_params else "") + (", bias" if has_bias else ""),
        "EXTRA_EXAMPLE": ("Int32(1), Float32(1.0), Boolean(False), " if has_params else "")
        + ("plain(Float32, batch, heads_q), " if has_bias else ""),
        "SCORE": ("s * gain" if has_params else "s") + (" + bias[b, h]" if has_bias else ""),
        "KEEP": "(key <= q_pos and q_pos - key < window) or flip" if has_params else "key < seqlen_kv",
        "PLANS": ", ".join(f'"plan_{i}"' for i in range(plans)) + ",",
        "BODY": body,
    }
    text = _TEMPLATE
    for name, value in fields.items():
        text = text.replace(f"@{name}@", value)
    identity = hashlib.sha256((text + spec.model_dump_json()).encode()).hexdigest()[:8]
    meta: dict[str, Any] = {
        "kernel_id": f"{spec.name}_sm_90a_{identity}",
        "name": spec.name,
        "target": "sm_90a",
        "layout": spec.layout.value,
        "dtype": spec.dtype.value,
        "plans": [{"name": f"plan_{i}"} for i in range(plans)],
        "limits": list(limits),
        "body_sha256": "0" * 64,
    }
    meta["body_sha256"] = body_sha256(text.replace("@META@", repr(meta)))
    text = text.replace("@META@", repr(meta))
    return KernelSource(text, meta["kernel_id"], hashlib.sha256(text.encode()).hexdigest())


_TEMPLATE = '''"""Stand-in kernel."""
ATTN_META = @META@

import cutlass
import cutlass.cute as cute
import cuda.bindings.driver as cuda
from cutlass import BFloat16, Boolean, Float16, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

D, DV = @D@, @DV@
PLANS = (@PLANS@)
LIMITS = tuple(ATTN_META["limits"])
@BODY@


@cute.kernel
def attend(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, scale: Float32@EXTRA_DECL@
):
    column, _, _ = cute.arch.thread_idx()
    row, h, b = cute.arch.block_idx()
    seqlen_q, seqlen_kv = q.shape[@ROWS@], k.shape[@ROWS@]
    h_kv = h // (q.shape[@HEADS@] // k.shape[@HEADS@])
    q_pos = row + seqlen_kv - seqlen_q
    row_max, row_sum, acc = Float32(-1e30), Float32(0.0), Float32(0.0)
    for key in cutlass.range(seqlen_kv):
        s = Float32(0.0)
        for d in cutlass.range(D):
            s += q[@Q_AT@, d].to(Float32) * k[@K_AT@, d].to(Float32)
        s = s * scale
        s = @SCORE@
        if @KEEP@:
            new_max = cute.arch.fmax(row_max, s)
            decay = cute.math.exp(row_max - new_max)
            p = cute.math.exp(s - new_max)
            row_sum = row_sum * decay + p
            acc = acc * decay + p * v[@K_AT@, column].to(Float32)
            row_max = new_max
    if row_sum > 0.0:
        acc = acc / row_sum
    o[@Q_AT@, column] = acc.to(o.element_type)
    if column == 0:
        if row_sum > 0.0:
            lse[b, h, row] = row_max + cute.math.log(row_sum)
        else:
            lse[b, h, row] = -Float32.inf


@cute.jit
def launch(
    q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, tile_counter: cute.Tensor,
    scale: Float32, workers: Int32@EXTRA_DECL@, stream: cuda.CUstream,
):
    attend(q, k, v, o, lse, scale@EXTRA@).launch(
        grid=[q.shape[@ROWS@], q.shape[@HEADS@], q.shape[0]], block=[DV, 1, 1], stream=stream
    )


def compile_plan(index=0, options=""):
    batch, heads_q, heads_kv = cute.sym_int(), cute.sym_int(), cute.sym_int()
    seqlen_q, seqlen_kv = cute.sym_int(), cute.sym_int()

    def tma(*shape):
        strides = (*(cute.sym_int64(divisibility=8) for _ in shape[1:]), 1)
        return make_fake_tensor(@ELEMENT@, shape, strides, assumed_align=16)

    def plain(dtype, *shape):
        return make_fake_tensor(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=dtype.width // 8)

    q_shape, k_shape = (@Q_SHAPE@), (@K_SHAPE@)
    return cute.compile(
        launch, tma(*q_shape), tma(*k_shape), tma(*k_shape[:3], DV), tma(*q_shape[:3], DV),
        plain(Float32, batch, heads_q, seqlen_q), plain(Int32, 1), Float32(1.0), Int32(1), @EXTRA_EXAMPLE@
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch sm_90a {options}",
    )
'''
