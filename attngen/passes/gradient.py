"""gradient: from a score to what its backward evaluates for each pair.

Rewrite   score(s, X...)  -->  slope = d score / d s, and for each read X[i] of a tensor declared `grad` its class and
          coefficient d score / d X[i]
Steps     differentiation by the table's rules (derive), simplified as it is built (algebra); classes by what moves i
Keeps     subexpressions of the score as they are, so that the printer shares them
Numerics  Exact as real numbers away from kinks and poles; see docs/passes/gradient.md for what the kernel selects
"""

from __future__ import annotations

from attngen.ir.expr import Atom, Expr, Load, atom, atoms_of, tensors_of, walk
from attngen.ir.gradient import Contribution, GradientForm, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.passes.algebra import ZERO
from attngen.passes.derive import derivative

_BY_QUERY, _BY_KEY = frozenset(("q_idx", "q_pos")), frozenset(("kv_idx",))


def gradient_form(spec: AttentionSpec, score: Expr | None = None, sink: Expr | None = None) -> GradientForm:
    """The form of the spec's score and sink, or of others of the same spec (a branch's, a segment's).

    Contributions are in order of declaration; those of one tensor in order of its reads, the sink's last.
    Raises: E0402 for a function that has no derivative.
    """
    if score is None:
        score, sink = spec.score, spec.sink
    learned = [t.name for t in spec.tensors if t.grad]
    reads = {n: _reads(score, n) for n in learned}
    found: list[Contribution] = []
    for name in learned:
        for element in reads[name]:
            coefficient = derivative(score, element)
            if coefficient != ZERO:
                kind = kind_of(element)
                found.append(Contribution(tensor=name, kind=kind, indices=element.indices, coefficient=coefficient))
        if sink is not None and any(derivative(sink, element) != ZERO for element in _reads(sink, name)):
            found.append(Contribution(tensor=name, kind=GradientKind.SINK))
    reached = {c.tensor for c in found}
    after = () if isinstance(spec.epilogue, Atom) else tuple(n for n in learned if n in tensors_of(spec.epilogue))
    return GradientForm(
        score=score,
        slope=derivative(score, atom("s")),
        contributions=tuple(found),
        in_epilogue=after,
        zero=tuple(n for n in learned if n not in reached and n not in after),
    )


def kind_of(element: Load) -> GradientKind:
    """The class of one read in a score, by the atoms that move its indices (through other tensors too)."""
    moved = frozenset().union(*(atoms_of(i) for i in element.indices))
    if "s" in moved or (moved & _BY_QUERY and moved & _BY_KEY):
        return GradientKind.ELEMENT
    return GradientKind.ROW if moved & _BY_QUERY else GradientKind.COLUMN


def _reads(e: Expr, tensor: str) -> list[Load]:
    """The different elements of a tensor that `e` reads, in order of first appearance."""
    return list(dict.fromkeys(n for n in walk(e) if isinstance(n, Load) and n.tensor == tensor))
