"""placed: axes that hold the call's sequences, read by a kernel whose batch entries or keys are others.

Rewrite   t[…, i, …] along the rows or keys of the call's sequences  -->  the element of the whole tensor: i held inside
          the sequence, behind those before it where sequences are packed
Reads     where a batch entry's sequence begins and how many rows and keys it has, from tensors that the call's front
          makes of its lengths (`PLACES`)
Keeps     meaning: an index past the end of a sequence reads its last element, never a neighbour's
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attngen.ir.expr import Expr, Load, atom, const, rewrite, tensors_of
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec, Segment, TensorDecl
from attngen.ir.types import DType, Layout, Type

#: Where the sequence of a batch entry begins along an axis of the call, and its length: i32[batch] tensors of a kernel.
PLACES = {"seqlen_q": ("call_first_row", "call_rows"), "seqlen_kv": ("call_first_key", "call_keys")}
#: By an axis, where a sequence begins on it, None at 0, and its length.
Parts = Mapping[str, tuple[Expr | None, Expr]]


def of_entry(name: str) -> Expr:
    """The element of an i32[batch] tensor that is a batch entry's."""
    return Load(type=Type.INT, tensor=name, dtype=DType.I32, indices=(atom("b"),))


def parts_of(layout: Layout) -> Parts:
    """The parts that the tensors PLACES say; in padded each sequence has an axis of its own."""
    packed = layout is Layout.VARLEN
    return {dim: (of_entry(first) if packed else None, of_entry(n)) for dim, (first, n) in PLACES.items()}


def indices_in_memory(indices: Sequence[Expr], dims: Sequence[str | int], parts: Parts) -> tuple[Expr, ...]:
    """Indices of one element, those that count inside a sequence as they stand in the whole tensor."""
    found = []
    for i, dim in zip(indices, dims, strict=True):
        if dim in parts:
            first, count = parts[str(dim)]
            i = apply("max", apply("min", i, apply("sub", count, const(1))), const(0))
            i = i if first is None else apply("add", first, i)
        found.append(i)
    return tuple(found)


def placed(e: Expr, tensors: Iterable[TensorDecl], parts: Parts) -> Expr:
    """`e` with every element of `tensors` read where it stands."""
    dims = {t.name: t.dims for t in tensors}

    def at(x: Expr) -> Expr:
        if not isinstance(x, Load) or x.tensor not in dims:
            return x
        return x.replace(indices=indices_in_memory(x.indices, dims[x.tensor], parts))

    return rewrite(e, at)


def places_read(exprs: Iterable[Expr]) -> tuple[TensorDecl, ...]:
    """Declarations of the tensors PLACES that expressions read."""
    read = frozenset().union(*map(tensors_of, exprs))
    names = [n for pair in PLACES.values() for n in pair if n in read]
    return tuple(TensorDecl(name=n, dtype=DType.I32, dims=("batch",)) for n in names)


def of_other_keys(t: TensorDecl) -> bool:
    """Whether a tensor is over the call's own keys, which a segment's kernel does not walk."""
    return "seqlen_kv" in t.dims


def places_of(spec: AttentionSpec, segment: Segment) -> frozenset[str]:
    """The names that the kernel over a segment of a ragged call has beside the spec's."""
    if not spec.layout.is_ragged:
        return frozenset()
    read = tensors_of(segment.score) | tensors_of(segment.mask)
    return (
        frozenset(PLACES["seqlen_kv"])
        if any(t.name in read and of_other_keys(t) for t in spec.tensors)
        else frozenset()
    )


def in_segment(spec: AttentionSpec) -> AttentionSpec:
    """The spec of a kernel over a segment, which reads the tensors over the call's own keys where those stand.

    They are as long as they are: an axis of a free name. In a ragged call it holds all sequences, or each has it whole.
    """
    changes = {}
    tensors = [t for t in spec.tensors if of_other_keys(t)]
    if spec.layout.is_ragged and tensors:
        own = {"seqlen_kv": parts_of(spec.layout)["seqlen_kv"]}
        score, mask = (placed(e, tensors, own) for e in (spec.score, spec.mask))
        changes = {"score": score, "mask": mask}
    made = tuple(_elsewhere(t, spec.layout.is_ragged) if of_other_keys(t) else t for t in spec.tensors)
    return spec.replace(tensors=(*made, *places_read(changes.values())), **changes)


def _elsewhere(t: TensorDecl, ragged: bool) -> TensorDecl:
    """`sorted` is a promise for each sequence of a ragged call."""
    dims = tuple("seqlen_kv_main" if d == "seqlen_kv" else d for d in t.dims)
    return t.replace(dims=dims, sorted=t.sorted and not ragged)
