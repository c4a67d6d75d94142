"""Variations of one tile that win at different lengths: a file holds the tile once. `build` refused its own record."""

from __future__ import annotations

from pathlib import Path

from attngen import search
from attngen.bench import tune
from attngen.ir.plan import KernelPlan
from attngen.syntax import load_spec

CAUSAL = Path(__file__).resolve().parents[2] / "examples" / "causal.attn"
LENGTHS = (512, 16384)


def _measure(ask: tune.Ask) -> tune.Rates:
    """One tile is best at both lengths, with two stages where rows are few and three where they are many."""

    def rate(p: KernelPlan, n: int) -> float:
        return 500.0 + 90.0 * (p.name == "128x96") + 200.0 * (p.memory.kv_stages == (3 if n > 1024 else 2))

    return [tuple(rate(p, n) for n in LENGTHS) for p in ask.plans]


def test_a_record_that_names_a_tile_once() -> None:
    spec = load_spec(CAUSAL)
    record = tune.tune(spec, "sm_90a", "NVIDIA H200", LENGTHS, _measure).record
    won = {max(record.rates, key=lambda r: r.tflops[j]).choice for j in range(len(LENGTHS))}
    assert {c.stages for c in won} == {2, 3} and len({(c.tile_m, c.tile_n) for c in won}) == 1
    tiles = [(c.tile_m, c.tile_n) for c in record.plans]
    assert len(tiles) == len(set(tiles)) and (128, 96) in tiles
    assert tuple(map(search.choice_of, search.plan(spec, tuned=record).plans)) == record.plans
