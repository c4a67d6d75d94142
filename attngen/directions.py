"""The backward beside the forward: its plans with every gradient that a kernel serves, and what it does without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attngen.diag.diagnostic import AttnError, Diagnostic
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.spec import AttentionSpec
from attngen.passes.epilogue import whole_form
from attngen.search_backward import plan_backward


@dataclass(frozen=True)
class Gradients:
    """`plans`: None where no backward serves the spec. `refused`: why, or the tensors whose gradient is left out."""

    plans: BackwardPlanSet | None
    refused: tuple[Diagnostic, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each refusal."""
        what = "There is no backward in this file" if self.plans is None else "The backward leaves a gradient out"
        return tuple(f"{what}: {d.message}." for d in self.refused)


def plan_gradients(spec: AttentionSpec, target: str) -> Gradients:
    """The backward of `spec` with the gradients of q, k, v and of every tensor declared `grad` that a kernel serves.

    Never refuses: what does not go is in `refused`, with its reason and its mend.
    """
    try:
        names = tuple(dict.fromkeys(c.tensor for c in whole_form(spec).contributions))
        whole, faults = _planned(spec, target, names)
        if whole is not None or not names:
            return Gradients(whole, faults)
        served = [n for n in names if _planned(spec, target, (n,))[0] is not None]
        part, why = _planned(spec, target, served)
        return Gradients(part, why if part is None else faults)
    except AttnError as fault:  # the score has no derivative
        return Gradients(None, fault.diagnostics)


def _planned(
    spec: AttentionSpec, target: str, captured: Sequence[str]
) -> tuple[BackwardPlanSet | None, tuple[Diagnostic, ...]]:
    try:
        return plan_backward(spec, target, captured=captured), ()
    except AttnError as fault:
        return None, fault.diagnostics
