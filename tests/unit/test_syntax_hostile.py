"""Hostile text: it is refused by a diagnostic or kept as harmless data, quickly, and never crashes the reader."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attngen.diag.diagnostic import AttnError, Diagnostic
from attngen.diag.render import render, render_github, render_short, to_json
from attngen.diag.span import Source
from attngen.ir.expr import walk
from attngen.syntax import check_text, format_text, limits, load_spec, print_spec
from attngen.syntax.parser import parse_expression


def spec(body: str, before: str = "") -> str:
    return f"attn 1\n{before}attention a {{\n  head_dim = 64\n{body}\n}}\n"


def only(text: str) -> Diagnostic:
    """The one fault of a text, soon found: seconds of this thread, whatever else the machine does."""
    started = time.thread_time()
    found = check_text(text)
    assert time.thread_time() - started < 5.0
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("open_, close", ["()", "[]", "{}"], ids=["round", "square", "curly"])
@pytest.mark.parametrize("depth", [limits.NESTING + 1, 10_000, 300_000])
def test_deep_brackets(open_: str, close: str, depth: int) -> None:
    assert only(spec(f"  mask = {open_ * depth}true{close * depth}")).code == "E0108"
    with pytest.raises(AttnError, match="E0108"):
        format_text(spec(f"  mask = {open_ * depth}true{close * depth}"))


def test_brackets_up_to_the_bound_are_fine() -> None:
    depth = limits.NESTING - 1  # the block's own brace is one
    assert load_spec(spec(f"  mask = {'(' * depth}true{')' * depth}")).mask.type == "bool"
    assert only(spec(f"  mask = {'(' * (depth + 1)}true{')' * (depth + 1)}")).code == "E0108"


@pytest.mark.parametrize(
    "chain",
    [
        " or ".join(["kv_idx < 3"] * 20_000),
        "not " * 20_000 + "true",
        "0 < " + "-" * 20_000 + "kv_idx",
        "0 < " + " + ".join(["kv_idx"] * 20_000),
        " < ".join(["kv_idx"] * 20_000),
        "true if true else " * 20_000 + "false",
        "0 < " + "abs(" * 60 + "abs(" * 20_000,
    ],
    ids=["or", "not", "minus", "plus", "compare", "conditional", "call"],
)
def test_long_chains(chain: str) -> None:
    assert only(spec(f"  mask = {chain}")).code == "E0108"


def test_chains_up_to_the_bound_are_fine() -> None:
    terms = " or ".join(f"kv_idx == {i}" for i in range(limits.DEPTH - 2))
    text = spec(f"  mask = {terms}")
    assert load_spec(print_spec(load_spec(text))) == load_spec(text)
    assert format_text(format_text(text)) == format_text(text)
    grouped = " or ".join(f"({' or '.join(f'kv_idx == {i * 100 + j}' for j in range(80))})" for i in range(30))
    assert sum(1 for _ in walk(load_spec(spec(f"  mask = {grouped}")).mask)) > 9_000


def test_depth_and_size_are_counted_after_inlining() -> None:
    lets = "".join(f"  let x{i} = x{i - 1} + 1\n" for i in range(1, 200))
    assert only(spec(f"  let x0 = kv_idx\n{lets}  mask = x199 < 3")).code == "E0108"
    defs = "def f0(x) = x + 1\n" + "".join(f"def f{i}(x) = f{i - 1}(x) + 1\n" for i in range(1, 200))
    assert only(spec("  mask = f199(kv_idx) < 3", defs)).code == "E0108"
    doubling = "def f0(x) = x + x\n" + "".join(f"def f{i}(x) = f{i - 1}(f{i - 1}(x))\n" for i in range(1, 8))
    assert only(spec("  mask = f7(kv_idx) < 3", doubling)).code == "E0108"
    # An argument that is thrown away costs time and leaves no node behind: steps are bounded too.
    dropping = "def k0(x, y) = 1\n" + "".join(
        f"def k{i}(x, y) = k0(k{i - 1}(x, y), k{i - 1}(y, x))\n" for i in range(1, 40)
    )
    assert only(spec("  mask = k39(1, 2) < 3", dropping)).code == "E0108"


def test_a_call_from_deep_inside_a_program() -> None:
    chain = " + ".join(["kv_idx"] * 100)

    def deeper(n: int) -> list[Diagnostic]:
        return check_text(spec(f"  mask = 0 < {chain}")) if n == 0 else deeper(n - 1)

    for depth in (0, 500, 700, 800, 850, 900):
        assert {d.code for d in deeper(depth)} <= {"E0108"}


@pytest.mark.parametrize(
    "text",
    [
        "#" * (1 << 20) + "\nattn 1\n",
        "attn 1\n" + "\n" * (1 << 20),
        "attn 1\n" + "é" * (1 << 19),
        "x" * (1 << 21),
    ],
)
def test_files_past_the_bound(text: str) -> None:
    assert only(text + "\n").code == "E0108"


@pytest.mark.parametrize(
    "text",
    [
        "attn 1\n# " + "x" * 1_000_000 + "\nattention a { head_dim = 64 }\n",
        "attn 1\n" + "# c\n" * 250_000 + "attention a { head_dim = 64 }\n",
        "attn 1\nattention a { head_dim = 64 }" + " \t\n" * 340_000,
    ],
)
def test_a_megabyte_that_is_fine(text: str) -> None:
    started = time.thread_time()
    assert load_spec(text).name == "a"
    once = format_text(text)
    assert format_text(once) == once
    assert time.thread_time() - started < 10.0


@pytest.mark.parametrize(
    "text, code",
    [
        ("attn 1\n" + "attention a { head_dim = 64 }\n" * 20_000, "E0108"),
        ("attn 1\n" + "".join(f"def f{i} = {i}\n" for i in range(20_000)), "E0108"),
        (spec("".join(f"  param p{i}: int\n" for i in range(limits.DECLARATIONS + 5))), "E0108"),
        (spec(f"  param {'p' * 65}: int"), "E0108"),
        (spec("", '"' + "x" * limits.STRING_CHARS + '"\n'), "E0108"),
        (spec("  mask = kv_idx < " + "9" * 100_000), "E0111"),
        (spec("  score = s * 0." + "9" * 100_000), "E0111"),
        (spec("  score = s * 1.0e" + "9" * 100_000), "E0111"),
        ("attn " + "9" * 100_000 + "\n", "E0106"),
        ('attn 1\n"' + "\\" * 100_000, "E0104"),
        ("attn 1\n" + '"' * 100_001, "E0104"),
        ("attn 1\n" + "@" * 100_000, "E0102"),
        ("attn 1\nattention " * 1000, "E0101"),
    ],
)
def test_other_bounds(text: str, code: str) -> None:
    assert only(text).code == code


def test_names_and_strings_up_to_the_bound_are_fine() -> None:
    assert load_spec(spec(f"  param {'p' * 64}: int")).params[0].name == "p" * 64
    assert load_spec(spec("", '"' + "x" * (limits.STRING_CHARS - 2) + '"\n')).doc == "x" * (limits.STRING_CHARS - 2)


def test_too_many_files(tmp_path: Path) -> None:
    for i in range(limits.FILES + 3):
        (tmp_path / f"f{i}.attn").write_text(f'attn 1\ninclude "f{i + 1}.attn"\n')
    (tmp_path / "a.attn").write_text('attn 1\ninclude "f0.attn"\nattention a { head_dim = 64 }\n')
    with pytest.raises(AttnError) as caught:
        load_spec(tmp_path / "a.attn")
    assert caught.value.code == "E0108"


def test_included_megabytes(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"f{i}.attn").write_text("attn 1\n#" + "x" * 500_000)
    (tmp_path / "a.attn").write_text(
        "attn 1\n" + "".join(f'include "f{i}.attn"\n' for i in range(3)) + "attention a { head_dim = 64 }\n"
    )
    with pytest.raises(AttnError) as caught:
        load_spec(tmp_path / "a.attn")
    assert caught.value.code == "E0108"


NASTY = [
    "''' + __import__(\"os\").system(\"id\") + '''",
    '"""',
    "'''",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "## if plan",
    "#! x",
    "{# c #}",
    "\\n",
    "${x}",
    "%s %d",
    "\\",
    "é ✓ 漢",
    "</script>",
    "$(id)",
    "; import os",
    "\\N{DIGIT ONE}",
    "eval(1)",
]


@pytest.mark.parametrize("nasty", NASTY)
def test_nasty_text_in_docs_and_comments_is_data(nasty: str) -> None:
    quoted = nasty.replace("\\", "\\\\").replace('"', '\\"')
    text = f'attn 1\n# {nasty}\n"{quoted}"\nattention a {{ # {nasty}\n  head_dim = 64\n}}\n'
    loaded = load_spec(text)
    assert loaded.doc == nasty
    assert load_spec(print_spec(loaded)) == loaded
    once = format_text(text)
    assert once.count(f"# {nasty}") == 2 and load_spec(once) == loaded and format_text(once) == once


@pytest.mark.parametrize("nasty", NASTY)
@pytest.mark.parametrize(
    "where", ["param {}: int", "mask = {}", "target = {}", "schedule {{ order = {} }}", "tensor t: f32[{}]", "{}"]
)
def test_nasty_text_as_code_is_refused(nasty: str, where: str) -> None:
    found = check_text(spec("  " + where.format(nasty)))
    # Text that is a comment, or nothing at all, may leave a good spec behind; it has no node of it.
    if found:
        assert all(d.code[0] == "E" for d in found)
    else:
        assert nasty.startswith("#") and load_spec(spec("  " + where.format(nasty))).params == ()


@pytest.mark.parametrize(
    "c",
    ["\0", "\x08", "\x0b", "\x0c", "\x1b", "\x7f", "\x85", "\u200b", "\u2028", "\u202e", "\ufeff", "\ue000", "\ud800"],
)
def test_characters_that_could_hide_something(c: str) -> None:
    for text in (spec(f"  mask = true # {c}"), spec("", f'"{c}"\n'), spec(f"  mask{c} = true")):
        d = only(text)
        assert d.code == "E0102"
        for shown in (render(d), render(d, color=True), render_short(d), to_json([d])):
            assert c not in shown or c == "\x1b"
        assert "\x1b" not in render(d) and "\x1b" not in render_short(d)


def test_a_lone_carriage_return_is_no_line_end() -> None:
    assert only("attn 1\n# a\rmask\nattention a { head_dim = 64 }\n").code == "E0102"


def test_a_file_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b[31m\n::error::.attn"
    path.write_text("attn 1\nattention a { head_dim = 64 mask = qpos }\n")
    (d,) = check_text(path)
    assert "\x1b" not in render(d) and "\n" not in render_short(d) and "\n" not in render_github(d)


def test_expressions_given_by_themselves() -> None:
    for bad, code in [
        ("", "E0107"),
        ("a b", "E0101"),
        ("(" * 100, "E0108"),
        ("a\0", "E0102"),
        ("x" * (1 << 21), "E0108"),
    ]:
        with pytest.raises(AttnError) as caught:
            parse_expression(Source("<mask>", bad))
        assert caught.value.code == code
