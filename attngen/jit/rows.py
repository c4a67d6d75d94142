"""Values of a row and elements of O in torch, for what follows the kernels: branch weights, the epilogue.

Differentiable in captured tensors and in O. A tensor read along plain axes, `gate[b, q_idx, h, d]`, is a permuted view;
any other index is computed, and clamped into its tensor as in a kernel, or checked where a call says check=True.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngen.ir.expr import Atom, Const, Expr, Load, Param, rewrite, tensors_of
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Layout
from attngen.jit.atoms import OF_SEQUENCE, environment, loads_in_memory, sequence_environment
from attngen.jit.named import broadcast
from attngen.jit.shapes import Sizes

#: Axes of (batch, heads_q, seqlen_q, head_dim_v) by the atom that runs along them.
_AXES = {"b": 0, "h": 1, "q_idx": 2, "d": 3}
#: The axis of a tensor that holds just what the atom runs along, whatever the lengths are.
_OWN = {"b": "batch", "h": "heads_q", "q_idx": "seqlen_q", "d": "head_dim_v"}


@dataclass(frozen=True)
class RaggedRows:
    """The rows of a ragged call: which are of a sequence, and their atoms.

    A row of none stands for one of some sequence: its values are finite where those are, so that nothing but 0 comes of
    them where its part of O is dropped, in the gradients either. Shapes: `there` (1, 1, total_q, 1) in varlen, (batch,
    1, seqlen_q, 1) in padded; `stand_in` its place, int64 (1,), in the flattened `there`.
    """

    there: torch.Tensor
    stand_in: torch.Tensor
    env: dict[str, torch.Tensor]

    @staticmethod
    def of(
        spec: AttentionSpec, sizes: Sizes, params: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> RaggedRows:
        """`tensors`: the lengths too, by name."""
        env = sequence_environment(spec, sizes, params, tensors, by_keys=False)
        there = (env["q_idx"] >= 0) & (env["q_idx"] < env["seqlen_q"])
        if not there.numel():
            return RaggedRows(there, torch.zeros(1, dtype=torch.int64, device=there.device), env)
        rows = RaggedRows(there, there.flatten().int().argmax().view(1), env)
        env |= {name: rows.held(env[name]) for name in OF_SEQUENCE}
        return rows

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, of axes that broadcast to `there`'s, with the stand-in's values in rows of no sequence."""
        rows, own = self.there.shape[2], x
        for place, at in ((2, self.stand_in % rows), (0, self.stand_in // rows)):
            if own.shape[place] > 1:
                own = own.index_select(place, at)
        return torch.where(self.there, x, own.detach())


class RowValue:
    """One expression of `spec` over rows (batch, heads_q, seqlen_q) or, with `o`, over elements of O.

    Varlen has no axis of batch: (1, heads_q, total_q).
    """

    def __init__(self, spec: AttentionSpec, e: Expr) -> None:
        self._spec = spec
        self.constant: float | None = float(e.value) if isinstance(e, Const) else None
        self._views: dict[str, Load] = {}
        self._whole, self._expr = e, loads_in_memory(spec, rewrite(e, self._viewed))
        self.tensors = tuple(t for t in spec.tensors if t.name in tensors_of(e))

    def _viewed(self, e: Expr) -> Expr:
        """A read along different plain axes as a value of its own name."""
        if not isinstance(e, Load) or not e.indices:
            return e
        names = [i.name for i in e.indices if isinstance(i, Atom)]
        if len(names) < len(e.indices) or len({*names}) < len(names) or not {*names} <= {*_AXES}:
            return e
        if self._spec.layout.is_ragged and not self._is_of_rows(e.tensor, names):
            return e
        name = f"{e.tensor}[{', '.join(names)}]"
        self._views[name] = e
        return Param(type=e.type, name=name)

    def _is_of_rows(self, tensor: str, names: list[str]) -> bool:
        """Whether an element stands in a ragged tensor where the row does in q."""
        dims = self._spec.tensor(tensor).dims
        packed = self._spec.layout is Layout.VARLEN
        return all(_OWN[n] == d and not (packed and n == "b") for n, d in zip(names, dims, strict=True))

    def __call__(
        self,
        sizes: Sizes,
        params: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        device: Any,
        *,
        o: torch.Tensor | None = None,
        check: bool = False,
        dtype: torch.dtype = torch.float32,
        rows: RaggedRows | None = None,
    ) -> torch.Tensor:
        """Of four axes, any of them 1; `o` (batch, heads_q, seqlen_q, head_dim_v) in `dtype`; `rows` of a ragged call,
        which checks nothing.
        """
        from attngen.ref.evaluate import evaluate

        env = environment(sizes, params, device) if rows is None else dict(rows.env)
        wide = {t.name: broadcast(tensors[t.name], t, sizes) for t in self.tensors}
        batch = 1 if self._spec.layout is Layout.VARLEN else sizes["batch"]
        extents = (batch, sizes["heads_q"], sizes["seqlen_q"], sizes["head_dim_v"])
        for name, e in ({} if check else self._views).items():
            view = _along(wide[e.tensor], e, extents, dtype)
            env[name] = view if rows is None or not view.numel() else rows.held(view)
        if o is not None:
            env["o"] = o
            env["d"] = torch.arange(sizes["head_dim_v"], device=device).view(1, 1, 1, -1)
        expr = self._whole if check else self._expr  # a view is cut to its rows: nothing of it is outside
        value = evaluate(expr, env, wide, dtype=dtype, clamp=not check)
        return value if value.dim() == 4 else value.view((1,) * (4 - value.dim()) + value.shape)


def _along(x: torch.Tensor, e: Load, extents: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`x` with its axes where its indices run; a longer one is cut, a shorter one repeats its last element, as clamped
    indices read it.
    """
    axes = [_AXES[i.name] for i in e.indices if isinstance(i, Atom)]
    for axis, place in enumerate(axes):
        extent = x.shape[axis]
        if extent > extents[place]:
            x = x.narrow(axis, 0, extents[place])
        elif 1 < extent < extents[place]:
            index = torch.arange(extents[place], device=x.device).clamp(max=extent - 1)
            x = x.index_select(axis, index)
    order = sorted(range(len(axes)), key=lambda n: axes[n])
    shape = [1, 1, 1, 1]
    for n in order:
        shape[axes[n]] = x.shape[n]
    x = x.permute(order).reshape(shape)
    return x.to(dtype) if x.is_floating_point() else x if x.dtype is torch.bool else x.long()
