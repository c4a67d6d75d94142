"""mask: which KV tiles run, which of them are masked, and how an element is tested."""

from __future__ import annotations

from typing import Literal

from attngen.ir.expr import Const, Expr, Load, const, walk
from attngen.ir.forms import Clause, MaskForm, TileBounds
from attngen.ir.linear import SEQLEN_KV
from attngen.ir.plan import MaskPlan
from attngen.ir.tables import Table
from attngen.ir.tile_map import TileMap

#: A bound is a register of each row, held over the walk; past this many clauses the mask expression itself is cheaper.
MAX_LIMIT_CLAUSES = 3


#: Bounds of a clause that nobody reads.
_ANY = TileBounds(lower_min=const(0), lower_max=SEQLEN_KV, upper_min=const(0), upper_max=SEQLEN_KV)


def element_test(form: MaskForm) -> Literal["limits", "elements"]:
    """How one element of a masked tile is tested: against per-row bounds, or by the mask expression."""
    return "limits" if form.is_exact and len(form.clauses) <= MAX_LIMIT_CLAUSES else "elements"


def loaded_limits(form: MaskForm) -> tuple[Expr, ...]:
    """The per-row bounds that read a captured tensor, where bounds are what an element is tested against."""
    if element_test(form) != "limits":
        return ()
    bounds = [e for c in form.clauses for e in (c.lower, c.upper, c.rows) if e is not None]
    return tuple(e for e in bounds if any(isinstance(n, Load) for n in walk(e)))


def _never_empty(form: MaskForm) -> MaskForm:
    """A mask that keeps nothing, as one empty interval: the walk and the tests then need no case of their own."""
    if form.clauses:
        return form
    zero = const(0)
    return form.replace(
        clauses=(Clause(upper=zero),),
        bounds=(TileBounds(lower_min=zero, lower_max=zero, upper_min=zero, upper_max=zero),),
    )


def _is_zero(e: Expr) -> bool:
    return isinstance(e, Const) and e.value == 0


def plan_mask(form: MaskForm, warpgroups: int, tile_map: TileMap | None = None) -> MaskPlan:
    """Split the KV walk into tiles that need no mask and tiles that do. `warpgroups`: how many share a row tile;
    `tile_map`: of a spec that asks for one.

    Rewrite   for n_block in all: S += mask(n_block)
              --> masked right edge ; unmasked interior ; masked left edge
    Keeps     every live tile exactly once; skipped tiles hold no kept pair; unmasked tiles hold only kept pairs
    Sources   FlashAttention-2 (arXiv:2307.08691) section 3.1, generalised to any union of per-row intervals
    """
    form = _never_empty(form)
    one = len(form.clauses) == 1
    only = form.clauses[0] if one else None
    edge = only is not None and (only.upper is not None or only.rows is not None or only.residual is not None)
    lower = only is not None and only.lower is not None
    interior = any(not _is_zero(b.upper_min) for b in form.bounds)
    if tile_map is not None:
        test = element_test(form)
        tables = tuple(t for t in form.tables if isinstance(t, Table)) if test == "limits" else ()
        return MaskPlan(
            form=form.replace(tables=tables, bounds=(_ANY,) * len(form.clauses)),
            walk="map",
            test=test,
            has_right_edge=True,
            has_interior=True,
            has_left_edge=lower,
            ranges_per_warpgroup=False,
            map=tile_map,
        )
    return MaskPlan(
        form=form,
        walk="interval" if one else "runs",
        test=element_test(form),
        has_right_edge=edge or not one,
        has_interior=interior,
        has_left_edge=lower and interior,
        ranges_per_warpgroup=one and warpgroups > 1 and (edge or lower),
    )
