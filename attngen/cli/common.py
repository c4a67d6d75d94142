"""What every command shares: exit codes, faults on stderr, tables on stdout."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import typer

from attngen.diag.diagnostic import AttnError, Diagnostic

OK, SPEC, USAGE, ENVIRONMENT, BUG = 0, 1, 2, 3, 70
P = ParamSpec("P")
R = TypeVar("R")

#: How faults are printed; set once by the global option.
diagnostics_format = "human"


class Usage(Exception):
    """A command line that makes no sense: exit 2."""


class Environment(Exception):
    """This machine lacks what the command needs: exit 3."""


def wants_color(stream: Any = None) -> bool:
    """Whether escape codes belong on `stream`: FORCE_COLOR, NO_COLOR, then whether it is a terminal."""
    stream = stream or sys.stderr
    if os.environ.get("FORCE_COLOR"):
        return True
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and bool(stream.isatty())


def say(*parts: object) -> None:
    """A line for the reader, not part of the product."""
    print(*parts, file=sys.stderr)


#: Codes that speak of the command line: files that cannot be read, options, names of blocks, output files, values of
#: params (E06xx).
_USAGE_CODES = ("E0110", "E0502", "E0503", "E0504", "E0530", "E0531", "E0532", "E06")


def exit_code(diagnostics: Iterable[Diagnostic]) -> int:
    """2 if the command line is at fault, 3 if this machine is (other E05xx), 1 if the spec is."""
    codes = [d.code for d in diagnostics]
    if any(c.startswith(_USAGE_CODES) for c in codes):
        return USAGE
    return ENVIRONMENT if any(c.startswith("E05") for c in codes) else SPEC


def report(diagnostics: Iterable[Diagnostic]) -> None:
    """Print faults on stderr in the chosen format."""
    from attngen.diag import render

    found = tuple(diagnostics)
    if diagnostics_format == "json":
        say(render.to_json(found))
    elif diagnostics_format == "short":
        for d in found:
            say(render.render_short(d))
    elif diagnostics_format == "github":
        for d in found:
            say(render.render_github(d))
    else:
        say("\n\n".join(render.render(d, color=wants_color()) for d in found))


def command(f: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that no traceback reaches a user: faults are printed and become exit codes."""

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return f(*args, **kwargs)
        except AttnError as fault:
            report(fault.diagnostics)
            raise typer.Exit(exit_code(fault.diagnostics)) from None
        except Usage as fault:
            say(f"error: {fault}")
            raise typer.Exit(USAGE) from None
        except Environment as fault:
            say(f"error: {fault}")
            raise typer.Exit(ENVIRONMENT) from None
        except BrokenPipeError:  # the reader of stdout has left: `attngen compile … | head`
            _drop_stdout()
            raise typer.Exit(OK) from None
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except OSError as fault:
            if fault.errno not in _FULL:
                raise _bug(fault) from None
            say(f"error: cannot write the output: {fault.strerror}; free some space, or write it elsewhere")
            _drop_stdout()
            raise typer.Exit(ENVIRONMENT) from None
        except Exception as bug:
            raise _bug(bug) from None

    return call


#: What writing to a disk that is full, over a quota or broken raises.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def _bug(fault: Exception) -> typer.Exit:
    """Say that a fault is ours; the exit that follows."""
    from attngen.cli.bug import write_bundle

    say(f"error: this is a bug in attngen ({type(fault).__name__}: {str(fault)[:200]})")
    say(f"  = help: please report it with this file: {write_bundle(fault)}")
    return typer.Exit(BUG)


def _drop_stdout() -> None:
    """Let what stdout still buffers go nowhere, so that the interpreter's exit does not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str, limit: int = 200) -> str:
    """A name fit for a terminal line: no control characters, bounded length."""
    clean = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return clean if len(clean) <= limit else f"{clean[:limit]}…"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: aligned text, the first column left, numbers right; drawn by rich on a terminal."""
    if sys.stdout.isatty() and wants_color(sys.stdout):
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table()
        for i, title in enumerate(header):
            drawn.add_column(title, justify="left" if i == 0 else "right")
        for row in rows:
            drawn.add_row(*(Text(cell) for cell in row))
        Console().print(drawn)
        return
    print(aligned(header, rows))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as plain text."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def need_gpu(what: str) -> None:
    """Raise Environment where torch sees no CUDA GPU; `what` begins the message."""
    import torch

    if not torch.cuda.is_available():
        raise Environment(f"{what} needs a CUDA GPU, and torch sees none; `attngen explain SPEC` estimates without one")
