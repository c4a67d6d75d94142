"""`attngen fmt` called every faulty file `<text>`, and its diff ran on into the next line at a text without an end."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from attngen.cli.main import app


def test_a_fault_names_its_file(tmp_path: Path) -> None:
    bad = tmp_path / "bad.attn"
    bad.write_text("attn 1\nattention a {\n  maks = true\n}\n")
    done = CliRunner().invoke(app, ["fmt", str(bad)])
    assert done.exit_code == 1
    assert f"{bad}:3:3" in done.stderr


def test_diff_of_a_text_without_a_last_newline(tmp_path: Path) -> None:
    ragged = tmp_path / "ragged.attn"
    ragged.write_text("attn 1\nattention a {\n  head_dim = 64 }")
    done = CliRunner().invoke(app, ["fmt", "--diff", str(ragged)])
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    at = lines.index("-  head_dim = 64 }")
    assert lines[at + 1] == "\\ No newline at end of file"


def test_the_files_mode_is_kept(tmp_path: Path) -> None:
    private = tmp_path / "private.attn"
    private.write_text("attn 1\nattention a { head_dim = 64 }\n")
    private.chmod(0o600)
    assert CliRunner().invoke(app, ["fmt", str(private)]).exit_code == 0
    assert private.stat().st_mode & 0o777 == 0o600
