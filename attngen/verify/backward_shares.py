"""verify: the emitted text shares out walks as the plan says; other counts leave steps out, or add them twice."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from attngen.ir.backward import BackwardPlanSet
from attngen.verify.ledger import said_faults

#: Method -> name -> its value: `BackwardSchedule.shared`, what a share takes of a walk, and which parts are summed.
_SHARES = {
    "__call__": {
        "rest": "num_tiles % workers",
        "shares": "cutlass.max(cutlass.min(workers // cutlass.max(rest, 1), steps // LEAST_SHARE), 1)",
        "shared_tiles": "select(shares > 1, rest, 0)",
        "whole_tiles": "num_tiles - shared_tiles",
    },
    "steps_of": {
        "share": "(item - p.whole_tiles) % p.shares",
        "busy": "cutlass.max(cutlass.min(count // LEAST_SHARE, p.shares), 1)",
    },
    "add_parts": {"first": "number * shares", "place": "self.tile_coords(whole_tiles + first, p)"},
}
#: Method -> a condition: what goes to the parts, and whether anything does.
_CONDITIONS = {
    "load": "(tile >= p.whole_tiles) & (skipped == end)",
    "reduce": "tile < p.whole_tiles",
    "__call__": "shared_tiles > 0",
}


def share_faults(methods: Mapping[str, ast.FunctionDef], plan_set: BackwardPlanSet) -> Iterator[str]:
    """What the text says otherwise; where no walk is shared, whatever of this it should not have."""
    return said_faults(methods, _SHARES, _CONDITIONS, plan_set.plans[0].schedule.shares_walks)
