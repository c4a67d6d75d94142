"""`attngen tune`: measure plans of a spec on this GPU and remember the fastest for its builds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli import arguments, common, files

if TYPE_CHECKING:
    from attngen.bench.tune import Outcome


def tune(
    spec: arguments.Source,
    name: arguments.Name = None,
    target: arguments.Target = None,
    dtype: arguments.DTypeOption = None,
    head_dim: arguments.HeadDim = None,
    layout: arguments.LayoutOption = None,
    seqlen: Annotated[str, typer.Option("--seqlen", help="Lengths to be fast at, ascending.")] = "512,1024,4096,16384",
    batch: arguments.Batch = None,
    heads: arguments.Heads = None,
    heads_kv: arguments.HeadsKv = None,
    param: arguments.Params = None,
    candidates: Annotated[
        int,
        typer.Option("--candidates", min=1, max=200, help="Tiles that are tried, best by the planner's ranking first."),
    ] = 14,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds of each measurement.")] = 5,
    jobs: Annotated[int, typer.Option("--jobs", min=0, max=64, help="Kernels compiled at once (0: one a core).")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of data and order.")] = 0,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Remember the choice for `attngen.build`.")] = True,
    export: Annotated[
        str | None,
        typer.Option("--export", help="Also add the record to this file, as it ships; of full and causal attention."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove what was remembered for this spec; measure nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The record as JSON on stdout in place of the table.")
    ] = False,
) -> None:
    """Measure plans on this GPU; the fastest is what `attngen.build` uses here from then on."""
    from attngen import samples, tuned
    from attngen.settings import settings

    changes = arguments.overrides(dtype=dtype, head_dim=head_dim, layout=layout)
    resolved = arguments.load(spec, name, changes)
    chosen = arguments.pick_target(resolved, target)
    root = settings().cache_dir
    if forget:
        count = tuned.forget(root, chosen, resolved)
        common.say(f"removed {count} record{'' if count == 1 else 's'} of `{resolved.name}`")
        return
    if not tuned.is_tunable(resolved):
        raise common.Usage(
            f"`{resolved.name}` names its own tile, stages, order or ping-pong: there is nothing to choose; "
            "take them out of its `schedule` clause"
        )
    lengths = arguments.lengths_of(seqlen)
    if list(lengths) != sorted(set(lengths)):
        raise common.Usage(f"--seqlen takes ascending lengths, found {common.printable(seqlen)!r}")
    values = samples.params(resolved, arguments.settings_of(param or [], "--param"))
    common.need_gpu("tuning")
    import torch

    from attngen.bench import tune as tuning
    from attngen.bench.cells import usual_cell, with_shape

    kv = heads if heads_kv is None else heads_kv
    shapes = {"batch": batch, "heads_q": heads, "heads_kv": kv}
    cells = [with_shape(usual_cell(resolved, n), **shapes) for n in lengths]
    if cells[0].heads_q % cells[0].heads_kv:
        raise common.Usage(f"{cells[0].heads_q} query heads cannot share {cells[0].heads_kv} KV heads")
    measure = tuning.OnGpu(
        cells, values, chosen, rounds=rounds, jobs=jobs or os.cpu_count() or 1, seed=seed, say=common.say
    )
    found = tuning.tune(resolved, chosen, torch.cuda.get_device_name(), lengths, measure, candidates)
    if as_json:
        files.write_text("-", json.dumps(json.loads(found.record.model_dump_json()), indent=1) + "\n")
    else:
        _show(found)
    if export is not None:
        common.say(f"added to {tuned.export(Path(export), resolved, found.record)}")
    if keep:
        common.say(f"kept in {tuned.keep(root, chosen, found.record)}")


def _show(found: Outcome) -> None:
    """All plans, best first at the longest length, then what was chosen and what the planner would have taken."""
    record = found.record
    rows = [
        [
            r.choice.text,
            *(f"{t:.0f}" for t in r.tflops),
            " ".join(["chosen"] * (r.choice in record.plans) + ["planner's"] * (r.choice in found.static)),
        ]
        for r in sorted(record.rates, key=lambda r: -r.tflops[-1])
    ]
    common.table(["plan", *map(str, record.lengths), ""], rows)
    spans = [f"up to {n}" for n in record.limits] + ["all others" if record.limits else "all lengths"]
    for span, choice in zip(spans, record.plans, strict=True):
        common.say(f"{span}: {choice.text}")
    worst = max(found.behind)
    common.say(f"the planner's own choice is behind the best by {worst:.1%} at most")
