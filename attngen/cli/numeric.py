"""Every way of computing a spec beside its dense float64 meaning: blockwise CPU reference, plan execution, kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attngen.diag.diagnostic import AttnError
from attngen.ir.expr import Load, atoms_of, walk

if TYPE_CHECKING:
    from attngen.ir.plan import KernelPlan, PlanSet
    from attngen.ir.spec import AttentionSpec
    from attngen.samples import Shape

#: float64 executions differ from the dense meaning by rounding alone.
_EXACT = 1e-9
#: The blockwise reference returns LSE in fp32, as a kernel does.
_LSE_FP32, _LSE_KERNEL = 1e-5, 2e-3


@dataclass(frozen=True)
class Outcome:
    """Largest absolute errors of one execution in one case; `skipped` says why it did not run, `empty` that no row
    keeps a key there: what was compared is zeros.
    """

    what: str
    case: str
    error: float = 0.0
    allowed: float = 0.0
    lse_error: float = 0.0
    failed: bool = False
    skipped: str | None = None
    empty: bool = False


def cases(spec: AttentionSpec) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_kv) that no tile divides, one row, fewer and more rows than keys where the spec allows it."""
    square = [(113, 113), (64, 64)]
    return [*square, (1, 129), (77, 300), *(() if self_attention(spec) else ((190, 45),))]


def self_attention(spec: AttentionSpec) -> bool:
    """Whether a captured tensor over the keys is read at a query's row: then there are no more rows than keys."""
    branches = [e for x in spec.branches for e in (x.mask, x.score)]
    segments = [e for x in spec.segments for e in (x.mask, x.score)]
    for e in (spec.mask, spec.score, *branches, *segments):
        for node in walk(e):
            if isinstance(node, Load):
                dims = spec.tensor(node.tensor).dims
                for dim, index in zip(dims, node.indices, strict=True):
                    if dim == "seqlen_kv" and atoms_of(index) & {"q_idx", "q_pos"}:
                        return True
    return False


def verify_spec(
    spec: AttentionSpec, shape: Shape, params: Mapping[str, Any], *, target: str, seed: int = 0, with_gpu: bool = True
) -> list[Outcome]:
    """Run everything that can run in this case."""
    import torch

    from attngen import samples
    from attngen.passes.selected import BLOCKS, is_selected
    from attngen.ref import dense

    if spec.layout.is_ragged:
        from attngen.cli import ragged

        return ragged.verify(spec, shape, params, target=target, seed=seed, with_gpu=with_gpu)
    case = f"{shape.seqlen_q}x{shape.seqlen_kv}"
    q, k, v = samples.qkv(spec, shape, seed=seed)
    arguments: dict[str, Any] = {"params": dict(params), "tensors": samples.tensors(spec, shape, seed=seed)}
    if is_selected(spec) and BLOCKS in arguments["tensors"]:  # a list is one for all query heads
        arguments["tensors"][BLOCKS] = arguments["tensors"][BLOCKS][:, :1]
    more: dict[str, Any] = {"segments": samples.segments(spec, shape, seed=seed)} if spec.segments else {}
    exact = dense.attention(spec, q, k, v, **arguments, **more)
    outcomes = [_blockwise(spec, case, exact, (q, k, v), arguments | more)]
    outcomes += _plans(spec, target, case, exact, (q, k, v), arguments, more)
    if not with_gpu:
        return outcomes
    if not torch.cuda.is_available():
        return [*outcomes, Outcome("kernel", case, skipped="torch sees no GPU")]
    return [*outcomes, _kernel(spec, target, case, (q, k, v), arguments, more)]


def keeps_nothing(o: Any) -> bool:
    """Whether O, by the dense meaning of values that are drawn, has rows and is 0 in all of them."""
    return bool(o.numel()) and not bool(o.any())


def _differences(o: Any, lse: Any, exact: Any) -> tuple[float, float]:
    import torch

    o_error = float((o.double() - exact.o).abs().max()) if exact.o.numel() else 0.0
    same = (lse == exact.lse) & ~torch.isfinite(exact.lse)
    gap = torch.where(same, torch.zeros_like(exact.lse), lse.double() - exact.lse)
    return o_error, float(gap.abs().max()) if gap.numel() else 0.0


def _outcome(what: str, case: str, o: Any, lse: Any, exact: Any, lse_allowed: float = _EXACT) -> Outcome:
    o_error, lse_error = _differences(o, lse, exact)
    failed = not (o_error <= _EXACT and lse_error <= lse_allowed)
    return Outcome(what, case, o_error, _EXACT, lse_error, failed, empty=keeps_nothing(exact.o))


def _double(x: Any) -> Any:
    """A tensor, one for each branch, or None for a V that is a view of K, in float64."""
    if x is None:
        return None
    return tuple(t.double() for t in x) if isinstance(x, tuple) else x.double()


def _cuda(x: Any) -> Any:
    """The same on the GPU."""
    if x is None:
        return None
    return tuple(t.cuda() for t in x) if isinstance(x, tuple) else x.cuda()


def _why(fault: AttnError) -> str:
    """The reasons of a fault in one line."""
    return "; ".join(f"{d.code}: {d.message}" for d in fault.diagnostics)


def _blockwise(
    spec: AttentionSpec, case: str, exact: Any, qkv: tuple[Any, Any, Any], arguments: dict[str, Any]
) -> Outcome:
    from attngen.ref import blockwise

    # In the data's own float64: an output dtype would round what is compared.
    result = blockwise.attention(spec.replace(out_dtype=None), *(_double(x) for x in qkv), **arguments)
    return _outcome("CPU reference", case, result[0], result[1], exact, _LSE_FP32)


def _plans(
    spec: AttentionSpec,
    target: str,
    case: str,
    exact: Any,
    qkv: tuple[Any, Any, Any],
    arguments: dict[str, Any],
    more: dict[str, Any],
) -> list[Outcome]:
    """Every plan; of a spec of several kernels, the first plans of all parts together, then the second ones, …"""
    from attngen.passes.parts import is_composed
    from attngen.passes.selected import is_selected
    from attngen.passes.serves import served_parts
    from attngen.search import plan

    try:
        found = [(p.spec, plan(p.spec, target)) for p in served_parts(spec, target)]
    except AttnError as fault:
        return [Outcome("plan", case, skipped=_why(fault))]
    q, k, v = (_double(x) for x in qkv)
    if is_selected(spec) and is_composed(spec):
        return [Outcome("plan", case, skipped="keys of a part are gathered by lists")]
    if is_selected(spec):
        ((_, plans),) = found
        return [_by_lists(spec, p, plans.spec, case, exact, (q, k, v), arguments) for p in plans.with_small]
    segments = {n: (_double(a), _double(b)) for n, (a, b) in more.get("segments", {}).items()}
    outcomes = []
    for i in range(max(len(plans.with_small) for _, plans in found)):
        chosen = [nth(plans, i) for _, plans in found]
        o, lse = by_parts(spec, chosen, [plans.spec for _, plans in found], q, k, v, **arguments, segments=segments)
        names = ", ".join(dict.fromkeys(p.name for p in chosen))
        outcomes.append(_outcome(f"plan {names}", case, o, lse, exact))
    return outcomes


def nth(plans: PlanSet, i: int) -> KernelPlan:
    """The i-th plan of a part, or its last where another part has more."""
    return plans.with_small[min(i, len(plans.with_small) - 1)]


def by_parts(
    spec: AttentionSpec,
    plans: Sequence[KernelPlan],
    specs: Sequence[AttentionSpec],
    q: Any,
    k: Any,
    v: Any,
    params: Mapping[str, Any],
    tensors: Mapping[str, Any],
    segments: Mapping[str, tuple[Any, Any]],
) -> tuple[Any, Any]:
    """(o, lse) of a call in bshd by executing a plan of each part, `specs` theirs, and putting the results together."""
    from attngen.ref import interp
    from attngen.ref.together import together

    values = v
    if spec.v_view_start is not None:
        first = k[0] if spec.branches else k
        values = first[..., spec.v_view_start :][..., : spec.head_dim_v]
    calls = list(zip(q, k, strict=True)) if spec.branches else [(q, k)]
    operands = [(*pair, values) for pair in calls] + [(q, *pair) for pair in segments.values()]
    results = []
    for p, own, call in zip(plans, specs, operands, strict=True):
        read = {t.name: tensors[t.name] for t in own.tensors}
        results.append(interp.run(p, own, *call, {d.name: params[d.name] for d in own.params}, read)[:2])
    if len(results) == 1:
        return results[0]
    return together(spec, results, q, k, v, params, tensors, segments or None)


def _by_lists(
    spec: AttentionSpec,
    p: KernelPlan,
    inner: AttentionSpec,
    case: str,
    exact: Any,
    qkv: tuple[Any, Any, Any],
    arguments: dict[str, Any],
) -> Outcome:
    from attngen.ir.types import Layout

    found = by_lists(spec.replace(layout=Layout.BSHD), p, inner, qkv, arguments["params"], arguments["tensors"])
    if found is None:
        return Outcome(f"plan {p.name}", case, skipped="the lists of keys are the caller's")
    return _outcome(f"plan {p.name}", case, *found, exact)


def by_lists(
    spec: AttentionSpec,
    p: KernelPlan,
    inner: AttentionSpec,
    qkv: tuple[Any, Any, Any],
    params: Mapping[str, Any],
    tensors: Mapping[str, Any],
) -> tuple[Any, Any] | None:
    """(o, lse) by a plan over K and V that were gathered by lists, those of the map that the dense meaning reads; None
    where the clause is none of the spec's own. `tensors`: of a ragged layout the lengths too.
    """
    from attngen.jit.gathered import gathered
    from attngen.jit.lists import lists_of
    from attngen.passes.selected import BLOCKS
    from attngen.ref import interp

    named = {**params, **tensors}
    if BLOCKS not in named:
        return None
    lists = lists_of(named.pop(BLOCKS))
    call = gathered(spec, *qkv, lists, named)
    known, own = ({d.name: call.named[d.name] for d in decls} for decls in (inner.params, inner.tensors))
    result = interp.run(p, inner, call.q, call.k, call.v, params=known, tensors=own)
    return call.o(result[0]), call.lse(result[1])


def _kernel(
    spec: AttentionSpec,
    target: str,
    case: str,
    qkv: tuple[Any, Any, Any],
    arguments: dict[str, Any],
    more: dict[str, Any],
) -> Outcome:
    import torch

    from attngen import api, samples
    from attngen.jit.lists import lists_of
    from attngen.passes.selected import BLOCKS, is_selected
    from attngen.ref.compare import error_ratio

    try:
        attn: Any = api.build(spec, target=target)
        for one in getattr(attn, "kernels", (attn,)):
            one.alone()
        on_gpu = [_cuda(x) for x in qkv]
        segments = {n: _cuda(pair) for n, pair in more.get("segments", {}).items()}
        tensors = {n: t.cuda() for n, t in arguments["tensors"].items()}
        q, k, v = on_gpu
        given, extra = samples.call_arguments(spec, q, k, v, segments)
        extra |= {**arguments["params"], **tensors}
        if is_selected(spec) and BLOCKS in tensors:
            extra[BLOCKS] = lists_of(tensors[BLOCKS])
        o, lse = attn(*given, return_lse=True, **extra)
        torch.cuda.synchronize()
    except AttnError as fault:
        return Outcome("kernel", case, skipped=_why(fault))
    o = o.transpose(1, 2) if spec.layout.value == "bhsd" else o
    known: dict[str, Any] = {"params": arguments["params"], "tensors": tensors}
    known |= {"segments": segments} if segments else {}
    found = error_ratio(o, spec, q, k, v, lse=lse, **known)
    failed = not (found.ratio <= 1 and found.lse_error <= _LSE_KERNEL)
    return Outcome("kernel", case, found.error, found.allowed, found.lse_error, failed, empty=keeps_nothing(o))
