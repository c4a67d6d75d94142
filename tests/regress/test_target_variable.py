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


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call, then ATTNGEN_TARGET, then the spec, then the default; the variable's description says so too."""
    from attngen import AttnError, compile
    from attngen.cli.arguments import pick_target
    from attngen.syntax import load_spec

    text = "attn 1\n\nattention full {\n  head_dim = 64\n  target = sm_100a\n}\n"
    spec = load_spec(text)

    def named(**call: str) -> str:
        with pytest.raises(AttnError) as fault:
            compile(text, **call)
        return fault.value.diagnostics[0].message

    monkeypatch.setenv("ATTNGEN_TARGET", "sm_1")
    settings.settings.cache_clear()
    try:
        assert "`sm_3`" in named(target="sm_3") and pick_target(spec, "sm_3") == "sm_3"
        assert "`sm_1`" in named() and pick_target(spec, None) == "sm_1"
        monkeypatch.delenv("ATTNGEN_TARGET")
        settings.settings.cache_clear()
        assert "`sm_100a`" in named() and pick_target(spec, None) == "sm_100a"
        assert pick_target(spec.replace(targets=()), None) == settings.DEFAULT_TARGET
    finally:
        settings.settings.cache_clear()
    assert "whatever the spec names" in settings.VARIABLES["ATTNGEN_TARGET"]
