"""Reasons: why a term of a mask is tested element by element, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

from attngen.ir.expr import Apply, Atom, Expr, Load, Param, walk
from attngen.ir.forms import Reason
from attngen.ir.linear import COMPARE, Linear, expr_of, linear_of
from attngen.ir.types import Type
from attngen.passes.clauses import MAX_CLAUSES, Draft
from attngen.passes.facts import Facts, is_positive
from attngen.passes.nnf import reads_key

#: What is left for terms that no interval says.
_LISTS = "`block_sparse { q = 128, kv = 128 }` skips the blocks that the values empty"
ROWS = ("q_idx", "q_pos")


def spelled(e: Expr) -> str:
    """`e` as a spec spells it."""
    from attngen.syntax import print_expr

    return print_expr(e)


def reasons_for(drafts: Iterable[Draft], whole: Iterable[Expr], facts: Facts) -> tuple[Reason, ...]:
    """One reason for each different residual term."""
    whole = set(whole)
    terms = dict.fromkeys(t for d in drafts for e in d.residual for t in ([e] if e in whole else _leaves(e)))
    return tuple(_reason(t, t in whole, facts) for t in terms)


def _leaves(e: Expr) -> Iterable[Expr]:
    if isinstance(e, Apply) and e.fn in ("and", "or"):
        for a in e.args:
            yield from _leaves(a)
    elif isinstance(e, Apply) and e.fn == "not":
        yield from _leaves(e.args[0])
    elif reads_key(e):
        yield e


def _reason(term: Expr, whole: bool, facts: Facts) -> Reason:
    why, mend = (
        (
            f"the mask needs more than {MAX_CLAUSES} key intervals per row",
            "write it as a union of fewer intervals, or leave it: it is tested element by element",
        )
        if whole
        else _explained(term, facts)
    )
    return Reason(term=spelled(term), why=why, mend=mend, span=term.span)


def _explained(term: Expr, facts: Facts) -> tuple[str, str]:
    for n in walk(term):
        if isinstance(n, Apply) and n.fn == "bit" and reads_key(n):
            return f"the bits of `{spelled(n.args[0])}` may keep any of their keys", (
                f"where they are about a stretch of the keys, bound it as well, `kv_idx >= first`; otherwise {_LISTS}"
            )
    loads = [n for n in walk(term) if isinstance(n, Load) and any(reads_key(i) for i in n.indices)]
    if loads:
        return _of_values(loads[0], facts)
    if isinstance(term, Apply) and term.fn in COMPARE and term.args[0].type is Type.FLOAT:
        return (
            "it compares floats, which no integer bound replaces exactly",
            "compare ints: `//` in the place of `/`, an int param in the place of a float, and what a rising function "
            "is applied to in the place of its value",
        )
    for n in walk(term):
        if not isinstance(n, Apply) or n.type is not Type.INT or not reads_key(n):
            continue
        if n.fn == "mod":
            return "a remainder of the key repeats along the row", (
                "use `//` where whole blocks are meant; where columns of a grid are, bound its rows as well, "
                "`kv_idx // width`, so that other rows are skipped"
            )
        if n.fn in ("floordiv", "mul"):
            others = n.args[1:] if n.fn == "floordiv" else n.args
            unsigned = [a for a in others if not reads_key(a) and not is_positive(a, facts)]
            if unsigned:
                what = "divisor" if n.fn == "floordiv" else "factor"
                return f"the {what} `{spelled(unsigned[0])}` may be zero or negative", _declare(unsigned[0])
            if all(reads_key(a) for a in n.args):
                return "it is not linear in the key", "write it as bounds on `kv_idx`"
    if isinstance(term, Apply) and term.fn in COMPARE:
        keyed = [t for t in (linear_of(term.args[0]) - linear_of(term.args[1])).terms if reads_key(t)]
        if len(keyed) > 1:
            both = " and ".join(f"`{spelled(expr_of(Linear({t: 1})))}`" for t in keyed[:2])
            return f"the key stands in several terms, {both}", "bring it to one term, e.g. `kv_idx // size`"
    return "no rule solves it for the key", "write it as bounds on `kv_idx`"


def _of_values(load: Load, facts: Facts) -> tuple[str, str]:
    """Of a term that reads a tensor by the key."""
    name = load.tensor
    why = f"which keys are kept depends on the values of tensor `{name}`"
    if load.type is Type.INT and name not in facts.sorted:
        return why, f"declare `{name}` sorted if it never decreases along its last axis; otherwise {_LISTS}"
    if load.type is Type.INT or any(isinstance(n, Atom) and n.name in ROWS for i in load.indices for n in walk(i)):
        ends = "give each row its first and last key instead, e.g. `kv_idx >= start[b, q_idx]`"
    else:
        ends = "where the kept keys are one run, give its ends instead, e.g. `kv_idx < length[b]`"
    return why, f"{ends}; otherwise {_LISTS}"


def _declare(e: Expr) -> str:
    if isinstance(e, Param):
        return f"declare `param {e.name}: int >= 1`"
    return f"write `max({spelled(e)}, 1)` if it is never less, or use a positive constant"
