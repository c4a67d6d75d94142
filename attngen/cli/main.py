"""The command table."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from attngen.cli import common
from attngen.cli.bench import bench
from attngen.cli.cache import app as cache_app
from attngen.cli.check import check
from attngen.cli.compile import compile_
from attngen.cli.completion import completion
from attngen.cli.doctor import doctor
from attngen.cli.explain import explain
from attngen.cli.fmt import fmt
from attngen.cli.import_ import import_
from attngen.cli.regen import regen
from attngen.cli.run import run
from attngen.cli.tune import tune

app = typer.Typer(
    name="attngen",
    help="A compiler for attention: a .attn spec in, a readable standalone CuTe-DSL kernel out.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(StrEnum):
    """How faults are printed on stderr."""

    HUMAN = "human"
    SHORT = "short"
    JSON = "json"
    GITHUB = "github"


def _version(wanted: bool) -> None:
    if not wanted:
        return
    from importlib import metadata

    import attngen

    try:
        dsl = metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        dsl = "not installed"
    print(f"attngen {attngen.__version__} (nvidia-cutlass-dsl {dsl}, Python {sys.version.split()[0]})")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print versions and exit.", callback=_version, is_eager=True)
    ] = False,
    diagnostics: Annotated[Format, typer.Option("--diagnostics", help="How faults are printed.")] = Format.HUMAN,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log stages and times; twice for details.")
    ] = 0,
) -> None:
    """A compiler for attention: a .attn spec in, a readable standalone CuTe-DSL kernel out."""
    common.diagnostics_format = diagnostics.value
    if verbose:
        logging.basicConfig(
            stream=sys.stderr,
            level=logging.INFO if verbose == 1 else logging.DEBUG,
            format="%(relativeCreated)6d ms  %(name)s: %(message)s",
        )
        # The DSL and its neighbours log too; only ours was asked for.
        logging.getLogger().setLevel(logging.WARNING)
        logging.getLogger("attngen").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


#: Every command but the `cache` group.
COMMANDS: dict[str, Callable[..., None]] = {
    "compile": compile_,
    "check": check,
    "fmt": fmt,
    "import": import_,
    "explain": explain,
    "run": run,
    "bench": bench,
    "tune": tune,
    "doctor": doctor,
    "regen": regen,
    "completion": completion,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(common.command(_command))
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Entry point of the `attngen` script."""
    for stream in (sys.stdout, sys.stderr):
        # A name or a spec may hold what the terminal's encoding cannot print: never a reason to fail.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="attngen")
