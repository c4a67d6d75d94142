"""What every command shares: exit codes, faults on stderr, the source argument, override options."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from attngen.diag.diagnostic import AttnError, Diagnostic

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec

OK, SPEC, USAGE, ENVIRONMENT, BUG = 0, 1, 2, 3, 70
P = ParamSpec("P")
R = TypeVar("R")

#: What is read of a file or of stdin before it is called no spec.
MAX_BYTES = 4_000_000

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


def read_source(argument: str) -> str | Path:
    """The SOURCE argument: a path that exists, or `-` for the text on stdin."""
    if argument == "-":
        return read_stdin()
    path = Path(argument)
    try:
        if not argument:
            raise Usage("SPEC is empty; name a file that ends in .attn, or - for stdin")
        if path.is_dir():
            raise Usage(f"{printable(argument)} is a folder, not a spec; name a file that ends in .attn")
        if not path.exists():
            raise Usage(f"no such file: {printable(argument)}{_near(path)}")
    except (OSError, ValueError) as fault:
        raise Usage(f"cannot read {printable(argument)}: {getattr(fault, 'strerror', None) or fault}") from None
    return path


def read_stdin() -> str:
    """All of stdin as text."""
    try:
        # A text without a newline would be taken for a path.
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Usage(f"stdin is larger than {MAX_BYTES // 1_000_000} MB: not a spec")
        return data.decode("utf-8") + "\n"
    except UnicodeDecodeError as fault:
        raise Usage(f"stdin is not UTF-8 text: {fault.reason} at byte {fault.start}") from None


def printable(text: str, limit: int = 200) -> str:
    """A name fit for a terminal line: no control characters, bounded length."""
    clean = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return clean if len(clean) <= limit else f"{clean[:limit]}…"


def write_text(output: str, text: str) -> None:
    """Write the product: `-` is stdout, anything else a file, replaced at once or not at all."""
    if output == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_bytes(Path(output), text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` at once or not at all. Devices and pipes (/dev/null) are written to directly."""
    try:
        if path.exists() and not path.is_file():
            if path.is_dir():
                raise Usage(f"{printable(str(path))} is a folder; give -o a file name")
            path.write_bytes(data)
            return
        part = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            if path.exists():
                part.chmod(path.stat().st_mode & 0o7777)
            os.replace(part, path.resolve() if path.is_symlink() else path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ValueError) as fault:
        raise Usage(f"cannot write {printable(str(path))}: {getattr(fault, 'strerror', None) or fault}") from None


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


def _near(path: Path) -> str:
    import difflib

    folder = path.parent
    names = sorted(p.name for p in folder.glob("*.attn") if p.is_file()) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / close[0]}?" if close else ""


# -- options that change a spec, the same words in every command ------------------------------------------------------

Source = Annotated[str, typer.Argument(metavar="SPEC", help="A .attn file, or - for stdin.", show_default=False)]
Name = Annotated[str | None, typer.Option("--name", help="Which attention block (default: the last).")]
Target = Annotated[
    str | None,
    typer.Option("--target", help="Architecture, e.g. sm_90a (default: ATTNGEN_TARGET, the spec's, sm_90a)."),
]
DTypeOption = Annotated[str | None, typer.Option("--dtype", help="bf16 or fp16 in place of the spec's.")]
HeadDim = Annotated[str | None, typer.Option("--head-dim", help="Head dim, e.g. 64, or 192x128 for q/k and v.")]
LayoutOption = Annotated[str | None, typer.Option("--layout", help="bshd, bhsd or packed_qkv in place of the spec's.")]
Tile = Annotated[str | None, typer.Option("--tile", help="tile_m x tile_n, e.g. 128x128.")]
Stages = Annotated[int | None, typer.Option("--stages", help="K/V stages in shared memory.", min=1, max=64)]
Order = Annotated[str | None, typer.Option("--order", help="Tile order: lpt or linear.")]
Deterministic = Annotated[
    bool | None,
    typer.Option("--deterministic/--no-deterministic", help="Gradients with the same bits from run to run, or not."),
]


def overrides(
    *,
    dtype: str | None = None,
    head_dim: str | None = None,
    layout: str | None = None,
    tile: str | None = None,
    stages: int | None = None,
    order: str | None = None,
    deterministic: bool | None = None,
) -> dict[str, object]:
    """The override options as `attngen.options.Options` takes them."""
    changes: dict[str, object] = {}
    if head_dim is not None:
        parts = head_dim.lower().split("x")
        if len(parts) > 2 or not all(p.isascii() and p.isdigit() and len(p) < 7 for p in parts):
            raise Usage(
                f"--head-dim takes a number such as 64, or 192x128 for q/k and v, found {printable(head_dim)!r}"
            )
        changes["head_dim"] = int(parts[0])
        if len(parts) == 2:
            changes["head_dim_v"] = int(parts[1])
    plain: dict[str, object] = {"dtype": dtype, "layout": layout, "tile": tile, "stages": stages, "order": order}
    plain["deterministic"] = deterministic
    return changes | {k: v for k, v in plain.items() if v is not None}


def load(source: str, name: str | None, changes: Mapping[str, object]) -> AttentionSpec:
    """The spec that SOURCE, --name and the override options mean."""
    from attngen import specs
    from attngen.options import Options

    return specs.resolve(read_source(source), name, Options.parse(changes))


def pick_target(spec: AttentionSpec, target: str | None) -> str:
    """--target, else ATTNGEN_TARGET, else the spec's first target, else sm_90a: as `attngen compile` picks."""
    from attngen.settings import DEFAULT_TARGET, settings

    return target or settings().target or (spec.targets[0] if spec.targets else DEFAULT_TARGET)


def settings_of(items: Iterable[str], option: str) -> dict[str, str]:
    """`NAME=VALUE` options as a dict."""
    found: dict[str, str] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key:
            raise Usage(f"{option} takes NAME=VALUE, found {printable(item)!r}")
        found[key.strip()] = value.strip()
    return found


def lengths_of(text: str) -> tuple[int, ...]:
    """The lengths of --seqlen, such as `1024,4096`."""
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isascii() and p.isdigit() and 0 < int(p) < 2**24 for p in parts):
        raise Usage(f"--seqlen takes lengths from 1 to {2**24 - 1} such as 1024,4096, found {printable(text)!r}")
    return tuple(int(p) for p in parts)


def need_gpu(what: str) -> None:
    """Raise Environment where torch sees no CUDA GPU; `what` begins the message."""
    import torch

    if not torch.cuda.is_available():
        raise Environment(f"{what} needs a CUDA GPU, and torch sees none; `attngen explain SPEC` estimates without one")
