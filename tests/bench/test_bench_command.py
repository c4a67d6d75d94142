"""`attngen bench` from end to end, with the CPU in place of a GPU."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
import torch
from bench_cases import EXAMPLES

from attngen.bench.peers import Case
from attngen.cli import common
from attngen.ref import dense


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="tries the command itself, on the CPU")
def test_the_command_measures_calls(monkeypatch, tmp_path) -> None:
    import functools

    from typer.testing import CliRunner

    from attngen.bench import calls
    from attngen.cli.main import app

    monkeypatch.setattr(common, "need_gpu", lambda what: None)
    monkeypatch.setattr(calls, "host_us", lambda call, count: 1.5 if call() is not None else 0.0)
    monkeypatch.setattr(calls, "measure", functools.partial(calls.measure, device="cpu"))
    out = tmp_path / "c.json"
    done = CliRunner().invoke(app, ["bench", "--calls", "--rounds", "1", "--save", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())["calls"]
    assert [x["name"] for x in found] == [k.name for k in calls.kinds()] and all(x["us"] == 1.5 for x in found)
    assert "1.5 us, least     1.5   row lists, kept" in done.stderr
    assert CliRunner().invoke(app, ["bench", "--calls", "--grid"]).exit_code == 2


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
    assert found["tile_map"]["map_bytes"] == 4 * 2 * 2 and found["tile_map"]["kept_ms"] > 0
    assert "tile map, ids in no order" in done.stderr
    assert "packed batch: 256 tokens" in done.stderr and "create_block_mask, eager" in done.stderr
    assert CliRunner().invoke(app, ["bench", "--masks", "--grid"]).exit_code == 2
