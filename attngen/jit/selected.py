"""Attention over listed keys: K and V are gathered by lists, for each block of rows or each row; see `passes.selected`.

The gather, its gradient and the views around the kernel are torch's; the kernel is one of the usual kind, whose batch
entries are blocks of rows. Memory: the gathered K and V, blocks_q * keys of a list * heads_kv * (D + Dv) elements a
batch entry, and as much for their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout
from attngen.jit import contract
from attngen.jit.composed import Recipe
from attngen.jit.kernel import Attention
from attngen.jit.lists import ListTables, listed
from attngen.jit.modes import is_dynamo
from attngen.jit.named import Binder, broadcast
from attngen.jit.shapes import Sizes, sizes_of
from attngen.jit.tables import NAME, no_handle, nothing_to_keep
from attngen.passes.selected import BLOCKS, SELECTED, SIZES, packs_heads

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Gathered:
    """A call of the kernel behind a call on lists, all in bshd, and the way back."""

    q: Tensor
    k: Tensor
    v: Tensor
    named: dict[str, Any]
    sizes: Sizes
    rows: int
    packed: bool

    def o(self, o: Tensor) -> Tensor:
        """O of the call (batch, seqlen_q, heads_q, Dv) from that of the kernel."""
        b, hq, sq = self.sizes["batch"], self.sizes["heads_q"], self.sizes["seqlen_q"]
        if self.packed:
            _, r, hkv, d = o.shape
            group = hq // max(hkv, 1)
            o = o.view(o.shape[0], r // max(group, 1), group, hkv, d).transpose(2, 3)
        return o.reshape(b, self._padded, hq, o.shape[-1])[:, :sq]

    def lse(self, lse: Tensor) -> Tensor:
        """LSE of the call (batch, heads_q, seqlen_q) from that of the kernel."""
        b, hq, sq = self.sizes["batch"], self.sizes["heads_q"], self.sizes["seqlen_q"]
        hkv, blocks = self.sizes["heads_kv"], self._padded // self.rows
        if self.packed:
            parted = lse.view(b, blocks, hkv, self.rows, hq // max(hkv, 1)).permute(0, 2, 4, 1, 3)
        else:
            parted = lse.view(b, blocks, hq, self.rows).transpose(1, 2)
        return parted.reshape(b, hq, self._padded)[..., :sq]

    @property
    def _padded(self) -> int:
        """Rows of whole blocks."""
        return -(-self.sizes["seqlen_q"] // self.rows) * self.rows


def gathered(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Tensor,
    named: dict[str, Any],
    kept: ListTables | None = None,
) -> Gathered:
    """The call of `selected_spec(spec)` that a call on bshd tensors is, `spec` in that layout. `named`: params and
    captured tensors; `kept`: the caller's handle.
    """
    sparse = spec.block_sparse
    assert sparse is not None
    sizes = sizes_of(spec, q, k)
    b, sq, skv, hq, hkv = (sizes[n] for n in ("batch", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv"))
    rows, blocks, group = sparse.q, -(-sq // sparse.q), hq // max(hkv, 1)
    keys = listed(spec, lists, sizes) if kept is None else kept.listed(spec, lists, sizes)
    deterministic = spec.backward.deterministic
    ks, vs = (_gather(x, keys.index, deterministic).flatten(0, 1) for x in (k, v))
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, blocks * rows - sq)) if blocks * rows != sq else q
    packed = packs_heads(spec)
    if packed:
        parted = q.reshape(b, blocks, rows, hkv, group, q.shape[-1]).transpose(3, 4)
        qs = parted.reshape(b * blocks, rows * group, hkv, q.shape[-1])
    else:
        qs = q.reshape(b * blocks, rows, hq, q.shape[-1])
    known = dict(zip(SIZES, (max(blocks, 1), sq, skv, max(group, 1)), strict=True))
    decls = {t.name: t for t in spec.tensors}
    wide = {n: broadcast(x, decls[n], sizes) if n in decls else x for n, x in named.items()}
    return Gathered(qs, ks, vs, {**wide, **known, SELECTED: keys.picked}, sizes, rows, packed)


def _gather(x: Tensor, index: Tensor, deterministic: bool) -> Tensor:
    """x (batch, seqlen, heads, D) at index (batch, blocks, n, heads): (batch, blocks, n, heads, D)."""
    found: Tensor = _Gather.apply(x, index, deterministic)  # type: ignore[no-untyped-call]
    return found


def _places(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1, 1)
    heads = torch.arange(x.shape[2], device=x.device).view(1, 1, 1, -1)
    return batch, index, heads


class _Gather(torch.autograd.Function):
    """Rows by index; the gradient adds them up in fp32 and rounds once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, deterministic: bool) -> Tensor:
        ctx.save_for_backward(index)
        ctx.x = x.shape, x.dtype, deterministic
        return x[_places(x, index)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        shape, dtype, deterministic = ctx.x
        total = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=grad.device)
        batch, rows, heads = _places(total, index)
        if deterministic or torch.are_deterministic_algorithms_enabled():
            total.index_put_((batch, rows, heads), grad.to(total.dtype), accumulate=True)  # sorts first
        else:
            flat = ((batch * shape[1] + rows) * shape[2] + heads).flatten()
            total.view(-1, shape[3]).index_add_(0, flat, grad.reshape(-1, shape[3]).to(total.dtype))
        return total.to(dtype), None, None


class SelectedAttention:
    """Attention over listed keys, as `block_sparse { q = …, kv = …, lists = given }` says it where q or kv is 1.

    `attn(q, k, v, blocks=lists, **keywords)` takes the other arguments of `Attention`, `out` and `lse` apart.
    `blocks`: int32 or int64 (batch or 1, heads_kv or 1, blocks_q, n): for each block of q rows the numbers of the
    blocks of kv keys that it sees, in any order; -1 fills a list up. A number outside the keys counts as none, one that
    stands twice as one; with `check=True` both are errors. A row attends to the listed keys that the mask keeps.
    Memory: K and V gathered by block of rows, and their gradients: blocks_q * n * kv * heads_kv * (D + Dv) elements.
    Gradients: of q, k, v and tensors declared `grad`; dK and dV of a key add up over the lists that hold it, in fp32,
    in a fixed order where the spec is deterministic.
    `tables`: a handle that `attn.tables()` returned keeps the sorted lists for the next call (see `ListTables`).
    Raises: AttnError as `Attention`; E0604 to E0607 (blocks), E0628 (with `check`).
    """

    def __init__(self, spec: AttentionSpec, inner: Attention, recipe: Recipe) -> None:
        self.spec = spec
        self.inner = inner
        self._recipe = recipe
        self._bhsd = spec.layout is Layout.BHSD
        self._plain = spec.replace(layout=Layout.BSHD) if self._bhsd else spec
        self._binder = Binder(spec)
        assert spec.block_sparse is not None
        self._sparse = spec.block_sparse
        #: What `contract` looks at: the call without its lists, whose axes are others than a mask's.
        self._checked = self._plain.replace(
            tensors=tuple(t for t in spec.tensors if t.name != BLOCKS), block_sparse=None
        )

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """The Attention over gathered keys."""
        return (self.inner,)

    def explain(self) -> str:
        """What was planned for the gathered keys, as `attngen explain` prints it."""
        return self.inner.explain()

    def compile(self, device: int | None = None, *, backward: bool | Sequence[str] = False) -> SelectedAttention:
        """As `Attention.compile`."""
        self.inner.compile(device, backward=backward)
        return self

    def tables(self) -> ListTables:
        """A handle that keeps sorted lists, and the tables of a mask over them, from call to call.

        Raises: AttnError E0601 where a tensor or param of the spec has its name.
        """
        if NAME in self._binder.names:
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

    def __reduce__(self) -> Recipe:
        return self._recipe

    def __deepcopy__(self, memo: dict[int, Any]) -> SelectedAttention:
        return self  # as an Attention

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        blocks: Any = None,
        return_lse: bool = False,
        scale: float | None = None,
        check: bool = False,
        **named: Any,
    ) -> Any:
        """See the class."""
        kept = None if NAME in self._binder.names else self._kept(named.pop(NAME, None))
        if self._bhsd:
            q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in (q, k, v))
        if not is_dynamo():
            q, k, v = _cast(q, k, v)
            self._fits(q, k, v, blocks, named)
        if check:
            _listed_well(blocks, -(-k.shape[1] // self._sparse.kv))
        call = gathered(self._plain, q, k, v, blocks, named, kept)
        own = {**call.named, **({} if kept is None or not self.inner.keeps_tables else {NAME: kept.tables})}
        found = self.inner(call.q, call.k, call.v, return_lse=return_lse, scale=scale, check=check, **own)
        o = call.o(found[0] if return_lse else found)
        o = (o.transpose(1, 2) if self._bhsd else o).contiguous()
        return (o, call.lse(found[1]).contiguous()) if return_lse else o

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
        want = (q.shape[0], k.shape[2], -(-q.shape[1] // sparse.q))
        if (
            blocks.ndim != 4
            or any(n not in (m, 1) for n, m in zip(blocks.shape[:2], want, strict=False))
            or blocks.shape[2] != want[2]
        ):
            raise error(
                "E0607",
                f"`{BLOCKS}` has {blocks.ndim} axes {tuple(blocks.shape)}, this call needs "
                f"({want[0]} or 1, {want[1]} or 1, {want[2]}, n)",
                notes=(f"a list for each block of {sparse.q} rows of each KV head",),
                helps=("give one list for each block of rows; -1 fills a short one up",),
            )


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
