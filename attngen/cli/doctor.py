"""`attngen doctor`: what this machine can do with attngen, and the mend where it cannot."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from attngen.cli import common
from attngen.diag.words import counted

GOOD, LIMIT, BAD = "ok", "limit", "fault"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it stands, what it means, the mend."""

    what: str
    state: str
    detail: str
    mend: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Findings and facts as JSON on stdout.")] = False,
) -> None:
    """Report on this machine. Exit 3 if something that compiling needs is missing; no GPU is a limit, not a fault."""
    facts: dict[str, Any] = {}

    def machine() -> Iterator[Finding]:
        from attngen.jit.doctor import report

        facts.update(report())
        yield from _machine(facts)

    found = [f for probe in (_python, _resources, _compiler, machine, _tools, _environment) for f in _safely(probe)]
    if as_json:
        print(json.dumps({"schema": 1, "findings": [asdict(f) for f in found], "facts": facts}, indent=1))
    else:
        for f in found:
            mark = {GOOD: "ok   ", LIMIT: "limit", BAD: "FAULT"}[f.state]
            print(f"{mark}  {f.what}: {f.detail}")
            if f.mend:
                print(f"       {f.mend}")
    if any(f.state == BAD for f in found):
        raise typer.Exit(common.ENVIRONMENT)


def _safely(probe: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(probe())
    except Exception as fault:  # a probe looks at broken machines: whatever it meets is a finding
        return [Finding(probe.__name__.strip("_"), BAD, f"{type(fault).__name__}: {str(fault)[:300]}")]


def _python() -> Iterator[Finding]:
    import attngen

    state = GOOD if sys.version_info >= (3, 11) else BAD
    yield Finding(
        "attngen",
        state,
        f"{attngen.__version__} on Python {sys.version.split()[0]}",
        "" if state == GOOD else "attngen needs Python 3.11 or newer",
    )


def _resources() -> Iterator[Finding]:
    from attngen import resources

    wanted = ("grammar/attn.lark", "grammar/std.attn", "templates/kernel", "examples/causal.attn")
    missing = [n for n in wanted if not (resources.root() / n).exists()]
    if missing:
        yield Finding("grammar and templates", BAD, f"missing: {', '.join(missing)}", "install attngen again")
    else:
        yield Finding("grammar and templates", GOOD, str(resources.root()))


def _compiler() -> Iterator[Finding]:
    from attngen import api, resources

    source = api.compile(resources.read("examples/causal.attn"), target="sm_90a")
    yield Finding(
        "compiler", GOOD, f"examples/causal.attn gives {source.kernel_id}, direction {source.meta['direction']}"
    )


def _machine(facts: dict[str, Any]) -> Iterator[Finding]:
    """The facts of jit.doctor: what works, then what is missing. Without GPU, linker or cache attngen still serves."""
    yield Finding(
        "torch", GOOD if facts["torch"] else BAD, str(facts["torch"]), "" if facts["torch"] else "pip install torch"
    )
    versions = ", ".join(f"{n} {v}" for n, v in facts["toolchain"].items() if "libs" not in n)
    yield Finding("toolchain", GOOD, versions or "none")
    for gpu in facts["gpus"]:
        major, minor = gpu["capability"]
        yield Finding(
            "GPU", GOOD, f"{gpu['index']}: {gpu['name']}, compute capability {major}.{minor}, {gpu['sms']} SMs"
        )
    cache = facts["cache"]
    held = f"{counted(cache['entries'], 'compiled kernel')} and {counted(cache['sources'], 'generated text')}"
    yield Finding("kernel cache", GOOD, f"{cache['folder']}, {held}, {cache['bytes'] / 1e6:.1f} MB")
    for fault in facts["missing"]:
        needed = any(word in fault["what"] for word in ("CuTe DSL", "tvm-ffi"))
        yield Finding("missing", BAD if needed else LIMIT, fault["what"], fault["mend"])


def _tools() -> Iterator[Finding]:
    from attngen.verify import machine

    missing = [t for t in ("ptxas", "nvdisasm") if machine.tool(t) is None]
    if missing:
        mend = "for development only: pip install 'attngen[dev]'"
        yield Finding(
            "machine-code tools", LIMIT, f"no {', '.join(missing)}: registers and spills cannot be read", mend
        )
    else:
        yield Finding("machine-code tools", GOOD, "ptxas, nvdisasm")


def _environment() -> Iterator[Finding]:
    from attngen.settings import VARIABLES

    known = [f"{n}={common.printable(os.environ[n])}" for n in VARIABLES if n in os.environ]
    yield Finding("environment", GOOD, ", ".join(known) or "no ATTNGEN_ variable is set")
    unknown = sorted(n for n in os.environ if n.startswith("ATTNGEN_") and n not in VARIABLES)
    if unknown:
        mend = f"attngen reads {', '.join(VARIABLES)}"
        yield Finding("environment", LIMIT, f"unknown: {', '.join(map(common.printable, unknown))}", mend)
