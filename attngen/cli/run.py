"""`attngen run`: verify a spec, or an edited kernel file, on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attngen.cli import arguments, common, files

if TYPE_CHECKING:
    from attngen.cli.numeric import Outcome


def run(
    subject: Annotated[
        str,
        typer.Argument(metavar="SPEC|KERNEL", help="A .attn file, -, or a generated kernel.py.", show_default=False),
    ],
    name: arguments.Name = None,
    target: arguments.Target = None,
    dtype: arguments.DTypeOption = None,
    head_dim: arguments.HeadDim = None,
    layout: arguments.LayoutOption = None,
    tile: arguments.Tile = None,
    stages: arguments.Stages = None,
    order: arguments.Order = None,
    seqlen: Annotated[str | None, typer.Option("--seqlen", help="Cases such as 200x333,64 (rows x keys).")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=4096, help="Batch entries.")] = 2,
    heads: Annotated[int, typer.Option("--heads", min=1, max=1024, help="Query heads.")] = 4,
    heads_kv: Annotated[int, typer.Option("--heads-kv", min=1, max=1024, help="KV heads.")] = 2,
    param: arguments.Params = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the data.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the GPU out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Errors as JSON on stdout.")] = False,
) -> None:
    """Compare every way of computing a spec with its dense float64 meaning; exit 1 if one is off.

    The CPU reference and the execution of the plan run anywhere; the kernel runs where there is a GPU for it. A kernel
    file checks itself on a GPU; without one it is compiled to machine code and its registers and spills are shown.
    """
    if subject != "-" and subject.endswith(".py"):
        _run_kernel_file(subject, as_json)
        return
    from attngen import samples
    from attngen.cli.numeric import cases, verify_spec

    if heads % heads_kv:
        raise common.Usage(
            f"{heads} query heads cannot share {heads_kv} KV heads: the first must be a multiple of the second"
        )
    changes = arguments.overrides(dtype=dtype, head_dim=head_dim, layout=layout, tile=tile, stages=stages, order=order)
    spec = arguments.load(subject, name, changes)
    params = samples.params(spec, arguments.settings_of(param or [], "--param"))
    lengths = list(_lengths(seqlen)) if seqlen is not None else cases(spec)
    outcomes: list[Outcome] = []
    from attngen.cli.progress import bar

    with bar() as progress:
        for number, (rows, keys) in enumerate(lengths):
            if progress is not None:
                progress(f"{spec.name} {rows}x{keys}", number, len(lengths))
            shape = samples.Shape(batch, heads, heads_kv, rows, keys)
            outcomes += verify_spec(
                spec, shape, params, target=arguments.pick_target(spec, target), seed=seed, with_gpu=not cpu
            )
    _print(outcomes, as_json)
    if any(o.failed for o in outcomes):
        raise typer.Exit(common.SPEC)


def _lengths(text: str) -> Iterator[tuple[int, int]]:
    for part in text.split(","):
        rows, sign, keys = part.strip().lower().partition("x")
        if not (rows.isascii() and rows.isdigit() and (not sign or (keys.isascii() and keys.isdigit()))):
            raise common.Usage(f"--seqlen takes cases such as 200x333,64, found {common.printable(text)!r}")
        pair = int(rows), int(keys or rows)
        if pair[0] * pair[1] > 2**28:
            raise common.Usage(f"{rows}x{keys or rows} is too much for a dense check; take at most 16384x16384")
        yield pair


def _print(outcomes: list[Outcome], as_json: bool) -> None:
    if as_json:
        found = [{**o.__dict__, "passed": None if o.skipped else not o.failed} for o in outcomes]
        print(json.dumps({"schema": 1, "outcomes": found}, indent=1))
        return
    rows = [
        [o.what, o.case, f"{o.error:.1e}", f"{o.allowed:.1e}", f"{o.lse_error:.1e}", "FAILED" if o.failed else "ok"]
        for o in outcomes
        if not o.skipped
    ]
    common.table(
        ["compared with the dense float64 meaning", "rows x keys", "O error", "allowed", "LSE error", ""], rows
    )
    for case in dict.fromkeys(o.case for o in outcomes if o.empty):
        common.say(f"{case}: no row keeps a key, so zeros were compared; give other params or lengths")
    for reason in dict.fromkeys(f"{o.what}: {o.skipped}" for o in outcomes if o.skipped):
        common.say(f"not run: {reason}")


def _run_kernel_file(name: str, as_json: bool) -> None:
    """A generated file, edited or not: its own check on a GPU, its machine code without one."""
    from attngen.source import is_edited, read_meta

    path = files.read_source(name)
    assert isinstance(path, Path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise common.Usage(f"cannot read {common.printable(name)}: {fault}") from None
    meta = read_meta(text)
    if not meta:
        raise common.Usage(f"{common.printable(name)} is no kernel file: it has no ATTN_META table")
    common.say(f"{meta.get('kernel_id', name)}{', edited' if is_edited(text) else ''}")
    from attngen.jit import device

    if device.has_gpu(str(meta.get("target"))):
        _self_check(path)
    else:
        common.say(f"no GPU for {meta.get('target')}: compiling to machine code instead")
        _inspect(path, meta, as_json)


def _self_check(path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, str(path)], check=False)
    if done.returncode:
        raise typer.Exit(common.SPEC)


def _tables(meta: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """Direction, plans and compiling function of what the file holds."""
    direction = meta.get("direction", "forward")
    if direction != "backward":
        yield "forward", meta.get("plans", []), "compile_plan"
    if direction != "forward":
        yield "backward", meta["backward"]["plans"], "compile_backward"


def _inspect(path: Path, meta: dict[str, Any], as_json: bool) -> None:
    from attngen.verify import machine

    found = {
        f"{direction} {p['name']}": machine.inspect_plan(path.resolve(), i, str(meta["target"]), entry)
        for direction, plans, entry in _tables(meta)
        for i, p in enumerate(plans)
    }
    if as_json:
        print(
            json.dumps({"schema": 1, "plans": {k: json.loads(machine.as_json(v)) for k, v in found.items()}}, indent=1)
        )
    else:
        rows = [
            [
                plan,
                str(c.registers),
                str(c.spill_bytes),
                str(c.opcodes.get("HGMMA", 0)),
                str(c.instructions),
                "ok" if c.is_clean else "NOT CLEAN",
            ]
            for plan, c in found.items()
        ]
        common.table(["plan", "registers", "spilled bytes", "WGMMA", "instructions", ""], rows)
        for plan, c in found.items():
            for line in c.serialized:
                common.say(f"{plan}: {line}")
    if not all(c.is_clean for c in found.values()):
        raise typer.Exit(common.SPEC)
