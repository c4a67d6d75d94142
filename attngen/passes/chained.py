"""chained: parts of a spec as kernels that run one after the other, each of which adds to what the one before gave.

Rewrite   segments  -->  LSE of the keys so far is one more logit of the next kernel, its sink: its own keys get their
          weights of all keys so far, and the sink's weight is what the O before still has
          branches  -->  the next kernel's epilogue is its weighted O and the O before
          the spec's epilogue stands in the last kernel
Keeps     O and LSE of the spec. Between kernels O has the input's dtype, as the O of a part has, or fp32 where it is
          passed on more than once: as many roundings of it as when parts are put together outside
Use       calls that need no gradient: nothing is launched but the kernels. A backward wants O and LSE of each part
Source    FlashAttention-2, section 3.1
"""

from __future__ import annotations

from attngen.ir.expr import Expr, Load, atom, atoms_of, params_of, substitute, tensors_of
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, TensorDecl
from attngen.ir.types import DType, Layout, Normalizer, Type
from attngen.passes.algebra import ONE
from attngen.passes.parts import Part, is_composed, parts
from attngen.passes.placed import of_other_keys

#: What a kernel of the chain reads of the one before: O, and LSE of all keys so far.
PRIOR, PRIOR_LSE = "prior", "prior_lse"


def chained(spec: AttentionSpec) -> tuple[Part, ...]:
    """The kernels of a chain, each with the name of its part; none where one kernel serves, or no chain means `spec`:
    where its epilogue reads what is the call's own keys', which the last kernel does not walk.
    """
    names = {p.name for p in spec.params} | {t.name for t in spec.tensors}
    if not is_composed(spec) or names & {PRIOR, PRIOR_LSE} or (spec.segments and _reads_own_keys(spec)):
        return ()
    found, alone = [], parts(spec)
    if any(p.listed is not None for p in alone):  # what is gathered has other rows
        return ()
    merges = bool(spec.segments) and spec.normalizer is Normalizer.SOFTMAX
    between = None if len(alone) == 2 else DType.F32
    for i, part in enumerate(alone):
        o: Expr = atom("o")
        if spec.branches and spec.branches[i].weight != ONE:
            o = apply("mul", spec.branches[i].weight, o)
        reads: tuple[TensorDecl, ...] = ()
        sink = part.spec.sink
        if i:
            before, lse = _o_before(spec, between), _lse_before(spec)
            prior: Expr = _element(before)
            if merges:
                sink, prior = _element(lse), apply("mul", atom("sink_weight"), prior)
            o, reads = apply("add", o, prior), ((before, lse) if merges else (before,))
        last = i == len(alone) - 1
        epilogue = substitute(spec.epilogue, {"o": o}) if last else o
        found.append(
            Part(part.name, _kernel(spec, part.spec, epilogue, sink, reads, spec.out_dtype if last else between))
        )
    return tuple(found)


def _reads_own_keys(spec: AttentionSpec) -> bool:
    read = tensors_of(spec.epilogue)
    return bool(atoms_of(spec.epilogue) & {"q_pos", "seqlen_kv"}) or any(
        t.name in read and of_other_keys(t) for t in spec.tensors
    )


def _kernel(
    spec: AttentionSpec, part: AttentionSpec, epilogue: Expr, sink: Expr | None, reads: tuple[TensorDecl, ...],
    out: DType | None,
) -> AttentionSpec:  # fmt: skip
    """The part's kernel with an epilogue, which reads declarations of the whole."""
    params, tensors = params_of(epilogue), tensors_of(epilogue)
    return part.replace(
        name=f"{part.name}_chained",
        sink=sink,
        epilogue=epilogue,
        params=tuple(p for p in spec.params if p in part.params or p.name in params),
        tensors=(*part.tensors, *(t for t in spec.tensors if t.name in tensors and t not in part.tensors), *reads),
        out_dtype=out,
        max_logit=False,
    )


def _o_before(spec: AttentionSpec, dtype: DType | None) -> TensorDecl:
    rows = {Layout.VARLEN: ("seqlen_q", "heads_q"), Layout.BHSD: ("batch", "heads_q", "seqlen_q")}
    dims = (*rows.get(spec.layout, ("batch", "seqlen_q", "heads_q")), spec.head_dim_v)
    return TensorDecl(name=PRIOR, dtype=dtype or spec.dtype, dims=dims)


def _lse_before(spec: AttentionSpec) -> TensorDecl:
    dims = ("heads_q", "seqlen_q") if spec.layout is Layout.VARLEN else ("batch", "heads_q", "seqlen_q")
    return TensorDecl(name=PRIOR_LSE, dtype=DType.F32, dims=dims)


_ALONG = {"batch": "b", "seqlen_q": "q_idx", "heads_q": "h"}


def _element(t: TensorDecl) -> Load:
    """The element of a row, and of a column where there are columns."""
    indices = tuple(atom(_ALONG[d]) if isinstance(d, str) else atom("d") for d in t.dims)
    return Load(type=Type.FLOAT, tensor=t.name, dtype=t.dtype, indices=indices)
