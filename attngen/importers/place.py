"""Where in a user's function something happened: the expression under a frame's current instruction."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from types import FrameType, TracebackType

from attngen.diag.span import Source, Span

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _foreign(filename: str) -> bool:
    """Whether a frame belongs to us or to torch, not to the function that is traced."""
    import torch

    return filename.startswith((_HERE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep))


def here() -> Span | None:
    """The expression of the innermost frame that is the user's, or None where its source cannot be read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else _span(frame, frame.f_lasti)


def of(trace: TracebackType | None) -> Span | None:
    """The expression of the innermost user's frame of a traceback."""
    found = None
    while trace is not None:
        if not _foreign(trace.tb_frame.f_code.co_filename):
            found = trace
        trace = trace.tb_next
    return None if found is None else _span(found.tb_frame, found.tb_lasti)


def definition(function: object) -> Span | None:
    """The line where a function starts."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return None
    return _cut(code.co_filename, code.co_firstlineno, 0, code.co_firstlineno, 1 << 30)


def _span(frame: FrameType, instruction: int) -> Span | None:
    positions = next(itertools.islice(frame.f_code.co_positions(), instruction // 2, None), (None,) * 4)
    line, last, start, end = positions
    line = line or frame.f_lineno
    return _cut(frame.f_code.co_filename, line, start or 0, last or line, end or 1 << 30)


def _cut(filename: str, line: int, start: int, last: int, end: int) -> Span | None:
    """Lines count from 1; columns are bytes, as the interpreter counts them."""
    lines = linecache.getlines(filename)
    if not 1 <= line <= last <= len(lines):
        return None
    source = Source(_short(filename), "".join(lines))
    offsets = list(itertools.accumulate((len(x) for x in lines), initial=0))
    first, final = lines[line - 1], lines[last - 1].rstrip("\n")
    low = len(first.encode()[:start].decode(errors="ignore"))
    high = len(final.encode()[:end].decode(errors="ignore"))
    low += len(first[low:]) - len(first[low:].lstrip())
    return Span(source, offsets[line - 1] + low, max(offsets[last - 1] + high, offsets[line - 1] + low + 1))


def _short(filename: str) -> str:
    inside = os.path.relpath(filename) if os.path.isabs(filename) else filename
    return filename if inside.startswith("..") else inside
