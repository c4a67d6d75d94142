"""Spell the mask section of a plan for the templates."""

from __future__ import annotations

from attngen.emit.exprs import CutePrinter
from attngen.emit.header import clipped, spelled
from attngen.emit.spell_map import NO_MAP, map_view
from attngen.emit.straight import ARGS, straight_line
from attngen.emit.view_mask import Bounds, Clause, MaskView
from attngen.ir.expr import Atom, Const, Expr
from attngen.ir.forms import Clause as MaskClause
from attngen.ir.functions import apply
from attngen.ir.plan import MaskPlan
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Type
from attngen.passes.facts import Facts, may_underflow


def mask_view(printer: CutePrinter, mask: MaskPlan, facts: Facts, spec: AttentionSpec, *, by_rows: bool) -> MaskView:
    """Spell the mask section. A tile map is made of the spec's whole mask; it has a row for each query tile where
    `by_rows`, else for each KV tile.
    """
    form = mask.form
    rows = tuple(_row_clause(c, facts) for c in form.clauses)
    by_limits = mask.test == "limits"
    lower = any(c.lower is not None for c in form.clauses)
    bounds = [(b.lower_min, b.lower_max, b.upper_min, b.upper_max) for b in form.bounds]
    bound_lines, bound_texts = straight_line(printer, [e for b in bounds for e in b], ARGS["bounds"])
    row_exprs = [e for pair in rows for e in pair] if by_limits else [form.mask]
    row_lines, row_texts = straight_line(printer, row_exprs, ARGS["row"] if by_limits else ARGS["pair"])
    return MaskView(
        title=clipped(spelled(form.mask)),
        is_interval=mask.walk == "interval",
        is_map=mask.map is not None,
        map=NO_MAP if mask.map is None else map_view(printer, mask.map, spec, by_rows=by_rows),
        is_runs=mask.walk == "runs",
        by_limits=by_limits,
        has_lower=lower,
        has_right_edge=mask.has_right_edge,
        has_interior=mask.has_interior,
        has_left_edge=mask.has_left_edge,
        per_warpgroup=mask.ranges_per_warpgroup,
        passes_left=mask.ranges_per_warpgroup and lower,
        interior_end="full_min" if mask.has_left_edge else "live_min",
        clauses=tuple(Bounds(*bound_texts[i : i + 4]) for i in range(0, len(bound_texts), 4)),
        bindings=bound_lines,
        rows=tuple(Clause(*row_texts[i : i + 2]) for i in range(0, len(row_texts), 2)) if by_limits else (),
        row_bindings=row_lines,
        keep="" if by_limits else row_texts[0],
    )


def _row_clause(c: MaskClause, facts: Facts) -> tuple[Expr, Expr]:
    """[lower, upper) of one clause for a row, empty where the clause does not apply to it.

    The kernel subtracts a column from both, which must not wrap.
    """
    zero = Const(type=Type.INT, value=0)
    lower = c.lower if c.lower is not None else zero
    upper = c.upper if c.upper is not None else Atom(type=Type.INT, name="seqlen_kv")
    lower, upper = (apply("max", e, zero) if may_underflow(e, facts) else e for e in (lower, upper))
    return lower, upper if c.rows is None else apply("where", c.rows, upper, zero)
