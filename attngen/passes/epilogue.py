"""epilogue: from what is applied to O to what its backward evaluates for each element of O.

Rewrite   e(o, X...)  -->  slope = d e / d o, and for each read X[i] of a tensor declared `grad` its kind and
          coefficient d e / d X[i]
Steps     as `gradient`: the table's rules, simplified; a kind by whether the column `d` moves i
Keeps     the score's form, to which the contributions are appended
Numerics  The gradient of O before the epilogue, dO * slope, is rounded to the dtype of the matrix products; D uses the
          rounded values. Gradients of captured values are fp32 products rounded to the tensor's dtype.
"""

from __future__ import annotations

from attngen.ir.expr import Atom, Expr, Load, atom, atoms_of, const, walk
from attngen.ir.gradient import Contribution, GradientForm, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.passes.algebra import ZERO
from attngen.passes.derive import Derivation
from attngen.passes.gradient import MAX_NODES, gradient_form, size, too_large

O = atom("o")  # noqa: E741


def has_epilogue(spec: AttentionSpec) -> bool:
    """O is not just the weighted sum."""
    return not isinstance(spec.epilogue, Atom)


def rewrites_do(spec: AttentionSpec) -> bool:
    """The main kernel of a backward cannot read dO as it comes: an epilogue lies between, or its dtype is another."""
    return has_epilogue(spec) or spec.out_dtype not in (None, spec.dtype)


def epilogue_slope(spec: AttentionSpec) -> Expr:
    """d epilogue / d o. Raises: E0402 for a function that has no derivative, or one that is too large."""
    if not has_epilogue(spec):
        return const(1.0)
    try:
        slope = Derivation(spec.epilogue, (O,)).by(O)
    except RecursionError:
        raise too_large(spec.epilogue, "epilogue") from None
    if size(slope) > MAX_NODES:
        raise too_large(spec.epilogue, "epilogue")
    return slope


def epilogue_contributions(spec: AttentionSpec) -> tuple[Contribution, ...]:
    """What tensors declared `grad` gain through the epilogue, in order of declaration and of reads.

    Raises: E0402 for a function that has no derivative, and where the derivatives grow past MAX_NODES.
    """
    learned = [t.name for t in spec.tensors if t.grad]
    elements = list(dict.fromkeys(n for n in walk(spec.epilogue) if isinstance(n, Load) and n.tensor in learned))
    derivation = Derivation(spec.epilogue, elements)
    found: list[Contribution] = []
    room = MAX_NODES
    for x in sorted(elements, key=lambda x: learned.index(x.tensor)):
        try:
            c = derivation.by(x)
        except RecursionError:
            raise too_large(spec.epilogue, "epilogue") from None
        room -= size(c)
        if room < 0:
            raise too_large(spec.epilogue, "epilogue")
        if c != ZERO:
            found.append(Contribution(tensor=x.tensor, kind=_kind(x), indices=x.indices, coefficient=c))
    return tuple(found)


def whole_form(spec: AttentionSpec) -> GradientForm:
    """The form of the spec's score and sink, with what captured tensors gain through the epilogue."""
    form = gradient_form(spec)
    more = epilogue_contributions(spec) if has_epilogue(spec) else ()
    if has_epilogue(spec):
        epilogue_slope(spec)  # a function without a derivative is refused here
    return form.replace(contributions=(*form.contributions, *more)) if more else form


def _kind(x: Load) -> GradientKind:
    moved = frozenset().union(*(atoms_of(i) for i in x.indices))
    return GradientKind.OUTPUT if moved & {"d", "o"} else GradientKind.OUTPUT_ROW


def further_names(spec: AttentionSpec) -> tuple[str, ...]:
    """What a forward kernel takes after the spec's own arguments, in order.

    `o_pre`: where O before the epilogue goes, like o, if the number `saves_o` is not 0. `max_logit`: where the largest
    kept score of each row goes, fp32 (batch, heads_q, seqlen_q), -inf where none is kept.
    """
    return (*(("o_pre", "saves_o") if has_epilogue(spec) else ()), *(("max_logit",) if spec.max_logit else ()))
