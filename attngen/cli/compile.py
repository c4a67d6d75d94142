"""`attngen compile`: a spec to the source of its kernel, or on to machine code. Needs no GPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli import arguments, common, files

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec
    from attngen.source import KernelSource


def compile_(
    source_name: Annotated[
        str, typer.Argument(metavar="SPEC", help="A .attn file, or - for stdin.", show_default=False)
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the source goes; - is stdout.")
    ] = "-",
    objects: Annotated[
        str | None,
        typer.Option("--object", metavar="FOLDER", help="Compile on to machine code, written into this folder."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="forward or backward: that one alone (default: both in one file)."),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option("--part", help="Of a spec that takes several kernels, this one (default: a file for each)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE even if it was edited or is no kernel.")] = False,
    name: arguments.Name = None,
    target: arguments.Target = None,
    dtype: arguments.DTypeOption = None,
    head_dim: arguments.HeadDim = None,
    layout: arguments.LayoutOption = None,
    tile: arguments.Tile = None,
    stages: arguments.Stages = None,
    order: arguments.Order = None,
    deterministic: arguments.Deterministic = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="What was made, as JSON on stdout (with -o FILE or --object).")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing when it worked.")] = False,
) -> None:
    """Compile a spec to a standalone file with its forward and backward kernels; with --object also to machine code.

    A spec with branches or segments takes a kernel for each: -o FILE.py then writes FILE.part.py for every part.
    """
    from attngen import specs
    from attngen.options import Options
    from attngen.passes.parts import formula, several
    from attngen.passes.serves import served_parts

    if as_json and output == "-" and objects is None:
        raise common.Usage("--json describes files: name one with -o FILE or --object FOLDER")
    if only not in (None, "forward", "backward"):
        raise common.Usage(f"--only takes forward or backward, found {common.printable(only or '')!r}")
    started = time.perf_counter()
    changes = arguments.overrides(
        dtype=dtype,
        head_dim=head_dim,
        layout=layout,
        tile=tile,
        stages=stages,
        order=order,
        deterministic=deterministic,
    )
    text = files.read_source(source_name)
    spec = specs.resolve(text, name, Options.parse(changes))
    chosen = served_parts(spec, arguments.pick_target(spec, target), part)
    if len(chosen) > 1 and output == "-" and objects is None:
        raise several(spec)  # two modules are no file
    made: list[dict[str, Any]] = []
    for one in chosen:
        where = output if output == "-" or len(chosen) == 1 else _beside(output, one.name)
        began = time.perf_counter()
        source, written = _compile_one(one.spec, target, only, where, objects, force)
        seconds = time.perf_counter() - (started if len(chosen) == 1 else began)
        if as_json:
            made.append(
                {
                    "kernel_id": source.kernel_id,
                    "sha256": source.sha256,
                    "files": written,
                    "seconds": round(seconds, 3),
                    "meta": source.meta,
                }
            )
        elif written and not quiet:
            common.say(f"{source.kernel_id}: {', '.join(written)} ({_plans(source.meta)}; {seconds:.2f} s)")
    if as_json:
        whole = made[0] if len(made) == 1 else {"name": spec.name, "formula": formula(spec), "parts": made}
        files.write_text("-", json.dumps({"schema": 1, **whole}) + "\n")
    elif len(chosen) > 1 and not quiet:
        common.say(f"put them together: {formula(spec)} (attngen.build does)")


def _compile_one(
    spec: AttentionSpec, target: str | None, only: str | None, output: str, objects: str | None, force: bool
) -> tuple[KernelSource, list[str]]:
    """The file of one kernel, and what was written."""
    from attngen import api

    def compiled(direction: str | None) -> KernelSource:
        return api.compile(spec, target=target, only=direction)

    source = compiled(only)
    for note in source.meta.get("notes", ()):
        common.say(f"note: {' '.join(note)}")
    written: list[str] = []
    if output != "-":
        written.append(str(_write(source, output, force)))
    elif objects is None:
        files.write_text("-", source.text)
    if objects is not None:
        both = source.meta["direction"] == "both"  # an object holds one plan of one direction
        for one in (compiled("forward"), compiled("backward")) if both else (source,):
            written += _machine_code(one, Path(objects))
    return source, written


def _beside(output: str, part: str) -> str:
    """FILE.part.py for FILE.py."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}.{part}{path.suffix or '.py'}"))


def _plans(meta: dict[str, Any]) -> str:
    """Tile plans of the directions that a file holds."""
    tables = {"forward": meta, "backward": meta.get("backward", {})}
    held = tables if meta["direction"] == "both" else {meta["direction"]: tables[meta["direction"]]}
    return "; ".join(f"{d} {', '.join(str(p['name']) for p in table['plans'])}" for d, table in held.items())


def _write(source: KernelSource, output: str, force: bool) -> Path:
    path = Path(output)
    if path.is_dir():
        raise common.Usage(f"{common.printable(output)} is a folder; give -o a file name")
    return source.write(path, force=force)


def _machine_code(source: KernelSource, folder: Path) -> list[str]:
    from attngen.cli.progress import bar
    from attngen.jit.load import write_objects

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise common.Usage(
            f"cannot make the folder {common.printable(str(folder))}: {fault.strerror or fault}"
        ) from None
    wanted: tuple[str, ...] = ()
    if source.meta["direction"] == "backward":
        wanted = ("q", "k", "v", *dict.fromkeys(g["tensor"] for g in source.meta["backward"]["gradients"]))
    with bar() as progress:
        made = write_objects(source, folder, str(source.meta["target"]), wanted=wanted, progress=progress)
    return [str(p) for p in made]
