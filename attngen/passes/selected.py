"""selected: lists of single keys, or for single rows, as attention over keys that were gathered.

Rewrite   `block_sparse { lists = given }` of q rows and kv keys, one of them 1  -->  a spec over gathered K and V:
          a block of q rows is a batch entry of its own, whose keys are those of its list, in ascending order; in
          ragged layouts too, where a block is of one sequence
Steps     positions are read back: b, q_idx and the sizes of the call from params, of a sequence from tensors, kv_idx
          from `picked`, which is sorted; where a block has few rows, the query heads of a KV head become rows too
Keeps     meaning, gradients of captured tensors included: they are read by the positions of the call
Source    DeepSeek-V3.2's sparse attention (token lists a row); NSA, section 3.3 (block lists a row)
"""

from __future__ import annotations

from attngen.diag.words import counted
from attngen.ir.expr import Atom, Const, Expr, Load, Param, atom, atoms_of, const, rewrite, tensors_of, walk
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, ParamDecl, ScheduleHints, TensorDecl
from attngen.ir.types import DType, Layout, Type
from attngen.passes.placed import PLACES, of_entry, parts_of, placed, places_read

#: The caller's lists, and what the clause declares for masks to read.
BLOCKS = "blocks"
#: Keys of each list, ascending; past its end, numbers from seqlen_kv on.
SELECTED = "picked"
#: Params of the kernel with their least values: blocks of rows a batch entry, rows and keys of the call, query heads a
#: KV head.
SIZES = {"call_blocks": 1, "call_rows": 0, "call_keys": 0, "call_group": 1}
#: Those in ragged layouts: sequences of the call, query heads a KV head.
RAGGED_SIZES = {"call_batch": 0, "call_group": 1}
#: Of a block of rows in ragged layouts, i32[batch]: its sequence, and the place of its first row there. What the
#: sequence has and where it begins say `placed.PLACES`.
SEQUENCE, START = "call_sequence", "call_start"
#: Names that a kernel over listed keys has of its own.
OWN_NAMES = {SELECTED, SEQUENCE, START, *SIZES, *RAGGED_SIZES, *(n for pair in PLACES.values() for n in pair)}
#: Rows of a tile. Blocks of fewer take the query heads of a KV head as rows.
TILE_M = 128
#: Keys of a tile whose scores read tensors by listed key and by row, up to head dims of 128: an index is loaded before
#: each element, of two rows; with 96 keys ptxas spilled 48 to 112 bytes.
READ_TILE_N, READ_DIMS = 80, 128
_OF_CALL = ("batch", "seqlen_q", "seqlen_kv", "heads_q")


def is_selected(spec: AttentionSpec) -> bool:
    """Whether K and V are gathered by lists: blocks of single keys, or of single rows."""
    sparse = spec.block_sparse
    return sparse is not None and sparse.given and 1 in (sparse.q, sparse.kv)


def packs_heads(spec: AttentionSpec) -> bool:
    """Whether query heads of a KV head become rows."""
    return spec.block_sparse is not None and spec.block_sparse.q < TILE_M


def describe(spec: AttentionSpec) -> str:
    """What `attngen explain` says of the gather: its lists, its memory and its cost, beside the kernel behind it."""
    sparse = spec.block_sparse
    assert sparse is not None
    element = 2 * (spec.head_dim_qk + spec.head_dim_v)
    rows = counted(sparse.q, "row")
    keys = counted(sparse.kv, "key")
    filled = f"{sparse.q} times the query heads of a KV head" if packs_heads(spec) else str(sparse.q)
    lines = (
        f"{spec.name}: K and V are gathered by `{BLOCKS}`, n blocks of {keys} for each {rows} and KV head, in torch",
        f"  gather    {element * sparse.kv} bytes a listed block, read and written once; kept for a backward, whose dK",
        "            and dV take as much",
        f"  lists     sorted in each call, or kept by a handle: {20 * sparse.kv} bytes a listed block",
        f"  kernel    a batch entry for each {rows}, of {filled} rows and {sparse.kv} n keys",
    )
    return "\n".join(lines)


def own_params(spec: AttentionSpec) -> dict[str, int]:
    """The params that the kernel of `spec` has beside the spec's, with their least values."""
    return RAGGED_SIZES if spec.layout.is_ragged else SIZES


def selected_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the kernel: bshd, batch entries are blocks of rows (batch outermost), keys are gathered.

    Its params are the spec's and `own_params`; its tensors the spec's, extents of 1 expanded by the caller, SELECTED
    and, in ragged layouts, SEQUENCE, START and PLACES, as far as they are read.
    """
    sparse = spec.block_sparse
    assert sparse is not None
    ragged = spec.layout.is_ragged
    tensors = tuple(t for t in spec.tensors if t.name != BLOCKS)
    where = parts_of(spec.layout)
    of_call, seqlen_q, seqlen_kv = _positions(spec)

    def moved(e: Expr) -> Expr:
        e = _substituted(_without_blocks(e), of_call)
        return placed(e, tensors, where) if ragged else e

    def of_row(e: Expr) -> Expr:
        """Read in every row, those that fill up the last block too: they read the last one's elements."""
        if sparse.q == 1 or ragged:  # where sequences are parts, every index is held inside them
            return moved(e)
        last = apply("min", of_call["q_idx"], apply("sub", seqlen_q, const(1)))
        held = {"q_idx": last, "q_pos": apply("add", last, apply("sub", seqlen_kv, seqlen_q))}
        return _substituted(e, {**of_call, **held})

    listed = apply("lt", of_call["kv_idx"], seqlen_kv)
    if sparse.q > 1:  # rows that fill up the last block
        listed = apply("and", listed, apply("lt", of_call["q_idx"], seqlen_q))
    mask = moved(spec.mask)
    mask = listed if isinstance(mask, Const) and mask.value else apply("and", listed, mask)
    score, epilogue = moved(spec.score), of_row(spec.epilogue)
    sink = None if spec.sink is None else of_row(spec.sink)
    read = [mask, score, epilogue, *([] if sink is None else [sink])]
    known = frozenset().union(*map(tensors_of, read))
    of_block = [TensorDecl(name=n, dtype=DType.I32, dims=("batch",)) for n in (SEQUENCE, START) if n in known]
    return spec.replace(
        name=f"{spec.name}_selected",
        doc="\n".join([*([spec.doc] if spec.doc else []), "Batch entries are blocks of rows; K and V are gathered."]),
        layout=Layout.BSHD,
        params=(
            *spec.params,
            *(ParamDecl(name=n, type=Type.INT, minimum=low) for n, low in own_params(spec).items()),
        ),
        tensors=(
            *(_of_call(t, ragged) for t in tensors),
            *((*of_block, *places_read(read)) if ragged else ()),
            TensorDecl(
                name=SELECTED, dtype=DType.I32, dims=("batch", "heads_kv", "seqlen_kv"), sorted=True, span=sparse.span
            ),
        ),
        score=score,
        mask=mask,
        sink=sink,
        epilogue=epilogue,
        block_sparse=None,
        schedule=_schedule(spec, score),
    )


def _positions(spec: AttentionSpec) -> tuple[dict[str, Expr], Expr, Expr]:
    """The call's atoms as the kernel finds them, and rows and keys of the call, or of the block's sequence."""
    sparse = spec.block_sparse
    assert sparse is not None
    params = {n: Param(type=Type.INT, name=n) for n in own_params(spec)}
    group: Expr = params["call_group"]
    row: Expr = atom("q_idx")
    heads: dict[str, Expr] = {}
    if packs_heads(spec):
        heads["h"] = apply("add", apply("mul", atom("h_kv"), group), apply("mod", atom("q_idx"), group))
        heads["heads_q"] = apply("mul", atom("heads_kv"), group)
        row = apply("floordiv", atom("q_idx"), group)
    if spec.layout.is_ragged:
        seqlen_q, seqlen_kv, b, first = (of_entry(n) for n in (*(n for _, n in PLACES.values()), SEQUENCE, START))
        batch: Expr = params["call_batch"]
    else:
        blocks, seqlen_q, seqlen_kv, _ = params.values()
        b, batch = (apply("floordiv", atom(n), blocks) for n in ("b", "batch"))
        start = apply("mod", atom("b"), blocks)
        first = apply("mul", start, const(sparse.q)) if sparse.q > 1 else start
    q_idx = apply("add", first, row) if sparse.q > 1 else first
    picked = Load(type=Type.INT, tensor=SELECTED, dtype=DType.I32, indices=(atom("b"), atom("h_kv"), atom("kv_idx")))
    return (
        {
            **heads,
            "b": b,
            "batch": batch,
            "seqlen_q": seqlen_q,
            "seqlen_kv": seqlen_kv,
            "kv_idx": picked,
            "q_idx": q_idx,
            "q_pos": apply("add", q_idx, apply("sub", seqlen_kv, seqlen_q)),
        },
        seqlen_q,
        seqlen_kv,
    )


def _schedule(spec: AttentionSpec, score: Expr) -> ScheduleHints:
    """What the spec asks for, and a tile where it does not."""
    hints, found = spec.schedule, [n for n in walk(score) if isinstance(n, Load) and n.tensor != SELECTED]
    held = any({"kv_idx", "q_idx"} <= atoms_of(n) for n in found) and spec.head_dim_qk <= READ_DIMS >= spec.head_dim_v
    named = hints.tile_m or hints.tile_n
    return hints.replace(tile_m=hints.tile_m or TILE_M, tile_n=READ_TILE_N if held and not named else hints.tile_n)


def _of_call(t: TensorDecl, ragged: bool) -> TensorDecl:
    """Axes of the call are free axes of the kernel: its own batch and lengths are others. `sorted` is a promise for
    each sequence of a ragged call.
    """
    dims = tuple(f"{d}_of_call" if d in _OF_CALL else d for d in t.dims)
    return t.replace(dims=dims, sorted=t.sorted and not ragged)


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
