"""`attngen run` of a ragged layout: sequences of uneven lengths, NaN in what belongs to none of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attngen.diag.diagnostic import AttnError
from attngen.ir.types import Layout

if TYPE_CHECKING:
    from attngen.cli.numeric import Outcome
    from attngen.ir.plan import KernelPlan, PlanSet
    from attngen.ir.spec import AttentionSpec
    from attngen.samples import Shape

#: As of `cli.numeric`: float64 executions, an LSE in fp32, a kernel's LSE.
_EXACT, _LSE_FP32, _LSE_KERNEL = 1e-9, 1e-5, 2e-3


@dataclass(frozen=True)
class Call:
    """Operands of a ragged call: q, k and v as `samples.qkv` has them, lengths and captured tensors by name."""

    qkv: tuple[Any, Any, Any]
    lengths: dict[str, Any]
    tensors: dict[str, Any]
    segments: dict[str, tuple[Any, Any, Any]]

    def dense(self, spec: AttentionSpec, params: Mapping[str, Any], kind: Any = None, **options: Any) -> Any:
        """(o, lse) by the dense meaning of each sequence, of operands in `kind`, or by another `how`."""
        from attngen.ref import ragged

        def cast(x: Any) -> Any:
            return x if kind is None else x.to(kind)

        q, k, v = (_each(cast, x) for x in self.qkv)
        segments = {n: (cast(a), cast(b), lengths) for n, (a, b, lengths) in self.segments.items()} or None
        return ragged.attention(spec, q, k, v, self.lengths, params, self.tensors, segments=segments, **options)


def _each(f: Any, x: Any) -> Any:
    """`f` of a tensor, or of the one of each branch; None where v is a view of k."""
    return None if x is None else tuple(map(f, x)) if isinstance(x, tuple) else f(x)


def call(spec: AttentionSpec, shape: Shape, seed: int) -> Call:
    """The first sequence has the whole extents, the others parts; what belongs to none holds NaN."""
    import torch

    from attngen import samples
    from attngen.passes.selected import BLOCKS, is_selected

    g = torch.Generator().manual_seed(seed)
    extents = [shape.seqlen_q, shape.seqlen_kv, *((shape.seqlen_kv + 1) // 2 for _ in spec.segments)]
    used = [torch.randint(0, n + 1, (shape.batch,), generator=g) for n in extents]
    for n, whole in zip(used, extents, strict=True):
        n[0] = whole
    varlen = spec.layout is Layout.VARLEN
    lengths = [n.int() for n in used]
    if varlen:
        lengths = [torch.cat((torch.zeros(1, dtype=torch.int64), n.cumsum(0))).int() for n in used]
        extents = [int(starts[-1]) + 1 for starts in lengths]
        shape = replace(shape, seqlen_q=extents[0], seqlen_kv=extents[1])

    def laid_out(x: Any, n: int) -> Any:
        """`x` (batch, seqlen, …) in the layout, NaN where axis `n` of the call has no sequence."""
        lost = torch.arange(extents[n]) >= (lengths[n][-1] if varlen else lengths[n][:, None])
        x = x[0] if varlen else x
        x[lost] = math.nan
        return x

    own = replace(shape, batch=1) if varlen else shape
    q, k, v = samples.qkv(spec, own, seed=seed)
    segments = {}
    for i, s in enumerate(spec.segments):
        alone = spec.replace(segments=(s,), branches=(), v_view_start=None)
        _, ks, vs = samples.qkv(alone, replace(own, seqlen_kv=extents[2 + i]), seed=seed + 1000 + i)
        segments[s.name] = (laid_out(ks, 2 + i), laid_out(vs, 2 + i), lengths[2 + i])
    tensors = samples.tensors(spec, shape, seed=seed)
    if is_selected(spec) and BLOCKS in tensors:  # a list is one for all query heads
        tensors[BLOCKS] = tensors[BLOCKS][:, :1]
    return Call(
        (_each(lambda x: laid_out(x, 0), q), _each(lambda x: laid_out(x, 1), k), _each(lambda x: laid_out(x, 1), v)),
        {t.name: n for t, n in zip(spec.lengths, lengths, strict=False)},
        tensors,
        segments,
    )


def verify(
    spec: AttentionSpec, shape: Shape, params: Mapping[str, Any], *, target: str, seed: int = 0, with_gpu: bool = True
) -> list[Outcome]:
    """Run everything that can run in this case, beside the dense meaning of each sequence."""
    import torch

    from attngen.cli.numeric import Outcome, by_parts, nth
    from attngen.passes.parts import is_composed, parts
    from attngen.passes.placed import places_of
    from attngen.passes.selected import is_selected
    from attngen.passes.serves import served_parts
    from attngen.ref import blockwise
    from attngen.search import plan

    case = f"{shape.seqlen_q}x{shape.seqlen_kv}"
    made = call(spec, shape, seed)
    exact = made.dense(spec, params, torch.float64)
    unrounded = spec.replace(out_dtype=None)

    def beside(what: str, how: Any, lse_allowed: float = _EXACT) -> Outcome:
        o, lse = made.dense(unrounded, params, torch.float64, how=how)
        return _compared(what, case, o, lse, exact, _EXACT, lse_allowed)

    outcomes = [beside("CPU reference", blockwise.attention, _LSE_FP32)]
    try:
        found = [plan(p.spec, target) for p in served_parts(spec, target)]
    except AttnError as fault:
        why = "; ".join(f"{d.code}: {d.message}" for d in fault.diagnostics)
        return [*outcomes, Outcome("plan", case, skipped=why)]
    if is_selected(spec) and is_composed(spec):
        outcomes.append(Outcome("plan", case, skipped="keys of a part are gathered by lists"))
        found = []
    elif is_selected(spec):
        outcomes += _by_lists(spec, found[0], case, made, params, exact)
        found = []
    plain = None if any(places_of(spec, x) for x in spec.segments) else unrounded.replace(layout=Layout.BSHD)
    for i in range(max((len(plans.plans) for plans in found), default=0)):
        chosen = [nth(plans, i) for plans in found]

        def by_plan(
            own: AttentionSpec, q: Any, k: Any, v: Any, params: Any, tensors: Any, scale: Any, segments: Any = None,
            i: int = i, chosen: list[KernelPlan] = chosen,
        ) -> Any:  # fmt: skip
            specs = [p.spec for p in parts(own)]
            # where `b` or other keys are read, the mask's bounds are those of the sequence's own spec
            mine = chosen if own == plain else [nth(plan(x, target), i) for x in specs]
            return by_parts(own, mine, specs, q, k, v, params, tensors, segments or {})

        names = ", ".join(dict.fromkeys(p.name for p in chosen))
        outcomes.append(beside(f"plan {names}", by_plan))
    if not with_gpu:
        return outcomes
    if not torch.cuda.is_available():
        return [*outcomes, Outcome("kernel", case, skipped="torch sees no GPU")]
    return [*outcomes, _kernel(spec, target, case, made, dict(params), exact)]


def _by_lists(
    spec: AttentionSpec, plans: PlanSet, case: str, made: Call, params: Mapping[str, Any], exact: tuple[Any, Any]
) -> list[Outcome]:
    """Every plan over gathered keys: a call of its own has blocks of rows of all sequences."""
    import torch

    from attngen.cli.numeric import Outcome, by_lists

    outcomes = []
    q, k, v = (x.to(torch.float64) for x in made.qkv)
    for p in plans.with_small:
        o_lse = by_lists(spec, p, plans.spec, (q, k, v), params, {**made.lengths, **made.tensors})
        if o_lse is None:
            outcomes.append(Outcome(f"plan {p.name}", case, skipped="the lists of keys are the caller's"))
        else:
            outcomes.append(_compared(f"plan {p.name}", case, *o_lse, exact, _EXACT, _EXACT))
    return outcomes


def _kernel(
    spec: AttentionSpec, target: str, case: str, made: Call, params: dict[str, Any], exact: tuple[Any, Any]
) -> Outcome:
    """The kernel may err twice as much as torch code in the same dtype, and two ulps."""
    import torch

    from attngen import api
    from attngen.cli.numeric import Outcome
    from attngen.jit.lists import lists_of
    from attngen.passes.selected import BLOCKS, is_selected
    from attngen.ref import dense

    try:
        given = {n: x.cuda() for n, x in (made.lengths | made.tensors).items()}
        if is_selected(spec) and BLOCKS in given:
            given[BLOCKS] = lists_of(given[BLOCKS])
        segments = {n: tuple(x.cuda() for x in part) for n, part in made.segments.items()}
        more = {"segments": segments} if segments else {}
        attention: Any = api.build(spec, target=target)
        operands = [_each(lambda x: x.cuda(), x) for x in made.qkv if x is not None]
        o, lse = attention(*operands, return_lse=True, **params, **given, **more)
        torch.cuda.synchronize()
    except AttnError as fault:
        return Outcome("kernel", case, skipped="; ".join(f"{d.code}: {d.message}" for d in fault.diagnostics))
    plain, _ = made.dense(spec, params, how=dense.same_dtype)
    q = made.qkv[0][0] if spec.branches else made.qkv[0]
    ulps = 2 * float(torch.finfo(q.dtype).eps * exact[0].abs().max())
    allowed = 2 * float((plain.double() - exact[0]).abs().max()) + ulps
    return _compared("kernel", case, o.cpu(), lse.cpu(), exact, allowed, _LSE_KERNEL)


def _compared(
    what: str, case: str, o: Any, lse: Any, exact: tuple[Any, Any], allowed: float, lse_allowed: float
) -> Outcome:
    import torch

    from attngen.cli.numeric import Outcome, keeps_nothing

    error = float((o.double() - exact[0]).abs().max()) if o.numel() else 0.0
    gap = torch.where(lse == exact[1], torch.zeros_like(exact[1]), lse.double() - exact[1]).abs()
    lse_error = float(gap.max()) if gap.numel() else 0.0
    failed = not (error <= allowed and lse_error <= lse_allowed)
    return Outcome(what, case, error, allowed, lse_error, failed, empty=keeps_nothing(exact[0]))
