"""What parts give, put together in torch: O and LSE of the whole, O(N), differentiable in all that they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from attngen.ir.expr import Atom
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout, Normalizer
from attngen.jit import contract
from attngen.jit.merge import softmax_weights, weighted_sum
from attngen.jit.modes import is_dynamo
from attngen.jit.named import TORCH_DTYPE, Binder, broadcast
from attngen.jit.ragged import RaggedBinder
from attngen.jit.rows import RaggedRows, RowValue
from attngen.jit.shapes import Sizes, sizes_of


@dataclass(frozen=True, slots=True)
class _Values:
    """Evaluates weights and epilogue in one call. `ragged`: its rows, where sequences have lengths of their own."""

    sizes: Sizes
    params: Mapping[str, Any]
    tensors: Mapping[str, Any]
    device: Any
    dtype: torch.dtype
    check: bool
    ragged: RaggedRows | None

    def __call__(self, of: RowValue, o: Any = None) -> Any:
        """`of`, of four axes; `o` (batch, heads_q, seqlen_q, head_dim_v)."""
        return of(
            self.sizes, self.params, self.tensors, self.device,
            o=o, check=self.check, dtype=self.dtype, rows=self.ragged,
        )  # fmt: skip


class Together:
    """The sum of a spec's branches, or of its own keys' attention and its segments', and what comes after it.

    Numerics: weights, sum and epilogue in fp32, rounded once, to the dtype of the parts' O or the spec's.
    """

    def __init__(self, spec: AttentionSpec, binder: Binder) -> None:
        self.spec = spec
        self._binder = binder
        self._bhsd = spec.layout is Layout.BHSD
        self._packed = spec.layout is Layout.VARLEN
        self._weights = [RowValue(spec, b.weight) for b in spec.branches]
        self._epilogue = None if isinstance(spec.epilogue, Atom) else RowValue(spec, spec.epilogue)
        after = [*self._weights, *([self._epilogue] if self._epilogue else [])]
        #: Tensors that are read here, not in a part.
        self.reads = {t.name: t for value in after for t in value.tensors}
        self._evaluates = bool(self.reads or self._epilogue) or any(w.constant is None for w in self._weights)
        #: Weights of the parts are shares of one softmax.
        self.one_softmax = bool(spec.segments) and spec.normalizer is Normalizer.SOFTMAX
        self._dtype = TORCH_DTYPE[spec.out_dtype] if spec.out_dtype else None

    def __call__(
        self, os: Sequence[Any], lses: Sequence[Any], q: Any, k: Any, named: Mapping[str, Any], check: bool
    ) -> tuple[Any, Any]:
        """(o, lse) of a call with `q` and `k` for its first part; lse None without `lses`, which one softmax takes."""
        values = self._values(q, k, named, check) if self._evaluates else None
        weights: list[Any] = [1.0] * len(os)
        rows = None
        if self.spec.branches:
            weights = [w.constant if values is None or w.constant is not None else self._rows(values(w)[..., 0])
                       for w in self._weights]  # fmt: skip
            rows = torch.stack(list(lses)) if lses else None
        elif self.one_softmax:
            weights, rows = softmax_weights(lses)
        elif lses:
            rows = softmax_weights(lses)[1]
        dtype = self._dtype or os[0].dtype
        o = weighted_sum(os, weights, self._bhsd, None if self._epilogue is not None else dtype)
        if self._epilogue is not None:
            assert values is not None
            heads_first = self._heads_first(o)
            made = torch.broadcast_to(values(self._epilogue, heads_first), heads_first.shape)
            o = self._rows(made if self._bhsd else made.transpose(1, 2)).to(dtype).contiguous()
        if values is not None and values.ragged is not None:  # 0 in rows of no sequence, whatever is read there
            o = torch.where(self._rows(values.ragged.there.transpose(1, 2)), o, 0)
        return o, rows

    def _rows(self, x: Any) -> Any:
        """`x` with the axes of this layout: packed rows have none of batch."""
        return x.squeeze(0) if self._packed else x

    def _heads_first(self, o: Any) -> Any:
        """An o of the call as (batch, heads_q, seqlen_q, head_dim_v)."""
        o = o.unsqueeze(0) if self._packed else o
        return o if self._bhsd else o.transpose(1, 2)

    def _values(self, q: Any, k: Any, named: Mapping[str, Any], check: bool) -> _Values:
        """Row values of this call."""
        spec = self.spec
        named = self._binder.filled(named, q, k) if isinstance(self._binder, RaggedBinder) else named
        sizes: Sizes = self._binder.sizes(named, q, k)
        tensors = {n: named[n] for n in (*self.reads, *(t.name for t in spec.lengths))}
        if not is_dynamo():
            extents: Sizes = dict(sizes)
            for name, decl in self.reads.items():
                contract.captured(decl, tensors[name], q, extents)
        params = {n: kind(named.get(n, decl.default)) for n, kind, decl in self._binder.params}
        values = _Values(sizes, params, tensors, q.device, torch.promote_types(q.dtype, torch.float32), check, None)
        if not spec.layout.is_ragged:
            return values
        if check:
            self._check_sequences(q, k, values)
        return replace(values, check=False, ragged=RaggedRows.of(spec, sizes, params, tensors))

    def _check_sequences(self, q: Any, k: Any, whole: _Values) -> None:
        """E0650 where weights or the epilogue index a tensor outside its extent in some sequence."""
        from attngen.ref import ragged

        given = {t.name: broadcast(whole.tensors[t.name], t, whole.sizes) for t in self.reads.values()}
        read = self.spec.replace(tensors=tuple(self.reads.values()))
        for s in ragged.sequences(self.spec, q, k, whole.tensors):
            own = ragged.one(read, s)
            rows, keys = (ragged.of_sequence(self.spec, x, s, part) for x, part in ((q, s.rows), (k, s.keys)))
            values = replace(whole, sizes=sizes_of(own, rows, keys), tensors=ragged.captured(read, s, given))
            for branch in own.branches:
                values(RowValue(own, branch.weight))
            values(RowValue(own, own.epilogue), rows.new_zeros((1, 1, 1, 1), dtype=whole.dtype))
