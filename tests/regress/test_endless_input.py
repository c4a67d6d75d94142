"""`attngen check /dev/zero` and an endless stdin filled the memory; a looping link was offered as its own mend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngen.cli.main import app

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero on this system")
@pytest.mark.parametrize("argument", ["/dev/zero", "-"])
@pytest.mark.parametrize("command", ["check", "fmt"])
def test_input_without_an_end(command: str, argument: str, tmp_path: Path) -> None:
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-m", "attngen", command, argument],
            stdin=zeros, capture_output=True, check=False, timeout=60, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode in (1, 2)
    assert b"is larger than" in done.stderr


def test_a_link_to_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.attn").symlink_to("loop.attn")
    done = CliRunner().invoke(app, ["check", str(tmp_path / "loop.attn")])
    assert done.exit_code == 2
    assert "did you mean" not in done.stderr


@pytest.mark.parametrize(("name", "says"), [("", "empty"), ("x" * 5000, "too long")])
def test_names_that_are_none(name: str, says: str) -> None:
    done = CliRunner().invoke(app, ["check", name])
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr) < 400
