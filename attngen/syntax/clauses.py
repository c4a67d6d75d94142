"""Clauses whose value is an expression: what each must be, and what each may read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attngen.diag.diagnostic import Label
from attngen.ir.expr import Atom, Expr, Load, walk
from attngen.ir.functions import to_float
from attngen.ir.types import Type
from attngen.syntax import ast
from attngen.syntax.collect import Faults
from attngen.syntax.constants import value_of
from attngen.syntax.typing import Typer


@dataclass(frozen=True, slots=True)
class Rule:
    """Type of a clause's value (FLOAT takes ints too), the atoms it may not read, and why."""

    type: Type
    forbidden: tuple[str, ...]
    why: str
    mend: str


RULES = {
    "mask": Rule(
        Type.BOOL,
        ("s", "o", "d"),
        "a mask decides by position, before any score is known",
        "change scores in `score`",
    ),
    "score": Rule(
        Type.FLOAT,
        ("o", "d"),
        "scores exist before there is any output",
        "change the output in `epilogue`",
    ),
    "sink": Rule(
        Type.FLOAT,
        ("s", "kv_idx", "o", "d"),
        "a sink is one extra logit of a row, the same for every key",
        "read row values only: `sinks[h]`",
    ),
    "weight": Rule(
        Type.FLOAT,
        ("s", "kv_idx", "o", "d"),
        "a branch is weighed as a whole, a row at a time",
        "read row values only: `lam[h]`",
    ),
    "epilogue": Rule(
        Type.FLOAT,
        ("s", "kv_idx"),
        "the epilogue sees a finished output row, all keys summed",
        "change scores in `score`",
    ),
}


def evaluate(setting: ast.Setting, typer: Typer, faults: Faults) -> Expr | None:
    """Type the value of a clause and check it against its rule."""
    typed = typer.type(setting.value)
    if typed is None:
        return None
    e, word = typed.expr, setting.word.text
    rule = RULES.get(word, RULES["score"])  # scale: a number too; what it reads is checked by itself
    if not _has_type(e, setting, rule, faults):
        return None
    if word == "scale":
        _check_scale(e, setting, faults)
    else:
        _check_reads(e, setting, rule, faults)
    return to_float(e) if rule.type is Type.FLOAT else e


def _has_type(e: Expr, setting: ast.Setting, rule: Rule, faults: Faults) -> bool:
    word, at = setting.word.text, setting.value.span
    if rule.type is Type.BOOL:
        if e.type is Type.BOOL:
            return True
        mend = (
            "compare the score's position, not the score: `mask = kv_idx <= q_pos`"
            if e.type is Type.FLOAT
            else "compare the two positions: `mask = kv_idx <= q_pos`"
        )
        faults.add(
            "E0302",
            f"{word} must be true or false, found `{e.type}`",
            at,
            f"this has type `{e.type}`",
            notes=("a mask keeps a score where it is true and sets it to -inf elsewhere",),
            helps=(mend,),
        )
        return False
    if e.type is not Type.BOOL:
        return True
    mend = "put the condition into `mask`" if word == "score" else "write `1.0 if condition else 0.0`"
    faults.add("E0303", f"{word} must be a number, found `bool`", at, "this has type `bool`", helps=(mend,))
    return False


def _check_scale(e: Expr, setting: ast.Setting, faults: Faults) -> None:
    for node in walk(e):
        name = node.name if isinstance(node, Atom) else node.tensor if isinstance(node, Load) else None
        if name is not None:
            faults.add(
                "E0305",
                f"scale reads `{name}`",
                node.span or setting.value.span,
                "varies inside a launch",
                also=_within(node, setting),
                notes=("scale is one number for the whole call: params and constants only",),
                helps=("multiply in `score` instead: `score = s * …`",),
            )


def check_scale_value(scale: Expr, score: Expr | None, setting: ast.Setting, faults: Faults) -> None:
    """A scale of literals only is known now: it is finite, and positive where no score expression follows it."""
    value = value_of(scale)
    if value is None or (math.isfinite(value) and (value > 0.0 or not isinstance(score, Atom | None))):
        return
    if math.isfinite(value):
        why = "without a score expression it must be positive: row maxima are taken before scores are scaled"
        mend = "write the factor into the score: `score = -s`, say"
    else:
        why = "it multiplies every score, so it must be a finite number"
        mend = "write a positive number such as `1.0 / sqrt(float(head_dim))`, which is the default"
    faults.add("E0311", f"scale is {value:g}", setting.value.span, f"this is {value:g}", notes=(why,), helps=(mend,))


def _check_reads(e: Expr, setting: ast.Setting, rule: Rule, faults: Faults) -> None:
    word = setting.word.text
    for node in walk(e):
        if isinstance(node, Atom) and node.name in rule.forbidden:
            faults.add(
                "E0304",
                f"{word} may not read `{node.name}`",
                node.span or setting.value.span,
                "not known here",
                also=_within(node, setting),
                notes=(rule.why,),
                helps=(rule.mend,),
            )


def _within(node: Expr, setting: ast.Setting) -> tuple[Label, ...]:
    """The clause as a second place, where the node comes from a `def` or `let`."""
    span, at = node.span, setting.value.span
    if span is None or (span.source is at.source and at.start <= span.start and span.end <= at.end):
        return ()
    return (Label(at, f"read through this `{setting.word.text}`"),)
