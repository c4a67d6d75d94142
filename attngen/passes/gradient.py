"""gradient: from a score to what its backward evaluates for each pair.

Rewrite   score(s, X...)  -->  slope = d score / d s, and for each read X[i] of a tensor declared `grad` its class and
          coefficient d score / d X[i]
Steps     differentiation by the table's rules (derive), simplified as it is built (algebra); classes by what moves i
Keeps     subexpressions of the score as they are, so that the printer shares them
Numerics  Exact as real numbers away from kinks and poles; see docs/passes/gradient.md for what the kernel selects
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from attngen.diag.diagnostic import AttnError, error
from attngen.ir.expr import Atom, Expr, Load, atom, atoms_of, tensors_of, walk
from attngen.ir.gradient import Contribution, GradientForm, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.passes.algebra import ZERO
from attngen.passes.derive import Derivation

S = atom("s")
#: Nodes of slope and coefficients together; the language bounds a score itself at a fifth of it.
MAX_NODES = 100_000
_BY_QUERY, _BY_KEY = frozenset(("q_idx", "q_pos")), frozenset(("kv_idx",))


def reduced_tensors(form: GradientForm) -> frozenset[str]:
    """Captured tensors that many threads of a backward kernel add to, in any order: sums by row and by element."""
    kinds = (GradientKind.ROW, GradientKind.ELEMENT)
    return frozenset(c.tensor for c in form.contributions if c.kind in kinds)


def gradient_form(spec: AttentionSpec, score: Expr | None = None, sink: Expr | None = None) -> GradientForm:
    """The form of the spec's score and sink, or of others of the same spec (a branch's, a segment's).

    Contributions are in order of declaration; those of one tensor in order of its reads, the sink's last.
    Raises: E0402 for a function that has no derivative, and where the derivatives grow past MAX_NODES.
    """
    if score is None:
        score, sink = spec.score, spec.sink
    try:
        return _form(spec, score, sink)
    except RecursionError:
        raise too_large(score) from None


def too_large(e: Expr, what: str = "score") -> AttnError:
    """E0402: derivatives past MAX_NODES."""
    return error(
        "E0402",
        f"the derivatives of the {what} have more than {MAX_NODES} nodes, or are nested too deeply",
        at=e.span,
        label=f"this {what}",
        helps=("move what does not depend on `s` or on a tensor declared `grad` into a captured tensor",),
    )


def _form(spec: AttentionSpec, score: Expr, sink: Expr | None) -> GradientForm:
    learned = [t.name for t in spec.tensors if t.grad]
    reads, in_sink = _reads(score, learned), _reads(sink, learned)
    of_score = Derivation(score, (S, *(x for elements in reads.values() for x in elements)))
    slope = of_score.by(S)
    found: list[Contribution] = []
    room = MAX_NODES - size(slope)
    for name in learned:
        for element in reads[name]:
            coefficient = of_score.by(element)
            if coefficient != ZERO:
                found.append(
                    Contribution(tensor=name, kind=kind_of(element), indices=element.indices, coefficient=coefficient)
                )
            room -= size(coefficient)
            if room < 0:
                raise too_large(score)
        if sink is not None and any(Derivation(sink, (x,)).by(x) != ZERO for x in in_sink[name]):
            found.append(Contribution(tensor=name, kind=GradientKind.SINK))
    reached = {c.tensor for c in found}
    after = () if isinstance(spec.epilogue, Atom) else tuple(n for n in learned if n in tensors_of(spec.epilogue))
    return GradientForm(
        score=score,
        slope=slope,
        contributions=tuple(found),
        zero=tuple(n for n in learned if n not in reached and n not in after),
    )


def size(e: Expr) -> int:
    """Nodes of `e`, up to what no form may have."""
    return sum(1 for _ in islice(walk(e), MAX_NODES + 1))


def kind_of(element: Load) -> GradientKind:
    """The class of one read in a score, by the atoms that move its indices (through other tensors too)."""
    moved = frozenset().union(*(atoms_of(i) for i in element.indices))
    if "s" in moved or (moved & _BY_QUERY and moved & _BY_KEY):
        return GradientKind.ELEMENT
    return GradientKind.ROW if moved & _BY_QUERY else GradientKind.COLUMN


def _reads(e: Expr | None, tensors: Collection[str]) -> dict[str, list[Load]]:
    """The different elements of each tensor that `e` reads, in order of first appearance."""
    found: dict[str, dict[Load, None]] = {n: {} for n in tensors}
    for n in walk(e) if e is not None else ():
        if isinstance(n, Load) and n.tensor in found:
            found[n.tensor][n] = None
    return {name: list(elements) for name, elements in found.items()}
