"""`check --json good.attn missing.attn` printed no JSON; a file that is not UTF-8 had two exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngen.cli.main import app

GOOD = "attn 1\n\nattention a {\n  head_dim = 64\n}\n"


def test_a_missing_file_is_one_of_the_faults(tmp_path: Path) -> None:
    good, bad, missing = tmp_path / "a.attn", tmp_path / "b.attn", tmp_path / "c.attn"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace("64", "0"))
    done = CliRunner().invoke(app, ["check", "--json", str(missing), str(good), str(bad)])
    assert done.exit_code == 2
    said = json.loads(done.stdout)
    assert [d["code"] for d in said["diagnostics"]] == ["E0110", "E0210"]
    assert "no such file" in said["diagnostics"][0]["message"] and "c.attn" in said["diagnostics"][0]["message"]
    assert said["files"] == [
        {"file": str(missing), "ok": False},
        {"file": str(good), "ok": True},
        {"file": str(bad), "ok": False},
    ]
    done = CliRunner().invoke(app, ["check", str(missing), str(good)])
    assert done.exit_code == 2 and "a.attn: ok" in done.stderr and "no such file" in done.stderr


@pytest.mark.parametrize("command", [["check"], ["check", "--json"], ["fmt"], ["fmt", "--check"], ["compile"], ["run"]])
def test_no_utf8_is_usage_everywhere(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "latin.attn"
    path.write_bytes(b"attn 1\n# \xe9\n\nattention a {\n  head_dim = 64\n}\n")
    done = CliRunner().invoke(app, [*command, str(path)])
    assert done.exit_code == 2
    assert "not UTF-8" in done.stdout + done.stderr and "latin.attn" in done.stdout + done.stderr
