"""Calls of ragged layouts: lengths that were left out, the launch, the reference, and what `check=True` looks at.

Nothing here reads a length on the host but the checks: a launch is bounded by the extents of q and the number of
sequences, and its plan is chosen by their quotient.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.plan import plan_at
from attngen.ir.spec import STARTS, AttentionSpec
from attngen.ir.types import Layout
from attngen.jit import contract, launch
from attngen.jit.launch import Launcher, Ready, _contiguous, _empty, _empty_like, _written
from attngen.jit.modes import dispatch_modes, is_dynamo
from attngen.jit.named import Binder
from attngen.jit.scale import number
from attngen.jit.shapes import Sizes, sizes_of
from attngen.jit.tables import TableBinder, TableLauncher

_I32, _F32 = torch.int32, torch.float32
#: Extents whose full lengths are kept, and strides that are known to be good.
_REMEMBERED = 64


class RaggedBinder(Binder):
    """Binds the lengths of the sequences with the captured tensors."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._varlen = spec.layout is Layout.VARLEN
        self._full: dict[tuple[Any, ...], Any] = {}

    def filled(self, named: Mapping[str, Any], q: Any, k: Any) -> Mapping[str, Any]:
        """`named` with the lengths that may be left out: `cu_seqlens_kv` is `cu_seqlens_q`, a `seqused` is full."""
        if self._varlen:
            if named.get("cu_seqlens_kv") is None and named.get("cu_seqlens_q") is not None:
                return {**named, "cu_seqlens_kv": named["cu_seqlens_q"]}
            return named
        for name, x in (("seqused_q", q), ("seqused_kv", k)):
            if named.get(name) is None and getattr(x, "ndim", 0) >= 2:  # of another rank than 4: said with the others
                named = {**named, name: self._whole(x)}
        return named

    def _whole(self, x: Any) -> Any:
        """The lengths of sequences that fill `x`, i32[batch]. Eager calls of a stream share those of an extent: nobody
        writes them. What a graph captures or torch traces makes its own.
        """
        batch, seqlen, device = x.shape[0], x.shape[1], x.device
        if is_dynamo() or type(x) is not torch.Tensor or dispatch_modes() or device.type != "cuda":
            return torch.full((batch,), seqlen, dtype=_I32, device=device)
        index = device.index
        key = (index, launch._raw_stream(index), batch, seqlen, torch.is_inference_mode_enabled())
        found = self._full.get(key)
        if found is None:
            found = torch.full((batch,), seqlen, dtype=_I32, device=device)
            if launch._capturing():
                return found
            if len(self._full) >= _REMEMBERED:
                self._full.clear()
            self._full[key] = found
        return found

    def counted(self, named: Mapping[str, Any]) -> int | None:
        return sequences_of(named.get("cu_seqlens_q")) if self._varlen else None

    def sizes(self, named: Mapping[str, Any], q: Any, k: Any) -> Sizes:
        """Extents that captured tensors broadcast to. Raises: AttnError E0604, E0607 (cu_seqlens_q)."""
        if self.spec.layout is not Layout.VARLEN:
            return sizes_of(self.spec, q, k)
        return sizes_of(self.spec, q, k, sequences_of(named.get("cu_seqlens_q")))


def sequences_of(cu_seqlens: Any) -> int:
    """How many sequences are packed. Raises: AttnError E0607 unless there is one axis of one element or more."""
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.ndim == 1 and cu_seqlens.shape[0] >= 1:
        return cu_seqlens.shape[0] - 1
    found = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, torch.Tensor) else type(cu_seqlens).__name__
    raise error(
        "E0607",
        f"`cu_seqlens_q` must have the shape (batch + 1,), found {found}",
        notes=("it holds the row at which each sequence begins, and the end of the last",),
        helps=("give the running sum of the lengths, from 0: torch.tensor([0, *lengths]).cumsum(0).int()",),
    )


class RaggedLauncher(Launcher):
    """Launches of a ragged layout."""

    def __init__(self, spec: AttentionSpec, binder: Binder, limits: tuple[int, ...]) -> None:
        super().__init__(spec, binder, limits)
        self._varlen = spec.layout is Layout.VARLEN
        self._first = len(spec.params)  # of the tail: the lengths
        self._stepped: set[tuple[Any, ...]] = set()
        count = self._first + len(spec.lengths)
        self._batch_axes = [
            (count + i, axis) for i, t in enumerate(spec.tensors) for axis, d in enumerate(t.dims) if d == "batch"
        ]

    def launch(
        self,
        ready: Ready,
        q: Any,
        k: Any,
        v: Any,
        tail: tuple[Any, ...],
        scale: Any,
        out: Any,
        lse: Any,
        return_lse: bool,
        further: tuple[Any, ...] = (),
    ) -> Any:
        """One call with bound arguments `tail`; returns o or (o, lse)."""
        state, workers = ready
        index = state.index
        if launch._current_device() != index:
            with torch.cuda.device(index):
                return RaggedLauncher.launch(self, ready, q, k, v, tail, scale, out, lse, return_lse, further)
        *_, seqlen_q, heads_q, _ = q.shape
        *_, seqlen_kv, heads_kv, _ = k.shape
        batch = self.sequences(tail)
        if not (seqlen_kv and seqlen_q and batch > 0 and heads_q and heads_kv) or heads_q % heads_kv:
            return self._without_launch(q, k, v, tail, scale, out, lse, return_lse)
        for at, axis in self._batch_axes:
            if tail[at].shape[axis] != batch:
                contract.validate(self.spec, q, k, v, self._binder.split(tail)[1], out, lse)
        if not self._varlen and batch > 1:
            strides = q.stride(), k.stride(), v.stride(), None if out is None else out.stride()
            if strides not in self._stepped:
                q, k, v = self._with_row_steps(strides, q, k, v, tail, out, lse)
        if scale is None:
            scale = self.scale.of(tail) if self._default_scale != self._default_scale else self._default_scale
        else:
            scale = number(scale, self.spec)
        given, provided = lse, [x for x in (out, lse) if x is not None]
        if out is None:
            if self._o_like_q:
                out = _empty_like(q, memory_format=_contiguous)
            else:
                out = _empty((*q.shape[:-1], self.spec.head_dim_v), dtype=self._dtype, device=state.device)
        elif out.data_ptr() in (q.data_ptr(), k.data_ptr(), v.data_ptr()):
            raise contract.overlap(q, k, v, out)
        capturing = launch._capturing()
        if capturing:
            counter = state.captured_counter()
        else:
            stream = launch._raw_stream(index)
            counter = state.counters.get(stream)
            counter = state.counter(stream) if counter is None else counter
        if lse is None:
            rows = (heads_q, seqlen_q) if self._varlen else (batch, heads_q, seqlen_q)
            # an LSE that nobody asked for: launches of one stream may share it
            lse = None if capturing or return_lse else state.scratch.get((stream, *rows))
            if lse is None:
                lse = _empty(rows, dtype=_F32, device=state.device)
                if not (capturing or return_lse):
                    state.keep_scratch((stream, *rows), lse)
        words = 2 * (batch + self._varlen) + 1
        order = _empty(words, dtype=_I32, device=state.device) if capturing else state.words(stream, "order", words)
        longest = max(seqlen_q, seqlen_kv)
        plan = plan_at(self._limits, -(-longest // batch) if self._varlen else longest) if self._limits else 0
        function = self.functions[plan]
        if self._ends_in_o and not further:
            further = (out, 0)
        rest = (counter, scale, workers, order, *tail, *further)
        try:
            function(q, k, v, out, lse, *rest)
        except Exception as failure:
            self._recover(failure, function, (q, k, v, out, lse, *rest), given)
        if provided:
            _written(*provided)
        return (out, lse) if return_lse else out

    def _with_row_steps(
        self, strides: tuple[Any, ...], q: Any, k: Any, v: Any, tail: tuple[Any, ...], out: Any, lse: Any
    ) -> tuple[Any, Any, Any]:
        """Operands whose sequences begin whole rows apart; strides that are good are remembered. Raises: AttnError."""
        given = (q, k, v, *(() if out is None else (out,)))
        if all(map(contract.has_row_steps, given)):
            if any(x.shape[0] != q.shape[0] for x in given):  # the entry point will refuse it
                return q, k, v
            if len(self._stepped) >= _REMEMBERED:
                self._stepped.clear()
            self._stepped.add(strides)
            return q, k, v
        q, k, v = (contract.normalized(x) for x in (q, k, v))  # one row: its stride says nothing
        contract.validate(self.spec, q, k, v, self._binder.split(tail)[1], out, lse)
        return q, k, v

    def sequences(self, tail: tuple[Any, ...]) -> int:
        """How many sequences a call has."""
        count: int = tail[self._first].shape[0] - self._varlen
        return count

    def _captured(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return arguments[9:]

    def reference(
        self, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: Any, out: Any, lse: Any, return_lse: bool
    ) -> Any:
        """The blockwise reference, sequence by sequence; waits for the lengths."""
        from attngen.ref import blockwise, ragged

        params, given, lengths = self._named(tail)
        value = self.scale.of(tail) if scale is None else number(scale, self.spec)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            rows: tuple[int, ...] = (q.shape[1], q.shape[0]) if self._varlen else (q.shape[0], q.shape[2], q.shape[1])
            if q.numel() and len(ragged.sequences(self.spec, q, k, lengths)):
                o, found = ragged.attention(self.spec, q, k, v, lengths, params, given, value, blockwise.attention)
            else:
                o, found = q.new_zeros((*q.shape[:-1], self.spec.head_dim_v)), q.new_full(rows, -torch.inf)
            o, found = o.to(self._dtype).contiguous(), found.to(_F32).contiguous()
            out = o if out is None else out.copy_(o)
            lse = found if lse is None else lse.copy_(found)
        return (out, lse) if return_lse else out

    def largest(self, q: Any, k: Any, v: Any, tail: tuple[Any, ...], scale: float) -> Any:
        """The largest kept score of each row by the blockwise reference; waits for the lengths."""
        from attngen.ref import ragged

        params, given, lengths = self._named(tail)
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return ragged.largest(self.spec, q, k, v, lengths, params, given, scale)

    def _named(self, tail: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """(params, captured tensors, lengths) by name."""
        params, given = self._binder.split(tail)
        return params, given, {t.name: given.pop(t.name) for t in self.spec.lengths}


class RaggedTableBinder(TableBinder, RaggedBinder):
    """Of a mask with tables: the handle comes last."""


class RaggedTableLauncher(TableLauncher, RaggedLauncher):
    """Of a mask with tables."""


def check_lengths(spec: AttentionSpec, q: Any, k: Any, given: Mapping[str, Any]) -> None:
    """Values of the lengths. Raises: AttnError E0623. Waits for the GPU."""
    for t, x in zip(spec.lengths, (q, k), strict=True):
        values = given[t.name].tolist()
        if t.dims == (STARTS,):
            _starts(t.name, values, x.shape[0], "rows" if x is q else "keys")
        else:
            _used(t.name, values, x.shape[1], "rows" if x is q else "keys")


def _starts(name: str, values: list[int], total: int, what: str) -> None:
    mend = "give the running sum of the lengths, from 0: torch.tensor([0, *lengths]).cumsum(0).int()"
    if values[0] != 0:
        raise error("E0623", f"`{name}` begins at {values[0]}, not at 0", helps=(mend,))
    for b, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise error(
                "E0623", f"`{name}` decreases at {b + 1}: sequence {b} would run from {start} to {end}", helps=(mend,)
            )
    if values[-1] > total:
        raise error(
            "E0623",
            f"`{name}` ends at {values[-1]}, and {total} {what} are packed",
            notes=("without check=True a kernel cuts the sequences where the tensor ends",),
            helps=(mend,),
        )


def _used(name: str, values: list[int], extent: int, what: str) -> None:
    for b, n in enumerate(values):
        if not 0 <= n <= extent:
            raise error(
                "E0623",
                f"`{name}` gives sequence {b} {n} {what}, outside 0 to {extent}",
                notes=("without check=True a kernel takes the nearest length that there is",),
                helps=(f"pass how many of the {extent} {what} sequence {b} has",),
            )
