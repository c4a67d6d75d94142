"""The grid: what kernels are measured at, in named parts, with the usual sizes where a part has none of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attngen.bench.cells import Cell, usual_cell

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec

Changes = Mapping[str, object]
USUAL_HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))
USUAL_LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768), (1024, 4096, 16384)
BACKWARD_LENGTHS = (1024, 4096, 16384, 32768)
#: Lengths at which turns are compared with additions in any order.
DETERMINISTIC_LENGTHS = (4096, 8192, 16384)
#: Row tiles that see one to four KV tiles: what a row tile costs beside its walk shows most.
SHORT_LENGTHS = (128, 256, 512)
#: Query heads that share a KV head in `grouped` and `rows`.
GROUP = 8
#: One batch entry of eight heads: fewer row tiles than twice the SMs.
FEW_HEADS, FEW_LENGTHS = 8, (512, 1024, 2048, 4096)
#: Few rows against many keys, as where a sequence grows by a few tokens: batch, query heads, rows, keys.
ROWS_BATCH, ROWS_HEADS, ROWS, ROWS_KEYS = 8, 32, (1, 16, 128), (4096, 16384)
#: Head dims that are no power of two, or little used.
ODD_HEAD_DIMS = (72, 80, 96, 104, 112, 160, 224)


@dataclass(frozen=True)
class Part:
    """Cells that belong together. `cells(lengths, changes)`: `lengths` where the user named any, else the part's."""

    name: str
    what: str
    cells: Callable[[tuple[int, ...] | None, Changes], Iterator[Cell]]
    #: Which directions it is measured in.
    forward: bool = True
    backward: bool = False
    quick: bool = False


def example(name: str, changes: Changes, head_dim: int = 128, head_dim_v: int | None = None) -> AttentionSpec:
    """An example's spec with these head dims; `changes` are options, which come first."""
    from attngen import specs
    from attngen.options import Options
    from attngen.resources import read

    dims: dict[str, Any] = {"head_dim": head_dim, "head_dim_v": head_dim_v or head_dim}
    return specs.resolve(read(f"examples/{name}.attn"), None, Options.parse({**dims, **changes}))


def _usual(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    for head_dim, head_dim_v in USUAL_HEAD_DIMS:
        for mask in ("full", "causal"):
            spec = example(mask, changes, head_dim, head_dim_v)
            for length in lengths or USUAL_LENGTHS:
                yield usual_cell(spec, length)


def _short(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    for head_dim in (64, 128):
        for mask in ("full", "causal"):
            spec = example(mask, changes, head_dim)
            for length in SHORT_LENGTHS:
                yield usual_cell(spec, length)


def _grouped(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    spec = example("causal", changes)
    for length in lengths or QUICK_LENGTHS:
        yield usual_cell(spec, length, group=GROUP)


def _few(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    for mask in ("full", "causal"):
        spec = example(mask, changes)
        for length in FEW_LENGTHS:
            yield Cell(spec, 1, FEW_HEADS, FEW_HEADS, length, length)


def _rows(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    spec = example("causal", changes)
    for keys in ROWS_KEYS:
        for rows in ROWS:
            yield Cell(spec, ROWS_BATCH, ROWS_HEADS, ROWS_HEADS // GROUP, rows, keys)


def _dims(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    for head_dim in ODD_HEAD_DIMS:
        yield usual_cell(example("causal", changes, head_dim), 4096)


def _rising(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    for mask in ("full", "causal"):
        cell = usual_cell(example(mask, changes), 4096)
        yield replace(cell, title=f"{mask} rising", rising=True)


def _turns(lengths: tuple[int, ...] | None, changes: Changes) -> Iterator[Cell]:
    spec = example("causal", {**changes, "deterministic": True})
    for length in DETERMINISTIC_LENGTHS if lengths is None or len(lengths) > 1 else lengths:
        yield usual_cell(spec, length)


PARTS: tuple[Part, ...] = (
    Part("usual", "head dims 64 to 256, full and causal, 1K to 32K", _usual, backward=True, quick=True),
    Part("short", "128, 256 and 512 rows, head dims 64 and 128", _short),
    Part("grouped", "8 query heads a KV head, causal", _grouped, backward=True, quick=True),
    Part("few", "batch 1 of 8 heads, 512 to 4K", _few),
    Part("rows", "1 to 128 rows against 4K and 16K keys, 8 query heads a KV head", _rows),
    Part("dims", "head dims 72 to 224, causal 4K", _dims),
    Part("rising", "scores that grow along the walk, so that O is rescaled at every KV tile", _rising),
    Part("turns", "deterministic gradients, causal", _turns, forward=False, backward=True, quick=True),
)


def chosen(words: str | None, *, backward: bool, quick: bool) -> tuple[Part, ...]:
    """The parts of a direction whose names begin with one of the words (commas between); all where None, of a quick
    run the quick ones. KeyError for a word that is no part's.
    """
    parts = tuple(p for p in PARTS if (p.backward if backward else p.forward))
    if words is None:
        return tuple(p for p in parts if p.quick or not quick)
    wanted = [w.strip().lower() for w in words.split(",") if w.strip()]
    for word in wanted:
        if not any(p.name.startswith(word) for p in parts):
            raise KeyError(word)
    return tuple(p for p in parts if any(p.name.startswith(w) for w in wanted))


def cells(
    words: str | None, lengths: tuple[int, ...] | None, changes: Changes, *, backward: bool = False, quick: bool = False
) -> list[Cell]:
    """The cells of the chosen parts. `lengths` replace those of parts that have no lengths of their own."""
    if lengths is None and (quick or backward):
        usual: tuple[int, ...] | None = QUICK_LENGTHS if quick else BACKWARD_LENGTHS
    else:
        usual = lengths
    return [c for p in chosen(words, backward=backward, quick=quick) for c in p.cells(usual, changes)]
