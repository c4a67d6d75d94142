"""The function table of grammar/README.md, made from `FUNCTIONS`; `python -m attngen.syntax` writes it."""

from __future__ import annotations

import re

from attngen.ir.functions import FUNCTIONS, Function
from attngen.syntax import words

BEGIN, END = "<!-- function table -->", "<!-- end of function table -->"


def function_table() -> str:
    """Operators from loosest to tightest, then named functions, as a Markdown table."""
    operators = sorted((r for r in FUNCTIONS.values() if r.infix), key=lambda r: r.precedence)
    named = [r for r in FUNCTIONS.values() if words.callable_name(r.name)]
    rows = ["| written | binds | takes and gives | meaning | gradient |", "|---|---|---|---|---|"]
    rows += [_row(r, f"`{r.infix}`", str(r.precedence)) for r in operators]
    rows += [_row(r, f"`{words.signature(r.name)}`", "call") for r in named]
    return "\n".join(rows)


def _row(row: Function, written: str, binds: str) -> str:
    if row.name == "neg":
        written = "unary `-`"
    types = "; ".join(f"{', '.join(wanted)} → {result}" for wanted, result in row.signatures)
    return f"| {written} | {binds} | {types} | {row.doc} | {'yes' if row.derivative else 'no'} |"


def updated(readme: str) -> str:
    """The text of the reference with the table of today."""
    block = f"{BEGIN}\n{function_table()}\n{END}"
    return re.sub(f"{BEGIN}.*?{END}", lambda _: block, readme, flags=re.S)
