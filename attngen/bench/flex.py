"""A spec's mask and score as FlexAttention's mask_mod and score_mod.

Expressions are printed from the closed set of nodes, so that torch.compile sees plain arithmetic; params are Python
numbers, which is how FlexAttention users write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, atoms_of

if TYPE_CHECKING:
    from attngen.bench.peers import Case

_SPELLING = {
    "or": "({0} | {1})", "and": "({0} & {1})", "not": "(~{0})",
    "lt": "({0} < {1})", "le": "({0} <= {1})", "gt": "({0} > {1})", "ge": "({0} >= {1})",
    "eq": "({0} == {1})", "ne": "({0} != {1})",
    "add": "({0} + {1})", "sub": "({0} - {1})", "mul": "({0} * {1})", "div": "({0} / {1})",
    "floordiv": "({0} // {1})", "mod": "({0} % {1})", "neg": "(-{0})",
    "min": "torch.where({0} <= {1}, {0}, {1})", "max": "torch.where({0} >= {1}, {0}, {1})",
    "clamp": "torch.clamp({0}, {1}, {2})", "abs": "abs({0})",
    "exp": "torch.exp({0})", "log": "torch.log({0})", "log2": "torch.log2({0})", "sqrt": "torch.sqrt({0})",
    "tanh": "torch.tanh({0})", "sigmoid": "torch.sigmoid({0})", "softplus": "torch.nn.functional.softplus({0})",
    "floor": "torch.floor({0})", "int": "({0}).to(torch.int32)", "float": "({0} * 1.0)",
    "where": "torch.where({0}, {1}, {2})",
}  # fmt: skip


def _print(e: Expr) -> str:
    if isinstance(e, Const):
        return repr(e.value)
    if isinstance(e, Atom):
        return e.name
    if isinstance(e, Param):
        return f"p_{e.name}"
    if isinstance(e, Load):
        return f"t_{e.tensor}[{', '.join(_print(i) for i in e.indices)}]"
    assert isinstance(e, Apply)
    if e.fn in ("exp", "log", "log2", "sqrt") and isinstance(e.args[0], Const):
        return f"math.{e.fn}({_print(e.args[0])})"
    return _SPELLING[e.fn].format(*(_print(a) for a in e.args))


def mods(case: Case) -> tuple[Any, Any]:
    """(mask_mod or None, score_mod or None) of the case's spec."""
    import math

    import torch

    spec, cell = case.cell.spec, case.cell
    names: dict[str, Any] = {
        "torch": torch, "math": math, "seqlen_q": cell.seqlen_q, "seqlen_kv": cell.seqlen_kv, "batch": cell.batch,
        "heads_q": cell.heads_q, "heads_kv": cell.heads_kv, "group": cell.heads_q // cell.heads_kv,
        **{f"p_{k}": v for k, v in case.params.items()},
        **{f"t_{k}": v for k, v in case.tensors.items()},
    }  # fmt: skip
    body = "    q_pos = q_idx + (seqlen_kv - seqlen_q)\n    h_kv = h // group\n    return "
    exec(f"def mask_mod(b, h, q_idx, kv_idx):\n{body}{_print(spec.mask)}\n", names)
    exec(f"def score_mod(s, b, h, q_idx, kv_idx):\n{body}{_print(spec.score)}\n", names)
    full = isinstance(spec.mask, Const) and spec.mask.value is True
    return (None if full else names["mask_mod"], None if isinstance(spec.score, Atom) else names["score_mod"])


def reads(mask: Expr) -> tuple[bool, bool]:
    """Whether a mask depends on the batch and on the head."""
    atoms = atoms_of(mask)
    return "b" in atoms, bool(atoms & {"h", "h_kv"})
