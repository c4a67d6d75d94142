"""The callable of a spec that no kernel serves: CPU tensors run the blockwise reference, others are refused.

What is refused is said twice: in a notice when it is built, and in the error that a tensor on another device meets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from attngen.diag.diagnostic import AttnError, Diagnostic, error
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import autograd, contract, views
from attngen.jit.blocks import block_map
from attngen.jit.checks import check_call
from attngen.jit.named import Binder
from attngen.jit.notice import say
from attngen.jit.ragged import RaggedBinder
from attngen.jit.recipe import Made, Recipe
from attngen.jit.scale import Scale, number
from attngen.jit.segments import segments_of
from attngen.jit.shapes import sizes_of
from attngen.passes.selected import BLOCKS, is_selected


class ReferenceAttention(Made):
    """Attention as `spec` says it, on CPU tensors; `reasons` say why no kernel for `target` computes it.

    `attn(q, k, v, **params_and_tensors)` returns o; with `return_lse=True`, (o, lse); of a spec with a max logit,
    `return_max_logit=True` appends it.

    Shapes: as the spec's layout has them for `attngen.jit.kernel.Attention`; packed_qkv: qkv and `heads_q`, as
    `attngen.jit.composed`; V as a view of K: no v. Branches: q and k are tuples, one for each branch, and lse has a
    leading axis of branches. Segments: `segments={name: (k, v)}`. Paged: k and v are (pages, page_size, heads_kv, D)
    and `page_table` int32 (batch, pages of a sequence) says where the pages of a sequence lie, all of them full.
    Numerics: fp32 inside (`attngen.ref.blockwise`), o in the dtype of q or the spec's, lse fp32. O(N) memory.
    Keywords: `scale` (natural units) overrides the spec's; `check=True` looks for NaN, broken `sorted` promises and
    indices out of range.
    Gradients: by torch's autograd through the reference, of q, k, v and the tensors declared `grad`.
    Raises: AttnError with the reasons (E0402) for tensors on another device, and for whatever needs a kernel; E0601 to
    E0614, E0650 to E0652 (arguments).
    """

    def __init__(self, spec: AttentionSpec, target: str, reasons: tuple[Diagnostic, ...], recipe: Recipe) -> None:
        self.spec = spec
        self.target = target
        self.reasons = reasons
        self._recipe = recipe
        #: The spec in the layout that the operands have once pages and packed tensors are taken apart.
        self._plain = spec if spec.layout is Layout.BHSD else spec.replace(layout=Layout.BSHD)
        self._binder = Binder(self._plain)
        self._ragged = Ragged(spec) if spec.layout.is_ragged else None
        self._scale = Scale(spec)
        what = "; ".join(d.message for d in reasons)
        say(f"`{spec.name}` runs on CPU tensors only: {what}")

    def __call__(
        self,
        *qkv: Any,
        return_lse: bool = False,
        return_max_logit: bool = False,
        scale: float | None = None,
        check: bool = False,
        segments: Mapping[str, tuple[Any, Any]] | None = None,
        heads_q: int | None = None,
        page_table: Any = None,
        **named: Any,
    ) -> Any:
        """See the class."""
        from attngen.ref import blockwise

        qs, ks, v = self._operands(qkv, heads_q)
        for x in (*qs, *ks, v):
            if isinstance(x, torch.Tensor) and x.device.type != "cpu":
                self.refuse()
        wants_top = return_max_logit and self.spec.max_logit
        if return_max_logit and not wants_top:
            self._binder.unknown("return_max_logit")
        if self._ragged is not None:
            found = self._ragged(qs, ks, v, named, scale, check, segments, wants_top)
            return _wanted(found, return_lse)
        if is_selected(self.spec):
            named = {**named, BLOCKS: _as_map(self._plain, named.get(BLOCKS), qs[0], ks[0])}
        if self.spec.layout is Layout.PAGED:
            ks, v = [_paged(x, page_table) for x in ks], _paged(v, page_table)
        tail = self._binder.bind(named, qs[0], ks[0])
        params, tensors = self._binder.split(tail)
        whole = v if v is not None else views.keys_and_values(self.spec, ks[0])[1]
        for q, k in zip(qs, ks, strict=True):
            contract.validate(self._plain, q, k, whole, tensors, strides=False)
            if check:
                check_call(self._plain, q, k, whole, params, tensors)
        _all_learned(self.spec, tensors)
        value = self._scale.of(tail) if scale is None else number(scale, self.spec)
        several = (tuple(map(self._bshd, qs)), tuple(map(self._bshd, ks))) if self.spec.branches else None
        q, k = several or (self._bshd(qs[0]), self._bshd(ks[0]))
        parts = {s.name: (self._bshd(s.k), self._bshd(s.v)) for s in segments_of(self._plain, segments, ks[0])}
        with torch.autocast("cpu", enabled=False):
            call = (self.spec, q, k, None if v is None else self._bshd(v), params, tensors, value, parts)
            o, lse = blockwise.attention(*call)
            tops = (blockwise.largest(*call).detach(),) if wants_top else ()
        return _wanted((self._bshd(o).contiguous(), lse.contiguous(), *tops), return_lse)

    def refuse(self) -> NoReturn:
        """Raise the reasons why there is no kernel."""
        raise AttnError(*self.reasons)

    def compile(self, device: int | None = None, *, backward: Any = False, group: int | None = None) -> NoReturn:
        """Raises: AttnError E0402, there is no kernel to compile."""
        self.refuse()

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "plan_set", "plans", "explain", "path", "backward"):
            self.refuse()
        raise AttributeError(name)

    def __repr__(self) -> str:
        s = self.spec
        return f"<attngen.ReferenceAttention {s.name} {s.dtype.value} {s.layout.value} on the CPU>"

    def _operands(self, qkv: tuple[Any, ...], heads_q: int | None) -> tuple[list[Any], list[Any], Any]:
        """The q and the k of each branch (one without branches), and v, None where it is a view of k."""
        spec = self.spec
        if spec.layout is Layout.PACKED_QKV:
            qkv = views.unpack(spec, *qkv, heads_q) if len(qkv) == 1 else qkv
        takes = "q and k" if spec.v_view_start is not None else "q, k and v"
        if len(qkv) != (2 if spec.v_view_start is not None else 3):
            raise contract.another_count(spec, takes, len(qkv))
        q, k, v = (*qkv, None)[:3]
        count = len(spec.branches)
        qs, ks = ([x] if not count else list(x) if isinstance(x, tuple | list) else [] for x in (q, k))
        if count and not len(qs) == len(ks) == count:
            names = ", ".join(b.name for b in spec.branches)
            raise error(
                "E0604",
                f"`{spec.name}` takes a q and a k for each of its {count} branches",
                notes=(f"its branches: {names}",),
                helps=("pass q and k as tuples, in the order of the branches",),
            )
        for name, x in (*(("q", x) for x in qs), *(("k", x) for x in ks), *([("v", v)] if len(qkv) == 3 else [])):
            if not isinstance(x, torch.Tensor):
                raise error("E0604", f"`{name}` must be a torch tensor, found {type(x).__name__}", helps=("pass one",))
        return qs, ks, v

    def _bshd(self, x: Any) -> Any:
        return x.transpose(1, 2) if self.spec.layout is Layout.BHSD else x


class Ragged:
    """A ragged layout by the reference, sequence by sequence; the lengths are read on the host."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._binder = RaggedBinder(spec)
        self._scale = Scale(spec)

    def __call__(
        self,
        qs: list[Any],
        ks: list[Any],
        v: Any,
        named: Mapping[str, Any],
        scale: Any,
        check: bool,
        segments: Any,
        wants_top: bool,
    ) -> tuple[Any, ...]:
        """(o, lse), and the largest scores where they are wanted."""
        from attngen.ref import blockwise, ragged

        spec = self._spec
        for name, x in (*(("q", q) for q in qs), *(("k", k) for k in ks)):
            contract.has_rank(spec, name, x)
        named = self._binder.filled(named, qs[0], ks[0])
        if is_selected(spec):
            named = {**named, BLOCKS: _as_map(spec, named.get(BLOCKS), qs[0], ks[0])}
        tail = self._binder.bind(named, qs[0], ks[0])
        params, tensors = self._binder.split(tail)
        whole = v if v is not None else views.keys_and_values(spec, ks[0])[1]
        calls = [(spec, q, k, whole, tensors) for q, k in zip(qs, ks, strict=True)]
        first, kv = (t.name for t in spec.lengths)
        for s in segments_of(spec, segments, ks[0]):
            own = self._binder.filled({**named, kv: s.lengths}, qs[0], s.k)
            calls.append((spec.replace(tensors=()), qs[0], s.k, s.v, {first: own[first], kv: own.get(kv)}))
        for read, q, k, values, given in calls:
            contract.validate(read, q, k, values, given, strides=False)
            if check:
                check_call(read, q, k, values, params, given)
        _all_learned(spec, tensors)
        value = self._scale.of(tail) if scale is None else number(scale, spec)
        starts = {t.name: tensors.pop(t.name) for t in spec.lengths}
        q, k = (tuple(qs), tuple(ks)) if spec.branches else (qs[0], ks[0])
        with torch.autocast("cpu", enabled=False):
            call = (spec, q, k, v, starts, params, tensors, value)
            o, lse = ragged.attention(*call, blockwise.attention, segments or None)
            tops = (ragged.largest(*call, segments=segments or None).detach(),) if wants_top else ()
        return o.contiguous(), lse.contiguous(), *tops


def _wanted(found: tuple[Any, ...], return_lse: bool) -> Any:
    """The results that a call asks for, of (o, lse) or (o, lse, largest scores)."""
    o, lse, *tops = found
    results = (o, *((lse,) if return_lse else ()), *tops)
    return results if len(results) > 1 else o


def _all_learned(spec: AttentionSpec, tensors: Mapping[str, Any]) -> None:
    """E0611 for a captured tensor that requires a gradient and is not declared `grad`."""
    for decl in spec.tensors:
        if torch.is_grad_enabled() and tensors[decl.name].requires_grad and not decl.grad:
            raise autograd.lost_gradient(spec.name, decl.name)


def _as_map(spec: AttentionSpec, lists: Any, q: Any, k: Any) -> Any:
    """Lists of blocks as the map that the mask reads; anything else as it is. Packed keys: a sequence has not more."""
    if not isinstance(lists, torch.Tensor) or lists.dtype not in (torch.int32, torch.int64) or lists.ndim != 4:
        return lists
    sizes = sizes_of(spec, q, k)
    count = spec.block_counts(sizes["seqlen_q"], sizes["seqlen_kv"])["blocks_kv"]
    found = block_map(lists.new_full(lists.shape[:-1], lists.shape[-1]), lists, count)
    group = sizes["heads_q"] // max(sizes["heads_kv"], 1)
    return found if found.shape[1] == 1 else found.repeat_interleave(group, 1)


def _paged(x: Any, table: Any) -> Any:
    """(pages, page_size, heads, D) as (batch, seqlen, heads, D), by the table (batch, pages of a sequence)."""
    if x is None:
        return None
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or table.dtype != torch.int32:
        found = f"{table.dtype} {tuple(table.shape)}" if isinstance(table, torch.Tensor) else type(table).__name__
        raise error(
            "E0604",
            f"`page_table` must be an int32 tensor (batch, pages of a sequence), found {found}",
            notes=("layout paged: k and v are (pages, page_size, heads_kv, head_dim)",),
            helps=("pass page_table=",),
        )
    if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < x.shape[0]:
        raise error(
            "E0650",
            f"`page_table` names pages {int(table.min())} to {int(table.max())}, the cache has {x.shape[0]}",
            helps=("give pages from 0 on",),
        )
    return x[table.long()].flatten(1, 2)
