"""Values of a row and elements of O in torch, for what follows the kernels: branch weights, the epilogue.

Differentiable in captured tensors and in O. A tensor read along plain axes, `gate[b, q_idx, h, d]`, is a permuted view;
any other index is computed, and clamped into its tensor as in a kernel, or checked where a call says check=True.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attngen.ir.expr import Atom, Const, Expr, Load, Param, rewrite
from attngen.ir.spec import AttentionSpec
from attngen.jit.atoms import environment
from attngen.jit.named import broadcast
from attngen.jit.shapes import Sizes

#: Axes of (batch, heads_q, seqlen_q, head_dim_v) by the atom that runs along them.
_AXES = {"b": 0, "h": 1, "q_idx": 2, "d": 3}


class RowValue:
    """One expression of `spec` over rows (batch, heads_q, seqlen_q) or, with `o`, over elements of O."""

    def __init__(self, spec: AttentionSpec, e: Expr) -> None:
        self._spec = spec
        self.constant: float | None = float(e.value) if isinstance(e, Const) else None
        self._views: dict[str, Load] = {}
        self._expr = rewrite(e, self._viewed)
        self.tensors = tuple(t for t in spec.tensors if t.name in _tensors(e))

    def _viewed(self, e: Expr) -> Expr:
        """A read along different plain axes as a value of its own name."""
        if not isinstance(e, Load) or not e.indices:
            return e
        names = [i.name for i in e.indices if isinstance(i, Atom)]
        if len(names) < len(e.indices) or len({*names}) < len(names) or not {*names} <= {*_AXES}:
            return e
        name = f"{e.tensor}[{', '.join(names)}]"
        self._views[name] = e
        return Param(type=e.type, name=name)

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
    ) -> torch.Tensor:
        """Of four axes, any of them 1; `o` (batch, heads_q, seqlen_q, head_dim_v) in `dtype`."""
        from attngen.ref.evaluate import evaluate

        env = environment(sizes, params, device)
        wide = {t.name: broadcast(tensors[t.name], t, sizes) for t in self.tensors}
        extents = (sizes["batch"], sizes["heads_q"], sizes["seqlen_q"], sizes["head_dim_v"])
        for name, e in self._views.items():
            env[name] = _along(wide[e.tensor], e, extents, dtype)
        if o is not None:
            env["o"] = o
            env["d"] = torch.arange(sizes["head_dim_v"], device=device).view(1, 1, 1, -1)
        value = evaluate(self._expr, env, wide, dtype=dtype, clamp=not check)
        return value if value.dim() == 4 else value.view((1,) * (4 - value.dim()) + value.shape)


def _tensors(e: Expr) -> frozenset[str]:
    from attngen.ir.expr import tensors_of

    return tensors_of(e)


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
