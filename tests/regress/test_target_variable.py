"""ATTNGEN_TARGET decided what `compile` made, and `check --plan` and `explain` ignored it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngen import settings
from attngen.cli.main import app


@pytest.mark.parametrize("command", [["check", "--plan"], ["explain"], ["compile"]])
def test_every_command_reads_it(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tmp_path / "full.attn"
    spec.write_text("attn 1\n\nattention full {\n  head_dim = 64\n}\n")
    monkeypatch.setenv("ATTNGEN_TARGET", "sm_1")
    settings.settings.cache_clear()
    try:
        done = CliRunner().invoke(app, [*command, str(spec)])
    finally:
        settings.settings.cache_clear()
    assert done.exit_code == 1
    assert "E0401" in done.stderr
