"""What `attngen explain --json` prints of one kernel and its gradients."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.directions import Gradients
    from attngen.ir.plan import PlanSet
    from attngen.rooflines import BackwardRoofline, Roofline


def document(plans: PlanSet, lines: list[tuple[str, Roofline]]) -> dict[str, Any]:
    """A forward: its spec, mask form, plans, rejections and rooflines."""
    from attngen.syntax import print_expr, print_spec

    form = plans.plans[0].mask.form
    return {
        "schema": 1,
        "name": plans.spec.name,
        "target": plans.target,
        "spec": print_spec(plans.spec),
        "mask": {
            "expression": print_expr(form.mask),
            "exact": form.is_exact,
            "clauses": [
                {
                    k: None if (e := getattr(c, k)) is None else print_expr(e)
                    for k in ("lower", "upper", "rows", "residual")
                }
                for c in form.clauses
            ],
            "element_wise": [r.model_dump() for r in form.reasons],
        },
        "limits": list(plans.limits),
        "plans": [p.model_dump(mode="json", exclude={"mask": {"form"}}) for p in plans.plans],
        "small": plans.small and plans.small.model_dump(mode="json", exclude={"mask": {"form"}}),
        "fit_too": [p.name for p in plans.others],
        "rejected": [r.model_dump() for r in plans.rejected],
        "rooflines": [{"shape": label, "bound": r.bound, **asdict(r)} for label, r in lines],
    }


def document_backward(gradients: Gradients, lines: list[tuple[str, BackwardRoofline]]) -> dict[str, Any]:
    """A backward likewise, with what each captured tensor gains; or why there is none."""
    from attngen.plan_text_backward import turn_words, workspace_formula
    from attngen.syntax import print_expr

    refused = [{"code": d.code, "message": d.message, "notes": d.notes, "helps": d.helps} for d in gradients.refused]
    plans = gradients.plans
    if plans is None:
        return {"served": False, "refused": refused}
    form = plans.gradient
    return {
        "served": True,
        "refused": refused,
        "slope": print_expr(form.slope),
        "gradients": [
            {
                "tensor": c.tensor,
                "kind": c.kind.value,
                "indices": [print_expr(i) for i in c.indices],
                "coefficient": print_expr(c.coefficient),
            }
            for c in form.contributions
        ],
        "deterministic": plans.deterministic,
        "turn_words": turn_words(plans),
        "workspace": workspace_formula(plans.long_plan),
        "limits": list(plans.limits),
        "plans": [p.model_dump(mode="json", exclude={"mask": {"form"}}) for p in plans.plans],
        "fit_too": [p.name for p in plans.others],
        "rejected": [r.model_dump() for r in plans.rejected],
        "rooflines": [{"shape": label, "bound": r.bound, **asdict(r)} for label, r in lines],
    }
