"""Clauses of words and entries: dtype, layout, normalizer, target, output, block_sparse, schedule, backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attngen.ir.spec import BackwardHints, BlockSparse, ScheduleHints
from attngen.ir.types import DType, Layout, Normalizer
from attngen.syntax import ast
from attngen.syntax.collect import Faults
from attngen.syntax.faults import closest, quoted

QKV_DTYPES = ("bf16", "fp16", "f32")
DTYPE_ALIASES = {
    "f16": "fp16",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp32": "f32",
    "float32": "f32",
    "float": "f32",
}
_TARGET = re.compile(r"sm_[0-9]{2,3}[a-z]?$")
_AUTO = object()

#: What each entry takes: "int low high", "bool", "shape", "words …"; `auto` where the block allows it.
SCHEDULE = {
    "tile": "shape",
    "tile_m": "int 1 1024",
    "tile_n": "int 1 1024",
    "stages": "int 1 16",
    "order": "words lpt linear",
    "persistent": "bool",
    "cluster": "shape",
    "split_kv": "int 1 1024",
    "pack_gqa": "int 1 8",
    "sm_margin": "int 0 1024",
    "pingpong": "bool",
}
OUTPUT = {"dtype": "words bf16 fp16 f32", "max_logit": "bool"}
BLOCK_SPARSE = {"q": "int 1 65536", "kv": "int 1 65536", "lists": "words mask given"}
BACKWARD = {"deterministic": "bool"}
BLOCKS = {"schedule": SCHEDULE, "output": OUTPUT, "block_sparse": BLOCK_SPARSE, "backward": BACKWARD}


def one_word(
    clause: ast.Words, kinds: tuple[str, ...], faults: Faults, aliases: dict[str, str] | None = None
) -> str | None:
    """The single word of `dtype`, `layout` or `normalizer`."""
    word = clause.word.text
    if len(clause.values) > 1:
        faults.add(
            "E0205",
            f"{word} takes one word, {len(clause.values)} given",
            clause.values[1].span,
            "one too many",
            helps=("keep one of them",),
        )
        return None
    return _known(clause.values[0], kinds, word, faults, aliases)


def _known(
    value: ast.Word, kinds: tuple[str, ...], what: str, faults: Faults, aliases: dict[str, str] | None = None
) -> str | None:
    if value.text in kinds:
        return value.text
    meant = (aliases or {}).get(value.text) or closest(value.text, kinds)
    helps = (f"did you mean `{meant}`?",) if meant else (f"write {quoted(kinds)}",)
    faults.add("E0205", f"{what} cannot be `{value.text}`", value.span, f"expected {quoted(kinds)}", helps=helps)
    return None


def dtype(clause: ast.Words, faults: Faults) -> DType | None:
    """Element type of q, k and v."""
    word = one_word(clause, QKV_DTYPES, faults, DTYPE_ALIASES)
    return DType(word) if word else None


def layout(clause: ast.Words, faults: Faults) -> Layout | None:
    """Memory layout."""
    word = one_word(clause, tuple(Layout), faults, {"thd": "varlen", "sbhd": "bshd", "nhd": "bshd", "hnd": "bhsd"})
    return Layout(word) if word else None


def normalizer(clause: ast.Words, faults: Faults) -> Normalizer | None:
    """What makes weights of scores."""
    word = one_word(clause, tuple(Normalizer), faults)
    return Normalizer(word) if word else None


def targets(clause: ast.Words, faults: Faults) -> tuple[str, ...]:
    """GPU architectures, in the order given."""
    seen: list[str] = []
    for value in clause.values:
        if not _TARGET.match(value.text):
            faults.add(
                "E0205",
                f"`{value.text}` is no target",
                value.span,
                "expected a name such as `sm_90a`",
                helps=("Hopper is `sm_90a`, Blackwell is `sm_100a`",),
            )
        elif value.text in seen:
            faults.add(
                "E0206", f"target `{value.text}` is given twice", value.span, "second time", helps=("keep one of them",)
            )
        else:
            seen.append(value.text)
    return tuple(seen)


def entries(block: ast.Block, faults: Faults) -> dict[str, Any]:
    """Checked values of a block's entries by name; `auto` entries are left out."""
    word, table = block.word.text, BLOCKS[block.word.text]
    values: dict[str, Any] = {}
    for entry in block.entries:
        name = entry.name.text
        if name not in table:
            meant = closest(name, table)
            faults.add(
                "E0207",
                f"`{word}` has no entry `{name}`",
                entry.name.span,
                "unknown entry",
                helps=(f"did you mean `{meant}`?" if meant else f"entries are {quoted(table)}",),
            )
            continue
        kind, *rest = table[name].split()
        value = _READERS[kind](entry, rest, faults)
        auto = isinstance(entry.value, ast.Word) and entry.value.text == "auto"
        if value is _AUTO and not (auto and word == "schedule"):
            faults.add(
                "E0208",
                f"`{name}` of `{word}` takes {_takes(table[name])}",
                _value_span(entry),
                "not such a value",
                helps=(f"write {_example(table[name])}" + (", or `auto`" if word == "schedule" else ""),),
            )
        elif value is not None and value is not _AUTO:
            values[name] = value
    return values


def _value_span(entry: ast.Entry) -> Any:
    return entry.value.span


def _int(entry: ast.Entry, rest: list[str], faults: Faults) -> Any:
    low, high = map(int, rest)
    if not isinstance(entry.value, ast.Number) or not isinstance(entry.value.value, int):
        return _AUTO
    if low <= entry.value.value <= high:
        return entry.value.value
    faults.add(
        "E0208",
        f"`{entry.name.text}` must be in {low}..{high}, found {entry.value.value}",
        entry.value.span,
        "out of range",
        helps=(f"give a value in {low}..{high}",),
    )
    return None


def _bool(entry: ast.Entry, _rest: list[str], _faults: Faults) -> Any:
    return entry.value.value if isinstance(entry.value, ast.Bool) else _AUTO


def _word(entry: ast.Entry, rest: list[str], faults: Faults) -> Any:
    if not isinstance(entry.value, ast.Word) or entry.value.text == "auto":
        return _AUTO
    return _known(
        entry.value, tuple(rest), f"`{entry.name.text}`", faults, DTYPE_ALIASES if entry.name.text == "dtype" else None
    )


def _shape(entry: ast.Entry, _rest: list[str], faults: Faults) -> Any:
    if not isinstance(entry.value, ast.Shape):
        return _AUTO
    sides: list[int | None] = []
    for side in (entry.value.first, entry.value.second):
        if side.text == "auto" and entry.name.text == "tile":
            sides.append(None)
        elif (
            side.text.isdigit()
            and len(side.text) < 6
            and 1 <= int(side.text) <= (1024 if entry.name.text == "tile" else 16)
        ):
            sides.append(int(side.text))
        else:
            bound = "1..1024, or `auto`" if entry.name.text == "tile" else "1..16"
            faults.add(
                "E0208",
                f"a side of `{entry.name.text}` must be in {bound}, found {side.text}",
                side.span,
                "out of range",
                helps=("write `128 x 128`" if entry.name.text == "tile" else "write `2 x 1`",),
            )
            return None
    return tuple(sides)


_READERS: dict[str, Callable[[ast.Entry, list[str], Faults], Any]] = {
    "int": _int,
    "bool": _bool,
    "words": _word,
    "shape": _shape,
}


def _takes(kind: str) -> str:
    head, *rest = kind.split()
    if head == "int":
        return f"a whole number in {rest[0]}..{rest[1]}"
    return {"bool": "`true` or `false`", "shape": "a shape such as `128 x 128`"}.get(head) or quoted(rest)


def _example(kind: str) -> str:
    head, *rest = kind.split()
    return {"bool": "`true` or `false`", "shape": "`128 x 128`", "int": "a whole number"}.get(head) or quoted(rest)


def schedule(block: ast.Block, faults: Faults) -> ScheduleHints:
    """The schedule clause; entries left out or `auto` are None."""
    values = entries(block, faults)
    tile = values.pop("tile", None)
    if tile is not None:
        for name, side in zip(("tile_m", "tile_n"), tile, strict=True):
            if name in values:
                at = next(e for e in block.entries if e.name.text == name)
                faults.add(
                    "E0206",
                    f"`{name}` is given twice",
                    at.name.span,
                    "also a side of `tile`",
                    helps=("keep one of them",),
                )
            elif side is not None:
                values[name] = side
    return ScheduleHints(**values, places=tuple((e.name.text, e.span) for e in block.entries))


def block_sparse(block: ast.Block, faults: Faults) -> BlockSparse | None:
    """The block_sparse clause; both block sides must be given."""
    values = entries(block, faults)
    given = {e.name.text for e in block.entries}
    for name in ("q", "kv"):
        if name not in given:
            faults.add(
                "E0208",
                f"`block_sparse` needs `{name}`",
                block.word.span,
                f"`{name}` is missing",
                helps=("write `block_sparse { q = 128, kv = 128 }`",),
            )
    if "q" not in values or "kv" not in values:
        return None
    return BlockSparse(q=values["q"], kv=values["kv"], given=values.get("lists") == "given", span=block.span)


def backward(block: ast.Block, faults: Faults) -> BackwardHints:
    """The backward clause."""
    return BackwardHints(**entries(block, faults), span=block.span)
