"""verify: facts checked on the emitted text of a backward against its plan (see `verify.source`)."""

from __future__ import annotations

import ast

from attngen.ir.backward import BackwardPlanSet
from attngen.verify.source import SourceError, general_faults


def verify_source(text: str, plan_set: BackwardPlanSet, tree: ast.Module) -> None:
    """Check the emitted text. Raises: SourceError."""
    found = source_faults(text, plan_set, tree)
    if found:
        raise SourceError(f"{plan_set.spec.name}: " + "; ".join(found))


def source_faults(text: str, plan_set: BackwardPlanSet, tree: ast.Module) -> list[str]:
    """Everything wrong with the text."""
    return general_faults(text, tree)
