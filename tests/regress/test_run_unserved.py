"""`attngen run` failed with E0651 on specs with branches or segments, and E0402 promised what no command did."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import attngen
from attngen.cli.main import app
from attngen.diag.diagnostic import AttnError
from attngen.jit import device
from attngen.jit.notice import AttngenNotice
from attngen.passes.serves import why_not
from attngen.syntax import load_spec

BODIES = {
    "branches": """head_dim = 16, v = 24
  tensor lam: f32[heads_q] grad
  mask = kv_idx <= q_pos
  branch positive {
    weight = 1.0
  }
  branch negative {
    weight = -lam[h]
  }""",
    "KV segments": "head_dim = 16\n  mask = kv_idx <= q_pos\n  segment past {\n    mask = kv_idx > 3\n  }",
    "the sigmoid normalizer": "head_dim = 16\n  normalizer = sigmoid",
    "the relu normalizer": "head_dim = 16\n  normalizer = relu",
    "f32 inputs": "head_dim = 16\n  dtype = f32",
    "head_dim = 264": "head_dim = 264",
    "layout paged": "head_dim = 16\n  layout = paged",
    "the max-logit output": "head_dim = 16\n  output { max_logit = true }",
    "f32 output": "head_dim = 16\n  output { dtype = f32 }",
}


@pytest.mark.parametrize("what", BODIES)
def test_run_gives_a_result_and_the_reason(what: str, tmp_path: Path) -> None:
    spec = tmp_path / "a.attn"
    spec.write_text(f"attn 1\n\nattention a {{\n  {BODIES[what]}\n}}\n")
    done = CliRunner().invoke(app, ["run", str(spec), "--seqlen", "33x50,40x19", "--cpu"])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("CPU reference") == 2
    if why_not(load_spec(spec), "sm_90a"):
        assert f"not run: plan: E0402: sm_90a kernels do not serve {what} yet" in done.stderr
    else:  # served since; its plans are executed
        assert "plan " in done.stdout and "not run: plan" not in done.stderr


def test_something_is_not_served() -> None:
    bodies = [load_spec(f"attn 1\n\nattention a {{\n  {body}\n}}\n") for body in BODIES.values()]
    assert sum(bool(why_not(s, "sm_90a")) for s in bodies) >= 3


def test_the_note_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "attn 1\nattention a {\n  head_dim = 264\n}\n"
    with pytest.raises(AttnError) as fault:
        attngen.compile(text)
    (note,) = fault.value.diagnostics[0].notes
    assert "attngen run SPEC" in note and "attngen.ref.dense.attention" in note and "without a GPU `build`" in note
    with pytest.warns(AttngenNotice, match="runs on CPU tensors only"):
        attngen.build(text)
    monkeypatch.setattr(device, "has_gpu", lambda target: True)
    with pytest.raises(AttnError):
        attngen.build(text)
