"""Attention by several kernels: branches over one V, KV segments under one softmax.

Each part is an Attention of its own, forward and backward; its O and LSE are put together in torch, O(N), and so are
the gradients: what reaches a part's O and LSE from the whole is exact, and its own backward kernel does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.spec import AttentionSpec
from attngen.jit import autograd
from attngen.jit.chained import Chain
from attngen.jit.kernel import Attention
from attngen.jit.modes import is_dynamo
from attngen.jit.named import Binder
from attngen.jit.ragged import RaggedBinder
from attngen.jit.recipe import Made, Recipe
from attngen.jit.segments import check_segments, places_of_keys, segments_of
from attngen.jit.selected import SelectedAttention
from attngen.jit.shapes import axes_of
from attngen.jit.tables import NAME, PartTables, no_handle, nothing_to_keep
from attngen.jit.together import Together
from attngen.passes.placed import places_of

#: What serves a part: its kernel, or a gather in front of it.
OfPart = Attention | SelectedAttention


class _Call(NamedTuple):
    """The tensors of a part; `lengths` by name, where they are not the call's."""

    q: Any
    k: Any
    v: Any
    lengths: dict[str, Any]


class SeveralAttention(Made):
    """Attention as a spec with branches or segments says it, callable on torch tensors.

    Branches: `attn((q1, q2), (k1, k2), v, **keywords)`, a q and a k for each branch in order, one v.
    Segments: `attn(q, k, v, segments={"past": (k2, v2)}, **keywords)`, a (k, v) for each, of any length; in varlen (k,
    v, cu_seqlens), in padded (k, v) or (k, v, seqused), lengths that stand where the call's `_kv` do for its own keys.
    Keywords and shapes as `Attention` has them. lse is that of all keys; with branches it has a leading axis of them,
    each by itself. With `output { max_logit = true }`, `return_max_logit=True` appends the
    largest kept scores, shaped like lse: of all keys, or of each branch.
    Numerics: each part's O is rounded to the input's dtype, or none where the spec's output dtype is f32; their sum,
    weights and epilogue are fp32, rounded once to the input's or the spec's output dtype.
    Gradients: of every q, k, v and tensor declared `grad`. Saved: q, k, v, O and LSE of each part, O(N).
    `parts`: the Attention of each part by name. Devices, dtypes, autocast and torch.compile as `Attention`.
    Raises: AttnError as `Attention`; E0604, E0607 also for a tuple or segments that do not fit the spec.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        parts: Mapping[str, OfPart],
        recipe: Recipe,
        make: Callable[[AttentionSpec], Attention],
    ) -> None:
        self.spec = spec
        self.parts = dict(parts)
        self.chain = Chain(spec, make)
        self._recipe = recipe
        self._binder = RaggedBinder(spec) if spec.layout.is_ragged else Binder(spec)
        self._together = Together(spec, self._binder)
        #: The lengths that a segment has of its own, by the name of the call's.
        self._keys_end = spec.lengths[1].name if spec.lengths else ""
        #: What the kernels over segments of a ragged call read of the call's own keys.
        self._placed = frozenset().union(*(places_of(spec, x) for x in spec.segments))
        #: Parts that keep tables or tile maps by a handle; a tensor or param of that name is the caller's.
        self._keep = () if NAME in self._binder.names else tuple(n for n, a in parts.items() if a.keeps_tables)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def kernels(self) -> tuple[Attention, ...]:
        """Those of the parts in order."""
        return tuple(k for a in self.parts.values() for k in a.kernels)

    def explain(self) -> str:
        """How the parts are put together, then each of them, as `attngen explain` prints it."""
        from attngen.passes.parts import describe

        return "\n\n".join([describe(self.spec), *(a.explain() for a in self.parts.values())])

    def compile(
        self, device: int | None = None, *, backward: bool | Sequence[str] = False, group: int | None = None
    ) -> SeveralAttention:
        """As `Attention.compile`: kernels of calls without gradients, and with `backward` those of every part, which
        has of the gradients named those it gives.
        """
        if self.chain.parts:
            for a in self.chain.kernels:
                a.compile(device, group=group)
            if backward is False:
                return self
        for part in self.parts.values():
            wanted = backward
            if not isinstance(backward, bool):
                names = [backward] if isinstance(backward, str) else backward
                wanted = [n for n in names if n in part.backward.names]
            part.compile(device, backward=wanted, group=group)
        return self

    def tables(self) -> PartTables:
        """As `Attention.tables`, of every part whose mask has tables or a tile map. Raises: AttnError E0601 (none)."""
        if not self._keep:
            raise nothing_to_keep(self.spec)
        return PartTables({n: self.parts[n].tables() for n in self._keep})

    def __repr__(self) -> str:
        return f"<attngen.SeveralAttention {self.spec.name} of {', '.join(self.parts)}>"

    # -- calls -----------------------------------------------------------------------------------------------------

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        segments: Mapping[str, tuple[Any, Any]] | None = None,
        return_lse: bool = False,
        return_max_logit: bool = False,
        out: Any = None,
        lse: Any = None,
        scale: float | None = None,
        check: bool = False,
        **named: Any,
    ) -> Any:
        """See the class."""
        calls = self._calls(q, k, v, segments)
        handle = self._kept(named.pop(NAME, None)) if self._keep else None
        kept = {} if handle is None else handle.parts
        self._names(named if not return_max_logit or self.spec.max_logit else {**named, "return_max_logit": True})
        wanted = return_lse or lse is not None
        if not (is_dynamo() or check or return_max_logit) and self.chain.serves(calls, named, wanted):
            return self._chained(calls, named, handle, scale, out, lse, return_lse)
        # of other normalisers an LSE costs a kernel of its own
        wants_lse = self._together.one_softmax or return_lse or lse is not None
        keywords = {"return_lse": wants_lse, "scale": scale, "check": check}
        keywords |= {"return_max_logit": True} if return_max_logit else {}
        places = self._places(calls, named, handle, check) if self._placed else {}
        found = [
            self._part(name, attention, call, keywords, {**named, **places}, kept.get(name))
            for (name, attention), call in zip(self.parts.items(), calls, strict=True)
        ]
        os = [x[0] for x in found] if wants_lse or return_max_logit else found
        lses = [x[1] for x in found] if wants_lse else []
        o, rows = self._together(os, lses, calls[0].q, calls[0].k, named, check)
        if out is not None or lse is not None:
            o, rows = self._written(o, rows, out, lse)
        results = (o, *((rows,) if return_lse else ()))
        if return_max_logit:
            tops = torch.stack([x[-1] for x in found])
            results = (*results, tops if self.spec.branches else tops.amax(0))
        return results if len(results) > 1 else o

    def _chained(
        self, calls: Sequence[_Call], named: Mapping[str, Any], handle: Any, scale: Any, out: Any, lse: Any,
        return_lse: bool,
    ) -> Any:  # fmt: skip
        """A call whose kernels add to each other's O."""
        places = self._places(calls, named, handle, False) if self._placed else {}
        kept = {} if handle is None else handle.parts
        o, rows = self.chain(
            calls, {**named, **places} if places else named, kept, scale, return_lse or lse is not None, self._run
        )
        if out is not None or lse is not None:
            o, rows = self._written(o, rows, out, lse)
        return (o, rows) if return_lse else o

    def _calls(self, q: Any, k: Any, v: Any, segments: Any) -> list[_Call]:
        """What each part is called with. Raises: AttnError E0604, E0607."""
        spec = self.spec
        given = segments_of(spec, segments, k)
        if spec.branches:
            names = [b.name for b in spec.branches]
            for what, x in (("q", q), ("k", k)):
                if not isinstance(x, tuple | list) or len(x) != len(names):
                    found = f"{len(x)} of them" if isinstance(x, tuple | list) else type(x).__name__
                    raise error(
                        "E0604",
                        f"`{spec.name}` takes a tuple of {len(names)} as `{what}`, found {found}",
                        notes=(f"one {what} for each branch: {', '.join(names)}",),
                        helps=(f"pass {what}=({what}1, {what}2)" if len(names) == 2 else f"pass a tuple of {what}",),
                    )
            for name, x in zip(names, q, strict=True):
                if getattr(x, "shape", None) != getattr(q[0], "shape", None):
                    raise error(
                        "E0607",
                        f"branch `{name}` has q {_shape(x)}, `{names[0]}` has q {_shape(q[0])}",
                        notes=("all branches add to the same rows of O",),
                        helps=("give every branch as many batch entries, rows and heads",),
                    )
            return [_Call(qs, ks, v, {}) for qs, ks in zip(q, k, strict=True)]
        name = self._keys_end
        own = [_Call(q, s.k, s.v, {name: s.lengths} if name else {}) for s in given]
        return [_Call(q, k, v, {}), *own]

    def _kept(self, handle: Any) -> PartTables | None:
        """The caller's handle. Raises: AttnError E0604 for what is none of this spec's."""
        if handle is not None and (not isinstance(handle, PartTables) or tuple(handle.parts) != self._keep):
            raise no_handle(handle)
        return handle

    def _places(
        self, calls: Sequence[_Call], named: Mapping[str, Any], handle: PartTables | None, check: bool
    ) -> dict[str, Any]:
        """What segments read of the call's own keys, `segments.places_of_keys`."""
        spec, main, binder = self.spec, calls[0], self._binder
        assert isinstance(binder, RaggedBinder)
        named = binder.filled(named, main.q, main.k)
        if check:
            given = [(x.k, x.v, *x.lengths.values()) for x in calls[1:]]
            check_segments(spec, main.q, main.k, given, *binder.split(binder.bind(named, main.q, main.k)))
        lengths = named.get(spec.lengths[1].name)
        if not isinstance(lengths, torch.Tensor):
            binder.missing(spec.lengths[1].name)
        sizes = binder.sizes(named, main.q, main.k)

        def make() -> dict[str, Any]:
            return places_of_keys(spec, sizes, lengths)

        call = (spec.layout, *sizes.items())
        return make() if handle is None or is_dynamo() else handle.places(lengths, call, make)

    def _names(self, named: Mapping[str, Any]) -> None:
        """E0601 and E0602 of the whole spec: a part knows its own names only."""
        for name in named:
            if name not in self._binder.names:
                self._binder.unknown(name)
        for name, decl in self._together.reads.items():
            x = named.get(name)
            if x is None:
                self._binder.missing(name)
            if torch.is_grad_enabled() and getattr(x, "requires_grad", False) and not decl.grad:
                raise autograd.lost_gradient(self.spec.name, name)

    def _part(
        self, name: str, attention: OfPart, call: _Call, keywords: Any, named: Mapping[str, Any], kept: Any
    ) -> Any:
        names = attention.binder.names - ({NAME} if attention.keeps_tables else set())  # the part's handle is `kept`
        own: Any = {n: x for n, x in named.items() if n in names} | call.lengths | ({NAME: kept} if kept else {})
        if is_dynamo():
            traced = {n: x for n, x in keywords.items() if n != "check"}
            return attention(call.q, call.k, call.v, **traced, **own)
        return self._run(name, attention, call, {**keywords, **own})

    def _run(self, name: str, attention: OfPart, call: _Call, keywords: Mapping[str, Any]) -> Any:
        """One kernel; a fault says whose it is."""
        try:
            return attention(call.q, call.k, call.v, **keywords)
        except AttnError as fault:
            where = f"in the {'branch' if self.spec.branches else 'part'} `{name}` of `{self.spec.name}`"
            raise AttnError(*(replace(d, notes=(*d.notes, where)) for d in fault.diagnostics)) from fault

    def _written(self, o: Any, rows: Any, out: Any, lse: Any) -> tuple[Any, Any]:
        """The results in the caller's memory."""
        if o.requires_grad or getattr(rows, "requires_grad", False):
            raise autograd.given_output(self.spec.name)
        for name, given, made in (("out", out, o), ("lse", lse, rows)):
            if given is not None and not (
                isinstance(given, torch.Tensor)
                and (given.shape, given.dtype, given.device) == (made.shape, made.dtype, made.device)
            ):
                axes = f" ({', '.join(axes_of(self.spec))})" if name == "out" else ""
                raise error(
                    "E0616",
                    f"`{name}` must be {made.dtype} {tuple(made.shape)}{axes} on {made.device}",
                    helps=("leave it out, or allocate it so",),
                )
        return (o if out is None else out.copy_(o)), (rows if lse is None else lse.copy_(rows))


def _shape(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
