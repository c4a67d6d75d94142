"""Values of the tables of a mask form, by the binary search that a kernel does.

O(N) memory; the same positions as in a kernel, whatever the tensors hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from attngen.ir.forms import MaskForm
from attngen.ir.tables import AXES, ROW_BLOCK, ROW_WINDOW, Extreme, Table
from attngen.ref.binding import Binding
from attngen.ref.evaluate import Tensor, evaluate


def with_tables(bound: Binding, form: MaskForm, seqlen_kv: int | None = None) -> Binding:
    """A call whose bounds and limits of `form` can be evaluated: with its tables among the captured tensors.

    `seqlen_kv`: of the keys that the form is about, if they are not the call's own.
    """
    if not form.tables:
        return bound
    seqlen_kv = bound.sets[0].parts[0].k.shape[1] if seqlen_kv is None else seqlen_kv
    env = bound.env(seqlen_kv, torch.arange(bound.sizes[1], device=bound.q.device))
    return replace(bound, tensors={**bound.tensors, **table_values(form.tables, env, bound.tensors)})


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def table_values(
    tables: Iterable[Table | Extreme], env: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Every table of a call, int64, in the extents of its dims.

    `env`: atoms of all batch elements, heads and rows, laid out (B, H, rows, 1), sizes and params.
    """
    found: dict[str, Tensor] = {}
    for t in tables:
        held = {**tensors, **found}
        found[t.name] = _extremes(t, env, held) if isinstance(t, Extreme) else _values(t, env, held)
    return found


def _extremes(t: Extreme, env: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    shape = [env[atom].numel() if d in t.dims else 1 for d, atom in AXES.items()] + [1]
    values = torch.broadcast_to(evaluate(t.value, env, tensors, clamp=True).to(torch.int64), shape)[..., 0]
    rows = shape[2]
    kept = [n for d, n in zip(AXES, shape[:3], strict=True) if d in t.dims and d != "seqlen_q"]
    if not rows:
        return values.reshape(*kept, 0)
    starts = torch.arange(0, rows, ROW_BLOCK, device=values.device)
    windows = (starts[:, None] + torch.arange(ROW_WINDOW, device=values.device)).clamp(max=rows - 1)
    blocks = values[:, :, windows]
    return (blocks.amax(-1) if t.greatest else blocks.amin(-1)).reshape(*kept, len(starts))


def _values(t: Table, env: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    def value(e: Any) -> Tensor:
        return evaluate(e, env, tensors, clamp=True)

    source = tensors[t.tensor]
    extents = [env[AXES[d]].numel() for d in t.dims]
    shape = [env[atom].numel() if d in t.dims else 1 for d, atom in AXES.items()] + [1]
    wanted = torch.broadcast_to(value(t.value), shape)
    length = source.shape[-1]
    if not length or not wanted.numel():
        return torch.zeros(extents, dtype=torch.int64, device=source.device)
    lead = tuple(value(e).clamp(0, n - 1) for e, n in zip(t.lead, source.shape[:-1], strict=True))
    low, high = torch.zeros_like(wanted), torch.full_like(wanted, length)
    for _ in range(length.bit_length()):  # as many halvings as leave no element
        middle = ((low + high) // 2).clamp(max=length - 1)
        there = source[(*lead, middle)].to(torch.int64)
        below = (there < wanted if t.side == "first" else there <= wanted) & (low < high)
        high = torch.where(below | (low >= high), high, middle)
        low = torch.where(below, middle + 1, low)
    return low.reshape(extents)
