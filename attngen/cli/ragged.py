"""`attngen run` of a ragged layout: sequences of uneven lengths, NaN in what belongs to none of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attngen.diag.diagnostic import AttnError
from attngen.ir.types import Layout

if TYPE_CHECKING:
    from attngen.cli.numeric import Outcome
    from attngen.ir.plan import KernelPlan
    from attngen.ir.spec import AttentionSpec
    from attngen.samples import Shape

#: As of `cli.numeric`: float64 executions, an LSE in fp32, a kernel's LSE.
_EXACT, _LSE_FP32, _LSE_KERNEL = 1e-9, 1e-5, 2e-3


def call(spec: AttentionSpec, shape: Shape, seed: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """(q, k, v), lengths by name, captured tensors. The first sequence has the whole extents, the others parts."""
    import torch

    from attngen import samples

    g = torch.Generator().manual_seed(seed)
    used = [torch.randint(0, n + 1, (shape.batch,), generator=g) for n in (shape.seqlen_q, shape.seqlen_kv)]
    used[0][0], used[1][0] = shape.seqlen_q, shape.seqlen_kv
    varlen = spec.layout is Layout.VARLEN
    if varlen:
        lengths = [torch.cat((torch.zeros(1, dtype=torch.int64), n.cumsum(0))).int() for n in used]
        shape = replace(shape, seqlen_q=int(lengths[0][-1]) + 1, seqlen_kv=int(lengths[1][-1]) + 1)
    else:
        lengths = [n.int() for n in used]
    q, k, v = samples.qkv(spec, replace(shape, batch=1) if varlen else shape, seed=seed)
    operands = [x[0] if varlen else x for x in (q, k, v)]
    for x, n, starts in zip(operands, (used[0], used[1], used[1]), (lengths[0], lengths[1], lengths[1]), strict=True):
        if varlen:
            x[int(starts[-1]) :] = math.nan
        else:
            x[torch.arange(x.shape[1]) >= n[:, None]] = math.nan
    names = [t.name for t in spec.lengths]
    return operands, dict(zip(names, lengths, strict=True)), samples.tensors(spec, shape, seed=seed)


def verify(
    spec: AttentionSpec, shape: Shape, params: Mapping[str, Any], *, target: str, seed: int = 0, with_gpu: bool = True
) -> list[Outcome]:
    """Run everything that can run in this case, beside the dense meaning of each sequence."""
    import torch

    from attngen.cli.numeric import Outcome
    from attngen.ref import blockwise, interp, ragged
    from attngen.search import plan

    case = f"{shape.seqlen_q}x{shape.seqlen_kv}"
    operands, lengths, tensors = call(spec, shape, seed)
    q, k, v = (x.double() for x in operands)
    exact = ragged.attention(spec, q, k, v, lengths, params, tensors)

    def beside(what: str, how: Any, lse_allowed: float = _EXACT) -> Outcome:
        o, lse = ragged.attention(spec, q, k, v, lengths, params, tensors, how=how)
        return _compared(what, case, o, lse, exact, _EXACT, lse_allowed)

    outcomes = [beside("CPU reference", blockwise.attention, _LSE_FP32)]
    try:
        plans = plan(spec, target).plans
    except AttnError as fault:
        why = "; ".join(f"{d.code}: {d.message}" for d in fault.diagnostics)
        return [*outcomes, Outcome("plan", case, skipped=why)]
    plain = spec.replace(layout=Layout.BSHD)
    for i, p in enumerate(plans):

        def by_plan(own: AttentionSpec, q: Any, k: Any, v: Any, *rest: Any, i: int = i, p: KernelPlan = p) -> Any:
            # where `b` is read, the mask's bounds are those of the sequence's own spec
            mine = p if own == plain else plan(own, target).plans[min(i, len(plan(own, target).plans) - 1)]
            return interp.run(mine, own, q, k, v, *rest)

        outcomes.append(beside(f"plan {p.name}", by_plan))
    if not with_gpu:
        return outcomes
    if not torch.cuda.is_available():
        return [*outcomes, Outcome("kernel", case, skipped="torch sees no GPU")]
    return [*outcomes, _kernel(spec, target, case, operands, lengths, dict(params), tensors, exact)]


def _kernel(
    spec: AttentionSpec,
    target: str,
    case: str,
    operands: list[Any],
    lengths: dict[str, Any],
    params: dict[str, Any],
    tensors: dict[str, Any],
    exact: tuple[Any, Any],
) -> Outcome:
    """The kernel may err twice as much as torch code in the same dtype, and two ulps."""
    import torch

    from attngen import api
    from attngen.cli.numeric import Outcome
    from attngen.ref import dense, ragged

    try:
        given = {n: x.cuda() for n, x in (lengths | tensors).items()}
        attention: Any = api.build(spec, target=target)
        o, lse = attention(*(x.cuda() for x in operands), return_lse=True, **params, **given)
        torch.cuda.synchronize()
    except AttnError as fault:
        return Outcome("kernel", case, skipped="; ".join(f"{d.code}: {d.message}" for d in fault.diagnostics))
    q, k, v = operands
    plain, _ = ragged.attention(spec, q, k, v, lengths, params, tensors, how=dense.same_dtype)
    ulps = 2 * float(torch.finfo(q.dtype).eps * exact[0].abs().max())
    allowed = 2 * float((plain.double() - exact[0]).abs().max()) + ulps
    return _compared("kernel", case, o.cpu(), lse.cpu(), exact, allowed, _LSE_KERNEL)


def _compared(
    what: str, case: str, o: Any, lse: Any, exact: tuple[Any, Any], allowed: float, lse_allowed: float
) -> Outcome:
    import torch

    from attngen.cli.numeric import Outcome

    error = float((o.double() - exact[0]).abs().max()) if o.numel() else 0.0
    gap = torch.where(lse == exact[1], torch.zeros_like(exact[1]), lse.double() - exact[1]).abs()
    lse_error = float(gap.max()) if gap.numel() else 0.0
    return Outcome(what, case, error, allowed, lse_error, not (error <= allowed and lse_error <= lse_allowed))
