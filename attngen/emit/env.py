"""The Jinja environment: templates are Python before and after rendering."""

from __future__ import annotations

import re
from functools import cache

import jinja2
import jinja2.ext

from attngen import resources

#: Marks a blank line that `tidy` keeps.
BLANK = "#~"


class Blocks(jinja2.ext.Extension):
    """Two spellings that keep an unrendered template parseable as Python.

    A line that holds only `{{expression}}` inserts the expression's lines at that line's indentation. A word
    `slot_<loop variable>_<field>` stands for `{{variable.field}}` where Python wants an identifier (the name of an
    argument).
    """

    _line = re.compile(r"^(?P<indent>[ \t]*)\{\{(?P<expr>[^{}\n]+)\}\}[ \t]*$", re.M)
    #: Jinja swallows the blank lines behind a line statement; a mark keeps them until `tidy`.
    _blank = re.compile(r"(?<=\n)(?P<statement>[ \t]*##[^\n]*\n)(?P<blank>\n+)")
    _slot = re.compile(r"\bslot_([a-z]+)_([a-z]+)\b")

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        source = self._blank.sub(lambda m: m["statement"] + f"{BLANK}\n" * len(m["blank"]), "\n" + source)[1:]
        source = self._slot.sub(r"{{\1.\2}}", source)
        return self._line.sub(
            lambda m: f"{m['indent']}{{{{ ({m['expr']}) | trim('\n') | indent({len(m['indent'])}) }}}}", source
        )


@cache
def environment() -> jinja2.Environment:
    """One environment for the process; an undefined field is an error."""
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: resources.read(f"templates/{name}")),
        undefined=jinja2.StrictUndefined,
        line_statement_prefix="##",
        line_comment_prefix="#!",
        keep_trailing_newline=True,
        extensions=[Blocks],
        autoescape=False,
    )


def tidy(text: str) -> str:
    """Strip trailing blanks, allow two blank lines in a row (one inside a class), end with a newline."""
    lines = ["" if line.strip() == BLANK else line.rstrip() for line in text.splitlines()]
    out: list[str] = []
    for i, line in enumerate(lines):
        if line:
            out.append(line)
            continue
        following = next((x for x in lines[i:] if x), "")
        if not out or (following.startswith(" ") and not out[-1]):
            continue  # inside a block one blank line is enough
        if len(out) > 1 and not out[-1] and not out[-2]:
            continue
        out.append("")
    return "\n".join(out).strip("\n") + "\n"
