"""The backward on the command line: compile, explain, check --plan, and the gallery's names."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from large import TOO_LARGE, large

from attngen.source import read_meta

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    """A spec that has a forward only."""
    path = tmp_path / "gated.attn"
    path.write_text(large())
    return path


# ---- compile ---------------------------------------------------------------------------------------------------------


def test_both_directions_in_one_file(attngen, causal, tmp_path):
    path = tmp_path / "k.py"
    done = attngen("compile", causal, "-o", path)
    assert done.code == 0 and "forward 128x128" in done.err and "backward " in done.err and "note" not in done.err
    assert read_meta(path.read_text())["direction"] == "both"
    assert attngen("compile", causal, "-o", path).code == 0, "replaced: nobody edited it"


@pytest.mark.parametrize("only", ["forward", "backward"])
def test_one_direction(attngen, causal, only):
    done = attngen("compile", causal, "--only", only)
    assert done.code == 0 and read_meta(done.out)["direction"] == only
    names = {n.name for n in ast.parse(done.out).body if isinstance(n, ast.ClassDef)}
    assert f"Attention{only.title()}" in names and len(names & {"AttentionForward", "AttentionBackward"}) == 1


def test_another_word_is_usage(attngen, causal):
    assert attngen("compile", causal, "--only", "sideways").code == 2


def test_no_backward_is_said_and_the_forward_written(attngen, gated, tmp_path):
    path = tmp_path / "k.py"
    done = attngen("compile", gated, "-o", path, "-q")
    said = f"There is no backward in this file: {TOO_LARGE}."
    assert done.code == 0 and f"note: {said}" in done.err
    assert said in " ".join(path.read_text().split()) and read_meta(path.read_text())["direction"] == "forward"
    assert attngen("compile", gated, "--only", "forward").err == ""
    done = attngen("compile", gated, "--only", "backward")
    assert done.code == 1 and "E0402" in done.err and done.out == ""


def test_deterministic_by_option(attngen, causal):
    for flag, wanted in (("--deterministic", True), ("--no-deterministic", False)):
        done = attngen("compile", causal, flag)
        assert done.code == 0 and read_meta(done.out)["backward"]["deterministic"] is wanted


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_shows_the_backward(attngen):
    done = attngen("explain", ROOT / "examples" / "gpt_oss.attn", "--name", "gpt_oss_local", "--seqlen", "1024")
    assert done.code == 0, done.err
    back = done.out[done.out.index("backward: dQ, dK, dV, d sinks") :]
    for word in (
        "slope     d score / d s = 1.0",
        "gradient  sinks, by sink: fp32 (batch, heads_q, seqlen_q)",
        "saved     q, k, v, O, and LSE",
        "workspace 4 * batch * heads_q * ceil(seqlen_q / ",
        "deterministic: no; the fp32 sums of dQ follow",
        "backward plan ",
        "registers ",
        "pipeline   ds: ",
        "B of fp32 reductions",
        "candidates: ",
        "rooflines of the backward, batch 32, heads 32/32, seqlen 1024x1024",
        "fp32 reductions of dQ in L2 ",
    ):
        assert word in back, word


def test_explain_says_what_turns_cost(attngen, causal):
    args = ("--json", "--seqlen", "4096", "--batch", "1", "--heads", "2")
    free = json.loads(attngen("explain", causal, *args).out)["backward"]
    turns = json.loads(attngen("explain", causal, *args, "--deterministic").out)["backward"]
    words = [x["turn_words"] for x in (free, turns)]
    assert words == [0, turns["plans"][0]["compute"]["warpgroups"]]
    (line,) = turns["rooflines"]
    plan = turns["plans"][-1]["compute"]
    assert line["turns"] == line["visited"] * plan["warpgroups"] and free["rooflines"][0]["turns"] == 0
    assert line["longest"] == -(-4096 // plan["tile_n"]), "the last rows see every KV tile"
    text = attngen("explain", causal, "--seqlen", "4096", "--deterministic").out
    assert "by turns" in text and f"up to {line['longest']} one after the other" in text
    assert f"{words[1]} words of each query tile's workspace count them" in text


def test_explain_says_which_lengths_a_plan_serves(attngen, causal):
    """And takes the plan of a length for its roofline and its workspace."""
    found = json.loads(attngen("explain", causal, "--json", "--seqlen", "1024,4096").out)["backward"]
    short, long = found["plans"]
    (limit,) = found["limits"]
    assert [x["plan"] for x in found["rooflines"]] == [short["name"], long["name"]] and 1024 <= limit < 4096
    text = attngen("explain", causal).out
    lines = f"backward plans by max(seqlen_q, seqlen_kv):\n  1 to {limit}: {short['name']}\n  from {limit + 1}: "
    assert lines + long["name"] in text
    words = [f"ceil(seqlen_q / {p['compute']['tile_m']}) * {p['memory']['workspace_per_tile']}" for p in (long, short)]
    assert words[0] in found["workspace"] and f"up to {limit}: 4 * batch * heads_q * {words[1]} bytes" in text


def test_the_rooflines_of_the_backward_add_up(attngen, causal):
    args = ("--json", "--seqlen", "4096", "--batch", "2", "--heads", "4")
    found = json.loads(attngen("explain", causal, *args).out)["backward"]
    (line,), plan = found["rooflines"], found["plans"][-1]
    c = plan["compute"]
    tiles = -(-4096 // c["tile_m"])
    assert line["workspace_bytes"] == 4 * 2 * 4 * tiles * plan["memory"]["workspace_per_tile"]
    assert line["reduced_bytes"] == line["visited"] * 4 * c["tile_m"] * c["head_dim_qk_padded"]
    assert 0.5 < line["visited"] / line["tiles"] < 0.55
    # five products of 2 * B * H * S^2 * d / 2 FLOP at 4096 FLOP a cycle, 132 SMs, 1.65 GHz
    assert line["mma_us"] == pytest.approx(10 * 2 * 4 * 4096**2 * 128 / 2 / (4096 * 132 * 1.65e9) * 1e6, rel=0.08)
    one = 2 * 4 * 4096 * 128 * 2
    assert line["tensor_bytes"] == 8 * one + 4 * 2 * 4 * 4096, "q k v o and their gradients, LSE"


def test_explain_says_why_there_is_no_backward(attngen, gated):
    done = attngen("explain", gated)
    assert done.code == 0 and "backward: refused; the forward is served" in done.out
    assert f"E0402 {TOO_LARGE}" in done.out and "instead: " in done.out
    found = json.loads(attngen("explain", gated, "--json").out)["backward"]
    assert found["served"] is False and found["refused"][0]["code"] == "E0402"


# ---- check -----------------------------------------------------------------------------------------------------------


def test_check_plan_names_what_has_no_backward(attngen, causal, gated):
    done = attngen("check", "--plan", causal, gated)
    assert done.code == 0 and f"{gated}: gated: {TOO_LARGE}" in done.err
    assert "backward" not in attngen("check", causal, gated).err
    files = json.loads(attngen("check", "--plan", "--json", causal, gated).out)["files"]
    assert files[0]["gradients_without"] == {"causal": []} and files[1]["ok"]
    assert len(files[1]["gradients_without"]["gated"]) == 1


# ---- gallery ---------------------------------------------------------------------------------------------------------


def test_names_in_the_gallery():
    from attngen.cli.regen import GALLERY

    names = [e.file("causal") for e in GALLERY if e.example == "causal"]
    assert names == ["causal.sm90.py", "causal.sm90.bwd.py", "causal.sm90.bwd_deterministic.py"]
    for entry in (e for e in GALLERY if e.direction == "backward"):
        files = [p for p in (ROOT / "generated").glob("*.bwd*.py") if entry.shows in _index_line(p.name)]
        assert len(files) == 1 and read_meta(files[0].read_text())["direction"] == "backward"


def _index_line(name: str) -> str:
    lines = (ROOT / "generated" / "README.md").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"| [{name}]")), "")
