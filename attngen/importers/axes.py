"""Axes of captured tensors: which of the axes that q, k and v give, and which are a tensor's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attngen.ir.expr import Atom, Expr

if TYPE_CHECKING:
    import torch

_AXES = {"b": "batch", "h": "heads_q", "h_kv": "heads_kv", "q_idx": "seqlen_q", "kv_idx": "seqlen_kv"}


def dims_of(
    loads: Mapping[str, Sequence[tuple[Expr, ...]]],
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
) -> dict[str, tuple[str, ...]]:
    """The declared axes of each tensor, from the indices that read them.

    An axis that only `b` reads is the batch, and so on; one that `q_idx` and `kv_idx` read is seqlen_kv. Extents must
    agree, with `sizes` and among tensors: an axis that disagrees is free, and takes whatever extent it is given.
    """
    known = {n: [_known([e[axis] for e in reads]) for axis in range(tensors[n].dim())] for n, reads in loads.items()}
    extents: dict[str, set[int]] = {axis: {n} for axis, n in sizes.items()}
    for name, axes in known.items():
        for axis, word in enumerate(axes):
            if word and word not in sizes:
                extents.setdefault(word, set()).add(tensors[name].shape[axis])
    out = {}
    for name, axes in known.items():
        words = []
        for axis, word in enumerate(axes):
            fits = word is not None and extents[word] == {tensors[name].shape[axis]}
            words.append(word if word is not None and fits else f"{name}_axis{axis}")
        out[name] = tuple(words)
    return out


def _known(indices: Sequence[Expr]) -> str | None:
    names = {i.name if isinstance(i, Atom) else "" for i in indices}
    if names == {"q_idx", "kv_idx"}:
        return "seqlen_kv"
    return _AXES.get(names.pop()) if len(names) == 1 else None
