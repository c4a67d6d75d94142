"""The benchmark's parts that need no GPU: what is recognised, how FlexAttention's mods are made, counting, reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from attngen import samples
from attngen.bench import cells, flex, grid, report
from attngen.bench.kept import kept
from attngen.bench.peers import PEERS, Case, Unsupported
from attngen.bench.recognize import features
from attngen.bench.runner import Row
from attngen.cli import common
from attngen.ref import dense
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str):
    return load_spec(EXAMPLES / f"{name}.attn")


@pytest.mark.parametrize(
    ("name", "mask", "window", "cap", "sink"),
    [
        ("full", "full", None, None, None),
        ("causal", "causal", None, None, None),
        ("llama3", "causal", None, None, None),
        ("mistral", "window", 4096, None, None),
        ("gemma2", "window", 4096, 50.0, None),
        ("gpt_oss", "window", 128, None, "sinks"),
        ("block_causal", "other", None, None, None),
        ("packing", "other", None, None, None),
        ("modernbert", "other", None, None, None),
        ("off_by_one", "causal", None, None, "other"),
        ("alibi", "causal", None, None, None),
    ],
)
def test_recognition(name, mask, window, cap, sink) -> None:
    spec = example(name)
    f = features(spec, samples.params(spec))
    assert (f.mask, f.window, f.softcap, f.sink) == (mask, window, cap, sink)


def test_top_left_causal_is_not_taken_for_bottom_right() -> None:
    spec = load_spec("attn 1\nattention x {\n  head_dim = 64\n  mask = kv_idx <= q_idx\n}\n")
    assert features(spec, {}).mask == "other"


def test_scale_is_passed_on() -> None:
    spec = example("mla")
    assert features(spec, samples.params(spec)).scale == pytest.approx(1.3688879**2 / 192**0.5)


def case_of(name: str, rows: int, columns: int, /, **params: int | float) -> tuple[Case, dict]:
    spec = example(name)
    cell = cells.Cell(spec, 2, 4, 2, rows, columns)
    shape = samples.Shape(2, 4, 2, rows, columns)
    values = samples.params(spec, params)
    tensors = samples.tensors(spec, shape)
    q, k, v = samples.qkv(spec, shape, dtype=torch.float32)
    case = Case(cell, features(spec, values), q, k, v, values, tensors)
    return case, {"params": values, "tensors": tensors}


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("causal", {}),
        ("gemma2", {"keys": 20, "cap": 2.0}),
        ("alibi", {}),
        ("packing", {}),
        ("prefix_lm", {}),
        ("t5", {}),
        ("block_causal", {"block": 8}),
        ("longformer", {"half": 5}),
        ("left_padding", {}),
        ("bias", {}),
    ],
)
def test_flex_mods_mean_what_the_spec_means(name, params) -> None:
    """Scores from mask_mod and score_mod, applied element by element, give the dense O."""
    case, arguments = case_of(name, 33, 33, **params)
    mask_mod, score_mod = flex.mods(case)
    b, h, q_idx, kv_idx = torch.meshgrid(
        torch.arange(2), torch.arange(4), torch.arange(33), torch.arange(33), indexing="ij"
    )
    k, v = (x.repeat_interleave(2, 2) for x in (case.k, case.v))
    s = torch.einsum("bqhd,bkhd->bhqk", case.q, k) * case.features.scale
    s = score_mod(s, b, h, q_idx, kv_idx) if score_mod else s
    s = s.masked_fill(~mask_mod(b, h, q_idx, kv_idx), -torch.inf) if mask_mod else s
    o = torch.einsum("bhqk,bkhd->bqhd", torch.nan_to_num(s.softmax(-1)), v)
    exact = dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o
    assert float((o - exact).abs().max()) < 2e-5


def test_flex_runs_them() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    case, arguments = case_of("alibi", 32, 32)
    mask_mod, score_mod = flex.mods(case)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))

    def both(s, b, h, q_idx, kv_idx):
        return torch.where(mask_mod(b, h, q_idx, kv_idx), score_mod(s, b, h, q_idx, kv_idx), -torch.inf)

    o = flex_attention(q, k, v, score_mod=both, scale=case.features.scale, enable_gqa=True).transpose(1, 2)
    assert float((o - dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o).abs().max()) < 2e-5


def test_every_row_of_the_function_table_has_a_flex_spelling() -> None:
    from attngen.ir.functions import FUNCTIONS

    assert set(flex._SPELLING) == set(FUNCTIONS)


@pytest.mark.parametrize(
    ("name", "params", "count"),
    [
        ("causal", {}, 500500),
        ("mistral", {"window": 128}, 119872),
        ("modernbert", {"half": 64}, 124840),
        ("llama4", {"chunk": 256}, 125716),
        ("block_causal", {"block": 32}, 515904),
        ("full", {}, 1000000),
    ],
)
def test_kept_pairs(name, params, count) -> None:
    spec = example(name)
    assert kept(cells.Cell(spec, 1, 1, 1, 1000, 1000), samples.params(spec, params), {}).pairs == count


def test_flops_count_kept_pairs_only() -> None:
    cell = cells.usual_cell(example("causal"), 1024)
    assert (cell.batch, cell.heads_q, cell.heads_kv) == (32, 16, 16)
    assert cell.flops(1024 * 1025 / 2) == pytest.approx(4 * 32 * 16 * 128 * 1024 * 1025 / 2)


@pytest.mark.parametrize("name", ["fa3", "fa4", "cudnn", "fa2"])
def test_peers_refuse_what_they_have_no_word_for(name) -> None:
    for spec in ("packing", "block_causal", "alibi", "off_by_one"):
        with pytest.raises(Unsupported):
            PEERS[name].prepare(case_of(spec, 16, 16)[0])


def test_sdpa_peers_refuse_causal_with_other_alignment() -> None:
    with pytest.raises(Unsupported, match="top-left"):
        PEERS["cudnn"].prepare(case_of("causal", 16, 32)[0])


def test_sdpa_call_is_the_same_attention() -> None:
    """On CPU torch's math backend stands in for the GPU ones: layout, scale, GQA and mask are passed on rightly."""
    from attngen.bench.peers import _sdpa

    for name in ("full", "causal"):
        case, arguments = case_of(name, 40, 40)
        got = _sdpa("MATH")(case)()
        exact = dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o
        assert got.shape == exact.shape and float((got - exact).abs().max()) < 1e-5


def rows() -> list[Row]:
    made = []
    for i, (ours, peer) in enumerate(((700.0, 650.0), (300.0, 400.0))):
        r = Row(f"causal d128 {i + 1}K b32 h16", "causal", {"batch": 32}, 0.5, ceiling=720.0)
        r.tflops = {"attngen": ours, "fa3": peer}
        r.spread = {k: (v - 10, v + 6) for k, v in r.tflops.items()}
        r.milliseconds = {k: 1.0 for k in r.tflops}
        r.absent = {"fa4": "not installed", **({"flex": "sink"} if i else {})}
        made.append(r)
    return made


def test_report() -> None:
    made = rows()
    header, body = report.cells(made)
    assert header == ["cell", "attngen", "fa3", "attngen / best peer", "matmul"]
    assert body[0][1:] == ["700 ±8", "650 ±8", "1.077", "720"] and body[1][3] == "0.750"
    assert report.absences(made) == ["fa4: not installed", "flex: sink (causal d128 2K b32 h16)"]
    document = report.as_json(made, {"gpu": "x"}, {"rounds": 3})
    json.dumps(document)
    assert document["rows"][0]["ratio_to_best_peer"] == pytest.approx(700 / 650)
    assert "| causal d128 1K b32 h16 | 700 ±8 |" in report.markdown(made, {"gpu": "x"})


def test_bars_are_as_high_as_their_values() -> None:
    svg = report.picture(rows(), {"gpu": "H200"}).svg()
    root = ET.fromstring(svg)
    bars = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("fill") == "#2a9d8f"]
    heights = sorted(float(e.get("height", 0)) for e in bars)
    assert heights[-1] / heights[-2] == pytest.approx(700 / 300, rel=0.01)


def test_without_a_gpu_it_is_the_environment(monkeypatch) -> None:
    from typer.testing import CliRunner

    from attngen.cli.main import app

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", str(EXAMPLES / "causal.attn")])
    assert done.exit_code == 3 and "needs a CUDA GPU" in done.stderr
    assert CliRunner().invoke(app, ["bench"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "--grid", "--peers", "fa9"]).exit_code == 2
    assert (
        CliRunner().invoke(app, ["bench", str(EXAMPLES / "causal.attn"), "--heads", "6", "--heads-kv", "4"]).exit_code
        == 2
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the benchmark itself, on the CPU")
def test_a_cell_is_measured_end_to_end(monkeypatch) -> None:
    """build, agreement of the peers, interleaved rounds, report; the CPU reference stands in for the kernel."""
    from attngen.bench import runner, timing
    from attngen.bench.peers import Peer, _sdpa

    def liar(case: Case):
        return lambda: torch.zeros_like(case.q)

    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setitem(PEERS, "math", Peer("math", "", ("torch",), _sdpa("MATH")))
    monkeypatch.setitem(PEERS, "liar", Peer("liar", "", ("torch",), liar))
    monkeypatch.setitem(PEERS, "gone", Peer("gone", "", ("no_such_module_at_all",), liar))
    cell = cells.Cell(example("causal"), 1, 4, 2, 96, 96)
    row = runner.measure(cell, ("math", "liar", "gone"), params={}, rounds=2, device="cpu", ceiling_size=64)
    assert set(row.tflops) == {"attngen", "math"} and all(v > 0 for v in row.tflops.values())
    assert row.best_peer == "math" and row.ratio and row.ceiling > 0
    assert timing.host_us(lambda: None, 10) < 1000
    assert "something else" in row.absent["liar"] and row.absent["gone"] == "not installed"
    assert row.kept_share == pytest.approx(97 / 192)
    assert all(low <= row.tflops[n] <= high for n, (low, high) in row.spread.items())


def test_rounds_are_shuffled_and_every_slot_warms_itself() -> None:
    from attngen.bench import timing

    log: list[str] = []
    slots = []
    for name in "abc":
        slot = object.__new__(timing.Slot)
        slot.name, slot.times, slot.launches, slot.warm = name, [], 2, 3
        slot.call = lambda name=name: log.append(name)
        slots.append(slot)
    timing.interleave(slots, rounds=6, seed=0)
    rounds = [log[i : i + 15] for i in range(0, len(log), 15)]
    assert len(rounds) == 6 and all(len(s.times) == 6 for s in slots)
    orders = [tuple(dict.fromkeys(r)) for r in rounds]
    assert len(set(orders)) > 1
    for r, order in zip(rounds, orders, strict=True):
        assert "".join(r) == "".join(n * 5 for n in order), (
            "three warm-up launches and two timed ones, one slot at a time"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the command itself, on the CPU")
def test_the_command_end_to_end(monkeypatch, tmp_path) -> None:
    """Table, JSON, plot and exit code, with the CPU in place of a GPU."""
    import functools

    from typer.testing import CliRunner

    from attngen.bench import runner, timing
    from attngen.cli.main import app

    monkeypatch.setattr(common, "need_gpu", lambda what: None)
    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setattr(runner, "measure", functools.partial(runner.measure, device="cpu", ceiling_size=64))
    shape = ["--seqlen", "40,64", "--batch", "1", "--heads", "2", "--rounds", "1"]
    out, plot = tmp_path / "b.json", tmp_path / "b.svg"
    done = CliRunner().invoke(
        app, ["bench", str(EXAMPLES / "causal.attn"), *shape, "--peers", "fa3", "--save", str(out), "--plot", str(plot)]
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0].split()[:2] == ["cell", "attngen"] and len(done.stdout.splitlines()) == 3
    assert "[2/2] causal d128 64" in done.stderr and "not in the table: fa3: not installed" in done.stderr
    assert len(json.loads(out.read_text())["rows"]) == 2
    ET.fromstring(plot.read_text())

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("planted\nsecond line")

    monkeypatch.setattr("attngen.api.build", broken)
    done = CliRunner().invoke(app, ["bench", str(EXAMPLES / "causal.attn"), *shape, "--peers", "fa3", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["rows"][0]["absent"]["attngen"] == "failed: RuntimeError: planted"


# ---- the backward ----------------------------------------------------------------------------------------------------


def test_flops_of_the_backward() -> None:
    cell = cells.usual_cell(example("causal"), 1024)
    assert cell.flops(1000.0, backward=True) == pytest.approx(10 * 32 * 16 * 1000.0 * 128)
    wide = cells.usual_cell(example("mla"), 1024)
    assert wide.flops(1.0, backward=True) / (wide.batch * wide.heads_q) == 2 * (3 * 192 + 2 * 128)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the benchmark itself, on the CPU")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_backward_is_measured_end_to_end(monkeypatch, layout) -> None:
    """The CPU reference stands in for the kernels; other gradients, or none, do not reach the table."""
    from attngen.bench import runner, timing
    from attngen.bench.peers import Peer, _sdpa

    def liar(case: Case):
        return lambda: _sdpa("MATH")(case)() * 1.5

    def blind(case: Case):
        return lambda: _sdpa("MATH")(case)().detach()

    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setitem(PEERS, "math", Peer("math", "", ("torch",), _sdpa("MATH")))
    monkeypatch.setitem(PEERS, "liar", Peer("liar", "", ("torch",), liar))
    monkeypatch.setitem(PEERS, "blind", Peer("blind", "", ("torch",), blind))
    spec = example("causal")
    spec = spec.replace(layout=layout, backward=spec.backward.replace(deterministic=True))
    cell = cells.Cell(spec, 1, 4, 2, 64, 64)
    assert cell.label.endswith("deterministic")
    row = runner.measure(
        cell, ("math", "liar", "blind"), params={}, rounds=2, device="cpu", ceiling_size=64, backward=True
    )
    assert set(row.tflops) == {"attngen", "attngen unordered", "math"} and row.direction == "backward"
    assert row.best_peer == "math" and row.ratio_to_unordered and row.ratio_to_unordered > 0
    assert "something else" in row.absent["liar"] and "not differentiable" in row.absent["blind"]
    assert set(row.peak_bytes) == {*row.tflops, "liar"} and not any(row.peak_bytes.values())
    flops = cell.flops(row.kept_share * 64 * 64, backward=True)
    assert row.tflops["math"] == pytest.approx(flops / row.milliseconds["math"] / 1e9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the command itself, on the CPU")
def test_the_command_measures_a_backward(monkeypatch, tmp_path) -> None:
    import functools

    from typer.testing import CliRunner

    from attngen.bench import runner, timing
    from attngen.cli.main import app

    monkeypatch.setattr(common, "need_gpu", lambda what: None)
    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setattr(runner, "measure", functools.partial(runner.measure, device="cpu", ceiling_size=64))
    shape = ["--seqlen", "40", "--batch", "1", "--heads", "2", "--rounds", "1", "--peers", "fa3"]
    out = tmp_path / "b.json"
    done = CliRunner().invoke(
        app, ["bench", str(EXAMPLES / "causal.attn"), *shape, "--backward", "--deterministic", "--save", str(out)]
    )
    assert done.exit_code == 0, done.stderr
    assert "/ unordered" in done.stdout.splitlines()[0] and "deterministic / unordered: geomean" in done.stderr
    document = json.loads(out.read_text())
    assert document["settings"]["direction"] == document["rows"][0]["direction"] == "backward"
    assert set(document["rows"][0]["kernels"]) == {"attngen", "attngen unordered"}


def test_backward_of_takes_the_gradient_again_and_again() -> None:
    from attngen.bench.backward import backward_of, leaves

    (x,) = leaves(torch.arange(3.0))
    call = backward_of(lambda: x * x, [x], torch.ones(3))
    assert torch.equal(call()[0], 2 * x) and torch.equal(call()[0], 2 * x)
    with pytest.raises(RuntimeError, match="no gradient"):
        backward_of(lambda: x.detach(), [x], torch.ones(3))


def test_report_of_a_backward() -> None:
    made = rows()
    for r in made:
        r.direction = "backward"
        r.tflops["attngen unordered"] = 2 * r.tflops["attngen"]
        r.spread["attngen unordered"] = (1.0, 2.0)
        r.milliseconds["attngen unordered"] = 1.0
        r.peak_bytes = {"attngen": 5_000_000, "fa3": 7_000_000}
    header, body = report.cells(made)
    assert header[-3:] == ["attngen / best peer", "/ unordered", "matmul"] and body[0][-3:] == ["1.077", "0.500", "720"]
    assert "Attention backward" in report.picture(made, {"gpu": "x"}).svg()
    said = report.summary(made)
    assert said[0].startswith("d128, attngen / best peer: geomean 0.899, worst 0.750 (causal d128 2K")
    assert said[1].startswith("d128, deterministic / unordered: geomean 0.500")
    assert said[2].endswith("attngen 5 MB, fa3 7 MB")
    kernels = report.as_json(made, {}, {})["rows"][0]["kernels"]
    assert kernels["attngen"]["peak_bytes"] == 5_000_000 and kernels["attngen unordered"]["peak_bytes"] is None


def test_the_grid_of_the_backward() -> None:
    labels = [c.label for c in grid.cells(None, (1024, 4096), {}, backward=True)]
    assert "causal d192/128 4K b8 h16" in labels and "full d256 1K b32 h8" in labels
    assert "causal d128 4K b8 h16/2" in labels and "causal d128 16K b2 h16 deterministic" in labels
    assert len(set(labels)) == len(labels) == 2 * 2 * 4 + 2 + 3
    assert {c.seqlen_q for c in grid.cells("usual", None, {}, backward=True)} == {1024, 4096, 16384, 32768}


def test_the_grid_of_the_forward() -> None:
    """Every cell that a release is judged by, once."""
    from typer.testing import CliRunner

    from attngen.cli.main import app

    made = grid.cells(None, None, {})
    labels = [c.label for c in made]
    assert len(set(labels)) == len(labels) == 4 * 2 * 6 + 2 * 2 * 3 + 3 + 2 * 4 + 2 * 3 + 7 + 2
    assert {"full d64 128 b256 h32", "causal d128 16K b2 h16/2", "full d128 2K b1 h8", "causal d128 1x16K b8 h32/4",
            "causal d104 4K b8 h19", "causal rising d128 4K b8 h16"} <= set(labels)  # fmt: skip
    assert not any(c.spec.backward.deterministic for c in made)
    assert [p.name for p in grid.chosen("sh,gr", backward=False, quick=False)] == ["short", "grouped"]
    assert {c.seqlen_q for c in grid.cells(None, None, {}, quick=True)} == {1024, 4096, 16384}
    done = CliRunner().invoke(app, ["bench", "--grid", "--only", "turns"])
    assert done.exit_code == 2 and "usual, short, grouped, few, rows, dims, rising" in " ".join(done.stderr.split())
    done = CliRunner().invoke(app, ["bench", str(EXAMPLES / "causal.attn"), "--only", "short"])
    assert done.exit_code == 2 and "--only picks parts of --grid" in " ".join(done.stderr.split())


def test_rising_scores_rescale_at_every_tile() -> None:
    q, k = samples.rising(*(torch.randn(1, 512, 2, 128) for _ in range(2)))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 128**0.5
    tops = s.unflatten(-1, (8, 64)).amax(-1).flip(-1)
    assert float((tops[..., 1:] - tops[..., :-1]).median()) * 1.44 > 8


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_memory_from_shapes() -> None:
    """What the issue names: S 32K, d 128, 32 heads, bf16."""
    from attngen.bench.memory import expected, megabytes

    cell = cells.Cell(example("causal"), 1, 32, 32, 32768, 32768)
    m = expected(cell, {"t": torch.zeros(5, dtype=torch.int32)})
    tensor = 32768 * 32 * 128 * 2
    assert (m.inputs, m.output, m.gradients) == (4 * tensor + 20, tensor, 3 * tensor)
    assert (m.dq_fp32, m.statistics) == (2 * tensor, 3 * 4 * 32 * 32768)
    assert m.made == 6 * tensor + m.statistics == m.as_json()["made"] and m.square == 2 * 32 * 32768**2
    assert megabytes(m.square) == "68.7 GB" and megabytes(m.made) == "1623 MB"
    grouped = expected(cells.Cell(example("mla"), 2, 8, 2, 100, 300), {})
    assert grouped.gradients == 2 * 2 * (8 * 100 * 192 + 2 * 300 * (192 + 128))
    assert grouped.output == 2 * 2 * 8 * 100 * 128 and grouped.square == 2 * 2 * 8 * 100 * 300


def test_memory_agrees_with_what_the_launcher_allocates() -> None:
    """The workspace is fp32 dQ and two statistics for each row, rounded up to tiles: see Backward._launch."""
    from attngen.bench.memory import expected
    from attngen.search_backward import plan_backward

    for name in ("causal", "gpt_oss", "mla"):
        spec = example(name)
        cell = cells.usual_cell(spec, 4096)
        m = expected(cell, {})
        for plan in plan_backward(spec).plans:
            tiles = -(-cell.seqlen_q // plan.compute.tile_m)
            workspace = 4 * cell.batch * cell.heads_q * tiles * plan.memory.workspace_per_tile
            needed = m.dq_fp32 + m.statistics * 2 // 3
            assert needed <= workspace <= 1.02 * needed, (name, plan.name)


def test_memory_is_shown() -> None:
    from attngen.bench.memory import expected

    made = rows()
    assert report.memory_cells(made)[1] == [] and "Memory" not in report.markdown(made, {})
    made[1].memory = expected(cells.Cell(example("causal"), 1, 32, 32, 32768, 32768), {})
    made[1].peak_bytes = {"attngen": 1_650_000_000, "fa4": 2_100_000_000}
    header, body = report.memory_cells(made)
    assert header[-4:] == ["their sum", "attngen", "fa4", "N x N"]
    assert len(body) == 1 and body[0][-4:] == ["1623 MB", "1650 MB", "2100 MB", "68.7 GB"]
    assert "| memory | inputs | O |" in report.markdown(made, {})
    said = report.summary(made)
    assert said[-2].endswith("attngen 1650 MB, fa4 2100 MB") and "one N x N matrix would be 68.7 GB" in said[-1]
    assert report.as_json(made, {}, {})["rows"][1]["memory"]["made"] == made[1].memory.made


# ---- variants --------------------------------------------------------------------------------------------------------


#: Kept share of all pairs of each row, from its definition (i query, j key, N = 16384).
SHARES = {
    "full": 1.0, "causal": 0.5, "window 1024": 0.0606, "documents 1500": 0.0455, "prefix 4096": 0.5313,
    "ALiBi causal": 0.5, "softcap causal": 0.5, "relative": 1.0, "window 128, sinks": 0.0078,
}  # fmt: skip


def test_the_grid_of_variants() -> None:
    from attngen.bench.variants import VARIANTS

    assert [v.title for v in VARIANTS] == [*(t for t in SHARES if "sinks" not in t), "full", "window 128, sinks"]
    assert [v.head_dim for v in VARIANTS] == [128] * 8 + [64, 64], "each head dim has an unmasked row to compare with"
    found = {v.title: v.cell({}) for v in VARIANTS if v.title != "full"}
    for title, cell in found.items():
        wide = title != "window 128, sinks"
        assert (cell.batch, cell.heads_q, cell.heads_kv) == (2, 16 if wide else 32, 16 if wide else 32)
        assert (cell.seqlen_q, cell.seqlen_kv, cell.spec.head_dim_qk) == (16384, 16384, 128 if wide else 64)
        assert cell.label.startswith(f"{title} d{128 if wide else 64} 16K b2")


@pytest.mark.parametrize("title", SHARES)
def test_variants_mean_what_they_say(title) -> None:
    """The mask of each row against its definition, at 4500 rows, and the values of its score."""
    from attngen.bench.variants import VARIANTS

    row = next(v for v in VARIANTS if v.title == title)
    n = 4500
    cell = cells.with_shape(row.cell({}), batch=1, seqlen_q=n, seqlen_kv=n)
    shape = samples.Shape(1, cell.heads_q, cell.heads_kv, n, n)
    params = samples.params(cell.spec, row.params)
    tensors = samples.tensors(cell.spec, shape) | (row.captured(shape) if row.captured else {})
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    keep = {
        "window 1024": (i - j >= 0) & (i - j <= 1024),
        "documents 1500": (j <= i) & (i // 1500 == j // 1500),
        "prefix 4096": (j <= i) | (j < 4096),
        "relative": torch.ones(n, n, dtype=torch.bool),
        "full": torch.ones(n, n, dtype=torch.bool),
        "window 128, sinks": (i - j >= 0) & (i - j < 128),
    }.get(title, j <= i)
    assert kept(cell, params, tensors).pairs == float(keep.sum())
    if title == "ALiBi causal":
        assert tensors["slopes"][0] == 2.0**-0.5 and tensors["slopes"][15] == 2.0**-8
    mask_mod, score_mod = flex.mods(Case(cell, features(cell.spec, params), i, j, i, params, tensors))
    s, b, h = torch.tensor(7.0), torch.tensor(0), torch.tensor(3)
    near, far = torch.tensor(1000), torch.tensor(900)
    assert bool(mask_mod(b, h, near, far)) is bool(keep[1000, 900]) if mask_mod else title in ("relative", "full")
    value = {
        "ALiBi causal": 7.0 - 2.0**-2 * 100, "softcap causal": 30 * torch.tanh(torch.tensor(7 / 30)).item(),
        "relative": 7.0 - 0.1,
    }.get(title)  # fmt: skip
    assert (score_mod is None) == (value is None)
    assert value is None or float(score_mod(s, b, h, near, far)) == pytest.approx(value)


def test_rows_of_the_variants_are_picked() -> None:
    from attngen.bench.variants import VARIANTS, chosen

    assert chosen(None) == VARIANTS
    assert [v.title for v in chosen("window, Soft")] == ["window 1024", "softcap causal", "window 128, sinks"]
    with pytest.raises(KeyError):
        chosen("causal,banana")


@pytest.mark.parametrize("title", ["window 1024", "documents 1500", "window 128, sinks"])
def test_the_flex_call_of_a_variant(monkeypatch, title) -> None:
    """Block mask, mods, scale, grouped heads, sink, layout: the call itself, its graph run by torch's own operators."""
    import functools

    from attngen.bench import variants

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(variants, "DOCUMENT", 100)
    (row,) = (v for v in variants.VARIANTS if v.title == title)
    n = 300
    shape = samples.Shape(2, 4, 2, n, n)
    cell = cells.with_shape(row.cell({}), batch=2, heads_q=4, heads_kv=2, seqlen_q=n, seqlen_kv=n)
    params = samples.params(cell.spec, {"window": 33} if row.params else {})
    tensors = samples.tensors(cell.spec, shape) | (row.captured(shape) if row.captured else {})
    q, k, v = samples.qkv(cell.spec, shape, dtype=torch.float32)
    case = Case(cell, features(cell.spec, params), q, k, v, params, tensors)
    got = PEERS["flex"].prepare(case)()
    exact = dense.attention(cell.spec, q, k, v, params=params, tensors=tensors).o
    assert got.shape == exact.shape and float((got - exact).abs().max()) < 2e-5
    blocks = flex.block_mask(case, flex.mods(case)[0])
    assert blocks.shape == (2 if title == "documents 1500" else 1, 1, n, n) and blocks.sparsity() > 0


def test_report_of_variants() -> None:
    made = rows()
    for r in made:
        r.tflops["flex"] = 200.0
        r.spread["flex"], r.milliseconds["flex"] = (190.0, 210.0), 2.0
    header, body = report.cells(made, "flex")
    assert header == ["cell", "kept", "attngen", "fa3", "flex", "attngen / best peer", "/ flex", "matmul"]
    assert body[0][1] == "0.500" and body[0][-2] == "3.500" and body[1][-2] == "1.500"
    assert report.summary(made, "flex")[0] == (
        f"forward, attngen / flex: geomean {(3.5 * 1.5) ** 0.5:.3f}, worst 1.500 (causal d128 2K b32 h16)"
    )
    assert report.as_json(made, {}, {})["rows"][0]["ratios"] == {"fa3": pytest.approx(700 / 650), "flex": 3.5}
    assert report.line(made[0], "flex").startswith("attngen 700 TFLOP/s (1.000 ms), fa3 650")
    assert "/ flex 3.500, fa4: not installed" in report.line(made[0], "flex")
    del made[1].tflops["flex"]
    assert report.cells(made, "flex")[1][1][-2] == "-" and "geomean 3.500" in report.summary(made, "flex")[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the command itself, on the CPU")
@pytest.mark.parametrize("backward", [False, True])
def test_the_command_measures_variants(monkeypatch, tmp_path, backward) -> None:
    """Small rows; FlexAttention's place is taken by one that fails in a cell: the others are measured and saved."""
    import functools

    from typer.testing import CliRunner

    from attngen.bench import flex, runner, timing, variants
    from attngen.cli.main import app

    def call(case: Case):
        if case.cell.title == "relative":
            raise RuntimeError("planted")
        arguments = {"params": case.params, "tensors": case.tensors}
        return lambda: dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o.to(case.q.dtype)

    for module, name, value in (
        (common, "need_gpu", lambda what: None), (timing, "SLOT_MS", 1.0), (timing, "WARM_MS", 0.1),
        (flex, "call", call),
        (variants, "SEQLEN", 32), (variants, "WIDTH", 256), (variants, "BATCH", 1),
        (runner, "measure", functools.partial(runner.measure, device="cpu", ceiling_size=64)),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    out, line = tmp_path / "v.json", ["bench", "--variants", "--rounds", "1", "--markdown", "--peers", "flex"]
    line += ["--seqlen", "32", "--save", str(out), *(["--backward"] if backward else [])]
    done = CliRunner().invoke(app, [*line, "--only", "alibi,relative,documents,window 128"])
    assert done.exit_code == 0, done.stderr
    direction = "backward" if backward else "forward"
    assert f"{direction}, attngen / flex: geomean" in done.stderr and "[4/4] window 128, sinks d64 32 b1" in done.stderr
    assert "flex: failed: RuntimeError: planted" in done.stderr and "| / flex |" in done.stdout
    document = json.loads(out.read_text())
    assert [bool(r["ratios"]) for r in document["rows"]] == [True, True, False, True]
    assert document["settings"]["against"] == "flex" and document["rows"][0]["direction"] == direction
    assert CliRunner().invoke(app, [*line, "--only", "banana"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "--grid", "--only", "causal"]).exit_code == 2
    assert CliRunner().invoke(app, ["bench", "--grid", "--variants"]).exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the benchmark itself, on the CPU")
def test_a_rehearsal_calls_everything_once(monkeypatch) -> None:
    from attngen.bench import runner
    from attngen.bench.peers import Peer

    called: list[Case] = []

    def noted(case: Case):
        return lambda: called.append(case) or case.q

    monkeypatch.setitem(PEERS, "noted", Peer("noted", "", ("torch",), noted))
    cell = cells.Cell(example("alibi"), 1, 2, 2, 40, 40)
    monkeypatch.setitem(PEERS, "gone", Peer("gone", "", ("no_such_module_at_all",), lambda case: lambda: case.q))
    absent = runner.rehearse(cell, ("noted", "gone"), {}, None, 0, False, lambda _: {"slopes": torch.ones(2)}, "cpu")
    assert len(called) == 1 and torch.equal(called[0].tensors["slopes"], torch.ones(2))
    assert absent["gone"] == "not installed" and "attngen" not in absent


def test_what_is_rehearsed(monkeypatch) -> None:
    from attngen.bench import rehearsal

    made = grid.cells("usual", (1024, 4096), {})
    assert rehearsal.kept_by(["fa3", "fa4", "flex"]) == ("flex",)
    alone = rehearsal.distinct(made, lambda c: c, ["fa4", "cudnn"])
    assert len(alone) == 8 and {c.seqlen_q for c in alone} == {1024}
    assert rehearsal.distinct(made, lambda c: c, ["flex"]) == made
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    assert rehearsal.kept_by(["fa4", "cudnn"]) == ("fa4",)


def rehearsed(cell: cells.Cell, what: str) -> dict[str, str]:
    """In a process of its own."""
    import os
    import time

    if what == "dies":
        raise ValueError("planted")
    if what == "hangs":
        time.sleep(60)
    return {"flex": f"failed: in {os.getpid()}"} if what == "absent" else {}


def test_rehearsals_run_beside_and_cost_nothing_when_they_fail() -> None:
    import os
    import time

    from attngen.bench.rehearsal import rehearse_all

    cell, said = cells.usual_cell(example("causal"), 1024), []
    rehearse_all([(cell, (w,)) for w in ("fine", "absent", "dies")], 2, said.append, rehearse=rehearsed)
    assert len(said) == 3 and sum("ValueError: planted" in line for line in said) == 1
    assert sum("flex failed: in" in line for line in said) == 1 and str(os.getpid()) not in "".join(said)
    begun = time.perf_counter()
    rehearse_all([(cell, ("hangs",))], 1, said.append, rehearse=rehearsed, timeout_s=1.0)
    assert "1 cells are still compiling" in said[-1] and time.perf_counter() - begun < 30


# ---- what kept tiles cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "tiles"),
    [((100, 100), 55), ((100, 300), 1 + 1 + 1 + 2 + 2 + 2 + 3 + 3 + 3 + 4), ((999, 1000), 2), ((1, 1), 500500)],
)
def test_tiles_with_a_kept_pair(tile, tiles) -> None:
    """Causal, 1000 x 1000: lower triangles of blocks, counted by hand."""
    cell = cells.Cell(example("causal"), 1, 1, 1, 1000, 1000)
    found = kept(cell, {}, {}, tile)
    assert found.pairs == 500500
    assert found.tile_share * -(-1000 // tile[0]) * -(-1000 // tile[1]) == pytest.approx(tiles)


def test_time_over_the_share_of_tiles() -> None:
    """Half of the tiles in 0.55 of the time: 10 % over; head dims and shapes are compared with their like only."""

    def row(label: str, spec: str, ms: float, share: float, batch: int = 1) -> Row:
        r = Row(label, spec, {"batch": batch}, share, tile_share=share)
        r.milliseconds["attngen"], r.tflops["attngen"], r.spread["attngen"] = ms, 1.0, (1.0, 1.0)
        return r

    full, wide = row("full d64 1K", "full", 10.0, 1.0), row("full d128 1K", "full", 20.0, 1.0)
    half, other = row("causal d128 1K", "causal", 11.0, 0.5), row("causal d64 1K", "causal", 11.0, 0.5, batch=2)
    rows = [full, wide, half, other]
    assert [report.over_tiles(r, rows) for r in rows] == [None, None, pytest.approx(1.1), None]
    header, body = report.cells(rows, "flex")
    assert [line[header.index("/ tiles")] for line in body] == ["-", "-", "1.100", "-"]
    assert "/ tiles" not in report.cells([half, other])[0]


# ---- metadata of masks -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the command itself, on the CPU")
def test_the_command_measures_masks(monkeypatch, tmp_path) -> None:
    import functools

    from typer.testing import CliRunner

    from attngen.bench import masks, timing
    from attngen.cli.main import app

    monkeypatch.setattr(common, "need_gpu", lambda what: None)
    monkeypatch.setattr(timing, "SLOT_MS", 1.0)
    monkeypatch.setattr(timing, "WARM_MS", 0.1)
    monkeypatch.setattr(masks, "measure", functools.partial(masks.measure, device="cpu", mean=20))
    out = tmp_path / "m.json"
    done = CliRunner().invoke(
        app,
        [
            "bench",
            "--masks",
            "--seqlen",
            "256",
            "--heads",
            "2",
            "--head-dim",
            "64",
            "--rounds",
            "1",
            "--save",
            str(out),
        ],
    )
    assert done.exit_code == 0, done.output
    (found,) = json.loads(out.read_text())["masks"]
    assert found["tables_bytes"] == 4 * 256 and found["head_dim"] == 64 and found["flex_eager_ms"] > 0
    assert "packed batch: 256 tokens" in done.stderr and "create_block_mask, eager" in done.stderr
    assert CliRunner().invoke(app, ["bench", "--masks", "--grid"]).exit_code == 2


def test_documents_of_the_packed_batch() -> None:
    from attngen.bench.masks import Cost, document_ids

    doc = document_ids(5000, 100, 1)
    assert doc.dtype is torch.int32 and doc.shape == (1, 5000) and doc[0, 0] == 0
    steps = doc[0, 1:] - doc[0, :-1]
    assert set(steps.unique().tolist()) == {0, 1} and 30 < int(doc.max()) < 75
    lines = Cost(5000, 50, 16, 128, 1.0, 0.9, 0.009, 20000, 3.0, 10**8, None, None).lines()
    assert "9.0 us (its kernel), 1.00 % of the attention" in lines[2] and "333.33 %" in lines[3] and len(lines) == 4
