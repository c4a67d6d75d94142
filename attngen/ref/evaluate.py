"""Dense evaluation of expressions: one torch operation for each row of `FUNCTIONS`, shapes by broadcasting.

Numerics: ints are int64, floats have the dtype of the call (float64 unless asked). A captured tensor is read as it
is: an index outside it raises E0650, nothing is clamped. An element is read only where it matters: the right operand
of `and` and `or` where the left one does not decide, a branch of a conditional where it is taken, and all of it where
`active` holds. Nothing is read where an atom has no values, in a sequence without rows say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.expr import Apply, Const, Expr, Load, atoms_of
from attngen.ir.functions import FUNCTIONS
from attngen.ir.types import Type

Tensor = torch.Tensor


def evaluate(
    e: Expr,
    env: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    active: Tensor | None = None,
    clamp: bool = False,
) -> Tensor:
    """The value of `e` with atoms and params from `env` and captured tensors from `tensors`.

    `clamp`: indices are put into their tensor, as a kernel does. For the bounds of a mask form, which hold whatever a
    row reads that keeps nothing: `kv_idx <= q_pos and kv_idx >= start[b, q_pos]` never reads a negative position, its
    lower bound does.

    Shapes: whatever the values in `env` broadcast to; a value that reads no atom keeps the shape of what it reads.
    Raises: E0650 for an index outside its tensor where the element matters; KeyError for a name that is missing.
    """
    if active is None and not all(x.numel() for x in env.values()):  # no row, no key: nobody reads anything
        active = torch.zeros((), dtype=torch.bool, device=next(iter(env.values())).device)
    return _Evaluation(env, tensors or {}, dtype, clamp).value(e, active)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    env: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype
    clamp: bool

    def value(self, e: Expr, active: Tensor | None) -> Tensor:
        if isinstance(e, Const):
            return self.constant(e)
        if isinstance(e, Load):
            return self.load(e, active)
        if not isinstance(e, Apply):
            return self.env[e.name]
        first = self.value(e.args[0], active)
        if e.fn == "float":
            return first.to(self.dtype)
        if e.fn in ("and", "or") and len(e.args) == 2:
            open_ = first if e.fn == "and" else ~first
            rest = [self.value(e.args[1], _both(active, open_))]
        elif e.fn == "where":
            rest = [self.value(e.args[1], _both(active, first)), self.value(e.args[2], _both(active, ~first))]
        else:
            rest = [self.value(a, active) for a in e.args[1:]]
        out: Tensor = FUNCTIONS[e.fn].dense(first, *rest)
        return out

    def constant(self, e: Const) -> Tensor:
        kinds = {Type.BOOL: torch.bool, Type.INT: torch.int64, Type.FLOAT: self.dtype}
        device = next((t.device for t in (*self.env.values(), *self.tensors.values())), None)
        return torch.full((), e.value, dtype=kinds[e.type], device=device)  # no copy from the host: graphs allow it

    def load(self, e: Load, active: Tensor | None) -> Tensor:
        source = self.tensors[e.tensor]
        indices = [self.value(i, active) for i in e.indices]
        if self.clamp:
            indices = [i.clamp(0, max(n - 1, 0)) for i, n in zip(indices, source.shape, strict=True)]
        else:
            indices = [_checked(e, axis, i, source.shape[axis], active, self.env) for axis, i in enumerate(indices)]
        if source.numel() == 0:  # nobody reads it, or _checked had raised
            out = source.new_zeros(sum(indices[1:], indices[0]).shape)
        else:
            out = source[tuple(indices)] if indices else source
        return out.to(torch.int64) if e.type is Type.INT else out if e.type is Type.BOOL else out.to(self.dtype)


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _checked(
    e: Load, axis: int, index: Tensor, extent: int, active: Tensor | None, env: Mapping[str, Tensor]
) -> Tensor:
    """`index` with 0 where nobody reads it."""
    wrong = (index < 0) | (index >= extent)
    if not bool(wrong.any()):
        return index
    read = wrong if active is None else wrong & active
    if extent and not bool(read.any()):
        # 0 on the broadcast shape only where an index is wrong for every reader
        return torch.where(wrong, torch.zeros_like(index), index)
    bad = torch.broadcast_to(index, read.shape)[read]
    if not bad.numel():
        return torch.zeros_like(index)
    first: Any = int(bad.flatten()[0])
    raise error(
        "E0650",
        f"index {first} is outside axis {axis} of tensor `{e.tensor}`, which has {extent} elements",
        at=e.span,
        label=f"axis {axis} is read at {first}",
        notes=(
            f"{bad.numel()} of {read.numel()} elements that the mask keeps or needs are outside"
            + _where(e.indices[axis], read, env),
        ),
        helps=("pass a tensor that covers every index, or clamp the index in the spec",),
    )


def _where(index: Expr, read: Tensor, env: Mapping[str, Tensor]) -> str:
    """`, the first at h 1, q_idx 3`: what the index reads, at the first element that is read outside."""
    first = tuple(int(i) for i in read.nonzero()[0])
    names = [n for n in ("b", "h", "h_kv", "q_idx", "q_pos", "kv_idx", "d") if n in atoms_of(index) and n in env]
    values = [f"{n} {int(torch.broadcast_to(env[n], read.shape)[first])}" for n in names]
    return f", the first at {', '.join(values)}" if values else ""
