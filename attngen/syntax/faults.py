"""Syntax faults in the reader's words: what was found, what may stand there, and the mend for common slips."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from lark import UnexpectedToken

from attngen.diag.diagnostic import AttnError, Diagnostic, Label, error
from attngen.diag.span import Source, Span

_SPELLED = {
    "NAME": "a name",
    "INT": "a whole number",
    "FLOAT": "a number",
    "STRING": "a text in double quotes",
    "SHAPE": "a shape such as `128 x 64`",
    "$END": "the end of the file",
    "COMPARE": "a comparison",
    "SLASH2": "`//`",
    "PLUS": "`+`",
    "MINUS": "`-`",
    "STAR": "`*`",
    "SLASH": "`/`",
    "PERCENT": "`%`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "COMMA": "`,`",
    "EQUALS": "`=`",
    "COLON": "`:`",
    "LBRACE": "`{`",
    "RBRACE": "`}`",
    "DOTS": "`..`",
    "AT_LEAST": "`>=`",
    "AT_MOST": "`<=`",
}
#: Terminals that stand for one idea when all of the second column may come next.
_GROUPS = (
    (
        "an expression",
        {"INT", "NAME", "LPAR", "MINUS"},
        {"INT", "FLOAT", "TRUE", "FALSE", "NAME", "LPAR", "MINUS", "NOT"},
    ),
    (
        "an operator",
        {"PLUS", "STAR"},
        {"PLUS", "MINUS", "STAR", "SLASH", "SLASH2", "PERCENT", "COMPARE", "AND", "OR", "IF", "LPAR", "LSQB"},
    ),
)
_PUNCTUATION = frozenset(_SPELLED) - {"$END"}
#: Slips, by the text at the fault (longest first), and what to write instead.
_SLIPS = (
    ("&&", "write `and`"),
    ("||", "write `or`"),
    ("!", "write `not`, or `!=` for unequal"),
    ("**", "write `x * x`, or `exp(y * log(x))`"),
    ("<>", "write `!=` for unequal"),
    ("^", "write `x * x`, or `exp(y * log(x))`"),
    ("&", "write `and`"),
    ("|", "write `or`"),
    ("=", "write `==` to compare"),
    ("'", "write texts in double quotes"),
    (";", "a new line ends a clause"),
    ("?", "write `a if condition else b`"),
    ("~", "write `not`"),
    (".", "write a digit on each side of the point: `0.5`, `2.0`"),
)
#: How a declaration is written, where a line that begins as one goes wrong.
_DECLARED = {
    "param": "write `param window: int >= 1 = 128`; bounds are `>= 1`, `<= 8` or `in 1..8`, both ends included",
    "tensor": "write `tensor bias: f32[heads_q, seqlen_q, seqlen_kv]`, then `grad` or `sorted`",
}
#: Slips whose second character is what cannot stand there.
_TOO_LATE = ("**", "<>")


def spelled(terminal: str) -> str:
    """How a reader would call a terminal."""
    return _SPELLED.get(terminal, f"`{terminal.lower()}`")


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely was meant to be."""
    names = sorted(known)
    lowered = {n.lower(): n for n in reversed(names)}
    found = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def one_of(words: Iterable[str]) -> str:
    """`a`, `b` or `c`."""
    items = list(words)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} or {items[-1]}"


def quoted(words: Iterable[str]) -> str:
    """one_of, each in backquotes."""
    return one_of(f"`{w}`" for w in words)


def bad_character(source: Source, at: int) -> AttnError:
    """A character that starts no token."""
    text = source.text
    c = text[at]
    if c == '"':
        line_end = text.find("\n", at)
        end = len(text) if line_end < 0 else line_end
        return error(
            "E0104",
            "text is not closed on its line, or holds an unknown escape",
            at=Span(source, at, end),
            label="starts here",
            notes=('inside a text only `\\"` and `\\\\` are escapes',),
            helps=('close it with `"`; several texts in a row make several lines',),
        )
    if c.isascii() and c.isdigit():
        end = at
        while end < len(text) and (text[end].isalnum() or text[end] in "_."):
            end += 1
        return error(
            "E0102",
            f"`{text[at:end][:40]}` is no number",
            at=Span(source, at, end),
            label="malformed number",
            helps=("write `128`, `0.5` or `1.0e-5`; a name starts with a letter",),
        )
    help_ = _slip(text, at) or "names, numbers and operators are ASCII; see grammar/README.md"
    return error(
        "E0102",
        f"unexpected character `{c}`",
        at=Span(source, at, at + 1),
        label="not part of the language",
        helps=(help_,),
    )


def bad_token(source: Source, fault: UnexpectedToken, unclosed: list[Span]) -> AttnError:
    """A token that may not stand where it stands."""
    accepts = set(fault.accepts or fault.expected)
    token = fault.token
    if token.type == "$END":
        return _end_of_file(source, accepts, unclosed)
    at = Span(source, token.start_pos or 0, token.end_pos or 0)
    if accepts == {"ATTN"}:
        return error(
            "E0105",
            "the language line is missing",
            at=at,
            label="expected `attn 1` before this",
            notes=("it says which version of the language the file is written in",),
            helps=("make `attn 1` the first line",),
        )
    words = {t.lower() for t in accepts - _PUNCTUATION - {"$END"}}
    before = source.text[: at.start].rpartition("\n")[2].strip()
    same_line = bool(before) and not before.endswith(("{", "}"))
    if token[:1].isalpha() and not same_line and words & {"mask", "def", "sink"}:
        return _unknown_word(str(token), at, words)
    expected = _expected(accepts, same_line)
    shown = spelled(token.type) if token.type in ("LBRACE", "RBRACE") else f"`{token[:40]}`"
    help_ = _slip(source.text, at.start)
    if token.type == "INT" and accepts == {"NAME"} and source.text[: at.start].rstrip().endswith("v ="):
        help_ = "`head_dim = 192, v = 128` gives V its own head dim; `v = k[0:512]` makes V a view of K"
    elif token.type == "GRAD" and "EQUALS" in accepts:
        help_ = "only tensors take `grad`; declare a trainable scalar as `tensor x: f32[1] grad` and read `x[0]`"
    elif same_line and (declared := _DECLARED.get(before.split()[0])):
        help_ = declared
    elif accepts == {"EQUALS"} and before.startswith("let "):
        help_ = "write `let distance = q_pos - kv_idx`: a let has the type of its expression"
    elif accepts == {"EQUALS"} and source.text[: at.start].rstrip().endswith(" x"):
        help_ = "a shape has two sides: `128 x 128`"
    elif token.type == "IN":
        help_ = "write `low <= x < high`"
    open_bracket = unclosed[-1:] if accepts & {"RPAR", "RSQB"} and token.type in ("RBRACE", "EQUALS", "LBRACE") else []
    return AttnError(
        Diagnostic(
            "E0101",
            f"expected {expected}, found {shown}",
            Label(at, f"expected {expected}"),
            tuple(Label(span, "opened here") for span in open_bracket),
            helps=(help_,) if help_ else (),
        )
    )


def _unknown_word(word: str, at: Span, words: set[str]) -> AttnError:
    inner = "a branch or segment" if "weight" in words else "an attention block"
    place = "a file" if "def" in words else inner
    known = sorted(words - {"and", "or", "if"})
    meant = closest(word, known)
    helps = (f"did you mean `{meant}`?",) if meant else (f"write {quoted(known)}",)
    return error(
        "E0103",
        f"unknown word `{word[:40]}` in {place}",
        at=at,
        label="no clause starts with this word",
        helps=helps,
    )


def _end_of_file(source: Source, accepts: set[str], unclosed: list[Span]) -> AttnError:
    end = len(source.text.rstrip())
    at = Label(Span(source, end, end), f"expected {_expected(accepts, False)}")
    if accepts == {"ATTN"}:
        return error(
            "E0105", "the file is empty", at=at.span, label="expected `attn 1`", helps=("make `attn 1` the first line",)
        )
    if unclosed:
        bracket = source.text[unclosed[-1].start]
        return AttnError(
            Diagnostic(
                "E0107",
                f"the file ends before `{bracket}` is closed",
                at,
                (Label(unclosed[-1], "opened here"),),
                helps=(f"add `{ {'(': ')', '[': ']', '{': '}'}[bracket] }`",),
            )
        )
    return AttnError(Diagnostic("E0107", "the file ends too early", at))


def _expected(accepts: set[str], same_line: bool) -> str:
    rest, words = set(accepts), []
    for name, needs, covers in _GROUPS:
        if needs <= rest:
            words.append(name)
            rest -= covers
    if {"MASK", "PARAM"} <= rest:
        words.append("a new line" if same_line and words else "a clause")
        rest -= {t for t in rest if t not in _PUNCTUATION}
    elif {"DEF", "ATTENTION"} <= rest:
        words.append("`def`, `include` or `attention`")
        rest -= {"DEF", "ATTENTION", "INCLUDE", "STRING", "$END"}
    words += [spelled(t) for t in sorted(rest)]
    # Nothing is left where an expression given by itself goes on past its end.
    return one_of(words or ["an operator", "the end of the expression"])


def _slip(text: str, at: int) -> str | None:
    if text[at - 1 : at + 1] == "==":
        return "write one `=` to give a clause its value"
    if text[at - 1 : at + 1] in _TOO_LATE:  # the first of the two is an operator by itself
        at -= 1
    return next((mend for slip, mend in _SLIPS if text.startswith(slip, at)), None)
