"""parts: from a spec to the specs of its kernels: one softmax each, q, k and v three tensors.

Rewrite   slices of one packed tensor, and V as columns of K  -->  strides of a call
          segments  -->  a kernel for each set of keys; the sink joins the first, results are merged by LSE
          branches  -->  a kernel for each score set; O is their weighted sum
Keeps     meaning: softmax over the union of keys is the sum of the parts' O with weights exp(LSE_part - LSE)
Source    FlashAttention-2, section 3.1; FlashDecoding's merge of splits
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attngen.diag.diagnostic import AttnError, error
from attngen.diag.span import Span
from attngen.ir.expr import Atom, Expr, atom, params_of, tensors_of
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Layout, Normalizer
from attngen.passes.placed import in_segment
from attngen.passes.selected import BLOCKS, is_selected, selected_spec
from attngen.passes.selected import describe as describe_gather

#: The part of a spec with segments that reads the call's own k and v, unless a segment has that name.
MAIN = "main"


@dataclass(frozen=True, slots=True)
class Part:
    """One kernel: the branch or segment of that name, MAIN, or the whole of a spec that one kernel serves."""

    name: str
    spec: AttentionSpec
    #: The softmax as the spec says it, where its keys are gathered by lists: `spec` is then that over gathered keys.
    listed: AttentionSpec | None = None


def is_composed(spec: AttentionSpec) -> bool:
    """Whether it takes several kernels."""
    return bool(spec.branches or spec.segments)


def kernel_spec(spec: AttentionSpec) -> AttentionSpec:
    """`spec` as its kernel sees it: q, k and v are tensors of their own, with any strides. Its doc says what they are.

    A spec that takes them so already is returned as it is. Listed keys are gathered: `passes.selected`.
    """
    if is_selected(spec) and not is_composed(spec):
        return selected_spec(spec)
    changes: dict[str, object] = {}
    notes: list[str] = []
    if spec.layout is Layout.PACKED_QKV:
        changes["layout"] = Layout.BSHD
        notes.append("q, k and v are slices of one qkv: heads_q heads of q, then heads_kv of k, then heads_kv of v.")
    if spec.v_view_start is not None:
        changes["v_view_start"] = None
        notes.append(f"v is a view of k: k[..., {spec.v_view_start}:{spec.v_view_start + spec.head_dim_v}].")
    if not changes:
        return spec
    return spec.replace(doc=_doc(spec, *notes), **changes)


def parts(spec: AttentionSpec) -> tuple[Part, ...]:
    """The kernels that `spec` takes, in order: branches, or the call's own keys and then the segments, or itself."""
    whole = kernel_spec(spec)
    if spec.branches:
        found = [
            _by_lists(b.name, _alone(whole, b.name, b.score, b.mask, b.sink, "one branch of", b.span))
            for b in spec.branches
        ]
    elif spec.segments:
        main = MAIN if all(s.name != MAIN for s in spec.segments) else f"{MAIN}_"
        own = _alone(whole, main, spec.score, spec.mask, spec.sink, "the call's own keys of", spec.span)
        found = [_by_lists(main, own)]
        for s in spec.segments:
            alone = _alone(whole, s.name, s.score, s.mask, None, "one KV segment of", s.span)
            found.append(Part(s.name, in_segment(alone)))
    else:
        found = [Part(spec.name, whole)]
    return tuple(found)


def _by_lists(name: str, alone: AttentionSpec) -> Part:
    """The part of that name, over gathered keys where lists say which."""
    return Part(name, kernel_spec(alone), alone) if is_selected(alone) else Part(name, alone)


def _alone(
    spec: AttentionSpec, name: str, score: Expr, mask: Expr, sink: Expr | None, what: str, span: Span | None
) -> AttentionSpec:
    """The spec of one softmax: what it reads is declared, the rest of `spec` is left out."""
    given = spec.block_sparse is not None and spec.block_sparse.given
    read = [e for e in (score, mask, sink, spec.scale) if e is not None]
    params = frozenset().union(*(params_of(e) for e in read))
    tensors = frozenset().union(*(tensors_of(e) for e in read))
    return spec.replace(
        name=f"{spec.name}_{name}",
        doc=_doc(spec, f"{what[0].upper()}{what[1:]} {spec.name}; O and LSE of the parts are put together outside."),
        score=score,
        mask=mask,
        sink=sink,
        params=tuple(p for p in spec.params if p.name in params),
        tensors=tuple(t for t in spec.tensors if t.name in tensors),
        branches=(),
        segments=(),
        epilogue=atom("o"),
        out_dtype=DType.F32 if spec.out_dtype is DType.F32 else None,
        block_sparse=None if spec.block_sparse is None or (given and BLOCKS not in tensors) else spec.block_sparse,
        span=span or spec.span,
    )


def _doc(spec: AttentionSpec, *lines: str) -> str:
    return "\n".join([*([spec.doc] if spec.doc else []), *lines])


def several(spec: AttentionSpec) -> AttnError:
    """E0404: where one kernel is asked for."""
    names = [p.name for p in parts(spec)]
    return error(
        "E0404",
        f"`{spec.name}` takes {len(names)} kernels: {', '.join(names)}",
        at=(spec.branches or spec.segments)[0].span,
        notes=(formula(spec),),
        helps=(f'name one: part="{names[0]}" (--part {names[0]})', "or `build` the spec, which puts them together"),
    )


def pick(spec: AttentionSpec, name: str | None) -> Part:
    """The part of that name, or the only one. Raises: AttnError E0404, E0405 (no such part)."""
    found = parts(spec)
    if name is None:
        if len(found) > 1:
            raise several(spec)
        return found[0]
    for p in found:
        if p.name == name:
            return p
    listed = ", ".join(p.name for p in found) if len(found) > 1 else "one kernel serves it"
    raise error("E0405", f"`{spec.name}` has no part `{name[:60]}`", helps=(f"its parts: {listed}",))


def formula(spec: AttentionSpec) -> str:
    """How O follows from the parts' O, on one line."""
    names = [p.name for p in parts(spec)]
    if spec.branches:
        terms = [f"({_printed(b.weight)}) O_{n}" for b, n in zip(spec.branches, names, strict=True)]
        return f"O = {' + '.join(terms)}"
    if spec.normalizer is not Normalizer.SOFTMAX:  # weights know no other key, so none of another part
        return f"O = {' + '.join(f'O_{n}' for n in names)}"
    terms = [f"exp(LSE_{n} - LSE) O_{n}" for n in names]
    return f"O = {' + '.join(terms)},  LSE = log({' + '.join(f'exp(LSE_{n})' for n in names)})"


def describe(spec: AttentionSpec) -> str:
    """What `attngen explain` says of the whole: its formula and its parts, or how keys are gathered."""
    if is_selected(spec) and not is_composed(spec):
        return describe_gather(spec)
    names = ", ".join(p.name for p in parts(spec))
    then = [] if isinstance(spec.epilogue, Atom) else [f"  then      {_printed(spec.epilogue)}, in torch"]
    lines = [f"{spec.name}: {len(parts(spec))} kernels, put together in torch: {names}", f"  {formula(spec)}", *then]
    return "\n".join([*lines, *(describe_gather(p.listed) for p in parts(spec) if p.listed is not None)])


def _printed(e: Expr) -> str:
    from attngen.syntax import print_expr

    return print_expr(e)


def gaps(spec: AttentionSpec) -> Iterator[tuple[str, Span | None, str]]:
    """What several kernels together do not serve: (what, where, mend)."""
    what = "branches" if spec.branches else "KV segments"
    if spec.layout is Layout.PAGED or (spec.branches and spec.layout is Layout.PACKED_QKV):
        yield f"layout {spec.layout} with {what}", spec.span, "use layout = bshd or bhsd"
