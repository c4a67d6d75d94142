"""The four forms of a diagnostic, and the table of codes behind them."""

from __future__ import annotations

import json
import re

import pytest

from attngen.diag.codes import CODES, find
from attngen.diag.diagnostic import AttnError, Diagnostic, Label, Severity, error
from attngen.diag.render import render, render_github, render_short, to_json
from attngen.diag.span import Source, Span

SOURCE = Source(
    "examples/bad/mask_type.attn", "attn 1\n\n\nattention a {\n  head_dim = 64\n  mask = q_pos - kv_idx\n}\n"
)
START = SOURCE.text.index("q_pos")
FAULT = Diagnostic(
    "E0302",
    "mask must be true or false, found `int`",
    Label(Span(SOURCE, START, START + 14), "this has type `int`"),
    notes=("a mask keeps a score where it is true and sets it to -inf elsewhere",),
    helps=("compare the two positions: `mask = kv_idx <= q_pos`",),
)
HUMAN = """\
error[E0302]: mask must be true or false, found `int`
  --> examples/bad/mask_type.attn:6:10
   |
 6 |   mask = q_pos - kv_idx
   |          ^^^^^^^^^^^^^^ this has type `int`
note: a mask keeps a score where it is true and sets it to -inf elsewhere
help: compare the two positions: `mask = kv_idx <= q_pos`
      more: attngen explain E0302"""


def test_human() -> None:
    assert render(FAULT) == HUMAN
    assert str(AttnError(FAULT)) == HUMAN
    colored = render(FAULT, color=True)
    assert colored != HUMAN and re.sub(r"\x1b\[[0-9;]*m", "", colored) == HUMAN


def test_short() -> None:
    assert render_short(FAULT) == (
        "examples/bad/mask_type.attn:6:10: error[E0302]: mask must be true or false, found `int`"
    )


def test_github() -> None:
    assert render_github(FAULT) == (
        "::error file=examples/bad/mask_type.attn,line=6,col=10,endLine=6,endColumn=24,title=E0302::"
        "mask must be true or false, found `int`%0Aa mask keeps a score where it is true and sets it to -inf elsewhere"
        "%0Acompare the two positions: `mask = kv_idx <= q_pos`"
    )


def test_json() -> None:
    (entry,) = json.loads(to_json([FAULT]))["diagnostics"]
    assert json.loads(to_json([]))["schema"] == 1
    assert (entry["code"], entry["slug"], entry["severity"]) == ("E0302", "mask-not-boolean", "error")
    assert entry["primary"] == {
        "file": "examples/bad/mask_type.attn", "start": START, "end": START + 14, "line": 6, "column": 10,
        "end_line": 6, "end_column": 24, "text": "this has type `int`",
    }  # fmt: skip


def test_without_a_place() -> None:
    plain = error("E0110", "cannot read x.attn", helps=("check the path",)).diagnostics[0]
    assert render(plain) == (
        "error[E0110]: cannot read x.attn\nhelp: check the path\n      more: attngen explain E0110"
    )
    assert render_short(plain) == "error[E0110]: cannot read x.attn"
    assert render_github(plain) == "::error::cannot read x.attn%0Acheck the path"
    assert json.loads(to_json([plain]))["diagnostics"][0]["primary"] is None


def test_two_places_of_two_files_share_their_gutter() -> None:
    other = Source("b.attn", "\n" * 99 + "def f = 1\n")
    both = Diagnostic(
        "E0203", "twice", Label(Span(SOURCE, 7, 7), "here"), (Label(Span(other, 99, 108), "there"),),
        severity=Severity.WARNING,
    )  # fmt: skip
    assert render(both).split("\n")[:8] == [
        "warning[E0203]: twice",
        "    --> examples/bad/mask_type.attn:2:1",
        "     |",
        "   2 |",
        "     | ^ here",
        "    ::: b.attn:100:1",
        "     |",
        " 100 | def f = 1",
    ]


@pytest.mark.parametrize(
    "line, start, end, under",
    [
        ("\tmask = x", 8, 9, "           ^"),
        ("漢字 x", 3, 4, "     ^"),
        ("漢字 x", 0, 2, "^^^^"),
        ("é x", 2, 3, "  ^"),
        ("abc", 3, 3, "   ^"),
        ("a\r\nb", 0, 4, "^"),
        ("ab\ncd", 1, 5, " ^"),
    ],
)
def test_carets_stand_under_their_text(line: str, start: int, end: int, under: str) -> None:
    source = Source("a.attn", line)
    shown = render(Diagnostic("E0101", "x", Label(Span(source, start, end)))).split("\n")
    assert shown[4] == f"   | {under}"


def test_long_lines_are_cut_around_the_span() -> None:
    source = Source("a.attn", "x" * 5000 + " BAD " + "y" * 5000)
    shown = render(Diagnostic("E0101", "x", Label(Span(source, 5001, 5004)))).split("\n")
    assert max(map(len, shown)) < 170
    at = shown[3].index("BAD")
    assert shown[4][at : at + 3] == "^^^"


def test_codes_are_complete() -> None:
    for code, row in CODES.items():
        assert code == row.code and re.fullmatch(r"[EW]0[1-7]\d\d", code)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row.slug), row.slug
        assert re.match(r"[a-z`]", row.summary) and not row.summary.endswith("."), code
        assert len(row.explanation) > 20
    slugs = [row.slug for row in CODES.values()]
    assert len(set(slugs)) == len(slugs)


def test_codes_are_found_by_number_and_slug() -> None:
    row = CODES["E0302"]
    assert find("E0302") is row and find("e0302 ") is row and find("mask-not-boolean") is row and find("E9999") is None
