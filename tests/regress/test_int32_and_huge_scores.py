"""Wrong kernels that values near the ends of int32 and fp32 made: bounds that wrapped, scores below any reference."""

from __future__ import annotations

import pytest
import torch
from builders import CAUSAL, FIRST, FLAG_K, QP, START, K, Q, S, f, param, positions, spec

from attngen.api import compile
from attngen.emit.spell_mask import _row_clause
from attngen.ir.expr import Apply, Const, Load
from attngen.ir.functions import FUNCTIONS
from attngen.ir.spec import ParamDecl
from attngen.ir.types import Type
from attngen.passes.facts import facts_of
from attngen.passes.mask_form import mask_form
from attngen.ref.evaluate import evaluate

LEAST, MOST = -(2**31), 2**31 - 1
HALF = param("half")
CHUNK = param("chunk")
MASKS = {
    "window from the first row": f("abs", Q - K) <= HALF,
    "window": f("abs", Q + 5 - K) <= HALF,
    "prefix": param("n") > K,
    "suffix": param("n") <= K,
    "left padding": K >= START,
    "length": K < START,
    "last key": K <= START,
    "after a key": K > START,
    "shifted": K - Q <= START,
    "first key of a row": CAUSAL & (K >= FIRST),
    "chunk before": Q // CHUNK - K // CHUNK <= 1,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("extreme", [LEAST, LEAST + 1, -5, 0, 7, MOST - 1, MOST])
def test_limits_less_a_column_stay_in_int32(name, extreme):
    """`abs(q_idx - kv_idx) <= 2**31 - 1` dropped keys: `q_idx - w` fits an int32, less a column it wraps to the top.

    `kv_idx <= last[b]` with last = 2**31 - 1 dropped all: it is solved for `kv_idx < last[b] + 1`.
    """
    s = spec(MASKS[name], tensors=("start", "first"))
    s = s.replace(
        params=(
            ParamDecl(name="half", type=Type.INT, minimum=0),
            ParamDecl(name="n", type=Type.INT),
            ParamDecl(name="chunk", type=Type.INT, minimum=1),
        )
    )
    sq, skv = 40, 600
    env = positions(sq, skv, half=max(extreme, 0), n=extreme, chunk=max(extreme, 1))
    tensors = {"start": torch.tensor([extreme], dtype=torch.int32), "first": torch.full((1, sq), extreme).int()}
    keep = evaluate(s.mask, env, tensors)
    found = torch.zeros(1, 1, sq, skv, dtype=torch.bool)
    for clause in mask_form(s).clauses:
        assert clause.residual is None
        lower, upper = (evaluate(e, env, tensors, clamp=True) for e in _row_clause(clause, facts_of(s)))
        upper = upper.clamp(max=skv)
        for kv_0 in (0, 512, 2**29):
            assert (lower - kv_0 >= LEAST).all() and (upper - kv_0 >= LEAST).all()
        assert (lower <= MOST).all() and (upper <= MOST).all()
        found |= (env["kv_idx"] >= lower) & (env["kv_idx"] < upper)
    assert torch.equal(found, torch.broadcast_to(keep, found.shape))


def test_limits_of_common_masks_are_not_clamped():
    for mask in (CAUSAL, CAUSAL & (param("window") > Q - K)):
        limits = compile(spec(mask, d=64)).text.split("def row_limits")[1].split("def row_columns")[0]
        assert "cutlass.max(q_" not in limits


@pytest.mark.parametrize(("dtype", "lowest"), [("bf16", "-(2.0**31)"), ("fp16", "-(2.0**27)")])
def test_a_reference_that_fp32_does_not_resolve_is_none(dtype, lowest):
    """All scores of a row at -1e30: `s * log2(e) - reference` was 1e22, P infinite and the row NaN."""
    text = compile(spec(score=f("where", FLAG_K, S, -1e30), tensors=("flag",), d=64), dtype=dtype).text
    assert f"\nLOWEST = {lowest}" in text
    assert "w.row_ref[r] = cute.arch.fmax(fma(quad_max(own[r]), w.scale_log2, HEADROOM), LOWEST)" in text


ROWS = {
    "rows before": param("n") > QP,
    "rows from": param("n") <= QP,
    "rows before, by batch": QP < START,
    "one row": param("n") == QP,
    "rows but one": param("n") != QP,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("extreme", [LEAST, LEAST + 1, -5, 0, 7, 570, MOST - 1, MOST])
def test_row_conditions_of_a_tile_stay_in_int32(name, extreme):
    """`q_pos < 2**31 - 1 or kv_idx < 3` lost tiles: over a tile it became `q_lo + seqlen_kv < seqlen_q + n`."""
    s = spec((ROWS[name] & CAUSAL) | (K < 3), tensors=("start",))
    s = s.replace(params=(ParamDecl(name="n", type=Type.INT),))
    tensors = {"start": torch.tensor([extreme], dtype=torch.int32)}
    for sq, skv in ((40, 600), (600, 40)):
        env = positions(sq, skv, n=extreme)
        env |= {n: torch.tensor(at, dtype=torch.int32) for n, at in (("q_lo", 8), ("q_hi", 15))}
        narrow = {n: t.int() for n, t in env.items()}
        for t in mask_form(s).bounds:
            for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max):
                assert torch.equal(wrapped(e, narrow, tensors), evaluate(e, env, tensors, clamp=True).int())


def wrapped(e, env, tensors):
    """The value in int32, as a kernel computes it: every step wraps."""
    if isinstance(e, Load):
        return tensors[e.tensor][tuple(wrapped(i, env, tensors).long() for i in e.indices)]
    if not isinstance(e, Apply):
        return env[e.name] if not isinstance(e, Const) else torch.tensor(e.value).int()
    out = FUNCTIONS[e.fn].dense(*(wrapped(a, env, tensors) for a in e.args))
    return out if out.dtype == torch.bool else out.int()
