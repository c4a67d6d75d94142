"""Attention over listed keys: K and V are gathered by lists, for each block of rows or each row; see `passes.selected`.

The gather, its gradient and the views around the kernel are torch's; the kernel is one of the usual kind, whose batch
entries are blocks of rows. Memory: the gathered K and V, blocks_q * keys of a list * heads_kv * (D + Dv) elements a
batch entry, and as much for their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout
from attngen.jit import contract
from attngen.jit.atoms import extents_of
from attngen.jit.backward import Backward
from attngen.jit.gathered import gathered
from attngen.jit.kernel import Attention
from attngen.jit.lists import ListTables
from attngen.jit.modes import is_dynamo
from attngen.jit.named import Binder
from attngen.jit.ragged import RaggedBinder
from attngen.jit.recipe import Made, Recipe
from attngen.jit.tables import NAME, no_handle, nothing_to_keep
from attngen.passes.selected import BLOCKS, describe, packs_heads, selected_spec

Tensor = torch.Tensor
#: Kinds of calls that are remembered.
_REMEMBERED = 256


class SelectedAttention(Made):
    """Attention over listed keys, as `block_sparse { q = …, kv = …, lists = given }` says it where q or kv is 1.

    `attn(q, k, v, blocks=lists, **keywords)` takes the other arguments of `Attention`, `out` and `lse` apart, and of a
    spec with a max logit `return_max_logit`.
    `blocks`: int32 or int64 (batch or 1, heads_kv or 1, blocks_q, n): for each block of q rows the numbers of the
    blocks of kv keys that it sees, in any order; -1 fills a list up. A number outside the keys counts as none, one that
    stands twice as one; with `check=True` both are errors. A row attends to the listed keys that the mask keeps.
    Memory: K and V gathered by block of rows, and their gradients: blocks_q * n * kv * heads_kv * (D + Dv) elements.
    Gradients: of q, k, v and tensors declared `grad`; dK and dV of a key add up over the lists that hold it, in fp32,
    in a fixed order where the spec is deterministic.
    Ragged layouts: lists count inside a sequence, `blocks` is (batch or 1, heads_kv or 1, blocks_q, n) with as many
    blocks of rows as the longest sequence has, or more; those without a list see nothing. In varlen with q = 1, where
    rows are packed, (heads_kv or 1, total_q, n) too: a list for each packed row.
    `tables`: a handle that `attn.tables()` returned keeps the sorted lists for the next call (see `ListTables`).
    Raises: AttnError as `Attention`; E0604 to E0607 (blocks), E0628 (with `check`).
    """

    def __init__(self, spec: AttentionSpec, inner: Attention, recipe: Recipe) -> None:
        self.spec = spec
        self.inner = inner
        self._recipe = recipe
        self._bhsd = spec.layout is Layout.BHSD
        self._plain = spec.replace(layout=Layout.BSHD) if self._bhsd else spec
        binder: type[Binder] = RaggedBinder if spec.layout.is_ragged else Binder
        self._binder = binder(self._plain)
        assert spec.block_sparse is not None
        self._sparse = spec.block_sparse
        #: What `contract` looks at: the call without its lists, whose axes are others than a mask's.
        self._checked = self._plain.replace(
            tensors=tuple(t for t in spec.tensors if t.name != BLOCKS), block_sparse=None
        )
        self._without_lists = binder(self._checked)
        #: Of what such a kernel may take, what this one does.
        self._read = inner.binder.names
        #: Kinds of calls that fit.
        self._fitted: set[tuple[Any, ...]] = set()

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """The Attention over gathered keys."""
        return (self.inner,)

    @property
    def binder(self) -> Binder:
        """What its calls take by name, but for a handle."""
        return self._binder

    @property
    def backward(self) -> Backward:
        """That of the kernel."""
        return self.inner.backward

    @property
    def keeps_tables(self) -> bool:
        """Whether calls take `tables=`, a handle."""
        return NAME not in self._binder.names

    def explain(self) -> str:
        """How keys are gathered, and what was planned for them, as `attngen explain` prints it."""
        return f"{describe(self.spec)}\n\n{self.inner.explain()}"

    def compile(
        self, device: int | None = None, *, backward: bool | Sequence[str] = False, group: int | None = None
    ) -> SelectedAttention:
        """As `Attention.compile`."""
        if group is not None and packs_heads(self.spec):
            group = min(group, 1)  # query heads of a KV head are rows of the kernel behind it
        self.inner.compile(device, backward=backward, group=group)
        return self

    def tables(self) -> ListTables:
        """A handle that keeps sorted lists, and the tables of a mask over them, from call to call.

        Raises: AttnError E0601 where a tensor or param of the spec has its name.
        """
        if not self.keeps_tables:
            raise nothing_to_keep(self.spec)
        return ListTables()

    def _kept(self, handle: Any) -> ListTables | None:
        """The caller's handle; none while Dynamo traces. Raises: AttnError E0604."""
        if handle is None or is_dynamo():
            return None
        if not isinstance(handle, ListTables):
            raise no_handle(handle)
        return handle

    def __repr__(self) -> str:
        return f"<attngen.SelectedAttention {self.spec.name} {self.inner!r}>"

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        blocks: Any = None,
        return_lse: bool = False,
        return_max_logit: bool = False,
        scale: float | None = None,
        check: bool = False,
        **named: Any,
    ) -> Any:
        """See the class."""
        kept = None if not self.keeps_tables else self._kept(named.pop(NAME, None))
        if self._bhsd:
            q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in (q, k, v))
        if isinstance(self._binder, RaggedBinder):
            named = dict(self._binder.filled(named, q, k))
        if not is_dynamo():
            q, k, v = _cast(q, k, v)
            kind = (*named, *map(_kind, (q, k, v, blocks, *named.values())))
            if kind not in self._fitted:
                self._fits(q, k, v, blocks, named)
                if not (self.spec.layout.is_ragged and q.device.type == "cpu"):  # lengths were looked at
                    if len(self._fitted) >= _REMEMBERED:
                        self._fitted.clear()
                    self._fitted.add(kind)
        if check:
            self._check(q, k, v, blocks, named)
        if return_max_logit and not self.spec.max_logit:
            self._binder.unknown("return_max_logit")
        call = gathered(self._plain, q, k, v, blocks, named, kept, into=not return_max_logit)
        own = {n: x for n, x in call.named.items() if n in self._read}
        own |= {} if kept is None or not self.inner.keeps_tables else {NAME: kept.tables}
        own |= {"return_max_logit": True} if return_max_logit else {"out": call.out}
        found = self.inner(call.q, call.k, call.v, return_lse=return_lse, scale=scale, **own)
        o, *rows = found if return_lse or return_max_logit else (found,)
        o = call.o(o)
        o = (o.transpose(1, 2) if self._bhsd else o).contiguous()
        return (o, *(call.lse(x).contiguous() for x in rows)) if rows else o

    def _fits(self, q: Any, k: Any, v: Any, blocks: Any, named: dict[str, Any]) -> None:
        """What the kernel behind it would find out too late, or say of tensors that the caller never saw.

        Raises: AttnError E0601, E0602, E0604 to E0608.
        """
        for name in named:
            if name not in self._binder.names:
                self._binder.unknown(name)
        for name in self._binder.tensor_names:
            if name != BLOCKS and named.get(name) is None:
                self._binder.missing(name)
        spec, sparse = self._checked, self._sparse
        if getattr(q, "dtype", None) in (torch.bfloat16, torch.float16):  # each has a kernel of its own
            spec = spec.replace(dtype=DType.BF16 if q.dtype is torch.bfloat16 else DType.FP16)
        contract.validate(spec, q, k, v, named, strides=False)
        if not isinstance(blocks, Tensor):
            raise error(
                "E0604",
                f"`{BLOCKS}` must be a torch tensor, found {type(blocks).__name__}",
                helps=(f"pass {BLOCKS}=, int32 (batch, heads_kv, blocks_q, n): a list of blocks of keys for each block "
                       "of rows",),
            )  # fmt: skip
        if blocks.device != q.device:
            raise error(
                "E0605",
                f"`{BLOCKS}` is on {blocks.device}, q is on {q.device}",
                helps=(f"move it: {BLOCKS}.to({str(q.device)!r})",),
            )
        if blocks.dtype not in (torch.int32, torch.int64):
            raise error(
                "E0606",
                f"`{BLOCKS}` is {blocks.dtype}; lists of blocks of {sparse.q} x {sparse.kv} are int32 or int64",
                notes=("a list holds the numbers of the blocks of keys that a block of rows sees",),
                helps=("of a bool map m: m.int().argsort(-1, descending=True), filled up with -1",),
            )
        self._fits_lists(blocks, q, k, named)

    def _fits_lists(self, blocks: Tensor, q: Any, k: Any, named: dict[str, Any]) -> None:
        """E0607 for the shape of the lists."""
        sizes, rows = self._binder.sizes(named, q, k), self._sparse.q
        batch, heads = sizes["batch"], sizes["heads_kv"]
        count = -(-sizes["seqlen_q"] // rows)
        lead: tuple[int, ...] = (batch, heads)
        extents = f"{batch} or 1, {heads} or 1, {count}, n"
        exact = self.spec.layout is not Layout.VARLEN  # there no length is known
        if not exact:
            extents = f"{batch} or 1, {heads} or 1, blocks_q of the longest sequence, n"
        if self._packs_rows and blocks.ndim == 3:
            lead, extents, exact = ((heads,), f"{heads} or 1, {count}, n", True)
        if (
            blocks.ndim != len(lead) + 2
            or any(n not in (m, 1) for n, m in zip(blocks.shape, lead, strict=False))
            or (exact and blocks.shape[-2] != count)
        ):
            raise error(
                "E0607",
                f"`{BLOCKS}` has {blocks.ndim} axes {tuple(blocks.shape)}, this call needs ({extents})",
                notes=(f"a list for each block of {rows} rows of each KV head",),
                helps=("give one list for each block of rows; -1 fills a short one up",),
            )
        if not exact and (starts := named["cu_seqlens_q"]).device.type == "cpu":  # what the host sees costs no wait
            self._has_lists(blocks, extents_of(self._plain, sizes, "seqlen_q", starts)[1].tolist())

    def _has_lists(self, blocks: Tensor, rows: list[int]) -> None:
        """E0607 where a sequence of so many rows has no list for some of them."""
        for b, n in enumerate(rows):
            need, found = -(-n // self._sparse.q), blocks.shape[2]
            if found < need:
                raise error(
                    "E0607",
                    f"`{BLOCKS}` has lists for {found} blocks of rows, sequence {b} has {need}",
                    notes=("on a GPU and without check=True, rows that have no list see nothing",),
                    helps=("give as many lists as the longest sequence has blocks of rows",),
                )

    @property
    def _packs_rows(self) -> bool:
        """Whether each packed row may have its list where it stands."""
        return self.spec.layout is Layout.VARLEN and self._sparse.q == 1

    def _check(self, q: Any, k: Any, v: Any, blocks: Tensor, named: dict[str, Any]) -> None:
        """What `check=True` looks at: lists, and the call that they make, by sequence where those have lengths.

        Raises: AttnError E0628 (lists), E0607 (too few of them), and as `checks.check_call`.
        """
        params, tensors = self._without_lists.split(self._without_lists.bind(named, q, k))
        if not self.spec.layout.is_ragged:
            self._check_one(self._plain, q, k, v, blocks, params, tensors)
            return
        from attngen.jit.ragged import check_lengths
        from attngen.ref import ragged

        check_lengths(self.spec, q, k, tensors)
        sequences = ragged.sequences(self.spec, q, k, tensors)
        if blocks.ndim == 4:
            self._has_lists(blocks, [s.rows.stop - s.rows.start for s in sequences])
        for s in sequences:
            rows, keys, values = (
                ragged.of_sequence(self.spec, x, s, part) for x, part in ((q, s.rows), (k, s.keys), (v, s.keys))
            )
            own = ragged.captured(self._checked, s, tensors)
            self._check_one(ragged.one(self.spec, s), rows, keys, values, self._lists_of(blocks, s), params, own)

    def _lists_of(self, blocks: Tensor, s: Any) -> Tensor:
        """The lists of one sequence, as a call of it alone takes them."""
        if blocks.ndim == 3:
            return blocks[:, s.rows].unsqueeze(0)
        need = -(-(s.rows.stop - s.rows.start) // self._sparse.q)
        return blocks[s.b if blocks.shape[0] > 1 else 0, :, :need].unsqueeze(0)

    def _check_one(
        self, spec: AttentionSpec, q: Any, k: Any, v: Any, blocks: Tensor, params: Any, tensors: dict[str, Any]
    ) -> None:
        """Of one call in bshd."""
        from attngen.jit.checks import check_call

        _listed_well(blocks, -(-k.shape[1] // self._sparse.kv))
        inner = selected_spec(spec)
        call = gathered(spec, q, k, v, blocks, {**params, **tensors})
        own, read = ({d.name: call.named[d.name] for d in decls} for decls in (inner.params, inner.tensors))
        check_call(inner, call.q, call.k, call.v, own, read)


def _kind(x: Any) -> Any:
    """What a check of shapes looks at."""
    return (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else type(x)


def _cast(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """The operands in autocast's dtype, where it is on: a gather of narrower rows moves fewer bytes."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)) or q.device.type not in ("cpu", "cuda"):
        return q, k, v
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    q, k, v = (x.to(dtype) if x.is_floating_point() else x for x in (q, k, v))
    return q, k, v


def _listed_well(blocks: Tensor, count: int) -> None:
    """E0628 for numbers outside 0..count - 1 other than -1, and for those that stand twice in a list."""
    outside = (blocks < -1) | (blocks >= count)
    if bool(outside.any()):
        raise _bad(f"holds {int(blocks[outside][0])}; there are blocks 0 to {count - 1}, and -1 fills a list up")
    ordered = blocks.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if bool(twice.any()):
        raise _bad(f"holds {int(ordered[..., 1:][twice][0])} twice in one list")


def _bad(what: str) -> AttnError:
    return error("E0628", f"`{BLOCKS}` {what}", helps=("without check=True it counts as not there, or as one",))
