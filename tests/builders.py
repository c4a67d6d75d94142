"""Specs and expressions built in Python, without the parser: `K <= QP` is an expression, `spec(mask=…)` a spec."""

from __future__ import annotations

import math
from typing import Any

import torch

from attngen.ir.expr import Expr, Load, Param, atom, const
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Type


class X:
    """An expression with Python's operators. `&`, `|`, `~` are and, or, not; `==` and `!=` compare expressions."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, e: Expr) -> None:
        self.e = e

    def __and__(self, o: Any) -> X:
        return f("and", self, o)

    def __or__(self, o: Any) -> X:
        return f("or", self, o)

    def __invert__(self) -> X:
        return f("not", self)

    def __neg__(self) -> X:
        return f("neg", self)


def _binary(fn: str, swapped: bool = False) -> Any:
    return lambda a, b: f(fn, b, a) if swapped else f(fn, a, b)


for _fn, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "div": "truediv", "floordiv": "floordiv", "mod": "mod",
}.items():  # fmt: skip
    setattr(X, f"__{_name}__", _binary(_fn))
    setattr(X, f"__r{_name}__", _binary(_fn, swapped=True))
for _fn in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(X, f"__{_fn}__", _binary(_fn))


def x(value: Any) -> X:
    """Lift a Python value."""
    return value if isinstance(value, X) else X(const(value))


def f(fn: str, *args: Any) -> X:
    """Apply a function of the table."""
    return X(apply(fn, *(x(a).e for a in args)))


def param(name: str, type: Type = Type.INT) -> X:
    return X(Param(type=type, name=name))


def load(name: str, *indices: Any, dtype: DType = DType.I32) -> X:
    return X(Load(type=dtype.type, tensor=name, dtype=dtype, indices=tuple(x(i).e for i in indices)))


B, H, HKV, Q, K, QP = (X(atom(n)) for n in ("b", "h", "h_kv", "q_idx", "kv_idx", "q_pos"))
SQ, SK, S, O, D = (X(atom(n)) for n in ("seqlen_q", "seqlen_kv", "s", "o", "d"))  # noqa: E741
W, P, C = param("window"), param("prefix"), param("size")
CAUSAL = K <= QP

PARAMS = (
    ParamDecl(name="window", type=Type.INT, default=128),
    ParamDecl(name="prefix", type=Type.INT, default=3),
    ParamDecl(name="size", type=Type.INT, default=4, minimum=1),
    ParamDecl(name="cap", type=Type.FLOAT, default=5.0),
)
TENSORS = {
    "start": TensorDecl(name="start", dtype=DType.I32, dims=("batch",)),
    "doc": TensorDecl(name="doc", dtype=DType.I32, dims=("batch", "seqlen_kv"), sorted=True),
    "first": TensorDecl(name="first", dtype=DType.I32, dims=("batch", "seqlen_q"), sorted=True),
    "late": TensorDecl(name="late", dtype=DType.I32, dims=("batch", "seqlen_q")),
    "flag": TensorDecl(name="flag", dtype=DType.BOOL, dims=("batch", "seqlen_kv")),
    "row_flag": TensorDecl(name="row_flag", dtype=DType.BOOL, dims=("batch", "seqlen_q")),
    "slopes": TensorDecl(name="slopes", dtype=DType.F32, dims=("heads_q",), grad=True),
    "sinks": TensorDecl(name="sinks", dtype=DType.F32, dims=("heads_q",), grad=True),
    "bias": TensorDecl(name="bias", dtype=DType.F32, dims=("batch", "heads_q", "seqlen_q", "seqlen_kv"), grad=True),
    "gate": TensorDecl(name="gate", dtype=DType.F32, dims=("batch", "seqlen_q", "heads_q", "head_dim_v"), grad=True),
}
START, DOC_K, FIRST = load("start", B), load("doc", B, K), load("first", B, Q)
FLAG_K, FLAG_Q = load("flag", B, K, dtype=DType.BOOL), load("row_flag", B, Q, dtype=DType.BOOL)

#: Masks of the standard library and of variants.md, by name.
MASKS: dict[str, X] = {
    "full": x(True),
    "causal": CAUSAL,
    "causal_top_left": K <= Q,
    "window": CAUSAL & (QP - K < W),
    "two_sided": f("abs", QP - K) <= W,
    "prefix": CAUSAL | (K < P),
    "chunk": CAUSAL & (K // C == QP // C),
    "chunk_const": CAUSAL & (K // 256 == QP // 256),
    "block_causal": K // C <= QP // C,
    "left_pad": CAUSAL & (K >= START),
    "key_length": K < START,
    "window_left_pad": CAUSAL & (QP - K < W) & (K >= START),
    "ring": K + P <= Q + W,
    "first": (FIRST <= K) & CAUSAL,
}


def spec(
    mask: Any = True, score: Any = S, *, tensors: tuple[str, ...] = (), d: int = 8, dv: int | None = None, **more: Any
) -> AttentionSpec:
    """A spec over `PARAMS` and the named `TENSORS`; expressions may be `X`."""
    lifted = {n: v.e if isinstance(v, X) else v for n, v in more.items()}
    lifted.setdefault("epilogue", O.e)
    lifted.setdefault("scale", const(1 / math.sqrt(d)))
    lifted.setdefault("name", "test")
    return AttentionSpec(
        head_dim_qk=d,
        head_dim_v=dv or d,
        mask=x(mask).e,
        score=x(score).e,
        params=PARAMS,
        tensors=tuple(TENSORS[t] for t in tensors),
        **lifted,
    )


def positions(sq: int, skv: int, batch: int = 1, heads: int = 1, **params: int) -> dict[str, torch.Tensor]:
    """Every atom of a (batch, heads, sq, skv) grid, as `evaluate` takes them."""
    q, h = torch.arange(sq).view(1, 1, -1, 1), torch.arange(heads).view(1, -1, 1, 1)
    sizes = {"seqlen_q": sq, "seqlen_kv": skv, "heads_q": heads, "heads_kv": heads, "batch": batch, **params}
    return {
        "b": torch.arange(batch).view(-1, 1, 1, 1), "h": h, "h_kv": h, "q_idx": q, "q_pos": q + skv - sq,
        "kv_idx": torch.arange(skv).view(1, 1, 1, -1), **{n: torch.tensor(v) for n, v in sizes.items()},
    }  # fmt: skip
