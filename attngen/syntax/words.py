"""Words and phrases of the checker: which names mean what, how types and ranges are spoken of, which mend fits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from attngen import resources
from attngen.ir.functions import FUNCTIONS
from attngen.ir.spec import TensorDecl
from attngen.ir.types import Type
from attngen.syntax import ast
from attngen.syntax.faults import closest

#: Atoms of tile bounds and of chained kernels; no spec may read them.
HIDDEN_ATOMS = ("q_lo", "q_hi", "kv_lo", "kv_hi", "sink_weight")
#: Words of other libraries and languages, with what to write here.
FOREIGN = {
    "True": "write `true`",
    "False": "write `false`",
    "None": "leave the clause out",
    "inf": "there is no infinity: a `mask` takes a score out",
    "nan": "there is no nan",
    "batch_idx": "write `b`",
    "head": "write `h`",
    "head_idx": "write `h`",
    "q_head": "write `h`",
    "kv_head": "write `h_kv`",
    "k_idx": "write `kv_idx`",
    "j": "write `kv_idx`",
    "i": "write `q_idx` (row) or `q_pos` (position among the keys)",
    "seqlen_k": "write `seqlen_kv`",
    "seqlen": "write `seqlen_q` or `seqlen_kv`",
    "num_heads": "write `heads_q` or `heads_kv`",
    "pow": "write `x * x`, or `exp(y * log(x))`",
    "where": "write `a if condition else b`",
    "select": "write `a if condition else b`",
    "relu": "write `max(x, 0.0)`",
    "exp2": "write `exp(x * 0.6931471805599453)`",
    "rsqrt": "write `1 / sqrt(x)`",
    "sum": "a sum over keys is what attention does itself; other sums come in as a `tensor`",
    "softmax": "softmax is the default `normalizer`",
    "round": "write `floor(x + 0.5)`",
    "ceil": "write `-floor(-x)`",
    "sign": "write `1.0 if x > 0 else -1.0`",
    "sin": "no such function; put values into a `tensor`",
    "cos": "no such function; put values into a `tensor`",
}
_AXIS_INDEX = {
    "batch": "b",
    "heads_q": "h",
    "heads_kv": "h_kv",
    "seqlen_q": "q_idx",
    "seqlen_kv": "kv_idx",
    "head_dim_v": "d",
}


class _Library:
    """Names that the shipped std.attn defines, read when a fault asks."""

    def __contains__(self, name: object) -> bool:
        return name in _library_names()


LIBRARY = _Library()


@cache
def _library_names() -> frozenset[str]:
    return frozenset(re.findall(r"^def (\w+)", resources.read("grammar/std.attn"), re.M))


def callable_name(name: str) -> bool:
    """A function that a spec calls by name."""
    row = FUNCTIONS.get(name)
    return row is not None and row.callable_by_name and row.infix is None


def call_help(name: str, defs: Iterable[str]) -> str:
    """The mend for a call of something unknown."""
    if name in FOREIGN:
        return FOREIGN[name]
    known = [*(n for n in FUNCTIONS if callable_name(n)), *defs]
    if name in LIBRARY and name not in known:
        return 'add `include "std.attn"` at the top of the file'
    meant = closest(name, known)
    return f"did you mean `{meant}`?" if meant else "define it with `def`"


def arity(name: str) -> int:
    """How many arguments a function takes."""
    return len(FUNCTIONS[name].signatures[0][0])


def signature(name: str) -> str:
    """`clamp(a, b, c)`."""
    return f"{name}({', '.join('abc'[: arity(name)]) if arity(name) > 1 else 'x'})"


def operator(fn: str) -> str:
    """A function as the spec spells it, in backquotes."""
    row = FUNCTIONS[fn]
    return "`if … else`" if fn == "where" else f"`{row.infix or fn}`"


def listed(types: Sequence[Type]) -> str:
    """`int` and `bool`."""
    return " and ".join(f"`{t}`" for t in types)


def count(n: int, one: str, many: str) -> str:
    """1 axis, 2 axes."""
    return f"{n} {one if n == 1 else many}"


def wrong_operand(fn: str, types: Sequence[Type]) -> int | None:
    """The first operand whose type no signature takes at its place; None if only the combination is at fault."""
    wrong = []
    for i, t in enumerate(types):
        takes = {s[0][i] for s in FUNCTIONS[fn].signatures}
        if t not in takes and not (t is Type.INT and Type.FLOAT in takes):
            wrong.append(i)
    return wrong[0] if wrong else None


def type_help(fn: str, types: Sequence[Type]) -> tuple[str, ...]:
    """The mend for operands that a function does not take."""
    if fn in ("and", "or", "not") or (fn == "where" and types[0] is not Type.BOOL):
        return ("compare the number: `x != 0`",)
    if fn in ("floordiv", "mod") and Type.FLOAT in types:
        return ("`//` and `%` take ints; write `floor(a / b)` for floats, or `int(x)` to truncate",)
    if Type.BOOL in types:
        return (
            "turn a bool into a number with `1 if x else 0`",
            *(("join conditions with `and`",) if fn in ("lt", "le", "gt", "ge") else ()),
        )
    return ("see the function table in grammar/README.md",)


def convert_help(found: Type, wanted: str) -> tuple[str, ...]:
    """How to turn one type into another."""
    if found is Type.BOOL:
        return (f"write `{'1' if wanted == 'int' else '1.0'} if x else {'0' if wanted == 'int' else '0.0'}`",)
    if wanted == "bool":
        return ("compare it: `x != 0`",)
    if wanted == "int":
        return ("`int(x)` truncates, `int(floor(x))` rounds down",)
    return ("see the function table in grammar/README.md",)


def example_index(tensor: TensorDecl) -> str:
    """A likely index for each axis: `b, kv_idx`."""
    return ", ".join(_AXIS_INDEX.get(str(d), "0") for d in tensor.dims)


def range_of(bounds: Iterable[ast.Bound]) -> tuple[int | float | None, int | float | None]:
    """The tightest lower and upper bound."""
    lows = [b.low.value for b in bounds if b.low is not None]
    highs = [b.high.value for b in bounds if b.high is not None]
    return max(lows, default=None), min(highs, default=None)


def interval(low: object, high: object) -> str:
    """`at least 1`, `at most 8`, `in 1..8`."""
    if low is None:
        return f"at most {high}"
    return f"at least {low}" if high is None else f"in {low}..{high}"


def negative_note(value: object) -> tuple[str, ...]:
    """A word on -1, which other libraries use for `no bound`."""
    return ("no bound is said by leaving the term out; there is no -1",) if value == -1 else ()
