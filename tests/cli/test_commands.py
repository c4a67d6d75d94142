"""run, cache, doctor, regen, completion, and what a start costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.cuda.is_available()


def test_run_compares_every_execution(attngen, causal):
    done = attngen("run", causal, "--seqlen", "70x90,33", "--cpu")
    assert done.code == 0, done.err
    lines = [line.split() for line in done.out.splitlines()[1:]]
    assert {line[-1] for line in lines} == {"ok"}
    assert sum(line[0] == "CPU" for line in lines) == 2 and sum(line[0] == "plan" for line in lines) >= 2


def test_run_json(attngen, causal):
    found = json.loads(attngen("run", causal, "--seqlen", "40", "--cpu", "--json").out)["outcomes"]
    assert found and all(o["passed"] for o in found)


def test_run_finds_a_wrong_execution(attngen, causal, monkeypatch):
    from attngen.ref import blockwise

    real = blockwise.attention

    def wrong(*args, **kwargs):
        o, lse = real(*args, **kwargs)[:2]
        return o + 1e-3, lse

    monkeypatch.setattr(blockwise, "attention", wrong)
    done = attngen("run", causal, "--seqlen", "40", "--cpu")
    assert done.code == 1 and "FAILED" in done.out


@pytest.mark.skipif(GPU, reason="says what is missing without a GPU")
def test_run_without_a_gpu_says_so(attngen, causal):
    done = attngen("run", causal, "--seqlen", "40")
    assert done.code == 0 and "not run: kernel: torch sees no GPU" in done.err


def test_run_a_spec_that_no_plan_serves(attngen, tmp_path):
    spec = tmp_path / "x.attn"
    spec.write_text("attn 1\nattention x {\n  head_dim = 264\n}\n")
    done = attngen("run", spec, "--seqlen", "40", "--cpu")
    assert done.code == 0 and "CPU reference" in done.out and "not run: plan" in done.err


@pytest.mark.parametrize(
    "options",
    [("--seqlen", "ten"), ("--seqlen", "99999x99999"), ("--heads", "3"), ("--param", "x=1"), ("--param", "x")],
)
def test_run_usage(attngen, causal, options):
    assert attngen("run", causal, *options).code == 2


def test_run_refuses_a_file_that_is_no_kernel(attngen, tmp_path):
    path = tmp_path / "x.py"
    path.write_text("print('no kernel')\n")
    done = attngen("run", path)
    assert done.code == 2 and "ATTN_META" in done.err


@pytest.mark.dsl
@pytest.mark.skipif(GPU, reason="on a GPU the kernel checks itself instead")
def test_run_an_edited_kernel_file_without_a_gpu(attngen, causal, tmp_path):
    from attngen.verify import machine

    if machine.tool("ptxas") is None:
        pytest.skip("needs the development tools")
    kernel = tmp_path / "kernel.py"
    assert attngen("compile", causal, "-o", kernel, "--tile", "128x64").code == 0
    kernel.write_text(kernel.read_text() + "\n# edited\n")
    done = attngen("run", kernel)
    assert done.code == 0, done.err
    assert "edited" in done.err and "registers" in done.out and "ok" in done.out


@pytest.mark.dsl
def test_compile_to_machine_code(attngen, causal, tmp_path):
    done = attngen("compile", causal, "--object", tmp_path / "out", "--tile", "128x64")
    assert done.code == 0, done.err
    made = sorted((tmp_path / "out").iterdir())
    # The forward's tile is named; of the backward there is a plan for short calls and one for long ones.
    wanted = (("_bwd_", "_plan_0"), ("_bwd_", "_plan_1"), ("_fwd_", "_plan_0"))
    for path, words in zip(made, wanted, strict=True):
        assert all(word in path.name for word in words), path.name
    for path in made:
        assert path.suffix in (".so", ".o") and path.stat().st_size > 10_000
    assert done.out == ""


def test_cache_commands(process, tmp_path):
    env = {"ATTNGEN_CACHE_DIR": str(tmp_path / "cache")}
    assert process("cache", "path", env=env).out.strip() == str(tmp_path / "cache")
    entry = tmp_path / "cache" / "v1" / "abc" / "causal-0123456789abcdef"
    entry.mkdir(parents=True)
    (entry / "kernel.py").write_text("x" * 1000)
    listed = json.loads(process("cache", "list", "--json", env=env).out)["entries"]
    assert [(e["kernel_id"], e["bytes"], e["complete"]) for e in listed] == [("causal", 1000, False)]
    assert "causal" in process("cache", "list", env=env).out
    assert int(process("cache", "size", env=env).out) == 1000
    assert process("cache", "clear", "--older", "1d", env=env).code == 0 and entry.exists()
    assert process("cache", "clear", "--older", "soon", env=env).code == 2
    done = process("cache", "clear", env=env)
    assert done.code == 0 and "removed 1 kernel, 1.0 KB" in done.err and not entry.exists()
    assert "empty" in process("cache", "list", env=env).err


def test_doctor(process, tmp_path):
    done = process("doctor", env={"ATTNGEN_CACHE_DIR": str(tmp_path / "cache"), "ATTNGEN_CASH_DIR": "x"})
    assert done.code == 0, done.out
    for word in (
        "attngen",
        "grammar and templates",
        "compiler",
        "torch",
        "toolchain",
        "kernel cache",
        "ATTNGEN_CASH_DIR",
    ):
        assert word in done.out, word
    found = json.loads(process("doctor", "--json").out)
    assert {f["state"] for f in found["findings"]} <= {"ok", "limit"} and found["facts"]["python"]


def test_doctor_names_a_bad_setting(process):
    done = process("doctor", env={"ATTNGEN_LOG": "shouting"})
    assert done.code == 3 and "ATTNGEN_LOG" in done.out


def test_a_bad_setting_is_the_environment(process, causal):
    done = process("compile", causal, env={"ATTNGEN_LOG": "shouting"})
    assert done.code == 3 and "ATTNGEN_LOG" in done.err


def test_regen_check_finds_a_change(attngen, tmp_path, monkeypatch):
    from attngen.cli import regen

    monkeypatch.setattr(regen, "GALLERY", regen.GALLERY[:1])
    folder = tmp_path / "gallery"
    folder.mkdir()
    assert attngen("regen", "--folder", folder, "--check").code == 1
    assert attngen("regen", "--folder", folder).code == 0
    assert attngen("regen", "--folder", folder, "--check").code == 0
    kernel = next(folder.glob("*.py"))
    kernel.write_text(kernel.read_text().replace("BARRIER_TURN = 1", "BARRIER_TURN = 2"))
    done = attngen("regen", "--folder", folder, "--check")
    assert done.code == 1 and "-BARRIER_TURN = 2" in done.out and kernel.name in done.err
    (folder / "stranger.py").write_text("")
    assert attngen("regen", "--folder", folder).code == 0
    assert not (folder / "stranger.py").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(process, shell):
    done = process("completion", shell)
    assert done.code == 0 and "_ATTNGEN_COMPLETE" in done.out


def test_completion_completes(process):
    done = process(env={"_ATTNGEN_COMPLETE": "complete_bash", "COMP_WORDS": "attngen exp", "COMP_CWORD": "1"})
    assert done.out.split() == ["explain"]


def test_version_names_the_compiler(process):
    assert re.fullmatch(r"attngen \d+\.\d+\.\d+ \(nvidia-cutlass-dsl \S+, Python \S+\)\n", process("--version").out)


def test_compile_check_fmt_and_explain_start_light(causal, tmp_path):
    """No torch, no DSL, no rich: that is what keeps `attngen compile` under 0.7 s, and `explain` without tensors."""
    code = (
        "import sys, atexit; sys.argv = ['attngen', *sys.argv[1:]]\n"
        "from attngen.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code, e.code\n"
        "print([m for m in ('torch', 'cutlass', 'rich', 'matplotlib', 'numpy') if m in sys.modules], file=sys.stderr)\n"
    )
    for command in (
        ["compile", str(causal), "-q", "-o", str(tmp_path / "k.py")],
        ["check", str(causal)],
        ["fmt", str(causal)],
        ["explain", "examples/causal.attn"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stderr.strip().splitlines()[-1] == "[]", (command, done.stderr)


def test_verbose_logs_on_stderr(process, causal):
    done = process("-vv", "compile", causal)
    assert done.code == 0 and done.out.startswith('"""')


def test_check_notes_terms_that_are_tested_element_by_element(attngen, tmp_path):
    """A note is no fault: the spec is ok, and the term has its place, its reason and its mend, for tools too."""
    spec = tmp_path / "x.attn"
    clauses = "tensor present: bool[batch, seqlen_kv]\n  mask = kv_idx <= q_pos and present[b, kv_idx]"
    spec.write_text(f"attn 1\n\nattention x {{\n  head_dim = 64\n  {clauses}\n}}\n")
    done = attngen("check", spec)
    assert done.code == 0 and f"{spec}: ok" in done.err
    assert "note[W0401]: `x` tests the mask's term `present[b, kv_idx]` element by element" in done.err
    assert f"{spec}:6:30" in done.err and "help: where the kept keys are one run" in done.err
    done = attngen("check", "--json", spec)
    found = json.loads(done.out)
    assert done.code == 0 and found["files"][0]["ok"]
    assert [(d["code"], d["severity"], d["primary"]["column"]) for d in found["diagnostics"]] == [("W0401", "note", 30)]
    explained = attngen("explain", spec)
    assert "element-wise term `present[b, kv_idx]`" in explained.out and "instead: where the kept" in explained.out
    assert "W0401 element-wise-term" in attngen("explain", "W0401").out
