"""`attngen check`: every fault of one or more specs, without compiling anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli import common
from attngen.diag.diagnostic import AttnError, Diagnostic, Severity

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec


def check(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Files, or - for stdin.", show_default=False)],
    plan: Annotated[
        bool, typer.Option("--plan", help="Also look for a plan that serves each attention block.")
    ] = False,
    target: common.Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="All faults as JSON on stdout.")] = False,
) -> None:
    """Check specs: syntax, names, types, meaning; with --plan also that a kernel exists. Exit 1 on a fault."""
    from attngen.diag import render
    from attngen.syntax import check_text, load_all

    found: list[Diagnostic] = []
    files: list[dict[str, object]] = []
    for name in specs:
        faults: list[Diagnostic]
        try:
            source = common.read_source(name)
            faults = check_text(source)
        except common.Usage as fault:  # no reason to keep silent about the other files
            faults = [Diagnostic("E0110", str(fault), helps=("check the path",))]
        if plan and not _errors(faults):
            for spec in load_all(source):
                faults = [*faults, *_plan_faults(spec, target)]
        found += faults
        files.append({"file": name, "ok": not _errors(faults)})
        if not as_json and not faults:
            common.say(f"{common.printable(name)}: ok")
    if as_json:
        print(render.to_json(found, files=files))
    elif found:
        common.report(found)
    if _errors(found):
        raise typer.Exit(common.exit_code(found))


def _errors(faults: Iterable[Diagnostic]) -> bool:
    return any(d.severity is Severity.ERROR for d in faults)


def _plan_faults(spec: AttentionSpec, target: str | None) -> tuple[Diagnostic, ...]:
    from attngen.search import plan as find_plan
    from attngen.settings import DEFAULT_TARGET, settings

    faults: tuple[Diagnostic, ...] = ()
    named = target or settings().target
    for architecture in (named,) if named else spec.targets or (DEFAULT_TARGET,):
        try:
            find_plan(spec, architecture)
        except AttnError as fault:
            faults += fault.diagnostics
    return faults
