"""`attngen bench`: the kernel beside the attention libraries that are installed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli import arguments, common, files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attngen.bench.cells import Cell, Work
    from attngen.bench.runner import Row

PEERS_DEFAULT, VARIANT_PEERS = "fa3,fa4,cudnn,fa2,flex", "flex,fa4,cudnn"


def bench(
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC]", help="A .attn file; none with a grid.", show_default=False)
    ] = None,
    name: arguments.Name = None,
    target: arguments.Target = None,
    dtype: arguments.DTypeOption = None,
    head_dim: arguments.HeadDim = None,
    layout: arguments.LayoutOption = None,
    tile: arguments.Tile = None,
    stages: arguments.Stages = None,
    order: arguments.Order = None,
    deterministic: arguments.Deterministic = None,
    seqlen: Annotated[str | None, typer.Option("--seqlen", help="Lengths, e.g. 1024,4096.")] = None,
    seqlen_kv: arguments.SeqlenKv = None,
    batch: arguments.Batch = None,
    heads: arguments.Heads = None,
    heads_kv: arguments.HeadsKv = None,
    param: arguments.Params = None,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers", help="fa3,fa4,cudnn,fa2,flex or a part of them (default: all; of variants flex,fa4,cudnn)."
        ),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="The grid: head dims, lengths, grouped heads, few rows, adverse data.")
    ] = False,
    variants: Annotated[
        bool,
        typer.Option("--variants", help="The grid of masks and scores, beside FlexAttention: 16K rows, batch 2."),
    ] = False,
    masks: Annotated[
        bool,
        typer.Option("--masks", help="What the metadata of a packed batch's mask costs: 128K tokens, beside Flex."),
    ] = False,
    calls: Annotated[
        bool, typer.Option("--calls", help="How long calls of each kind keep the host busy: tables, lists, segments.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Of a grid, parts whose names begin so, e.g. short,grouped, or window,softcap."),
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", min=0, max=64, help="Compile all cells beforehand, in so many processes.")
    ] = 0,
    backward: Annotated[
        bool, typer.Option("--backward", help="Measure the gradients of q, k and v in place of the forward.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths and rounds.")] = False,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, max=100, help="Rounds (default 7, 3 with --quick).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of data and order.")] = 0,
    host: Annotated[bool, typer.Option("--host", help="Also measure how long a call keeps the host busy.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Results as JSON on stdout in place of the table.")] = False,
    save: Annotated[str | None, typer.Option("--save", help="Also write the JSON to this file.")] = None,
    plot: Annotated[str | None, typer.Option("--plot", help="Bars to FILE.svg or FILE.png.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
) -> None:
    """Measure kernels side by side: random order, each warmed by itself, median of rounds, with the matmul ceiling."""
    from attngen import samples
    from attngen.bench.cells import Work
    from attngen.bench.variants import AGAINST

    if (spec is not None) + grid + variants + masks + calls != 1:
        raise common.Usage("give one SPEC to measure, or --grid for the usual grid, or --variants, --masks, or --calls")
    if calls:
        from attngen.cli.bench_calls import calls as measure_calls

        return measure_calls(rounds, target, as_json, save)
    if masks:
        from attngen.cli.bench_masks import masks as measure_masks

        return measure_masks(seqlen, heads, head_dim, rounds, seed, target, as_json, save)
    if only is not None and not (variants or grid):
        raise common.Usage("--only picks parts of --grid, or rows of --variants")
    chosen = _peers(peers, variants)
    if plot is not None and not plot.endswith((".svg", ".png")):
        raise common.Usage("--plot takes a file that ends in .svg or .png")
    lengths = _lengths(seqlen, quick, backward)
    changes = arguments.overrides(
        dtype=dtype,
        head_dim=head_dim,
        layout=layout,
        tile=tile,
        stages=stages,
        order=order,
        deterministic=deterministic,
    )
    given = arguments.settings_of(param or [], "--param")
    shapes = {"batch": batch, "heads_q": heads, "heads_kv": heads_kv, "seqlen_kv": seqlen_kv}
    if variants:
        work = list(_variant_cells(only, lengths if seqlen is not None else None, changes, given))
    else:
        cells = (
            list(_spec_cells(spec, name, lengths, changes, shapes))
            if spec is not None
            else _grid_cells(only, lengths if seqlen is not None else None, changes, backward, quick)
        )
        work = [Work(c, samples.params(c.spec, given)) for c in cells]
    common.need_gpu("a benchmark")
    settings = {
        "rounds": rounds or (3 if quick else 7), "seed": seed, "peers": chosen,
        "direction": "backward" if backward else "forward", "against": AGAINST if variants else None,
    }  # fmt: skip
    if jobs:
        _rehearse(work, settings, target, jobs)
    rows = _measure_all(work, settings, target, host, save)
    _publish(rows, settings, as_json, plot, markdown)
    if any("attngen" not in r.tflops for r in rows):
        raise typer.Exit(common.SPEC)


def _peers(text: str | None, variants: bool) -> list[str]:
    """The libraries of --peers."""
    from attngen.bench.peers import PEERS

    text = text if text is not None else VARIANT_PEERS if variants else PEERS_DEFAULT
    chosen = [p.strip() for p in text.split(",") if p.strip()]
    for unknown in (p for p in chosen if p not in PEERS):
        raise common.Usage(f"no peer {common.printable(unknown)!r}; there are {', '.join(PEERS)}")
    return chosen


def _lengths(seqlen: str | None, quick: bool, backward: bool) -> tuple[int, ...]:
    from attngen.bench.grid import BACKWARD_LENGTHS, QUICK_LENGTHS, USUAL_LENGTHS

    if seqlen is None:
        return QUICK_LENGTHS if quick else BACKWARD_LENGTHS if backward else USUAL_LENGTHS
    return arguments.lengths_of(seqlen)


def _spec_cells(
    source: str, name: str | None, lengths: tuple[int, ...], changes: dict[str, object], shapes: dict[str, int | None]
) -> Iterator[Cell]:
    from attngen.bench.cells import usual_cell, with_shape
    from attngen.passes.parts import pick

    # what is measured is the kernel on its q, k and v
    resolved = pick(arguments.load(source, name, changes), None).spec
    for length in lengths:
        cell = usual_cell(resolved, length)
        if shapes["heads_q"] is not None and shapes["heads_kv"] is None:
            cell = with_shape(cell, heads_kv=shapes["heads_q"])
        cell = with_shape(cell, **shapes)
        if cell.heads_q % cell.heads_kv:
            raise common.Usage(
                f"{cell.heads_q} query heads cannot share {cell.heads_kv} KV heads: "
                "the first must be a multiple of the second"
            )
        yield cell


def _grid_cells(
    only: str | None, lengths: tuple[int, ...] | None, changes: dict[str, object], backward: bool, quick: bool
) -> list[Cell]:
    from attngen.bench import grid

    try:
        return grid.cells(only, lengths, changes, backward=backward, quick=quick)
    except KeyError as unknown:
        parts = ", ".join(p.name for p in grid.chosen(None, backward=backward, quick=False))
        raise common.Usage(
            f"no part of the grid begins with {common.printable(unknown.args[0])!r}; there are {parts}"
        ) from None


def _variant_cells(
    only: str | None, lengths: tuple[int, ...] | None, changes: dict[str, object], given: dict[str, str]
) -> Iterator[Work]:
    from attngen import samples
    from attngen.bench.cells import Work
    from attngen.bench.variants import SEQLEN, chosen

    try:
        rows = chosen(only)
    except KeyError as unknown:
        titles = ", ".join(v.title for v in chosen(None))
        raise common.Usage(
            f"no variant begins with {common.printable(unknown.args[0])!r}; there are {titles}"
        ) from None
    for length in lengths or (SEQLEN,):
        for row in rows:
            cell = row.cell(changes, length)
            mine = {n: v for n, v in given.items() if n in {p.name for p in cell.spec.params}}
            yield Work(cell, samples.params(cell.spec, {**row.params, **mine}), row.captured)


def _rehearse(work: list[Work], settings: dict[str, Any], target: str | None, jobs: int) -> None:
    from attngen.bench.rehearsal import distinct, kept_by, rehearse_all

    backward, peers, seed = settings["direction"] == "backward", kept_by(settings["peers"]), settings["seed"]
    chosen = distinct(work, lambda w: w.cell, peers)
    common.say(f"compiling {len(chosen)} cells in {jobs} processes")
    rehearse_all([(w.cell, (peers, w.params, target, seed, backward, w.captured)) for w in chosen], jobs, common.say)


def _measure_all(
    work: list[Work], settings: dict[str, Any], target: str | None, host: bool, save: str | None
) -> list[Row]:
    """Measure cell by cell. Each is told, and the JSON written, at once: a run that is cut short keeps what it has."""
    from attngen.bench import report
    from attngen.bench.runner import measure

    rows: list[Row] = []
    for number, w in enumerate(work, 1):
        common.say(f"[{number}/{len(work)}] {w.cell.label}")
        begun = time.perf_counter()
        rows.append(
            measure(
                w.cell,
                settings["peers"],
                params=w.params,
                rounds=settings["rounds"],
                seed=settings["seed"],
                target=target,
                with_host=host,
                backward=settings["direction"] == "backward",
                captured=w.captured,
            )
        )
        common.say(f"  {report.line(rows[-1], settings['against'])} [{time.perf_counter() - begun:.1f} s]")
        if save is not None:
            files.write_text(save, _document(rows, settings))
    return rows


def _document(rows: list[Row], settings: dict[str, Any]) -> str:
    from attngen.bench import machine, report

    return json.dumps(report.as_json(rows, machine.describe(), settings), indent=1) + "\n"


def _publish(rows: list[Row], settings: dict[str, Any], as_json: bool, plot: str | None, markdown: bool) -> None:
    from attngen.bench import machine, report

    about = machine.describe()
    if plot is not None:
        picture = report.picture(rows, about)
        files.write_bytes(Path(plot), picture.png() if plot.endswith(".png") else picture.svg().encode())
    if as_json:
        files.write_text("-", _document(rows, settings))
    elif markdown:
        files.write_text("-", report.markdown(rows, about, settings["against"]))
    else:
        header, body = report.cells(rows, settings["against"])
        common.table(header, body)
        machine_words = "; ".join(f"{k} {v}" for k, v in about.items())
        common.say(f"TFLOP/s of the kept pairs; ± is half the spread of the rounds; {machine_words}")
    for line in report.summary(rows, settings["against"]) if len(rows) > 1 or rows[0].peak_bytes else ():
        common.say(line)
    for line in report.absences(rows):
        common.say(f"not in the table: {line}")
