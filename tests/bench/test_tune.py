"""Tuning without a GPU: a measurement that is a formula, the choice it leads to, and the store of choices."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen import api, search, search_backward, tuned
from attngen.bench import tune, tune_grid
from attngen.bench.cells import Cell, Work
from attngen.bench.tune_gpu import Gpu
from attngen.diag.diagnostic import AttnError, error
from attngen.emit.module import emit
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.plan import PlanSet
from attngen.ir.spec import AttentionSpec
from attngen.ir.tuned import Choice, Direction, Tuned
from attngen.ir.types import Layout
from attngen.jit import device
from attngen.passes import few
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LENGTHS = (512, 1024, 4096, 16384)
CHIP = "NVIDIA H200"


@pytest.fixture
def causal() -> AttentionSpec:
    return load_spec(EXAMPLES / "causal.attn")


def by(formula: Callable[[Choice, int], float]) -> tune.Measure:
    """A measurement: TFLOP/s of a choice at a length."""

    def measure(ask: tune.Ask) -> tune.Rates:
        return [tuple(formula(tune.choice_of(p), n) for n in LENGTHS) for p in ask.plans]

    return measure


def tuned_to(spec: AttentionSpec, formula: Callable[[Choice, int], float]) -> tune.Outcome:
    return tune.tune(spec, "sm_90a", CHIP, LENGTHS, by(formula))


def test_the_fastest_is_chosen_and_built(causal: AttentionSpec) -> None:
    found = tuned_to(causal, lambda c, n: 500.0 + (c.tile_n == 96) * 50 + c.stages + c.pingpong)
    (choice,) = found.record.plans
    assert choice.tile_n == 96 and found.record.limits == ()
    best = max(r.tflops for r in found.record.rates)
    assert next(r.tflops for r in found.record.rates if r.choice == choice) == best
    plans = search.plan(causal, tuned=found.record)
    assert tuple(map(search.choice_of, plans.plans)) == (choice,)
    assert plans.plans != search.plan(causal).plans
    assert all(b > 0.08 for b in found.behind), "the planner takes another width"


def test_short_and_long_rows_may_take_plans_of_their_own(causal: AttentionSpec) -> None:
    found = tuned_to(causal, lambda c, n: 500.0 + 100.0 * ((c.tile_n == 64) == (n <= 1024)) - (c.tile_m != 128) * 9)
    record = found.record
    assert [c.tile_n == 64 for c in record.plans] == [True, False] and record.limits == (1024,)
    plans = search.plan(causal, tuned=record)
    assert [plans.plans[plans.index(n, n)].compute.tile_n == 64 for n in LENGTHS] == [True, True, False, False]


def test_what_rules_decide_is_measured_too(causal: AttentionSpec) -> None:
    """No ping-pong and the linear order win by far: the second round must find them, each on its own."""
    for wins in (lambda c: not c.pingpong, lambda c: c.order == "linear"):
        (choice,) = tuned_to(causal, lambda c, n, wins=wins: 400.0 + 100.0 * wins(c)).record.plans
        assert wins(choice), choice.text


def test_clusters_are_measured_too(causal: AttentionSpec) -> None:
    """And a kernel of them chooses by the number of row tiles, two a pair, as others do."""
    record = tuned_to(causal, lambda c, n: 400.0 + 100.0 * c.pairs).record
    assert all(c.pairs and "CTAs in pairs" in c.text for c in record.plans)
    found = search.plan(causal, tuned=record)
    assert {p.ctas for p in few.paces(found)} == {2} and found.small is not None
    assert all(p["ctas"] == 2 for p in emit(found).meta["paces"])
    ragged = causal.replace(layout=Layout.VARLEN)
    assert not any(r.choice.pairs for r in tuned_to(ragged, lambda c, n: 400.0 + c.tile_n).record.rates)


def test_a_difference_within_noise_is_no_second_plan(causal: AttentionSpec) -> None:
    found = tuned_to(causal, lambda c, n: 500.0 + (0.5 if (c.tile_n == 64) == (n <= 1024) else 0.0))
    assert len(found.record.plans) == 1


def test_every_plan_of_a_record_fits_one_file(causal: AttentionSpec) -> None:
    """Plans of one file share a skeleton, whatever is fastest: here each length prefers another."""
    found = tuned_to(causal, lambda c, n: 500.0 + 100.0 * (c.pingpong == (n <= 1024)))
    plans = search.plan(causal, tuned=found.record)
    assert len({search.skeleton(p) for p in plans.plans}) == 1
    assert tuple(map(search.choice_of, plans.plans)) == found.record.plans


def test_the_planner_is_compared_with_the_best(causal: AttentionSpec) -> None:
    own = {search.choice_of(p) for p in search.plan(causal).plans}
    found = tuned_to(causal, lambda c, n: 500.0 if c in own else 525.0)
    assert set(found.static) == own and found.behind == pytest.approx([0.05] * len(LENGTHS))


def test_a_plan_that_is_rejected_now_is_told_and_not_used(
    causal: AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    record = tuned_to(causal, lambda c, n: 500.0).record
    broken = record.replace(plans=(record.plans[0].replace(stages=40),))
    with caplog.at_level(logging.WARNING, "attngen.plan"):
        assert search.plan(causal, tuned=broken).plans == search.plan(causal).plans
    assert "rejects it" in caplog.text and "tune again" in caplog.text


# ---- the store -------------------------------------------------------------------------------------------------------


def record_of(spec: AttentionSpec, chip: str = CHIP) -> Tuned:
    return tune.tune(spec, "sm_90a", chip, LENGTHS, by(lambda c, n: 500.0 + c.tile_n)).record


def test_kept_found_replaced_forgotten(causal: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(causal)
    monkeypatch.setattr(tuned, "shipped", lambda target: ())
    assert tuned.find(tmp_path, "sm_90a", CHIP, causal) is None
    path = tuned.keep(tmp_path, "sm_90a", record)
    assert path == tmp_path / "tuned" / "sm_90a.json"
    assert tuned.find(tmp_path, "sm_90a", CHIP, causal) == record
    assert tuned.find(tmp_path, "sm_90a", "NVIDIA H100 PCIe", causal) is None
    tuned.keep(tmp_path, "sm_90a", record_of(causal, "NVIDIA H100 PCIe"))
    tuned.keep(tmp_path, "sm_90a", record.replace(lengths=(7,)))
    assert len(tuned.records(tmp_path, "sm_90a")) == 2
    found = tuned.find(tmp_path, "sm_90a", CHIP, causal)
    assert found is not None and found.lengths == (7,)
    assert tuned.forget(tmp_path, "sm_90a", causal) == 2 and tuned.records(tmp_path, "sm_90a") == ()


def test_a_class_is_the_meaning_and_nothing_else(causal: AttentionSpec) -> None:
    name = tuned.spec_class(causal)
    assert name == tuned.spec_class(causal.replace(name="other", doc=None))
    assert name == tuned.spec_class(causal.replace(schedule=causal.schedule.replace(sm_margin=2)))
    assert name != tuned.spec_class(causal.replace(head_dim_v=64))
    mistral = load_spec(EXAMPLES / "mistral.attn")
    (window,) = mistral.params
    assert tuned.spec_class(mistral) == tuned.spec_class(mistral.replace(params=(window.replace(default=7),)))


def test_a_spec_with_a_tile_of_its_own_is_not_tuned(causal: AttentionSpec, tmp_path: Path) -> None:
    tuned.keep(tmp_path, "sm_90a", record_of(causal))
    own = causal.replace(schedule=causal.schedule.replace(tile_m=128, tile_n=64))
    assert tuned.find(tmp_path, "sm_90a", CHIP, own) is None


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"schema": 9, "records": []}', '{"schema": 2, "records": [{"chip": 3}]}']
)
def test_a_damaged_store_costs_nothing_but_a_warning(
    causal: AttentionSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tuned.path_of(tmp_path, "sm_90a")
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "attngen.tuned"):
        assert tuned.records(tmp_path, "sm_90a") == ()
    assert str(path) in caplog.text
    tuned.keep(tmp_path, "sm_90a", record_of(causal))
    assert tuned.find(tmp_path, "sm_90a", CHIP, causal) is not None


def test_what_no_choice_depends_on_is_not_of_the_class(causal: AttentionSpec) -> None:
    name = tuned.spec_class(causal)
    assert name == tuned.spec_class(load_spec(EXAMPLES / "llama3.attn"))
    assert name == tuned.spec_class(causal.replace(layout="bhsd", dtype="fp16"))
    classes = [tuned.spec_class(load_spec(EXAMPLES / f"{e}.attn")) for e in ("full", "mistral", "alibi", "longformer")]
    assert len({name, *classes, tuned.spec_class(causal.replace(layout="varlen"))}) == 6
    packed = causal.replace(schedule=causal.schedule.replace(pack_gqa=8))
    assert tuned.is_tunable(packed) and tuned.spec_class(packed) != name
    assert tuned.spec_class(causal.replace(schedule=causal.schedule.replace(pack_gqa=1))) == name
    gpt_oss = load_spec(EXAMPLES / "gpt_oss.attn")
    learned = gpt_oss.replace(tensors=tuple(t.replace(grad=not t.grad) for t in gpt_oss.tensors))
    assert tuned.spec_class(learned) == tuned.spec_class(gpt_oss)


def test_a_record_of_packed_heads_is_their_own(causal: AttentionSpec) -> None:
    packed = causal.replace(schedule=causal.schedule.replace(pack_gqa=8))
    record = tuned_to(packed, lambda c, n: 500.0 + (c.tile_n == 96) * 50).record
    assert record.pack == 8
    assert {(p.schedule.pack, p.compute.tile_n) for p in search.plan(packed, tuned=record).plans} == {(8, 96)}


def test_the_store_comes_before_what_ships(
    causal: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(causal)
    (ships,) = tuned._read(tuned.export(tmp_path / "ships.json", record))
    assert {r.choice for r in ships.rates} == set(record.plans)
    monkeypatch.setattr(tuned, "shipped", lambda target: (ships,))
    assert tuned.find(tmp_path, "sm_90a", CHIP, causal) == ships
    assert tuned.find(tmp_path, "sm_90a", "NVIDIA H100 PCIe", causal) is None
    assert tuned.find(tmp_path, "sm_90a", CHIP, load_spec(EXAMPLES / "full.attn")) is None
    own = causal.replace(schedule=causal.schedule.replace(tile_m=128, tile_n=64))
    assert tuned.find(tmp_path, "sm_90a", CHIP, own) is None
    tuned.keep(tmp_path, "sm_90a", record)
    assert tuned.find(tmp_path, "sm_90a", CHIP, causal) == record


def test_a_store_that_cannot_be_written_is_an_error(causal: AttentionSpec, tmp_path: Path) -> None:
    (tmp_path / "tuned").write_text("a file where the folder should be")
    with pytest.raises(AttnError) as raised:
        tuned.keep(tmp_path, "sm_90a", record_of(causal))
    assert raised.value.diagnostics[0].code == "E0520"


def test_build_follows_the_record_of_its_gpu_and_compile_does_not(
    causal: AttentionSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attngen.settings import settings

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        plain = api.build(causal)
        record = tuned_to(causal, lambda c, n: 500.0 + (c.tile_n == 96) * 50).record
        tuned.keep(tmp_path, "sm_90a", record)
        assert api.build(causal).source == plain.source, "no GPU here: the planner's choice"
        monkeypatch.setattr(device, "has_gpu", lambda target: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: CHIP)
        monkeypatch.setattr("attngen.jit.kernel.Attention.compile", lambda self, **_: self)
        followed = api.build(causal)
        assert [p["tile_n"] for p in followed.source.meta["plans"]] == [96]
        assert tuple(map(search.choice_of, followed.plans)) == record.plans
        assert api.build(causal).source == followed.source, "from the remembered texts"
        assert [p["tile_n"] for p in api.compile(causal, only="forward").meta["plans"]] != [96]
        low = tune.tune(causal, "sm_90a", CHIP, LENGTHS, by(lambda c, n: 500.0 - c.tile_m), direction="backward").record
        steps = [p.name for p in search_backward.plan_backward(causal, tuned=low).plans]
        assert steps == ["32x128"]
        tuned.keep(tmp_path, "sm_90a", low)
        assert [p["name"] for p in api.build(causal).backward.source.meta["backward"]["plans"]] == steps
        assert [p["name"] for p in api.compile(causal, only="backward").meta["backward"]["plans"]] != steps
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 PCIe")
        assert api.build(causal).source == plain.source
    finally:
        settings.cache_clear()


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: str) -> object:
    from typer.testing import CliRunner

    from attngen.cli.main import app

    return CliRunner().invoke(app, ["tune", *arguments])


class Formula(Gpu):
    """A formula in place of a GPU: kernels are their plans."""

    made: list[Formula]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.asked: list[tuple[int, bool]] = []
        Formula.made.append(self)

    def compile(self, file: PlanSet | BackwardPlanSet) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(tune.choice_of(file.plans[0]))
        return done

    def rates(
        self, work: Sequence[Work], kernels: Sequence[Future[Any]], rough: bool, direction: Direction
    ) -> tune.Rates:
        self.asked.append((len(kernels), rough))
        self.work = work
        return [tuple(500.0 + k.result().tile_n + (k.result().tile_m == 64) * 50 for _ in work) for k in kernels]


@pytest.fixture
def formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Formula]]:
    """Commands measure by a formula; the GPUs that they made."""
    from attngen.cli import common
    from attngen.settings import settings

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    Formula.made = []
    monkeypatch.setattr(common, "need_gpu", lambda what: None)
    monkeypatch.setattr("attngen.bench.tune_gpu.Gpu", Formula)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: CHIP)
    yield Formula.made
    settings.cache_clear()


def test_the_command_end_to_end(tmp_path: Path, formula: list[Formula]) -> None:
    """Table, what was chosen, where it is kept."""
    spec = str(EXAMPLES / "causal.attn")
    done = run(spec, "--heads", "16", "--heads-kv", "2", "--batch", "3", "--jobs", "2")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["plan", "512", "1024", "4096", "16384"]
    assert sum("chosen" in line for line in lines) == 1 and any("planner's" in line for line in lines)
    assert "the planner's own choice is behind the best by" in done.stderr
    assert str(tuned.path_of(tmp_path, "sm_90a")) in done.stderr
    (gpu,) = formula
    assert [rough for _, rough in gpu.asked] == [True, True, False] and gpu.asked[0][0] == tune.CANDIDATES
    cell = gpu.work[0].cell
    assert (cell.batch, cell.heads_q, cell.heads_kv, gpu.jobs) == (3, 16, 2, 2)
    (record,) = tuned.records(tmp_path, "sm_90a")
    assert (record.spec, record.head_dims, record.pack) == ("causal/causal", (128, 128), 1)
    done = run(spec, "--json", "--no-keep")
    assert json.loads(done.stdout)["spec_class"] == record.spec_class
    assert run(spec, "--forget").exit_code == 0 and tuned.records(tmp_path, "sm_90a") == ()


def test_the_grid_end_to_end(tmp_path: Path, formula: list[Formula]) -> None:
    """Each cell with the planner's rate beside the tuned one, a summary, and a file of what gains, as it ships."""
    ships = tmp_path / "ships.json"
    done = run("--grid", "--only", "windows,grouped", "--export", str(ships))
    assert done.exit_code == 0, done.stderr
    header, *cells = done.stdout.splitlines()
    assert header.split()[:2] == ["cell", "planner's"]
    assert [c.rsplit(maxsplit=5)[0] for c in cells] == [
        *("mistral d128",) * 3, *("gpt_oss_local d64",) * 3, *("causal d128 8 heads a tile",) * 3
    ]  # fmt: skip
    assert [int(c.split()[-5]) for c in cells[:3]] == [256, 1152, 4224], "windows, and the rows of a tile"
    assert "planner's choice over the tuned one, 9 cells: geomean 0." in done.stderr
    kept = tuned.records(tmp_path, "sm_90a")
    assert [(r.spec, r.head_dims, r.pack) for r in kept] == [
        ("mistral/mistral", (128, 128), 1), ("gpt_oss/gpt_oss_local", (64, 64), 1), ("causal/causal", (128, 128), 8)
    ]  # fmt: skip
    assert [r.plans for r in tuned._read(ships)] == [r.plans for r in kept]
    assert json.loads(run("--grid", "--only", "grouped", "--no-keep", "--json").stdout)[0]["pack"] == 8


def test_the_backward_end_to_end(causal: AttentionSpec, tmp_path: Path, formula: list[Formula]) -> None:
    """Of steps there is one round and a careful one; the record is the backward's own, and a backward follows it."""
    spec = str(EXAMPLES / "causal.attn")
    done = run(spec, "--backward")
    assert done.exit_code == 0, done.stderr
    assert [rough for _, rough in formula[0].asked] == [True, False]
    record = tuned.find(tmp_path, "sm_90a", CHIP, causal, "backward")
    assert record is not None and record.direction == "backward" and tuned.find(tmp_path, "none", CHIP, causal) is None
    own = search_backward.plan_backward(causal)
    assert [c.tile_m for c in record.plans] == [64] and len(own.plans[-1:]) == 1
    followed = search_backward.plan_backward(causal, tuned=record)
    assert [p.name for p in followed.plans] == ["64x128"] and own.plans[-1] in followed.others
    turns = causal.replace(backward=causal.backward.replace(deterministic=True))
    assert tuned.find(tmp_path, "sm_90a", CHIP, turns, "backward") is None
    assert tuned.spec_class(turns) == tuned.spec_class(causal)
    assert run(spec, "--forget").exit_code == 0 and tuned.records(tmp_path, "sm_90a") == ()


def test_a_backward_that_does_not_fit_now_is_told_and_not_used(
    causal: AttentionSpec, caplog: pytest.LogCaptureFixture
) -> None:
    record = tune.tune(causal, "sm_90a", CHIP, LENGTHS, by(lambda c, n: 500.0), direction="backward").record
    broken = record.replace(plans=(record.plans[0].replace(tile_m=72),))
    with caplog.at_level(logging.WARNING, "attngen.plan"):
        found = search_backward.plan_backward(causal, tuned=broken)
    assert found == search_backward.plan_backward(causal)
    assert "tune again" in caplog.text


def test_a_plan_that_does_not_run_is_not_chosen(causal: AttentionSpec) -> None:
    """Not the planner's own either: what did not run has rate 0."""
    own = {search.choice_of(p) for p in search.plan(causal).plans}
    found = tuned_to(causal, lambda c, n: 0.0 if c in own else 500.0)
    assert not own & set(found.record.plans) and found.behind == (math.inf,) * len(LENGTHS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seqlen", "4096,1024"], "ascending"),
        (["--seqlen", "many"], "--seqlen takes lengths"),
        (["--param", "window=3"], "window"),
        (["--only", "usual"], "--grid"),
        (["--grid"], "takes no SPEC"),
    ],
)
def test_command_lines_that_make_no_sense(arguments: list[str], words: str) -> None:
    done = run(str(EXAMPLES / "causal.attn"), *arguments)
    assert done.exit_code == 2 and words in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "SPEC, or --grid"), (["--grid", "--only", "x"], "begins with"), (["--grid", "--batch", "2"], "shapes")],
)
def test_command_lines_without_a_spec(arguments: list[str], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2 and words in done.stderr


def test_rows_of_the_grid_are_what_their_titles_say() -> None:
    """A record that ships is found again by its title: file and block of an example, head dims, packed heads."""
    rows = tune_grid.rows(None)
    for row in rows:
        named = tune_grid.spec_of(row.title, (row.spec.head_dim_qk, row.spec.head_dim_v), tuned.pack_of(row.spec))
        assert tuned.spec_class(named) == tuned.spec_class(row.spec)
        assert len(row.work) == len(row.lengths) >= 3 and list(row.lengths) == sorted(row.lengths)
    assert len({tuned.spec_class(row.spec, row.direction) for row in rows}) == len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run(str(EXAMPLES / "causal.attn"))
    assert done.exit_code == 3 and "tuning needs a CUDA GPU" in done.stderr


def test_a_spec_that_leaves_nothing_to_choose(tmp_path: Path) -> None:
    spec = tmp_path / "own.attn"
    spec.write_text("attn 1\n\nattention own {\n  head_dim = 64\n  schedule { tile = 128 x 128 }\n}\n")
    done = run(str(spec))
    assert done.exit_code == 2 and "nothing to choose" in done.stderr


@pytest.mark.parametrize(
    "record", tuned.shipped("sm_90a"), ids=lambda r: f"{r.spec} {r.head_dims} {r.pack} {r.direction}".replace(" ", "-")
)
def test_what_ships_is_what_builds_take(record: Tuned, tmp_path: Path) -> None:
    """A record whose plans this attngen cannot build any more, or that no spec finds, would be lost in silence."""
    spec = tune_grid.spec_of(record.spec, record.head_dims, record.pack)
    found = tuned.find(tmp_path, "sm_90a", record.chip, spec, record.direction)
    assert found == record, "its class moved: `attngen regen`"
    plan = search.plan if record.direction == "forward" else search_backward.plan_backward
    plans = plan(spec, tuned=record)
    taken = [tune.choice_of(p) for p in plans.plans]
    assert [by_rule(c, t) for c, t in zip(record.plans, taken, strict=True)] == taken
    assert plans.limits == record.limits


def by_rule(recorded: Choice, taken: Choice) -> Choice:
    """What a record from before there was a choice of maxima leaves to the rule, as it was taken."""
    return recorded.replace(maxima=taken.maxima) if recorded.maxima is None else recorded


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on the GPU runs the CPU reference, uncompiled."""
    from attngen.bench import runner

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("attngen.jit.kernel.Attention.compile", lambda self, *_, **__: self)
    monkeypatch.setattr(runner, "arguments", partial(runner.arguments, device="cpu"))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_plans_are_timed_and_compared(
    causal: AttentionSpec, on_cpu: None, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both directions, from plans to rates; of a plan that computes something else, or does not compile, the rate is
    0, and why is told.
    """
    told: list[str] = []
    gpu = Gpu("sm_90a", rounds=1, jobs=2, say=told.append)
    monkeypatch.setattr("attngen.bench.timing.SLOT_MS", 1.0)
    row = tune_grid.row_of("causal/causal", [Work(Cell(causal, 1, 2, 1, n, n)) for n in (16, 32)], direction)
    ask = next(tune.steps(causal, "sm_90a", CHIP, row.lengths, 2, direction=direction))
    good = gpu.compile(ask.alone(ask.plans[0]))
    other, broken = Future[Any](), Future[Any]()
    other.set_result(lambda q, k, v: good.result()(q, k, v, scale=3.0))
    broken.set_exception(error("E0513", "the compiler died"))
    rates = gpu.rates(row.work, [good, other, broken], False, row.direction)
    assert [len(r) for r in rates] == [2, 2, 2] and all(rates[0]) and not any((*rates[1], *rates[2]))
    assert sum("something else" in line for line in told) == sum("compiler died" in line for line in told) == 2
    gpu.close()
