"""Results of parts put together by the formulas: the oracle of whatever runs a spec with branches or segments in parts.

Segments:  LSE = log(sum_i exp(LSE_i)),  O = epilogue(sum_i exp(LSE_i - LSE) O_i)   (sigmoid, relu: epilogue(sum O_i))
Branches:  O = epilogue(sum_i weight_i O_i),  LSE by branch
Numerics: the dtype of the results, float64 as a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.ref.binding import Several, bind
from attngen.ref.dense import epilogue
from attngen.ref.evaluate import Tensor


def together(
    spec: AttentionSpec,
    found: Sequence[tuple[Tensor, Tensor]],
    q: Several,
    k: Several,
    v: Tensor | None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of the whole from (o, lse) of its parts, in order: branches, or the call's own keys and the segments.

    Shapes: bshd whatever the spec's layout: each o (B, Sq, Hq, Dv), each lse (B, Hq, Sq); q, k, v and the rest as
    `dense.attention` takes them.
    """
    bound = bind(spec, q, k, v, params, tensors, None, segments, dtype=found[0][0].dtype)
    rows = torch.arange(bound.sizes[1], device=bound.q.device)
    env = bound.env(bound.sets[0].parts[0].k.shape[1], rows)
    os, lses = [o.transpose(1, 2) for o, _ in found], torch.stack([lse for _, lse in found])
    if spec.branches:
        weights = [bound.value(b.weight, env) for b in spec.branches]
        lse = lses
    else:
        lse = torch.logsumexp(lses, 0)
        shares = torch.where(lse == -torch.inf, torch.zeros_like(lses), (lses - lse).exp())
        weights = list(shares.unsqueeze(-1)) if spec.normalizer is Normalizer.SOFTMAX else [lse.new_ones(())] * len(os)
    total = sum((o * w for o, w in zip(os[1:], weights[1:], strict=True)), os[0] * weights[0])
    return epilogue(bound, total, env).transpose(1, 2), lse
