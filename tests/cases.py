"""Masks, scores and sinks beyond `builders.MASKS`, and the inputs of any of them."""

from __future__ import annotations

import torch
from builders import CAUSAL, DOC_K, FLAG_K, FLAG_Q, MASKS, QP, SQ, B, C, H, K, P, Q, S, W, X, f, load, param, x

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Type

F32 = DType.F32
CAP = param("cap", Type.FLOAT)
HALF = P

#: Several clauses, or residual tests.
MORE_MASKS: dict[str, X] = {
    "longformer": (f("abs", QP - K) <= W) | FLAG_Q | FLAG_K,
    "sink_tokens": CAUSAL & ((QP - K < W) | (K < 4)),
    "bd3lm": f(
        "where",
        Q < HALF,
        f("where", K < HALF, Q // C == K // C, (K - HALF) // C < Q // C),
        (K >= HALF) & ((K - HALF) // C <= (Q - HALF) // C),
    ),
    "not_self": CAUSAL & (K != QP),
    "dilated": CAUSAL & ((QP - K) % 2 == 0),
    "same_document": CAUSAL & (f("min", f("max", QP // C, 0), 3) == DOC_K),
    # read outside of their tensors where another term decides
    "packed": CAUSAL & (load("doc", B, QP) * 3 <= K),
    "tree": (K < P) | (CAUSAL & load("flag", B, K - P, dtype=DType.BOOL)),
    "nothing": K < 0,
    "rows": Q < P,
    "natten": f("abs", K // 16 - f("clamp", QP // 16, 1, 3)) <= 1,
    "two_windows": ((K <= QP - W) & (K > QP - W - C)) | ((K <= QP) & (K > QP - C)),
}
ALL_MASKS = {**MASKS, **MORE_MASKS}

SLOPES, BIAS = load("slopes", H, dtype=F32), load("bias", B, H, Q, K, dtype=F32)
SCORES: dict[str, X] = {
    "none": S,
    "softcap": f("tanh", S / CAP) * CAP,
    "alibi": S - SLOPES * (QP - K),
    "distance": S + f("where", K % 3 == 0, 0.5, -0.25) * f("sqrt", f("float", f("abs", QP - K))),
    "bias": S + BIAS,
    "log_bias": S + f("log", f("max", BIAS, 0.0)),
    "temperature": S * f("log", f("float", SQ + Q)) / 3.0,
}
SINKS: dict[str, X | None] = {"none": None, "per_head": load("sinks", H, dtype=F32), "zero": x(0.0)}


def tensors_for(spec: AttentionSpec, b: int, sq: int, skv: int, hq: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values for the tensors that `spec` declares."""
    g = torch.Generator().manual_seed(seed)
    make = {
        "start": lambda: torch.randint(-2, skv + 2, (b,), generator=g, dtype=torch.int32),
        "doc": lambda: (torch.randint(0, 4, (b, skv), generator=g, dtype=torch.int32)).sort(-1).values,
        "first": lambda: torch.randint(-2, skv + 1, (b, sq), generator=g, dtype=torch.int32).sort(-1).values,
        "flag": lambda: torch.rand(b, skv, generator=g) < 0.1,
        "row_flag": lambda: torch.rand(b, sq, generator=g) < 0.1,
        "slopes": lambda: torch.rand(hq, generator=g) * 0.2,
        "sinks": lambda: torch.randn(hq, generator=g),
        "bias": lambda: torch.randn(b, hq, sq, skv, generator=g),
        "gate": lambda: torch.randn(b, sq, hq, spec.head_dim_v, generator=g),
    }
    return {t.name: make[t.name]() for t in spec.tensors}


def qkv(
    spec: AttentionSpec,
    b: int,
    sq: int,
    skv: int,
    hq: int,
    hkv: int,
    *,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Random q, k, v in bshd."""
    g = torch.Generator().manual_seed(seed)
    shapes = ((b, sq, hq, spec.head_dim_qk), (b, skv, hkv, spec.head_dim_qk), (b, skv, hkv, spec.head_dim_v))
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes)
