"""Random typed expressions over every row of `FUNCTIONS`, with values at which nothing overflows or divides by zero."""

from __future__ import annotations

from hypothesis import strategies as st

from attngen.ir.expr import Const, Expr, Load, Param, atom, const
from attngen.ir.functions import FUNCTIONS, apply
from attngen.ir.types import DType, Type

B, I, F = Type.BOOL, Type.INT, Type.FLOAT  # noqa: E741
INT_ATOMS = ("b", "h", "h_kv", "q_idx", "kv_idx", "q_pos", "seqlen_q", "seqlen_kv", "heads_q")
PARAMS: dict[str, tuple[Type, bool | int | float]] = {
    "window": (I, 7), "size": (I, 3), "cap": (F, 2.5), "gain": (F, -0.75), "on": (B, True), "off": (B, False),
}  # fmt: skip
TENSORS: dict[str, tuple[DType, tuple[str, ...]]] = {
    "doc": (DType.I32, ("b", "kv_idx")),
    "slopes": (DType.F32, ("h",)),
    "bias": (DType.F32, ("b", "h", "q_idx", "kv_idx")),
    "flag": (DType.BOOL, ("b", "kv_idx")),
}
#: Signatures of every row: result type -> (function, argument types).
ROWS = {
    kind: [(row.name, args) for row in FUNCTIONS.values() for args, result in row.signatures if result is kind]
    for kind in (B, I, F)
}


def _load(name: str) -> Expr:
    dtype, axes = TENSORS[name]
    return Load(type=dtype.type, tensor=name, dtype=dtype, indices=tuple(atom(a) for a in axes))


def leaves(kind: Type, score: bool) -> st.SearchStrategy[Expr]:
    constants: dict[Type, st.SearchStrategy[Expr]] = {
        B: st.booleans().map(const),
        I: st.integers(-9, 9).map(const),
        F: st.sampled_from((-2.5, -1.0, -0.125, 0.0, 0.5, 1.0, 3.0, 49.0)).map(const),
    }
    others: list[Expr] = [Param(type=t, name=n) for n, (t, _) in PARAMS.items() if t is kind]
    others += [_load(n) for n, (d, _) in TENSORS.items() if d.type is kind]
    others += [atom(a) for a in INT_ATOMS] if kind is I else []
    others += [atom("s")] * 3 if kind is F and score else []
    return st.sampled_from(others) | constants[kind]


@st.composite
def exprs(draw: st.DrawFn, kind: Type, depth: int = 4, score: bool = True) -> Expr:
    """An expression of type `kind`; divisors are positive, arguments of log, sqrt and exp are bounded."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        return draw(leaves(kind, score))
    name, types = draw(st.sampled_from(ROWS[kind]))
    args = [draw(exprs(t, depth - 1, score)) for t in types]
    if name in ("floordiv", "mod"):
        args[1] = draw(st.sampled_from((const(1), const(3), const(-2), Param(type=I, name="size"))))
    elif name == "div":
        args[1] = draw(st.sampled_from((const(3.0), const(-4.0), const(49.0), Param(type=F, name="cap"))))
    elif name in ("log", "log2", "sqrt"):
        args[0] = apply("max", apply("abs", args[0]), const(0.25))
    elif name in ("exp", "int", "softplus"):
        args[0] = args[0] if args[0].type is I else apply("clamp", args[0], const(-20.0), const(20.0))
    elif name == "mul":
        args = [_bounded(a) for a in args]
    return apply(name, *args)


def _bounded(e: Expr) -> Expr:
    """Products of products must stay exact in 64 bits."""
    if isinstance(e, Const | Param | Load):
        return e
    low, high = (const(-1000), const(1000)) if e.type is I else (const(-1000.0), const(1000.0))
    return apply("clamp", e, low, high)
