"""Formatter and printers over generated specs: idempotent, meaning and comments kept, text parses back to its value."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attngen.diag.diagnostic import AttnError
from attngen.diag.span import Source
from attngen.ir.expr import Expr, Load, Param, atom, atoms_of, const
from attngen.ir.functions import FUNCTIONS, apply
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Type
from attngen.syntax import format_text, load_all, load_spec, print_expr, print_spec
from attngen.syntax.parser import parse_expression
from attngen.syntax.unparse import expression

B, I, F = Type.BOOL, Type.INT, Type.FLOAT  # noqa: E741
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HEAD = """attn 1
attention a {
  head_dim = 64
  param  n: int >= 1
  param  x: float = -0.5
  param  flag: bool = true
  tensor doc: i32[batch, seqlen_kv] sorted
  tensor bias: f32[heads_q, seqlen_q, seqlen_kv] grad
"""

_INDEX = st.sampled_from([atom("b"), atom("h"), atom("q_idx"), atom("kv_idx"), atom("q_pos")])


def _leaf(kind: Type) -> st.SearchStrategy[Expr]:
    if kind is B:
        return st.one_of(st.booleans().map(const), st.just(Param(type=B, name="flag")))
    if kind is I:
        doc = st.tuples(_INDEX, _INDEX).map(lambda i: Load(type=I, tensor="doc", dtype=DType.I32, indices=i))
        return st.one_of(st.integers(-(2**31), 2**31 - 1).map(const), _INDEX, st.just(Param(type=I, name="n")), doc)
    bias = st.tuples(_INDEX, _INDEX, _INDEX).map(lambda i: Load(type=F, tensor="bias", dtype=DType.F32, indices=i))
    floats = st.floats(-(2.0**127), 2.0**127, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30).map(const)
    return st.one_of(floats, st.just(Param(type=F, name="x")), st.just(atom("s")), bias)


#: Every way the function table has to make a value of a type.
_ROWS = {
    kind: [(name, wanted) for name, row in FUNCTIONS.items() for wanted, result in row.signatures if result is kind]
    for kind in Type
}


@st.composite
def expressions(draw: st.DrawFn, kind: Type, depth: int = 3) -> Expr:
    """An expression of a type, over every function of the table and leaves of every kind."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(_leaf(kind))
    name, wanted = draw(st.sampled_from(_ROWS[kind]))
    return apply(name, *(draw(expressions(w, depth - 1)) for w in wanted))


@st.composite
def specs(draw: st.DrawFn) -> str:
    """Text of a spec with generated mask and score, and a choice of other clauses."""
    lines = [HEAD, f"  mask = {print_expr(draw(expressions(B).filter(lambda e: 's' not in atoms_of(e))))}\n"]
    lines.append(f"  score = {print_expr(draw(expressions(F)))}\n")
    more = [
        "  let near = q_pos - kv_idx < n\n",
        "  sink = 0.0\n",
        "  epilogue = o * 0.5\n",
        "  target = sm_90a, sm_100a\n",
        "  schedule { tile = 128 x 64, order = lpt, persistent = auto }\n",
        "  output { dtype = f32, max_logit = true }\n",
        "  branch one {\n    mask = true\n  }\n  branch two {\n    weight = -0.5\n  }\n",
        "  layout = bhsd\n",
        "\n",
        "  block_sparse { q = 128, kv = 128, lists = given }\n",
        "  backward { deterministic = true }\n",
        "  dtype = fp16\n",
    ]
    chosen = draw(st.lists(st.sampled_from(more), unique=True, max_size=5))
    doc = draw(
        st.lists(st.sampled_from(['"One line."', '"A \\"quoted\\" word, a \\\\ and {{ braces }}."']), max_size=2)
    )
    body = "".join([*lines, *chosen])
    return body.replace("attention a", "\n".join([*doc, "attention a"])) + "}\n"


_TOKEN = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|(?:\d+|auto) x (?:\d+|auto)|\d+(?:\.\d+(?:e[+-]?\d+)?)?|\w+|\.\.|//|[<>=!]=|\n|[^\s\w]'
)


@st.composite
def messy(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A spec with blanks, line breaks and comments wherever they may stand, and the comments in it."""
    out, comments = [], []
    gaps = st.sampled_from(["", "", "", "", " ", "  ", "\n", "\t", "\r\n", "#"])
    for token in _TOKEN.findall(draw(specs())):
        if token != "\n":
            out.append(token)
        gap = draw(gaps) if token != "attn" else ""
        if gap == "#":
            comment = (
                f"# {draw(st.sampled_from(['why', 'a = b', '{{', 'mask', chr(34), 'é', 'x' * 90]))} {len(comments)}"
            )
            comments.append(comment)
            gap = f"  {comment}\n"
        out.append("\n" if token == "\n" and "\n" not in gap else gap or " ")
    return "".join(out), comments


def loaded(text: str) -> tuple[AttentionSpec, ...]:
    """Specs of a random text; one that divides by a literal zero, or with an impossible scale, is no example."""
    try:
        return load_all(text)
    except AttnError as fault:
        assume(fault.code not in ("E0311", "E0312"))
        raise


@QUICK
@given(messy())
def test_fmt_keeps_meaning_and_comments_and_is_idempotent(case: tuple[str, list[str]]) -> None:
    text, comments = case
    wanted = loaded(text)
    once = format_text(text)
    assert format_text(once) == once
    assert load_all(once) == wanted
    found = re.findall(r'"(?:[^"\\\n]|\\.)*"|(#[^\n]*)', once)
    assert [c for c in found if c] == comments or sorted(c for c in found if c) == sorted(comments)
    assert all(line == line.rstrip() for line in once.split("\n"))


@QUICK
@given(specs())
def test_print_spec_parses_back_to_an_equal_spec(text: str) -> None:
    (spec,) = loaded(text)
    printed = print_spec(spec)
    assert load_spec(printed) == spec
    assert print_spec(load_spec(printed)) == printed
    assert format_text(printed) == printed


@QUICK
@given(expressions(F))
def test_print_expr_parses_back_to_an_equal_expression(e: Expr) -> None:
    assert loaded(f"{HEAD}  score = {print_expr(e)}\n}}\n")[-1].score == e


@QUICK
@given(st.one_of(expressions(F), expressions(B), expressions(I)))
def test_parentheses_are_the_fewest(e: Expr) -> None:
    """Dropping any pair of parentheses changes the expression or its syntax; a call's and `-(-1)`'s are left alone."""
    text = print_expr(e)
    tree = expression(parse_expression(Source("<e>", text)))
    assert tree == text
    opens = [m.start() for m in re.finditer(r"(?<![\w-])\(", text)]
    for start in opens[:6]:
        depth, end = 0, start
        while True:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if depth == 0:
                break
            end += 1
        without = f"{text[:start]} {text[start + 1 : end]} {text[end + 1 :]}"
        try:
            other = parse_expression(Source("<e>", without))
        except Exception:
            continue
        assert expression(other) != text
