"""What commands read and write: the SOURCE argument, stdin, and products, replaced at once or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from attngen.cli.common import Usage, printable

#: What is read of a file or of stdin before it is called no spec.
MAX_BYTES = 4_000_000


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


def _near(path: Path) -> str:
    import difflib

    folder = path.parent
    names = sorted(p.name for p in folder.glob("*.attn") if p.is_file()) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / close[0]}?" if close else ""
