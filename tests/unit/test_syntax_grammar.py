"""The grammar files themselves, the table made from them, and the reference that describes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from attngen import resources
from attngen.ir.functions import FUNCTIONS
from attngen.syntax import check_text, format_text, hints, limits, load_all, table, words
from attngen.syntax.reference import function_table

README = resources.read("grammar/README.md")
GRAMMAR = resources.read("grammar/attn.lark") + resources.read("grammar/expr.lark")


def test_strict_lark_accepts_the_grammar() -> None:
    """No shift/reduce conflict is resolved silently, and no two terminals compete for a text (interegular checks)."""
    pytest.importorskip("interegular")
    table.from_grammar(strict=True)


def test_the_shipped_table_is_that_of_the_grammar() -> None:
    """After a change of the grammar: python -m attngen.syntax"""
    stored = json.loads(resources.read(table.TABLE))
    assert stored["grammar"] == table.fingerprint()
    # The numbering of states differs from run to run, so it is what the two parsers read that is compared.
    shipped, fresh = table.parser(None), table.from_grammar()
    assert len(stored["table"]["data"]["parser"]["parser"]["states"]["#"]) == len(
        fresh.parser.parser._parse_table.states
    )
    for text in re.findall(r"^```attn\n(.*?)^```", README, re.M | re.S):
        assert shipped.parse(text, start="start") == fresh.parse(text, start="start")


def test_a_table_that_does_not_fit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Lark, another grammar, a damaged or missing file: the parser is built from the text instead."""
    good = resources.read(table.TABLE)
    read = resources.read
    for bad in (good.replace('"lark":"', '"lark":"0.'), good.replace('"grammar":"', '"grammar":"0'), "{", "[]", "{}"):
        monkeypatch.setattr(resources, "read", lambda f, bad=bad: bad if f == table.TABLE else read(f))
        built = table.parser(None)
        assert built.parse("attn 1\nattention a { head_dim = 64 }\n", start="start").data == "start"


def test_the_first_spec_is_loaded_quickly() -> None:
    """By the stored table, which takes a tenth of the time of the grammar's text."""
    script = (
        "import lark, attngen.syntax as s; lark.Lark.open = None\n"
        "s.load_spec('attn 1\\ninclude \"std.attn\"\\nattention a {\\n head_dim = 64\\n mask = causal\\n}\\n')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=resources.root())


def test_every_clause_word_is_in_the_reference() -> None:
    for word in re.findall(r"^[A-Z0-9_]+\.1: /(\w+)\(\?!", GRAMMAR, re.M):
        assert re.search(rf"`[^`]*\b{word}\b[^`]*`|^\s*(?:\|.*)?\b{word}\b", README, re.M), word
    for block, entries in hints.BLOCKS.items():
        for entry in entries:
            assert f"`{entry}`" in README or f" {entry} = " in README, (block, entry)


def test_the_function_table_of_the_reference_is_that_of_the_code() -> None:
    """After a change of the functions: python -m attngen.syntax"""
    assert function_table() in README
    for name, row in FUNCTIONS.items():
        assert f"`{row.infix}`" in README or f"`{words.signature(name)}" in README or name == "where"


def test_every_example_of_the_reference_loads_and_is_canonical() -> None:
    examples = re.findall(r"^```attn\n(.*?)^```", README, re.M | re.S)
    assert len(examples) >= 5
    for text in examples:
        assert check_text(text) == [], text
        assert load_all(text)
        assert format_text(text) == text


def test_the_bounds_of_the_reference_are_those_of_the_code() -> None:
    for shown in (
        f"{limits.FILES} files",
        f"{limits.NESTING} brackets",
        f"{limits.NODES:,}".replace(",", " ") + " operations",
        f"{limits.DEPTH} deep",
        f"{limits.DECLARATIONS} declarations",
        f"{limits.NAME_CHARS} characters",
        f"{limits.TENSOR_RANK} axes",
    ):
        assert shown in README, shown
