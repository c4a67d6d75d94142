"""verify: the emitted text zeroes dQ ahead as the plan says; another lag would race, or wait for what never comes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from attngen.ir.backward import BackwardPlanSet
from attngen.verify.ledger import said_faults

#: Method -> name -> the values that it is given: `BackwardSchedule.zero_lag`, and the heads that it separates.
_ZEROES = {
    "__call__": {
        "zero_lag": "group_heads + cute.ceil_div(workers, n_blocks)",
        "zeroed_tiles": "cutlass.min(zero_lag, heads) * (q_tiles // heads)",
    },
    "zero_ahead": {"head_batch": "b * p.heads_dkv + h_dkv + p.zero_lag"},
    "zero_part": {"part": "cute.ceil_div(tiles * pieces, p.n_blocks)"},
}
#: Method -> the conditions that decide who zeroes and who waits.
_CONDITIONS = {
    "prepare": "tile < zeroed_tiles",
    "zero_ahead": "head_batch < p.heads_dkv * p.batch",
    "wait_zeroed": "(head_batch >= p.zero_lag) & (lane == 0)",
}


def zero_faults(methods: Mapping[str, ast.FunctionDef], plan_set: BackwardPlanSet) -> Iterator[str]:
    """What the text says otherwise; where `prepare` zeroes all of dQ, whatever of this it should not have."""
    return said_faults(methods, _ZEROES, _CONDITIONS, plan_set.plans[0].schedule.zeroes_ahead)
