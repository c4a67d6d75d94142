"""Blockwise gradients on any device: blocks of rows times blocks of keys, O(N) memory, P recomputed from LSE.

What a built callable runs for CPU tensors, and the formulas of the kernels in plain torch. For kept pairs, with
z = score(s):  P = exp(z - LSE),  D = rowsum(dO * O) - dLSE,  dV = P^T dO,  dz = P (dO V^T - D),  ds = dz * slope,
dQ = scale ds K,  dK = scale ds^T Q,  dX[i] += dz * d z / d X[i],  and  dsink = -exp(sink - LSE) D  a row. The sigmoid
and relu normalisers have  dz = w'(z) dO V^T + P dLSE.  Slopes are symbolic (`passes.gradient`); epilogues, branch
weights and sinks, which are values of a row, go through autograd of their dense evaluation.

Numerics: fp32 (float64 for float64 inputs) throughout. Rows with LSE = -inf count as D = 0 and P = 0, and where dz is
0 so is all that it is multiplied with, whatever a slope is there: empty rows, dropped keys and keys whose score is -inf
give zeros, never NaN.
Sources: FlashAttention-2, section 3.1.2 and algorithm 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attngen.diag.diagnostic import error
from attngen.ir.expr import Atom, Expr, atom
from attngen.ir.gradient import GradientForm
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.passes.gradient import gradient_form
from attngen.ref import blockwise
from attngen.ref.backward_blocks import Rows, Totals, add_rows, lanes
from attngen.ref.binding import Binding, ScoreSet, Several, bind
from attngen.ref.captured import Captured
from attngen.ref.dense import epilogue
from attngen.ref.evaluate import Tensor


class Gradients(NamedTuple):
    """Gradients in the shapes and dtypes of their tensors; None where not wanted.

    `dq` and `dk` are tuples where q and k were. `captured` by tensor name, `segments` (dk, dv) by segment name. Where V
    is a view of K, `dv` is None and `dk` holds its part.
    """

    dq: Any
    dk: Any
    dv: Tensor | None
    captured: dict[str, Tensor]
    segments: dict[str, tuple[Tensor | None, Tensor | None]]


@torch.no_grad()
def attention_backward(
    spec: AttentionSpec,
    q: Several,
    k: Several,
    v: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | Tensor | None = None,
    wanted: Collection[str] | None = None,
    segments: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Gradients:
    """Gradients of a loss whose gradients with respect to o and lse are `do` and `dlse` (None: zero).

    Shapes: as `blockwise.attention`, whose results `o` (B, Sq, Hq, Dv) and `lse` (B, Hq, Sq) are; with branches, lse
    and dlse have their leading axis. Without `dlse`, only a softmax reads `lse`.
    `wanted`: "q", "k", "v" (segments' keys and values go with k and v) and names of tensors declared `grad`; by default
    all of them. No other is computed.
    Raises: E0650 to E0652 (indices, missing arguments, shapes), E0651 also for a wanted tensor that is not declared
    `grad`, E0402 for a score that has no derivative.
    """
    narrow = q.dtype if isinstance(q, torch.Tensor) else q[0].dtype
    wide = torch.promote_types(narrow, torch.float32)
    bound = bind(spec, q, k, v, params, tensors, scale, segments, dtype=wide)
    names = _wanted(spec, wanted)
    captured = Captured(bound, tensors or {}, names)
    totals = _totals(bound, names, captured)
    outputs = _before_epilogue(bound, captured, o.to(wide), do.to(wide))
    if dlse is None and spec.normalizer is not Normalizer.SOFTMAX:
        lse = torch.full_like(lse, -torch.inf)  # nothing reads it, and a kernel of these does not write it
    lses, dlses = _by_set(bound, lse), _by_set(bound, dlse)
    rows = [Rows.of(*x, a, b) for x, a, b in zip(outputs, lses, dlses, strict=True)]
    for s, r in zip(bound.sets, rows, strict=True):
        if s.sink is not None:
            _sink(bound, captured, s, s.sink, r)
    for lane, step in lanes(bound):
        for number, s in enumerate(bound.sets):
            for start in range(0, lane.seqlen_q, step):
                block = slice(start, min(start + step, lane.seqlen_q))
                for j, p in enumerate(s.parts):
                    add_rows(totals, lane, (number, j), _form(spec, p.score), rows[number], block)
    for total in (*totals.dq.values(), *totals.dk.values()):
        total *= bound.scale
    return _gradients(bound, totals, q, k, v, segments or {})


@lru_cache(maxsize=64)
def _form(spec: AttentionSpec, score: Expr) -> GradientForm:
    return gradient_form(spec, score)


def _wanted(spec: AttentionSpec, wanted: Collection[str] | None) -> frozenset[str]:
    known = ("q", "k", "v", *(t.name for t in spec.tensors if t.grad))
    for n in wanted or ():
        if n not in known:
            raise error(
                "E0651",
                f"`{spec.name}` gives no gradient of `{n}`",
                notes=(f"it gives those of {', '.join(known)}",),
                helps=("declare the tensor with `grad`",),
            )
    return frozenset(known if wanted is None else wanted)


def _totals(bound: Binding, wanted: frozenset[str], captured: Captured) -> Totals:
    """Zeros in the dtype of the call. A view of K as V goes with k."""
    v = "k" if bound.spec.v_view_start is not None else "v"
    sets = list(enumerate(bound.sets))
    return Totals(
        dq={i: torch.zeros_like(s.q) for i, s in sets if "q" in wanted},
        dk={(i, j): torch.zeros_like(p.k) for i, s in sets for j, p in enumerate(s.parts) if "k" in wanted},
        dv={j: torch.zeros_like(p.v) for j, p in enumerate(bound.sets[0].parts) if v in wanted},
        captured=captured,
    )


def _by_set(bound: Binding, x: Tensor | None) -> list[Tensor]:
    """(B, Hq, Sq) for each score set."""
    b, sq, hq, _ = bound.sizes
    if x is None:
        return [bound.q.new_zeros(b, hq, sq)] * len(bound.sets)
    return list(x.to(bound.dtype)) if bound.spec.branches else [x.to(bound.dtype)]


def _before_epilogue(bound: Binding, captured: Captured, o: Tensor, do: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(o, do) of each score set, (B, Hq, Sq, Dv); what weights and epilogue give to captured tensors is added."""
    o, do = o.transpose(1, 2), do.transpose(1, 2)
    if not bound.spec.branches and isinstance(bound.spec.epilogue, Atom):
        return [(o, do)]
    env = _row_env(bound, bound.sets[0])
    with torch.enable_grad():
        inputs = [_own_output(bound, i).transpose(1, 2).requires_grad_() for i in range(len(bound.sets))]
        leaves, graph = captured.graph()
        terms = [
            x if s.weight is None else x * graph.value(s.weight, env) for s, x in zip(bound.sets, inputs, strict=True)
        ]
        out = epilogue(graph, sum(terms[1:], terms[0]), env)
        found: list[Tensor | None] = [None] * (len(inputs) + len(leaves))
        if out.requires_grad:  # an epilogue may ignore its o
            found = list(torch.autograd.grad(out, [*inputs, *leaves.values()], do, allow_unused=True))
    captured.add(dict(zip(leaves, found[len(inputs) :], strict=True)))
    return [(x.detach(), torch.zeros_like(x) if g is None else g) for x, g in zip(inputs, found, strict=False)]


def _own_output(bound: Binding, number: int) -> Tensor:
    """o (B, Sq, Hq, Dv) of one score set, before weight and epilogue: it is not saved, and computed again."""
    s = bound.sets[number]
    first = s.parts[0]
    alone = bound.spec.replace(
        branches=(), epilogue=atom("o"), out_dtype=None, v_view_start=None,
        score=first.score, mask=first.mask, sink=s.sink,
    )  # fmt: skip
    others = {x.name: (p.k, p.v) for x, p in zip(bound.spec.segments, s.parts[1:], strict=True)}
    with torch.no_grad():
        return blockwise.attention(alone, s.q, first.k, first.v, bound.params, bound.tensors, bound.scale, others)[0]


def _row_env(bound: Binding, s: ScoreSet) -> dict[str, Tensor]:
    return bound.env(s.parts[0].k.shape[1], torch.arange(bound.sizes[1], device=bound.q.device))


def _sink(bound: Binding, captured: Captured, s: ScoreSet, sink: Expr, rows: Rows) -> None:
    """dsink = -exp(sink - LSE) D a row, taken through the sink's expression."""
    env = _row_env(bound, s)
    with torch.enable_grad():
        leaves, graph = captured.graph()
        value = torch.broadcast_to(graph.value(sink, env), rows.lse.shape)
        if not value.requires_grad:
            return
        gradient = -(value.detach() - rows.lse).exp() * rows.delta
        found = torch.autograd.grad(value, list(leaves.values()), gradient, allow_unused=True)
    captured.add(dict(zip(leaves, found, strict=True)))


def _gradients(
    bound: Binding, totals: Totals, q: Several, k: Several, v: Tensor | None, segments: Mapping[str, Any]
) -> Gradients:
    """The totals in the dtypes of the inputs."""
    spec, captured = bound.spec, totals.captured
    view = spec.v_view_start
    if view is not None and 0 in totals.dv:
        totals.dk[0, 0][..., view : view + spec.head_dim_v] += totals.dv[0]

    def like(total: Tensor | None, x: Tensor) -> Tensor | None:
        return None if total is None else total.to(x.dtype)

    dqs = tuple(like(totals.dq.get(i), x) for i, x in enumerate(_several(q)))
    dks = tuple(like(totals.dk.get((i, 0)), x) for i, x in enumerate(_several(k)))
    extra = {}
    for j, segment in enumerate(spec.segments, start=1):
        given_k, given_v = segments[segment.name]
        extra[segment.name] = like(totals.dk.get((0, j)), given_k), like(totals.dv.get(j), given_v)
    return Gradients(
        dq=dqs[0] if isinstance(q, torch.Tensor) else dqs,
        dk=dks[0] if isinstance(k, torch.Tensor) else dks,
        dv=None if v is None or view is not None else like(totals.dv.get(0), v),
        captured={n: total.to(captured.given[n].dtype) for n, total in captured.totals.items()},
        segments=extra,
    )


def _several(x: Several) -> list[Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)
