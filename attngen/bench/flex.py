"""A spec's mask and score as FlexAttention's mask_mod and score_mod, and the compiled call of them.

Expressions are printed from the closed set of nodes, so that torch.compile sees plain arithmetic; params are Python
numbers, which is how FlexAttention users write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, atoms_of, tensors_of

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
    "where": "torch.where({0}, {1}, {2})", "bit": "((({0} >> ({1} & 31)) & 1) == 1)",
}  # fmt: skip

#: The same of Python numbers, which torch's functions do not take: what reads nothing but params and sizes.
_NUMBERS = {
    "or": "({0} or {1})", "and": "({0} and {1})", "not": "(not {0})", "min": "min({0}, {1})", "max": "max({0}, {1})",
    "clamp": "min(max({0}, {1}), {2})", "exp": "math.exp({0})", "log": "math.log({0})", "log2": "math.log2({0})",
    "sqrt": "math.sqrt({0})", "tanh": "math.tanh({0})", "sigmoid": "(1 / (1 + math.exp(-{0})))",
    "softplus": "math.log1p(math.exp({0}))", "floor": "float(math.floor({0}))", "int": "int({0})",
    "float": "float({0})", "where": "({1} if {0} else {2})",
}  # fmt: skip
_SIZES = {"seqlen_q", "seqlen_kv", "batch", "heads_q", "heads_kv"}


def _is_number(e: Expr) -> bool:
    return not tensors_of(e) and atoms_of(e) <= _SIZES


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
    spelling = _NUMBERS.get(e.fn, _SPELLING[e.fn]) if _is_number(e) else _SPELLING[e.fn]
    return spelling.format(*(_print(a) for a in e.args))


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


#: Elements of a mask up to which its block form is made in eager mode: it holds a few bytes an element for a moment,
#: and a compilation costs more than that.
_EAGER_MASK = 1 << 31


def block_mask(case: Case, mask_mod: Any) -> Any:
    """FlexAttention's BlockMask of the case: which blocks of 128 x 128 are empty, full, or tested by element."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    cell = case.cell
    by_batch, by_head = reads(cell.spec.mask)
    batch, heads = cell.batch if by_batch else None, cell.heads_q if by_head else None
    elements = (batch or 1) * (heads or 1) * cell.seqlen_q * cell.seqlen_kv
    make: Any = create_block_mask if elements <= _EAGER_MASK else torch.compile(create_block_mask)
    return make(mask_mod, batch, heads, cell.seqlen_q, cell.seqlen_kv, device=case.q.device.type)


def compile_alone() -> None:
    """One kernel a graph: starting inductor's pool of compile processes would take longer than compiling it here."""
    from torch._inductor import config

    config.compile_threads = 1


def call(case: Case) -> Callable[[], Any]:
    """The call of compiled FlexAttention, O as (batch, seqlen_q, heads_q, d_v). Compiled when it first runs.

    A sink of each head, for which FlexAttention has no word, goes the way that its users take: O by the softmax without
    it, times 1 / (1 + exp(sink - LSE)), in the same compiled graph.
    """
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    f = case.features
    mask_mod, score_mod = mods(case)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))
    options: dict[str, Any] = {"scale": f.scale, "enable_gqa": q.shape[1] != k.shape[1], "score_mod": score_mod}
    if mask_mod is not None:
        options["block_mask"] = block_mask(case, mask_mod)
    if f.sink is None:
        plain: Any = torch.compile(flex_attention, dynamic=False)
        return lambda: plain(q, k, v, **options).transpose(1, 2)

    from torch.nn.attention.flex_attention import AuxRequest

    sinks = case.tensors[f.sink].float()[None, :, None]

    def with_sink(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
        o, aux = flex_attention(q, k, v, return_aux=AuxRequest(lse=True), **options)
        return (o * torch.sigmoid(aux.lse - sinks)[..., None]).to(o.dtype)

    function: Any = torch.compile(with_sink, dynamic=False)
    return lambda: function(q, k, v, sinks, **options).transpose(1, 2)


def reads(mask: Expr) -> tuple[bool, bool]:
    """Whether a mask depends on the batch and on the head."""
    atoms = atoms_of(mask)
    return "b" in atoms, bool(atoms & {"h", "h_kv"})
