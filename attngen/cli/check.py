"""`attngen check`: every fault of one or more specs, without compiling anything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from attngen.cli import arguments, common, files
from attngen.diag.diagnostic import AttnError, Diagnostic, Severity

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec


def check(
    specs: Annotated[list[str], typer.Argument(metavar="SPEC...", help="Files, or - for stdin.", show_default=False)],
    plan: Annotated[
        bool, typer.Option("--plan", help="Also look for a plan that serves each attention block.")
    ] = False,
    target: arguments.Target = None,
    as_json: Annotated[bool, typer.Option("--json", help="All faults as JSON on stdout.")] = False,
) -> None:
    """Check specs: syntax, names, types, meaning; with --plan also that a kernel exists. Exit 1 on a fault.

    A term of a mask that has to be tested element by element is no fault: a note says why, and what to write instead.
    A backward, or a gradient, that no kernel serves yet is no fault: --plan says it in a line.
    """
    from attngen.diag import render
    from attngen.passes.advice import element_wise
    from attngen.syntax import check_text, load_all

    found: list[Diagnostic] = []
    checked: list[dict[str, object]] = []
    for name in specs:
        faults: list[Diagnostic]
        try:
            source = files.read_source(name)
            faults = check_text(source)
        except common.Usage as fault:  # no reason to keep silent about the other files
            faults = [Diagnostic("E0110", str(fault), helps=("check the path",))]
        without: dict[str, list[str]] = {}
        if plan and not _errors(faults):
            for spec in load_all(source):
                refused = _plan_faults(spec, target)
                faults = [*faults, *refused]
                if not refused:
                    without[spec.name] = _without(spec, target)
        notes = [] if _errors(faults) else [n for spec in load_all(source) for n in element_wise(spec)]
        found += [*faults, *notes]
        checked.append({"file": name, "ok": not _errors(faults), **({"gradients_without": without} if plan else {})})
        if not as_json and not faults:
            common.say(f"{common.printable(name)}: ok")
            for block, reasons in without.items():
                for reason in reasons:
                    common.say(f"{common.printable(name)}: {block}: {reason}")
    if as_json:
        print(render.to_json(found, files=checked))
    elif found:
        common.report(found)
    if _errors(found):
        raise typer.Exit(common.exit_code(found))


def _errors(faults: Iterable[Diagnostic]) -> bool:
    return any(d.severity is Severity.ERROR for d in faults)


def _targets(spec: AttentionSpec, target: str | None) -> tuple[str, ...]:
    from attngen.settings import DEFAULT_TARGET, settings

    named = target or settings().target
    return (named,) if named else spec.targets or (DEFAULT_TARGET,)


def _without(spec: AttentionSpec, target: str | None) -> list[str]:
    """What of the backward no kernel serves yet, a reason each."""
    from attngen.directions import plan_gradients
    from attngen.passes.parts import parts

    return [
        d.message if len(parts(spec)) == 1 else f"{p.name}: {d.message}"
        for x in _targets(spec, target)
        for p in parts(spec)
        for d in plan_gradients(p.spec, x).refused
    ]


def _plan_faults(spec: AttentionSpec, target: str | None) -> tuple[Diagnostic, ...]:
    from attngen.passes.serves import served_parts
    from attngen.search import plan as find_plan

    faults: tuple[Diagnostic, ...] = ()
    for architecture in _targets(spec, target):
        try:
            for part in served_parts(spec, architecture):
                find_plan(part.spec, architecture)
        except AttnError as fault:
            faults += fault.diagnostics
    return faults
