"""selected: lists of single keys, or for single rows, as attention over keys that were gathered.

Rewrite   `block_sparse { lists = given }` of q rows and kv keys, one of them 1  -->  a spec over gathered K and V:
          a block of q rows is a batch entry of its own, whose keys are those of its list, in ascending order
Steps     positions are read back: b, q_idx and the sizes of the call from params, kv_idx from `picked`, which is
          sorted; where a block has few rows, the query heads of a KV head become rows too
Keeps     meaning, gradients of captured tensors included: they are read by the positions of the call
Source    DeepSeek-V3.2's sparse attention (token lists a row); NSA, section 3.3 (block lists a row)
"""

from __future__ import annotations

from attngen.ir.expr import Atom, Const, Expr, Load, Param, atom, const, rewrite
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, ParamDecl, TensorDecl
from attngen.ir.types import DType, Layout, Type

#: The caller's lists, and what the clause declares for masks to read.
BLOCKS = "blocks"
#: Keys of each list, ascending; past its end, numbers from seqlen_kv on.
SELECTED = "picked"
#: Params of the kernel with their least values: blocks of rows a batch entry, rows and keys of the call, query heads a
#: KV head.
SIZES = {"call_blocks": 1, "call_rows": 0, "call_keys": 0, "call_group": 1}
#: Rows of a tile. Blocks of fewer take the query heads of a KV head as rows.
TILE_M = 128
_OF_CALL = ("batch", "seqlen_q", "seqlen_kv", "heads_q")


def is_selected(spec: AttentionSpec) -> bool:
    """Whether K and V are gathered by lists: blocks of single keys, or of single rows."""
    sparse = spec.block_sparse
    return sparse is not None and sparse.given and 1 in (sparse.q, sparse.kv)


def packs_heads(spec: AttentionSpec) -> bool:
    """Whether query heads of a KV head become rows."""
    return spec.block_sparse is not None and spec.block_sparse.q < TILE_M


def selected_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the kernel: bshd, batch entries are blocks of rows (batch outermost), keys are gathered.

    Its params are the spec's and SIZES; its tensors the spec's, extents of 1 expanded by the caller, and SELECTED.
    """
    sparse = spec.block_sparse
    assert sparse is not None
    blocks, seqlen_q, seqlen_kv, group = (Param(type=Type.INT, name=n) for n in SIZES)
    row: Expr = atom("q_idx")
    of_call: dict[str, Expr] = {
        "b": apply("floordiv", atom("b"), blocks),
        "batch": apply("floordiv", atom("batch"), blocks),
        "seqlen_q": seqlen_q,
        "seqlen_kv": seqlen_kv,
        "kv_idx": Load(
            type=Type.INT, tensor=SELECTED, dtype=DType.I32, indices=(atom("b"), atom("h_kv"), atom("kv_idx"))
        ),
    }
    if packs_heads(spec):
        of_call["h"] = apply("add", apply("mul", atom("h_kv"), group), apply("mod", atom("q_idx"), group))
        of_call["heads_q"] = apply("mul", atom("heads_kv"), group)
        row = apply("floordiv", atom("q_idx"), group)
    start = apply("mod", atom("b"), blocks)
    of_call["q_idx"] = apply("add", apply("mul", start, const(sparse.q)), row) if sparse.q > 1 else start
    of_call["q_pos"] = apply("add", of_call["q_idx"], apply("sub", seqlen_kv, seqlen_q))

    def moved(e: Expr) -> Expr:
        return _substituted(_without_blocks(e), of_call)

    def of_row(e: Expr) -> Expr:
        """Read in every row, those that fill up the last block too: they read the last one's elements."""
        if sparse.q == 1:
            return moved(e)
        last = apply("min", of_call["q_idx"], apply("sub", seqlen_q, const(1)))
        held = {"q_idx": last, "q_pos": apply("add", last, apply("sub", seqlen_kv, seqlen_q))}
        return _substituted(e, {**of_call, **held})

    listed = apply("lt", of_call["kv_idx"], seqlen_kv)
    if sparse.q > 1:  # rows that fill up the last block
        listed = apply("and", listed, apply("lt", of_call["q_idx"], seqlen_q))
    mask = moved(spec.mask)
    return spec.replace(
        name=f"{spec.name}_selected",
        doc="\n".join([*([spec.doc] if spec.doc else []), "Batch entries are blocks of rows; K and V are gathered."]),
        layout=Layout.BSHD,
        params=(*spec.params, *(ParamDecl(name=n, type=Type.INT, minimum=low) for n, low in SIZES.items())),
        tensors=(
            *(_of_call(t) for t in spec.tensors if t.name != BLOCKS),
            TensorDecl(
                name=SELECTED, dtype=DType.I32, dims=("batch", "heads_kv", "seqlen_kv"), sorted=True, span=sparse.span
            ),
        ),
        score=moved(spec.score),
        mask=listed if isinstance(mask, Const) and mask.value else apply("and", listed, mask),
        sink=None if spec.sink is None else of_row(spec.sink),
        epilogue=of_row(spec.epilogue),
        block_sparse=None,
        schedule=spec.schedule.replace(tile_m=spec.schedule.tile_m or TILE_M),
    )


def _of_call(t: TensorDecl) -> TensorDecl:
    """Axes of the call are free axes of the kernel: its own batch and lengths are others."""
    return t.replace(dims=tuple(f"{d}_of_call" if d in _OF_CALL else d for d in t.dims))


def _without_blocks(e: Expr) -> Expr:
    """The mask without the blocks that the clause put into it: what is gathered is listed."""

    def gone(n: Expr) -> Expr:
        if isinstance(n, Load) and n.tensor == BLOCKS:
            return const(True)
        if getattr(n, "fn", "") == "and":
            rest = [a for a in n.args if not (isinstance(a, Const) and a.value is True)]  # type: ignore[union-attr]
            return const(True) if not rest else rest[0] if len(rest) == 1 else n
        return n

    return rewrite(e, gone)


def _substituted(e: Expr, table: dict[str, Expr]) -> Expr:
    """Atoms replaced once: what is put in reads the kernel's own."""
    return rewrite(e, lambda n: table.get(n.name, n) if isinstance(n, Atom) else n)
