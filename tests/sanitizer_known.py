"""Reports of compute-sanitizer's racecheck on our kernels that are no fault, by what the two places in the source say.

Each is one thing: lane 0 arrives at an mbarrier for its whole warp, behind `sync_warp`. racecheck counts an arrival for
the accesses of the thread that arrives; that the other 31 lanes met it in `sync_warp` before does not count. The PTX
checker (tests/ptxcheck) has the rule whole, and finds where a `sync_warp` is missing.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

from sanitizer_log import Report


class Known(NamedTuple):
    """`write` and `read` stand in `function: line` of the places; `barrier`: what orders them."""

    write: str
    read: str
    barrier: str


KNOWN = (
    Known("slot[", "slot[", "mailbox.empty: a warp has read the next tile"),
    Known("t.walks[", "t.walks[", "rings.walk.empty: a warp has read the KV tile and the length of its walk"),
    Known("t.steps[", "t.steps[", "rings.q.empty: a warp has read which step it is"),
    Known("bulk_load: ", "w.sLSE[", "rings.q.empty: a warp has read the rows' LSE"),
    Known("bulk_load: ", "w.sD[", "rings.do.empty: a warp has read the rows' D"),
    Known("w.sP[", "w.sP[", "rings.p.full and .empty: a warp has written, has read its part of P"),
)


def known_kind(report: Report, path: Path) -> bool:
    """Whether some entry has all of a report's places, which lie in the kernel's file `path`: one write and the reads
    beside it, or the other way round.
    """
    kind = re.fullmatch(r"Race reported between (Write|Read) access", report.what)
    if kind is None or not report.beside:
        return False
    one, *others = (_said(place, path) for place in (report.at, *report.beside))
    writes, reads = ([one], others) if kind[1] == "Write" else (others, [one])
    return any(all(k.write in w for w in writes) and all(k.read in r for r in reads) for k in KNOWN)


def _said(place: str, path: Path) -> str:
    """`function: line` of `kernel+offset in FILE:LINE`; nothing where that is another file."""
    at = re.search(rf" in (?:\S*/)?{re.escape(path.name)}:(\d+)$", place)
    if at is None:
        return ""
    text, number = path.read_text(encoding="utf-8"), int(at[1])
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
    around = [f for f in functions if f.lineno <= number <= (f.end_lineno or f.lineno)]
    name = max(around, key=lambda f: f.lineno).name if around else ""
    return f"{name}: {text.splitlines()[number - 1].strip()}"
