"""`check` took a file with a byte order mark, and `fmt` refused it."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from attngen.cli.main import app


def test_the_mark_is_dropped(tmp_path: Path) -> None:
    marked = tmp_path / "marked.attn"
    marked.write_bytes(b"\xef\xbb\xbfattn 1\r\n\r\nattention a {\r\n  head_dim = 64\r\n}\r\n")
    assert CliRunner().invoke(app, ["check", str(marked)]).exit_code == 0
    assert CliRunner().invoke(app, ["fmt", "--check", str(marked)]).exit_code == 1
    assert CliRunner().invoke(app, ["fmt", str(marked)]).exit_code == 0
    assert marked.read_bytes() == b"attn 1\n\nattention a {\n  head_dim = 64\n}\n"
