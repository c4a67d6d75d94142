"""`check=True`: what a kernel takes on trust, looked at before the launch. Slow, and waits for the GPU."""

from __future__ import annotations

from typing import Any

import torch

from attngen.diag.diagnostic import error
from attngen.ir.expr import tensors_of
from attngen.ir.spec import AttentionSpec
from attngen.jit.atoms import environment
from attngen.jit.shapes import Sizes, sizes_of

#: Elements of one evaluated block of index expressions.
_BLOCK_ELEMS = 1 << 22


def check_call(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    params: dict[str, Any],
    tensors: dict[str, Any],
) -> None:
    """Look for NaN in the inputs, decreasing `sorted` tensors, and captured tensors indexed outside their extent.

    An index counts where its element can reach a result: where the mask keeps the score, and not behind an `and`, `or`
    or conditional that has decided already.
    Raises: AttnError E0613 (NaN), E0614 (not sorted), E0623 (lengths of sequences), E0650 (index out of range).
    """
    if spec.layout.is_ragged:
        _each_sequence(spec, q, k, v, params, tensors)
        return
    for name, x in (("q", q), ("k", k), ("v", v), *tensors.items()):
        if x.is_floating_point():
            _no_nan(name, x)
    for decl in spec.tensors:
        if decl.sorted:
            _is_sorted(decl.name, tensors[decl.name])
    if spec.tensors and q.numel() and k.numel():
        _indices(spec, sizes_of(spec, q, k), params, tensors, q.device)


def _each_sequence(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    params: dict[str, Any],
    tensors: dict[str, Any],
) -> None:
    """The lengths, then each sequence as a call of its own: what lies between sequences is nobody's."""
    from attngen.jit.ragged import check_lengths
    from attngen.ref import ragged

    check_lengths(spec, q, k, tensors)
    for s in ragged.sequences(spec, q, k, tensors):
        rows, keys, values = (
            ragged.of_sequence(spec, x, s, part) for x, part in ((q, s.rows), (k, s.keys), (v, s.keys))
        )
        check_call(ragged.one(spec, s), rows, keys, values, params, ragged.captured(spec, s, tensors))


def _no_nan(name: str, x: torch.Tensor) -> None:
    bad = torch.isnan(x)
    count = int(bad.sum())
    if count:
        raise error(
            "E0613",
            f"`{name}` holds {count} NaN, the first at {_first(bad)}",
            notes=("one NaN in q spoils its row, one in k or v every row that sees it",),
            helps=(f"find where {name} comes from: torch.autograd.set_detect_anomaly, or check the layer before",),
        )


def _is_sorted(name: str, x: torch.Tensor) -> None:
    if x.ndim == 0 or x.shape[-1] < 2:
        return
    bad = x[..., 1:] < x[..., :-1]
    if bool(bad.any()):
        at = list(_first(bad))
        at[-1] += 1
        raise error(
            "E0614",
            f"`{name}` is declared `sorted` and decreases at {tuple(at)}",
            notes=("tiles are skipped on the strength of that promise: the result would be wrong",),
            helps=(f"sort {name} along its last axis (with the rows it belongs to), or drop `sorted` from the spec",),
        )


def _indices(
    spec: AttentionSpec, sizes: Sizes, params: dict[str, Any], tensors: dict[str, Any], device: torch.device
) -> None:
    """Evaluate each clause that reads a captured tensor, in blocks of rows: the reference checks ranges."""
    from attngen.ref.evaluate import evaluate

    step = max(1, _BLOCK_ELEMS // max(1, sizes["batch"] * sizes["heads_q"] * max(sizes["seqlen_kv"], spec.head_dim_v)))
    for start in range(0, sizes["seqlen_q"], step):
        env = environment(sizes, params, device, start, min(sizes["seqlen_q"], start + step))
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.float64, device=device)
        keep = evaluate(spec.mask, env, tensors)
        if tensors_of(spec.score):
            evaluate(spec.score, {**env, "s": zero}, tensors, active=keep)
        if spec.sink is not None and tensors_of(spec.sink):
            evaluate(spec.sink, env, tensors)
        if tensors_of(spec.epilogue):
            columns = torch.arange(spec.head_dim_v, device=device).view(1, 1, 1, -1)
            evaluate(spec.epilogue, {**env, "o": zero, "d": columns}, tensors)


def _first(bad: torch.Tensor) -> tuple[int, ...]:
    """Index of the first true element."""
    return tuple(int(i) for i in bad.nonzero()[0])
