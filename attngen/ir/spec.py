"""AttentionSpec: the meaning of one `attention` block, names resolved, definitions inlined, every expression typed."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from attngen.ir.base import Node
from attngen.ir.expr import Expr
from attngen.ir.types import DType, Layout, Normalizer, Type


class ParamDecl(Node):
    """A run-time scalar, `param window: int >= 1 = 128`. Changing it never recompiles.

    `minimum`/`maximum` are checked at call time and used by the mask analysis (a positive divisor, say).
    """

    name: str
    type: Type
    default: bool | int | float | None = None
    minimum: int | float | None = None
    maximum: int | float | None = None


class TensorDecl(Node):
    """A captured tensor, `tensor doc: i32[batch, seqlen_kv] sorted`.

    A dim is a known axis (`types.KNOWN_DIMS`), an int, or a free name. A tensor given with extent 1 where the
    declaration names a larger axis is broadcast. `grad`: it receives a gradient. `sorted`: its last axis never
    decreases (a promise that `check=True` verifies).
    """

    name: str
    dtype: DType
    dims: tuple[str | int, ...]
    grad: bool = False
    sorted: bool = False


class Branch(Node):
    """One of several score sets over one V: O = sum over branches of weight * softmax_i(score_i) V.

    The call takes one q and one k for each branch (`q=(q1, q2), k=(k1, k2)`), in order. `weight` is a float
    expression without `kv_idx`.
    """

    name: str
    score: Expr
    mask: Expr
    sink: Expr | None = None
    weight: Expr


class Segment(Node):
    """A further KV segment under the same softmax: its own k, v, seqlen_kv, mask, score; `kv_idx` counts inside it."""

    name: str
    score: Expr
    mask: Expr


class BlockSparse(Node):
    """Block lists over `q` x `kv` blocks. `lists = given`: the caller passes them; else they follow from the mask."""

    q: int
    kv: int
    given: bool = False


class ScheduleHints(Node):
    """The `schedule` clause. None means `auto`; a value that cannot be honoured is an error at planning."""

    tile_m: int | None = None
    tile_n: int | None = None
    stages: int | None = None
    order: str | None = None
    persistent: bool | None = None
    cluster: tuple[int, int] | None = None
    split_kv: int | None = None
    #: Query heads of a KV head that share a row tile; None: calls with few rows may take a kernel that packs them.
    pack_gqa: int | None = None
    sm_margin: int | None = None
    pingpong: bool | None = None
    #: Spans of the entries, by entry name, for messages.
    places: tuple[tuple[str, Any], ...] = Field(default=(), repr=False, exclude=True)


class BackwardHints(Node):
    """The `backward` clause."""

    deterministic: bool = False


class AttentionSpec(Node):
    """One attention variant.

    Meaning (language.md): s = scale * <q, k>; s = score(s, …); keep where mask; weights by normalizer; O =
    epilogue(sum w v). All expressions are closed over `params`, `tensors` and the atoms; `def`, `let`, `include`,
    `extends` and `head_dim` are already gone.
    """

    name: str
    doc: str | None = None
    head_dim_qk: int
    head_dim_v: int
    dtype: DType = DType.BF16
    layout: Layout = Layout.BSHD
    #: Float expression over params only; the default is the constant 1/sqrt(head_dim_qk).
    scale: Expr
    params: tuple[ParamDecl, ...] = ()
    tensors: tuple[TensorDecl, ...] = ()
    #: Float expression over `s`; the atom `s` itself when the spec gives none.
    score: Expr
    #: Bool expression; the constant true when the spec gives none.
    mask: Expr
    #: Float expression without `kv_idx` and `s`; joins the normaliser as one more logit.
    sink: Expr | None = None
    normalizer: Normalizer = Normalizer.SOFTMAX
    #: Float expression over `o` (and `d`); the atom `o` itself when the spec gives none.
    epilogue: Expr
    out_dtype: DType | None = None
    #: Also return the largest kept score of each row (fp32, (batch, heads_q, seqlen_q)).
    max_logit: bool = False
    #: V is columns [start, start + head_dim_v) of K.
    v_view_start: int | None = None
    branches: tuple[Branch, ...] = ()
    segments: tuple[Segment, ...] = ()
    block_sparse: BlockSparse | None = None
    schedule: ScheduleHints = ScheduleHints()
    backward: BackwardHints = BackwardHints()
    targets: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[TensorDecl, ...]:
        """Tensors that a call passes because of the layout: where each sequence begins in varlen, how long it is in
        padded.
        """
        return _LENGTHS.get(self.layout, ())

    @property
    def inputs(self) -> tuple[TensorDecl, ...]:
        """Every tensor of a call beside q, k and v, in the order in which kernels take them."""
        return (*self.lengths, *self.tensors)

    def param(self, name: str) -> ParamDecl:
        """The declaration of a param."""
        return next(p for p in self.params if p.name == name)

    def block_counts(self, seqlen_q: int, seqlen_kv: int) -> dict[str, int]:
        """Extents of the axes of given blocks in a call of these lengths; nothing where no blocks are given."""
        if self.block_sparse is None or not self.block_sparse.given:
            return {}
        return {
            "blocks_q": -(-seqlen_q // self.block_sparse.q),
            "blocks_kv": -(-seqlen_kv // self.block_sparse.kv),
        }

    def tensor(self, name: str) -> TensorDecl:
        """The declaration of a captured tensor."""
        return next(t for t in self.tensors if t.name == name)


#: The extents of `cu_seqlens_q` and `cu_seqlens_kv`: one more than there are sequences.
STARTS = "sequence_starts"
_LENGTHS = {
    Layout.VARLEN: tuple(TensorDecl(name=f"cu_seqlens_{x}", dtype=DType.I32, dims=(STARTS,)) for x in ("q", "kv")),
    Layout.PADDED: tuple(TensorDecl(name=f"seqused_{x}", dtype=DType.I32, dims=("batch",)) for x in ("q", "kv")),
}
