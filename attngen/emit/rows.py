"""Spell what a backward makes of rows of O before its main kernel: dO through the epilogue, and what tensors gain."""

from __future__ import annotations

from typing import Any

from attngen.emit.captured import output_names
from attngen.emit.exprs import CutePrinter
from attngen.emit.header import clipped, spelled
from attngen.emit.spell import TENSOR_TYPES
from attngen.emit.straight import ARGS, straight_line
from attngen.emit.view import Formula, Output
from attngen.emit.view_backward import OutputGain
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.gradient import GradientKind
from attngen.ir.types import Normalizer
from attngen.passes.epilogue import epilogue_slope, has_epilogue, rewrites_do

#: dO as the main kernel loads it, in the dtype of q.
DO_PRE = Output("do_pre", "tma_tensor(*shape_o)", "torch.empty_like(o, dtype=q.dtype)")


def spell_rows(plan_set: BackwardPlanSet, printer: CutePrinter, has_sink: bool) -> dict[str, Any]:
    """The fields of `BackwardView` about what happens between dO as it comes and dO as the main kernel reads it."""
    spec = plan_set.spec
    named = zip(output_names(plan_set), plan_set.gradient.contributions, strict=True)
    gains = [(name, c) for name, c in named if c in plan_set.gradient.of_epilogue]
    changes, apart = has_epilogue(spec), rewrites_do(spec)
    epilogue, found = Formula("", "", ()), list[tuple[OutputGain, GradientKind]]()
    if changes:
        exprs = [epilogue_slope(spec), *(c.coefficient for _, c in gains)]
        lines, texts = straight_line(printer, exprs, ARGS["output"])
        epilogue = Formula(clipped(spelled(spec.epilogue)), texts[0], lines)
        for k, (text, (name, c)) in enumerate(zip(texts[1:], gains, strict=True)):
            kind = TENSOR_TYPES[spec.tensor(c.tensor).dtype]
            found.append((OutputGain(name, f"gained_{k}", k, text, kind), c.kind))
    formulas = [what for what, on in (("the sink", has_sink), ("the epilogue", changes)) if on]
    return {
        "has_epilogue": changes,
        "epilogue": epilogue,
        "rewrites_do": apart,
        "reads_rows": apart or spec.normalizer is Normalizer.SOFTMAX,
        "given_do": "do_pre" if apart else "do",
        "loaded_do": "mdO_pre" if apart and not spec.layout.is_ragged else "mdO",
        "last_there": "last_there" if spec.layout.is_ragged else "last_row",
        "frag_of_do": "frag_pre" if apart else "frag_do",
        "has_row_formulas": bool(formulas),
        "row_formulas": " and ".join(formulas),
        "output_gains": tuple(g for g, _ in found),
        "output_rows": tuple(g for g, kind in found if kind is GradientKind.OUTPUT_ROW),
        "output_elements": tuple(g for g, kind in found if kind is GradientKind.OUTPUT),
        "has_output_gains": bool(found),
        "num_output_gains": len(found),
    }
