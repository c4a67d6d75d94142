"""What is tuned: rows of cells of one spec, and the order of work that keeps the GPU and all cores busy.

A row asks for rough measurements twice and for a careful one (`tune.steps`). While kernels of one row compile, those
of another are timed; a row begins only when compilers would soon run dry, so that second rounds do not queue behind
first rounds of rows that nobody waits for yet.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attngen.bench.cells import Work, usual_cell
from attngen.bench.grid import GROUP, ODD_HEAD_DIMS, USUAL_HEAD_DIMS
from attngen.bench.tune import Ask, Outcome, Rates, steps
from attngen.bench.variants import CAP, slopes, starts
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.plan import PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.tuned import Direction, Tuned
from attngen.passes import few
from attngen.targets import sm90

if TYPE_CHECKING:
    from attngen.bench.cells import Captured
    from attngen.bench.tune_gpu import Gpu

#: Lengths of the grid: with those of few KV tiles for each row tile where tiles are many, without elsewhere.
LENGTHS, LONG_LENGTHS = (128, 512, 1024, 4096, 16384), (1024, 4096, 16384)
BACKWARD_LENGTHS = (512, 1024, 2048, 4096, 16384)
#: Windows, in keys, and the rows that they are measured in.
WINDOWS, WINDOW_ROWS = (128, 1024, 4096), 16384
#: Tiles of the first round and winners of the second, of a grid: fewer than of one spec.
CANDIDATES, FINALISTS = 8, 2


@dataclass(frozen=True)
class Row:
    """Cells of one spec, by `lengths`, the lengths that name their plans, ascending."""

    title: str
    spec: AttentionSpec
    lengths: tuple[int, ...]
    work: tuple[Work, ...]
    direction: Direction = "forward"

    def usual(self, planned: PlanSet | BackwardPlanSet) -> list[int]:
        """Which of the planner's plans a call of each cell takes, as a launch finds it."""
        found = [planned.index(n, n) for n in self.lengths]
        if not isinstance(planned, PlanSet):
            return found
        paces, cells = few.paces(planned), [w.cell for w in self.work]
        return [
            few.pick(paces, i, c.batch * c.heads_q, c.seqlen_q, min(n, c.seqlen_kv), sm90.SMS)
            for i, c, n in zip(found, cells, self.lengths, strict=True)
        ]


def row_of(title: str, work: Sequence[Work], direction: Direction = "forward") -> Row:
    """A row of work on one spec. Of cells that rows reach alike, whose plan is the same, the last is taken."""
    at = {plan_length(w): w for w in work}
    lengths = sorted(at)
    return Row(title, work[0].cell.spec, tuple(lengths), tuple(at[n] for n in lengths), direction)


def plan_length(work: Work) -> int:
    """The length that names the plan of a cell, as a launch finds it."""
    from attngen.jit.reach import Reach
    from attngen.search import plan

    cell, longest = work.cell, max(work.cell.seqlen_q, work.cell.seqlen_kv)
    reach = Reach.of(cell.spec)
    if reach is None or not few.paces(plan(cell.spec)):
        return longest
    keys = reach.keys([work.params[n] for n in reach.names], cell.seqlen_q, cell.seqlen_kv)
    return few.length_of_plan(cell.seqlen_q, cell.seqlen_kv, keys)


# ---- the grid --------------------------------------------------------------------------------------------------------


def spec_of(title: str, head_dims: tuple[int, int], pack: int = 1) -> AttentionSpec:
    """The spec of a title, FILE/BLOCK of the examples, with these head dims and query heads in a row tile."""
    from attngen import specs
    from attngen.options import Options
    from attngen.resources import read

    file, _, block = title.rpartition("/")
    options = Options.parse({"head_dim": head_dims[0], "head_dim_v": head_dims[1]})
    spec = specs.resolve(read(f"examples/{file}.attn"), block, options)
    return spec if pack == 1 else spec.replace(schedule=spec.schedule.replace(pack_gqa=pack))


def _by_length(
    title: str,
    head_dims: tuple[int, int],
    lengths: Sequence[int],
    captured: Captured | None = None,
    group: int = 1,
    direction: Direction = "forward",
    **params: float,
) -> Row:
    spec = spec_of(title, head_dims, group)
    return row_of(title, [Work(usual_cell(spec, n, group=group), params, captured) for n in lengths], direction)


def _by_window(title: str, head_dim: int) -> Row:
    cell = usual_cell(spec_of(title, (head_dim, head_dim)), WINDOW_ROWS)
    return row_of(title, [Work(cell, {"window": n}) for n in WINDOWS])


def _usual() -> Iterator[Row]:
    for dims in USUAL_HEAD_DIMS:
        for mask in ("full", "causal"):
            yield _by_length(f"{mask}/{mask}", dims, LENGTHS)


def _windows() -> Iterator[Row]:
    yield _by_window("mistral/mistral", 128)
    yield _by_window("gpt_oss/gpt_oss_local", 64)


def _documents() -> Iterator[Row]:
    yield _by_length("packing/packing", (128, 128), LONG_LENGTHS, starts)


def _grouped() -> Iterator[Row]:
    yield _by_length("causal/causal", (128, 128), LONG_LENGTHS, group=GROUP)


def _scores() -> Iterator[Row]:
    yield _by_length("alibi/alibi", (128, 128), LONG_LENGTHS, slopes)
    for head_dim in (128, 256):
        yield _by_length("gemma2/gemma2_global", (head_dim, head_dim), LONG_LENGTHS, cap=CAP)


def _dims() -> Iterator[Row]:
    for head_dim in ODD_HEAD_DIMS:
        yield _by_length("causal/causal", (head_dim, head_dim), LONG_LENGTHS)


def _backward() -> Iterator[Row]:
    for dims in USUAL_HEAD_DIMS:
        for mask in ("full", "causal"):
            yield _by_length(f"{mask}/{mask}", dims, BACKWARD_LENGTHS, direction="backward")


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "usual": _usual,
    "windows": _windows,
    "documents": _documents,
    "grouped": _grouped,
    "scores": _scores,
    "dims": _dims,
    "backward": _backward,
}


def rows(words: str | None) -> list[Row]:
    """Rows of the parts whose names begin with one of the words (commas between), of all where None; KeyError for a
    word that is no part's.
    """
    wanted = [w.strip().lower() for w in (words or "").split(",") if w.strip()]
    for word in wanted:
        if not any(name.startswith(word) for name in PARTS):
            raise KeyError(word)
    found = [make for name, make in PARTS.items() if not wanted or any(name.startswith(w) for w in wanted)]
    return [row for make in found for row in make()]


# ---- the order of work -----------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """A row at work: what it asks for, and the kernels that compile for it (kept: a careful round has them again)."""

    row: Row
    steps: Generator[Ask, Rates, Outcome]
    ask: Ask
    kernels: dict[str, Future[Any]] = field(default_factory=dict)

    def asked(self, gpu: Gpu) -> list[Future[Any]]:
        """The kernels of what is asked for, those that are new submitted."""
        found = []
        for p in self.ask.plans:
            key = p.model_dump_json()
            if key not in self.kernels:
                self.kernels[key] = gpu.compile(self.ask.alone(p))
            found.append(self.kernels[key])
        return found


def tune_all(
    rows: Sequence[Row],
    gpu: Gpu,
    target: str,
    chip: str,
    *,
    candidates: int = CANDIDATES,
    finalists: int = FINALISTS,
    known: Callable[[Row], Tuned | None] = lambda row: None,
) -> Iterator[tuple[Row, Outcome]]:
    """Tune row after row, and give each outcome as soon as it is known. `known`: a row's record of an earlier run.

    Raises: AttnError E04xx where no plan serves a row's spec.
    """
    left, active = list(rows), list[_Run]()
    while left or active:
        while left and sum(not f.done() for r in active for f in r.kernels.values()) <= gpu.jobs:
            row = left.pop(0)
            shape, tries = (row.spec, target, chip, row.lengths), (candidates, finalists)
            run = steps(*shape, *tries, row.title, row.direction, known(row), row.usual)
            active.append(_Run(row, run, next(run)))
            active[-1].asked(gpu)
        ready = next((r for r in active if all(f.done() for f in r.asked(gpu))), None)
        if ready is None:
            wait([f for r in active for f in r.asked(gpu) if not f.done()], return_when=FIRST_COMPLETED)
            continue
        try:
            ready.ask = ready.steps.send(
                gpu.rates(ready.row.work, ready.asked(gpu), ready.ask.rough, ready.row.direction)
            )
        except StopIteration as end:
            active.remove(ready)
            yield ready.row, end.value
