"""Straight-line form: shared and overlong subexpressions get names.

So emitted lines stay short and say things once.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from attngen.emit.exprs import PART, CutePrinter, bindings, is_literal, part_name
from attngen.ir.expr import Apply, Expr, Load, Param, children, params_of, rewrite, walk

#: Text wider than this is split.
WIDTH = 84
#: A shared subexpression of at least this many nodes gets a name; smaller ones read better in place.
SHARED_NODES = 5
#: Functions that cost a trip through the special-function unit: named whenever they repeat.
_COSTLY = frozenset(("exp", "log", "log2", "sqrt", "tanh", "sigmoid", "softplus", "div"))
#: Atoms that stand as arguments, by the kind of method that an expression is printed in.
ARGS = {
    "bounds": frozenset({"b", "h", "q_lo", "q_hi"}),
    "row": frozenset({"b", "h", "q_idx"}),
    "pair": frozenset({"b", "h", "q_idx", "kv_idx", "s"}),
    "output": frozenset({"o", "b", "h", "q_idx", "d", "sink_weight"}),
}


def _size(e: Expr) -> int:
    return sum(1 for _ in walk(e))


def straight_line(
    printer: CutePrinter, exprs: Sequence[Expr], given: frozenset[str], *, from_problem: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Lines `name = value` to put first, and one text for each of `exprs`.

    `given`: atoms that stand as arguments; with `from_problem` the others, params and tensors are bound from the
    kernel's `p`.
    """
    results = [printer.lowered(e) for e in exprs]
    parts: dict[str, Expr] = {}

    def name(part: Expr) -> None:
        fresh = Param(type=part.type, name=f"{PART}{len(parts) + 1}")

        def put(e: Expr) -> Expr:
            return rewrite(e, lambda n: fresh if n == part else n)

        results[:] = [put(e) for e in results]
        parts.update({word: put(e) for word, e in parts.items()})
        parts[fresh.name] = part

    while shared := _shared([*results, *parts.values()]):
        name(shared)
    while wide := _wide(printer, [*results, *parts.values()]):
        name(wide)
    lines: list[str] = []

    def place(word: str) -> None:
        for inner in params_of(parts[word]):
            if inner in waiting:
                waiting.remove(inner)
                place(inner)
        lines.append(f"{part_name(word)} = {fold(printer.plain(parts[word]))}")

    waiting = list(parts)
    while waiting:
        place(waiting.pop(0))
    bound = bindings([*parts.values(), *results], given) if from_problem else ()
    return (*bound, *lines), tuple(fold(printer.plain(e)) for e in results)


def statement(target: str, function: str, given: Sequence[str], room: int = 108) -> str:
    """`target = function(given)` of names as long as names may be: an argument a line where it does not fit `room`."""
    line = f"{target} = {function}({', '.join(given)})"
    return line if len(line) <= room else "\n".join([f"{target} = {function}(", *(f"    {x}," for x in given), ")"])


def fold(text: str, room: int = WIDTH + 16) -> str:
    """An expression that nothing could shorten, on several lines inside parentheses; one that fits `room` as it is.

    No text of an expression holds a string, so it may break at every space.
    """
    if len(text) <= room or "\n" in text:
        return text
    lines = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "(" + "\n".join(lines) + ")"


def _shared(work: Sequence[Expr]) -> Expr | None:
    """The largest subexpression that occurs more than once."""
    seen: Counter[Expr] = Counter(n for e in work for n in walk(e) if isinstance(n, Apply | Load))
    repeated = [n for n, count in seen.items() if count > 1 and (_size(n) >= SHARED_NODES or _is_costly(n))]
    return max(repeated, key=_size, default=None)


def _is_costly(e: Expr) -> bool:
    return isinstance(e, Apply) and e.fn in _COSTLY and not is_literal(*e.args)


def _wide(printer: CutePrinter, work: Sequence[Expr]) -> Expr | None:
    """A subexpression whose naming shortens the first overlong text: the largest one that itself fits a line."""
    for e in work:
        if len(printer.plain(e)) > WIDTH:
            inner = [n for n in walk(e) if n is not e and isinstance(n, Apply | Load) and len(children(n)) > 0]
            fitting = [n for n in inner if 12 < len(printer.plain(n)) <= WIDTH]
            return max(fitting, key=lambda n: len(printer.plain(n)), default=None)
    return None
