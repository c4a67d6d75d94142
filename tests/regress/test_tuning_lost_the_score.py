"""A file of one plan, as tuning measures it, was made without the form of the score: tuning ALiBi was refused."""

from __future__ import annotations

from pathlib import Path

from attngen import search
from attngen.bench.tune import Ask
from attngen.emit.module import emit
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_plan_alone_is_the_plan_of_the_whole() -> None:
    """What the search writes for a spec that names this tile is what is measured."""
    spec = load_spec(EXAMPLES / "alibi.attn", name="alibi")
    planned = search.plan(spec)
    for p in planned.plans:
        named = spec.schedule.replace(tile_m=p.compute.tile_m, tile_n=p.compute.tile_n)
        wanted = search.plan(spec.replace(schedule=named)).replace(rejected=(), others=())
        assert wanted.plans == (p,)
        assert emit(Ask(planned, planned.plans, rough=True).alone(p).replace(spec=wanted.spec)) == emit(wanted)
