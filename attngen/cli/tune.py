"""`attngen tune`: measure plans of a spec, or of the grid, on this GPU and remember the fastest for builds."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli import arguments, common, files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attngen.bench.tune import Outcome
    from attngen.bench.tune_gpu import Gpu
    from attngen.bench.tune_grid import Row
    from attngen.ir.spec import AttentionSpec
    from attngen.ir.tuned import Tuned

#: A record ships where it gains this share over the planner at some length: less is noise.
WORTH_SHIPPING = 0.02
DEFAULT_LENGTHS = "512,1024,4096,16384"


def tune(
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help="A .attn file, or - for stdin; none with --grid.")
    ] = None,
    name: arguments.Name = None,
    target: arguments.Target = None,
    dtype: arguments.DTypeOption = None,
    head_dim: arguments.HeadDim = None,
    layout: arguments.LayoutOption = None,
    seqlen: Annotated[
        str | None,
        typer.Option("--seqlen", help=f"Lengths to be fast at, ascending (default: {DEFAULT_LENGTHS})."),
    ] = None,
    batch: arguments.Batch = None,
    heads: arguments.Heads = None,
    heads_kv: arguments.HeadsKv = None,
    param: arguments.Params = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="Tune the gradients of q, k and v in place of the forward.")
    ] = False,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="Tune the grid: head dims, lengths, windows, documents, grouped heads, scores."),
    ] = False,
    only: Annotated[
        str | None, typer.Option("--only", help="Of the grid, parts whose names begin so, e.g. usual,dims.")
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(
            "--candidates",
            min=1,
            max=200,
            help="Tiles that are tried, best by the planner's ranking first (default: 14; of a grid 8).",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Rounds of each measurement.")] = 5,
    jobs: Annotated[int, typer.Option("--jobs", min=0, max=64, help="Kernels compiled at once (0: one a core).")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of data and order.")] = 0,
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Remember the choice for `attngen.build`.")] = True,
    export: Annotated[
        str | None,
        typer.Option("--export", help="Also add records that gain to this file, as they ship."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Remove what was remembered for this spec; measure nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The records as JSON on stdout in place of the table.")
    ] = False,
) -> None:
    """Measure plans on this GPU; the fastest is what `attngen.build` uses here from then on."""
    from attngen import samples, tuned
    from attngen.settings import DEFAULT_TARGET, settings

    if grid == (spec is not None):
        raise common.Usage("name a SPEC, or --grid" if spec is None else "--grid takes no SPEC: it has its own")
    root = settings().cache_dir
    changes = arguments.overrides(dtype=dtype, head_dim=head_dim, layout=layout)
    if spec is None:
        shape = (name, seqlen, batch, heads, heads_kv, *(param or ()))
        if changes or forget or backward or any(x is not None for x in shape):
            raise common.Usage("--grid has its own specs and shapes; choose parts of it with --only")
        found = _grid_rows(only)
        chosen = target or settings().target or DEFAULT_TARGET
    else:
        if only is not None:
            raise common.Usage("--only picks parts of --grid")
        resolved = arguments.load(spec, name, changes)
        chosen = arguments.pick_target(resolved, target)
        if forget:
            count = tuned.forget(root, chosen, resolved)
            common.say(f"removed {count} record{'' if count == 1 else 's'} of `{resolved.name}`")
            return
        if not backward and not tuned.is_tunable(resolved):
            raise common.Usage(
                f"`{resolved.name}` names its own tile, stages, order or ping-pong: there is nothing to choose; "
                "take them out of its `schedule` clause"
            )
        lengths = arguments.lengths_of(seqlen or DEFAULT_LENGTHS)
        if list(lengths) != sorted(set(lengths)):
            raise common.Usage(f"--seqlen takes ascending lengths, found {common.printable(seqlen or '')!r}")
        values = samples.params(resolved, arguments.settings_of(param or [], "--param"))
        kv = heads if heads_kv is None else heads_kv
        shapes = {"batch": batch, "heads_q": heads, "heads_kv": kv}
        found = [_row(resolved, f"{Path(spec).stem}/{resolved.name}", lengths, values, shapes, backward)]
    common.need_gpu("tuning")
    from attngen.bench.tune_gpu import Gpu

    cores = max(1, (os.cpu_count() or 2) - 1)  # one for what is timed
    gpu = Gpu(chosen, rounds=rounds, jobs=jobs or cores, seed=seed, say=common.say)
    with closing(gpu):
        outcomes = _measure(found, gpu, chosen, candidates, grid, (root if keep else None, export))
    if as_json:
        records = [json.loads(o.record.model_dump_json()) for _, o in outcomes]
        files.write_text("-", json.dumps(records if grid else records[0], indent=1) + "\n")
    elif grid:
        _show_grid(outcomes)
    else:
        _show(outcomes[0][1])


def _row(
    spec: AttentionSpec,
    title: str,
    lengths: Sequence[int],
    values: dict[str, object],
    shapes: dict[str, int | None],
    backward: bool,
) -> Row:
    from attngen.bench.cells import Work, usual_cell, with_shape
    from attngen.bench.tune_grid import row_of

    cells = [with_shape(usual_cell(spec, n), **shapes) for n in lengths]
    if cells[0].heads_q % cells[0].heads_kv:
        raise common.Usage(f"{cells[0].heads_q} query heads cannot share {cells[0].heads_kv} KV heads")
    return row_of(title, [Work(c, values) for c in cells], "backward" if backward else "forward")


def _grid_rows(only: str | None) -> list[Row]:
    from attngen.bench import tune_grid

    try:
        return tune_grid.rows(only)
    except KeyError as unknown:
        parts = ", ".join(tune_grid.PARTS)
        raise common.Usage(
            f"no part of the grid begins with {common.printable(unknown.args[0])!r}; there are {parts}"
        ) from None


def _measure(
    rows: Sequence[Row],
    gpu: Gpu,
    target: str,
    candidates: int | None,
    grid: bool,
    stores: tuple[Path | None, str | None],
) -> list[tuple[Row, Outcome]]:
    """Tune all rows; each is told and kept at once, so that a run that is cut short keeps what it has."""
    import torch

    from attngen import tuned
    from attngen.bench import tune as tuning
    from attngen.bench import tune_grid
    from attngen.settings import settings

    begun, outcomes = time.perf_counter(), []
    tried = candidates or (tune_grid.CANDIDATES if grid else tuning.CANDIDATES)
    finalists = tune_grid.FINALISTS if grid else tuning.FINALISTS
    chip = torch.cuda.get_device_name()
    root, export = stores

    def known(row: Row) -> Tuned | None:
        return tuned.find(settings().cache_dir, target, chip, row.spec, row.direction)

    for row, outcome in tune_grid.tune_all(rows, gpu, target, chip, candidates=tried, finalists=finalists, known=known):
        outcomes.append((row, outcome))
        seconds = time.perf_counter() - begun
        common.say(f"[{len(outcomes)}/{len(rows)}] {_label(row)}: {outcome.tried} plans, {seconds:.0f} s")
        for line in _lines(row, outcome):
            common.say("  " + "  ".join(line))
        if root is not None:
            common.say(f"  kept in {tuned.keep(root, target, outcome.record)}")
        if export is not None and _gain(outcome) >= WORTH_SHIPPING:
            common.say(f"  added to {tuned.export(Path(export), outcome.record)}")
    return outcomes


def _label(row: Row) -> str:
    d, dv = row.spec.head_dim_qk, row.spec.head_dim_v
    pack = f" {row.spec.schedule.pack_gqa} heads a tile" if row.spec.schedule.pack_gqa else ""
    backward = " backward" if row.direction == "backward" else ""
    return f"{row.title.rpartition('/')[2]} d{d}{'' if d == dv else f'/{dv}'}{pack}{backward}"


def _gain(outcome: Outcome) -> float:
    """What the record gains over the planner, at the length where it gains most."""
    pairs = zip(outcome.chosen_rates, outcome.static_rates, strict=True)
    return max((c / s if s else math.inf) - 1.0 for c, s in pairs)


def _lines(row: Row, outcome: Outcome) -> list[list[str]]:
    """Cells of a row: the planner's TFLOP/s, the record's, the fastest plan's, the planner's over the record's."""
    rates = zip(outcome.static_rates, outcome.chosen_rates, outcome.best_rates, strict=True)
    return [
        [f"{_label(row)} {n}", f"{s:.0f}", f"{c:.0f}", f"{b:.0f}", f"{s / c:.3f}" if c else "-"]
        for n, (s, c, b) in zip(row.lengths, rates, strict=True)
    ]


def _show_grid(outcomes: Sequence[tuple[Row, Outcome]]) -> None:
    """All cells, and how near the planner comes to what was tuned."""
    common.table(
        ["cell", "planner's", "tuned", "fastest", "planner's / tuned"],
        [line for row, outcome in outcomes for line in _lines(row, outcome)],
    )
    ratios = [s / c for _, o in outcomes for s, c in zip(o.static_rates, o.chosen_rates, strict=True) if s and c]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    behind = sum(r < 0.95 for r in ratios)
    common.say(
        f"the planner's choice over the tuned one, {len(ratios)} cells: geomean {mean:.3f}, worst {min(ratios):.3f}; "
        f"{behind} more than 5 % behind"
    )


def _show(found: Outcome) -> None:
    """What was measured carefully, best first at the longest length; what was chosen, and the planner's own choice."""
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
