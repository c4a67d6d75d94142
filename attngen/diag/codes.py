"""The code table: every code that attngen raises, once. `attngen explain E0302` prints a row.

Codes are never reused. E01 syntax, E02 names, shapes and dtypes, E03 meaning (tables of their own, in `codes_syntax`,
`codes_names`, `codes_meaning`); E04 target and feasibility, E05 toolchain, cache and environment, E06 call arguments,
E07 imports from other libraries (in tables by area).
"""

from __future__ import annotations

from attngen.diag.codes_import import IMPORT
from attngen.diag.codes_meaning import MEANING
from attngen.diag.codes_names import NAMES
from attngen.diag.codes_reference import REFERENCE
from attngen.diag.codes_run import RUN
from attngen.diag.codes_syntax import SYNTAX
from attngen.diag.codes_target import TARGET
from attngen.diag.codes_tools import TOOLS
from attngen.diag.row import Code

_ROWS: tuple[Code, ...] = (
    *SYNTAX,
    *NAMES,
    *MEANING,
    *TARGET,
    *RUN,
    *REFERENCE,
    *TOOLS,
    *IMPORT,
)

#: Every row by code.
CODES: dict[str, Code] = {row.code: row for row in _ROWS}
assert len(CODES) == len({row.slug for row in _ROWS}) == len(_ROWS), "a code or a slug is used twice"


def find(text: str) -> Code | None:
    """The row of a code or slug, whatever its case."""
    wanted = text.strip().lower()
    return next((row for row in _ROWS if wanted in (row.code.lower(), row.slug)), None)
