"""Exit codes and streams: 0 done, 1 spec, 2 usage, 3 environment, 70 our bug; product on stdout, the rest on stderr."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

BAD_MASK = "attn 1\nattention x {\n  head_dim = 64\n  mask = q_pos - kv_idx\n}\n"
COMMANDS = ("compile", "check", "fmt", "explain", "run", "bench", "cache", "doctor", "regen", "completion")


def test_compile_writes_the_source_to_stdout_and_nothing_else(attngen, causal):
    done = attngen("compile", causal)
    assert done.code == 0, done.err
    compile(done.out, "kernel.py", "exec")
    assert "ATTN_META" in done.out
    assert done.err == ""


def test_compile_to_a_file_says_so_on_stderr(attngen, causal, tmp_path):
    done = attngen("compile", causal, "-o", tmp_path / "kernel.py")
    assert (done.code, done.out) == (0, "")
    assert "kernel.py" in done.err
    assert (tmp_path / "kernel.py").read_text() == attngen("compile", causal).out


def test_compile_json_describes_the_files(attngen, causal, tmp_path):
    done = attngen("compile", causal, "-o", tmp_path / "kernel.py", "--json")
    made = json.loads(done.out)
    assert made["schema"] == 1 and made["files"] == [str(tmp_path / "kernel.py")]
    assert made["meta"]["kernel_id"] == made["kernel_id"]


def test_compile_keeps_an_edited_file_unless_forced(attngen, causal, tmp_path):
    kernel = tmp_path / "kernel.py"
    assert attngen("compile", causal, "-o", kernel).code == 0
    assert attngen("compile", causal, "-o", kernel).code == 0, "an unedited kernel is replaced"
    edited = kernel.read_text() + "\n# mine\n"
    kernel.write_text(edited)
    done = attngen("compile", causal, "-o", kernel)
    assert done.code != 0 and "edited" in done.err and "--force" in done.err
    assert kernel.read_text() == edited
    assert attngen("compile", causal, "-o", kernel, "--force").code == 0
    assert "# mine" not in kernel.read_text()


def test_compile_does_not_replace_a_stranger(attngen, causal, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    assert attngen("compile", causal, "-o", notes).code != 0
    assert notes.read_text() == "keep me"


def test_overrides_reach_the_kernel(attngen, causal):
    plain = attngen("compile", causal).out
    other = attngen(
        "compile", causal, "--head-dim", "192x128", "--dtype", "fp16", "--layout", "bhsd", "--tile", "128x64"
    ).out
    assert plain != other and "HEAD_DIM_QK = 192" in other and "HEAD_DIM_V = 128" in other


@pytest.mark.parametrize(
    "options",
    [
        ("--head-dim", "wide"), ("--head-dim", "-8"), ("--head-dim", "64x64x64"), ("--tile", "128"), ("--tile", "axb"),
        ("--dtype", "fp8"), ("--layout", "shdb"), ("--order", "random"), ("--stages", "0"), ("--target", "sm_12"),
        ("--head-dim", "10" * 50), ("--no-such-option",), ("--stages", "many"),
    ],
)  # fmt: skip
def test_senseless_options_are_refused_in_words(attngen, causal, options):
    done = attngen("compile", causal, *options)
    assert done.code in (1, 2, 3) and done.code != 70
    assert done.err and "Traceback" not in done.err and done.out == ""


def test_a_fault_of_the_spec_is_1(attngen, tmp_path):
    bad = tmp_path / "bad.attn"
    bad.write_text(BAD_MASK)
    for command in ("compile", "check", "explain", "run"):
        done = attngen(command, bad)
        assert done.code == 1, (command, done.err)
        assert "error[E03" in done.err and "bad.attn:4:" in done.err and "help:" in done.err


def test_check_json_lists_every_fault_on_stdout(attngen, tmp_path):
    bad = tmp_path / "bad.attn"
    bad.write_text(BAD_MASK.replace("head_dim = 64", "head_dim = 64\n  score = nothing"))
    done = attngen("check", bad, "--json")
    found = json.loads(done.out)["diagnostics"]
    assert done.code == 1 and len(found) == 2
    assert {d["primary"]["line"] for d in found} == {4, 5}


def test_check_prints_nothing_on_stdout_for_people(attngen, causal):
    done = attngen("check", causal)
    assert (done.code, done.out) == (0, "") and "ok" in done.err


def test_check_plan_refuses_what_no_target_serves(attngen, tmp_path):
    spec = tmp_path / "large.attn"
    spec.write_text("attn 1\nattention x {\n  head_dim = 576\n}\n")
    assert attngen("check", spec).code == 0
    done = attngen("check", spec, "--plan")
    assert done.code == 1 and "error[E04" in done.err


@pytest.mark.parametrize("form", ["short", "json", "github"])
def test_diagnostics_formats(attngen, tmp_path, form):
    bad = tmp_path / "bad.attn"
    bad.write_text(BAD_MASK)
    done = attngen("--diagnostics", form, "check", bad)
    assert done.code == 1
    if form == "json":
        assert json.loads(done.err)["diagnostics"][0]["code"].startswith("E03")
    elif form == "short":
        assert done.err.count("\n") == 1 and "bad.attn:4:" in done.err
    else:
        assert done.err.startswith("::error file=")


@pytest.mark.parametrize("command", ["compile", "check", "fmt", "explain", "run"])
def test_a_missing_file_is_usage(attngen, causal, command):
    done = attngen(command, causal.with_name("casual.attn"))
    assert done.code == 2 and "no such file" in done.err and "causal.attn" in done.err


@pytest.mark.parametrize("command", ["compile", "check", "fmt", "explain", "run"])
def test_a_folder_is_usage(attngen, tmp_path, command):
    assert attngen(command, tmp_path).code == 2


def test_every_command_has_help(attngen):
    for command in COMMANDS:
        done = attngen(command, "--help")
        assert done.code == 0 and command in done.out, command


def test_no_arguments_print_help(attngen):
    assert "compile" in attngen().out


def test_stdin_is_a_spec(attngen, causal):
    text = causal.read_text()
    assert attngen("compile", "-", stdin=text).out == attngen("compile", causal).out
    assert attngen("check", "-", stdin=text).code == 0
    assert attngen("fmt", "-", stdin=text).out == text
    assert attngen("check", "-", stdin="no spec at all").code == 1
    assert attngen("check", "-", stdin="").code == 1
    assert attngen("check", "-", stdin=b"\xff\xfe\x00").code == 2


def test_an_internal_fault_is_70_with_a_bundle(attngen, causal, monkeypatch, tmp_path):
    from attngen import api

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(api, "compile", broken)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("sys.argv", ["attngen", "compile", str(causal)])
    done = attngen("compile", causal)
    assert done.code == 70 and "this is a bug in attngen" in done.err and "Traceback" not in done.err
    bundle = json.loads(next(tmp_path.glob("attngen-bug-*.json")).read_text())
    assert "planted" in "".join(bundle["traceback"])
    assert causal.read_text() in bundle["specs"].values()


def test_a_reader_that_leaves_is_no_error(causal):
    import subprocess
    import sys

    command = f"{sys.executable} -m attngen compile {causal} | head -c 10 >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_unwritable_outputs(attngen, causal, tmp_path):
    assert attngen("compile", causal, "-o", tmp_path).code == 2
    done = attngen("compile", causal, "-o", tmp_path / "no" / "such" / "folder.py")
    assert done.code in (2, 3) and "folder.py" in done.err
    assert attngen("explain", causal, "--svg", tmp_path / "no" / "x.svg").code == 2
    assert attngen("compile", causal, "-o", "/dev/null", "--force").code == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    "name", ["x y z.attn", "-dash.attn", "new\nline.attn", "ünï.attn", "q'uote\".attn", "x" * 200 + ".attn"]
)
def test_hostile_paths_work(attngen, causal, tmp_path, monkeypatch, name):
    hostile = tmp_path / name
    hostile.write_text(causal.read_text())
    done = attngen("check", hostile)
    assert done.code == 0, done.err
    assert "\n" not in done.err.removesuffix("\n")
    assert attngen("compile", hostile, "-q", "-o", tmp_path / "k.py").code == 0
    assert name.removesuffix(".attn") not in (tmp_path / "k.py").read_text(), "paths never enter the text"


def test_hostile_paths_that_do_not_exist(attngen):
    for name in ("\x00", "x" * 5000, "/proc/self/mem/x", "/dev/full/x", "\x1b[31mred"):
        done = attngen("check", name)
        assert done.code in (1, 2) and "Traceback" not in done.err and "\x1b" not in done.err


def test_a_binary_file_is_no_spec(attngen, tmp_path):
    path = tmp_path / "x.attn"
    path.write_bytes(os.urandom(2048))
    for command in ("check", "compile", "fmt"):
        done = attngen(command, path)
        assert done.code in (1, 2) and "Traceback" not in done.err, (command, done.err)
