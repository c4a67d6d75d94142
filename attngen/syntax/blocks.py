"""`lists = given`: what the clause stands for. A tensor `blocks` says which blocks may be kept, and the mask reads it:

    tensor blocks: bool[batch, heads_q, blocks_q, blocks_kv]
    mask = (the spec's own) and blocks[b, h, q_idx // q, kv_idx // kv]

A spec that declares `blocks` itself, with other axes say, reads it itself; nothing is added then.
"""

from __future__ import annotations

from attngen.ir.expr import Const, Expr, Load, atom, const, tensors_of
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import DType, Type
from attngen.syntax.collect import Faults

NAME = "blocks"
DIMS = ("batch", "heads_q", "blocks_q", "blocks_kv")


def with_blocks(spec: AttentionSpec, faults: Faults) -> AttentionSpec | None:
    """The spec with its given blocks in tensors and masks; as it is where there are none, or it reads its own.

    Faults: E0204 a param of that name; E0208 a tensor of that name that no mask reads.
    """
    sparse = spec.block_sparse
    if sparse is None or not sparse.given:
        return spec
    named = next((p for p in spec.params if p.name == NAME), None)
    if named is not None:
        faults.add(
            "E0204",
            f"`{NAME}` is the tensor that `lists = given` takes",
            named.span or sparse.span,
            "a param of that name",
            helps=("choose another name",),
        )
        return None
    own = next((t for t in spec.tensors if t.name == NAME), None)
    if own is not None:
        masks = [spec.mask, *(x.mask for x in spec.branches), *(x.mask for x in spec.segments)]
        if any(NAME in tensors_of(m) for m in masks):
            return spec
        faults.add(
            "E0208",
            f"`lists = given` with a tensor `{NAME}` that no mask reads",
            sparse.span,
            "which blocks are kept?",
            helps=(
                f"read it in the mask: {NAME}[…, q_idx // {sparse.q}, kv_idx // {sparse.kv}]",
                f"or leave the declaration out: the clause declares {NAME}: bool[{', '.join(DIMS)}]",
            ),
        )
        return None
    at = sparse.span
    listed = Load(
        type=Type.BOOL,
        tensor=NAME,
        dtype=DType.BOOL,
        indices=(
            atom("b", span=at),
            atom("h", span=at),
            apply("floordiv", atom("q_idx", span=at), const(sparse.q, span=at), span=at),
            apply("floordiv", atom("kv_idx", span=at), const(sparse.kv, span=at), span=at),
        ),
        span=at,
    )

    def both(mask: Expr) -> Expr:
        return listed if isinstance(mask, Const) and mask.value else apply("and", mask, listed, span=mask.span or at)

    return spec.replace(
        tensors=(*spec.tensors, TensorDecl(name=NAME, dtype=DType.BOOL, dims=DIMS, span=sparse.span)),
        mask=both(spec.mask),
        branches=tuple(x.replace(mask=both(x.mask)) for x in spec.branches),
    )
