"""Runs the command line in this process (fast) or in one of its own (for what only a process shows)."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def attngen(monkeypatch: pytest.MonkeyPatch):
    """`attngen("check", "x.attn", stdin="…")` in this process."""
    from attngen.cli import common
    from attngen.cli.main import app

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: object, stdin: str | bytes | None = None) -> Done:
        common.diagnostics_format = "human"
        result = CliRunner().invoke(app, [str(a) for a in arguments], input=stdin, prog_name="attngen")
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def process(tmp_path: Path):
    """`process("--version")` in a process of its own, started in an empty folder."""

    def run(*arguments: object, stdin: bytes = b"", cwd: Path = tmp_path, env: dict[str, str] | None = None) -> Done:
        done = subprocess.run(
            [sys.executable, "-m", "attngen", *map(str, arguments)],
            input=stdin, capture_output=True, cwd=cwd, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", **(env or {})},
        )  # fmt: skip
        return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    return run


@pytest.fixture
def causal(tmp_path: Path) -> Path:
    """A good spec."""
    path = tmp_path / "causal.attn"
    path.write_text("attn 1\n\nattention causal {\n  head_dim = 128\n  mask     = kv_idx <= q_pos\n}\n")
    return path
