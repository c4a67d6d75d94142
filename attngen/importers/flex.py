"""FlexAttention's functions to a spec: score_mod(score, b, h, q_idx, kv_idx), mask_mod(b, h, q_idx, kv_idx)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.importers import block_mask as lists
from attngen.importers import place
from attngen.importers.axes import dims_of
from attngen.importers.capture import Captures, rebound
from attngen.importers.imported import Imported, identifier, refused
from attngen.importers.trace import Trace, standin
from attngen.importers.value import FALSE, TRUE, Untraceable, Value, as_float, both, dead_of, negated
from attngen.ir.expr import Atom, Const, Expr, Param, atom, params_of, walk
from attngen.ir.spec import BlockSparse, ParamDecl
from attngen.ir.types import KNOWN_DIMS, Type
from attngen.passes.advice import element_wise

#: Constants from here down are masks in disguise.
_VERY_NEGATIVE = -1e4
_INDICES = ("b", "h", "q_idx", "kv_idx")


def from_flex(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    *,
    head_dim: int,
    head_dim_v: int | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    params: Sequence[str] | Mapping[str, Mapping[str, object]] = (),
    sorted: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    name: str | None = None,
    dtype: str = "bf16",
    layout: str = "bhsd",
    **options: object,
) -> Imported:
    """The spec that FlexAttention's functions mean, with the tensors that they capture.

        spec, tensors = attngen.from_flex(score_mod, mask_mod, head_dim=64)
        o = attngen.build(spec)(q, k, v, **tensors)            # q, k, v as flex_attention takes them: (B, H, S, D)

    The functions run once, on stand-ins for 0-dimensional tensors; what torch computes on them becomes the score and
    the mask. Semantics are FlexAttention's: the score comes scaled and in fp32; q_idx and kv_idx count from the first
    row and the first key (a spec's `q_idx` and `kv_idx`), so that what is causal there stays aligned top-left; the mask
    acts after the score; a score of -inf takes its key out and becomes part of the mask.

    Captured tensors that are indexed become declared tensors, `grad` where they require gradients; float64 and 64-bit
    ints are passed as f32 and i32. A captured 0-dimensional tensor becomes a param with its value as the default (a
    tensor of one element where it requires a gradient). Python numbers are constants, unless `params` names them.

    Args:
        score_mod, mask_mod: as flex_attention and create_block_mask take them; partials, closures, methods, and_masks
            and or_masks too.
        block_mask: a BlockMask in place of mask_mod. Its function is the mask; where its block lists say less than the
            function (or there is none), they become a captured tensor. A mask that is no interval of keys is walked by
            blocks of the BlockMask's size (`block_sparse`).
        scale: of flex_attention; None is 1 / sqrt(head_dim).
        params: captured Python numbers that stay run-time values: names, or `{"window": {"minimum": 1}}` with bounds.
        sorted: captured tensors whose last axis never decreases, by name (document ids): a promise that lets
            masks on them become intervals.
        sizes: extents of the call where known (`{"seqlen_kv": 4096}`): an axis that has another extent gets a name of
            its own. Without it an axis that `kv_idx` alone indexes is taken for seqlen_kv, and so on.
        options: what a spec takes as overrides: `tile_m`, `stages`, `deterministic`, …

    Raises: AttnError E0701 to E0706 (what cannot be traced, with the place in the function), E01xx to E03xx.
    """
    blocks: tuple[int, int] | None = None
    for option, given in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if hasattr(given, "kv_num_blocks"):
            raise refused(option, "found a BlockMask", "pass it as block_mask=")
    if block_mask is not None:
        if mask_mod is not None:
            raise refused("block_mask", "given beside mask_mod", "give one of them: a BlockMask holds its mask_mod")
        mask_mod, extents = lists.function(block_mask)
        blocks = lists.sizes(block_mask)
        sizes = {**extents, **(sizes or {})}
    for axis in {*(sizes or {})} - {*KNOWN_DIMS}:
        raise refused(f"sizes: `{axis}`", "is no axis", f"the axes are {', '.join(KNOWN_DIMS)}")
    captures = Captures(score_mod, mask_mod)
    trace = Trace(captures)
    table = _params(trace, captures, params)
    score_mod, mask_mod = (rebound(f, table) if table else f for f in (score_mod, mask_mod))

    indices = {n: atom(n) for n in _INDICES}
    mask, score = Value(TRUE), Value(atom("s"))
    if mask_mod is not None:
        mask = _condition(trace.run(mask_mod, "mask_mod", indices), mask_mod)
    if score_mod is not None:
        score = as_float(trace.run(score_mod, "score_mod", {"score": atom("s"), **indices}))
        try:
            mask = both(mask, negated(dead_of(score)))
        except Untraceable as fault:
            raise trace.fault(fault) from None
    _used(trace, table, mask.expr, score.expr)
    if any(isinstance(n, Const) and n.type is Type.FLOAT and n.value <= _VERY_NEGATIVE for n in walk(score.expr)):
        trace.note(
            "a large negative score hides a key, and every tile is still computed: -inf in its place, or a mask_mod, "
            "takes keys out, and rows that keep nothing become 0"
        )
    found = _finished(
        trace,
        name or _name_of(mask_mod, score_mod),
        None if isinstance(score.expr, Atom) and score.expr.name == "s" else score.expr,
        None if mask.expr == TRUE else mask.expr,
        sizes or {},
        sorted,
        {"head_dim": head_dim, "head_dim_v": head_dim_v, "scale": scale, "dtype": dtype, "layout": layout, **options},
    )
    return found if blocks is None else _skipping(found, blocks)


def _skipping(found: Imported, blocks: tuple[int, int]) -> Imported:
    """With a walk by blocks of a BlockMask's size where intervals of keys do not say its mask: what it was made for."""
    if not element_wise(found.spec):
        return found
    q, kv = blocks
    note = f"block_sparse: the GPU finds the blocks of {q} x {kv} that the mask keeps, in each call"
    return replace(found, spec=found.spec.replace(block_sparse=BlockSparse(q=q, kv=kv)), notes=(*found.notes, note))


def _condition(value: Value, function: object) -> Value:
    if value.type is not Type.BOOL:
        raise error(
            "E0704",
            f"the mask_mod returns a {value.type}",
            at=place.definition(function),
            helps=("return a condition, true where the pair is kept; a change of the score belongs into a score_mod",),
        )
    return value


def _params(
    trace: Trace, captures: Captures, wanted: Sequence[str] | Mapping[str, Mapping[str, object]]
) -> dict[str, torch.Tensor]:
    """Stand-ins for the captured numbers that stay params, by the name that they are captured under."""
    table: dict[str, torch.Tensor] = {}
    for captured in [wanted] if isinstance(wanted, str) else wanted:
        found = captures.numbers.get(captured, set())
        if not found:
            close = get_close_matches(captured, captures.numbers, n=1)
            raise refused(
                f"params: `{captured}`",
                "no number of that name is captured",
                f"did you mean `{close[0]}`?" if close else f"captured are: {', '.join(captures.numbers) or 'none'}",
            )
        if len(found) > 1:
            values = ", ".join(str(v) for v in found)
            raise refused(f"params: `{captured}`", f"captured with several values ({values})", "give them names apart")
        (value,) = found
        bounds = dict(wanted[captured]) if isinstance(wanted, Mapping) else {}
        kind = Type(str(bounds.pop("type", _kind(value))))
        low, high = bounds.pop("minimum", None), bounds.pop("maximum", None)
        if bounds:
            raise refused(f"params: `{captured}`", f"no field `{next(iter(bounds))}`", "known: type, minimum, maximum")
        word = identifier(captured, {**trace.given, **trace.params}, "value")
        value = float(value) if kind is Type.FLOAT else value
        trace.add_param(ParamDecl(name=word, type=kind, default=value, minimum=low, maximum=high), value)
        table[captured] = standin(Value(Param(type=kind, name=word)))
    return table


def _used(trace: Trace, table: Mapping[str, object], *expressions: Expr) -> None:
    """A number that could not be replaced (it is an attribute of an object, say) is no param."""
    read = frozenset().union(*(params_of(e) for e in expressions))
    for captured, decl in zip(table, trace.params.values(), strict=False):
        if decl.name not in read:
            raise refused(
                f"params: `{captured}`",
                "the traced expressions do not read it as a variable",
                "capture it by its own name (`window = config.window` outside the function), or leave it a constant",
            )


def _kind(value: object) -> Type:
    return Type.BOOL if isinstance(value, bool) else Type.INT if isinstance(value, int) else Type.FLOAT


def _name_of(*functions: object) -> str:
    for f in functions:
        word = str(getattr(f, "__name__", ""))
        if word not in ("", "<lambda>", "mask_mod", "score_mod", "and_mask", "or_mask"):
            return identifier(word.removesuffix("_mask_mod").removesuffix("_score_mod"), {}, "flex")
    return "flex"


def _finished(
    trace: Trace,
    name: str,
    score: Expr | None,
    mask: Expr | None,
    sizes: Mapping[str, int],
    promised: Sequence[str],
    options: dict[str, Any],
) -> Imported:
    from attngen.syntax import make_spec, print_expr

    dims = dims_of(trace.loads, trace.given, sizes)
    for wrong in {*promised} - {*trace.given}:
        raise refused(f"sorted: `{wrong}`", "no tensor of that name is captured", f"captured are: {', '.join(dims)}")
    declared = {
        n: {
            "dtype": trace.dtypes[n].value,
            "dims": dims[n],
            "grad": trace.given[n].requires_grad,
            "sorted": n in promised,
        }
        for n in trace.given
    }
    params = {
        p.name: {"type": p.type.value, "default": p.default, "minimum": p.minimum, "maximum": p.maximum}
        for p in trace.params.values()
    }
    spec = make_spec(
        name,
        score=None if score is None else print_expr(score),
        mask="false" if mask == FALSE else None if mask is None else print_expr(mask),
        params=params,
        tensors=declared,
        include=(),
        **options,
    )
    return Imported(spec, dict(trace.given), dict(trace.values), tuple(trace.notes))
