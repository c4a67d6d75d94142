"""mask-form: from a mask expression to key intervals per row.

Rewrite   mask  -->  OR of clauses  rows and lower <= kv_idx < upper and residual,  with bounds over a tile of rows
Steps     negation normal form (nnf), comparisons solved for kv_idx (isolate), elements of sorted tensors at the key
          by positions that a table holds (lookups), distribution and joining (clauses),
          interval arithmetic over q_lo..q_hi (tile_bounds)
Keeps     the mask's value at every (q_idx, kv_idx); bounds hold for every row of every tile
Falls     back to element-wise tests (residual) with a Reason, never to a rejection
Numerics  Lengths are below 2**30 and positions fit an int32. A param such as `window = 2**31 - 1` is limited to +-2**30
          inside bounds where the sum could overflow (facts.guarded); tile bounds expect q_hi <= seqlen_q - 1.
"""

from __future__ import annotations

from dataclasses import replace

from attngen.ir.expr import Apply, Atom, Const, Expr, Load, Param, tensors_of
from attngen.ir.forms import Clause, MaskForm
from attngen.ir.spec import AttentionSpec
from attngen.passes.clauses import clause_of, clauses_of
from attngen.passes.facts import facts_of
from attngen.passes.isolate import isolate
from attngen.passes.lookups import Lookups
from attngen.passes.nnf import nnf
from attngen.passes.reasons import reasons_for
from attngen.passes.tile_bounds import tile_bounds


def mask_form(spec: AttentionSpec, mask: Expr | None = None) -> MaskForm:
    """The form of `spec.mask`, or of another mask of the same spec (a branch's, a segment's)."""
    mask = spec.mask if mask is None else mask
    facts = facts_of(spec)
    lookups = Lookups(spec)
    formula = isolate(nnf(mask), facts, lookups)
    facts = facts.with_tables(lookups.tables)
    drafts, whole = clauses_of(formula, facts)
    clauses = tuple(clause_of(d) for d in drafts)
    # A clause of all keys with a residual makes every tile live, whatever the others do.
    if not any(c == Clause(residual=c.residual) for c in clauses):
        facts = replace(facts, extremes=lookups.extremes)
    bounds = tuple(tile_bounds(c, facts) for c in clauses)
    read = {
        name
        for part in (*clauses, *bounds)
        for e in vars(part).values()
        if isinstance(e, Const | Atom | Param | Load | Apply)
        for name in tensors_of(e)
    }
    return MaskForm(
        mask=mask,
        clauses=clauses,
        bounds=bounds,
        reasons=reasons_for(drafts, whole, facts),
        tables=tuple(t for t in lookups.tables if t.name in read),
    )
