"""Messages that left a newcomer without a mend, or said two things about one slip."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from attngen.cli.main import app
from attngen.diag.diagnostic import AttnError
from attngen.syntax import check_text

SPEC = "attn 1\n\nattention a {\n  head_dim = 64\n}\n"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "a.attn"
    path.write_text(SPEC)
    return path


def test_head_dim_by_option_and_by_clause(spec: Path) -> None:
    by_option = CliRunner().invoke(app, ["compile", str(spec), "--head-dim", "7"])
    spec.write_text(SPEC.replace("64", "7"))
    by_clause = CliRunner().invoke(app, ["compile", str(spec)])
    assert by_option.exit_code == by_clause.exit_code == 1
    for done in (by_option, by_clause):
        assert done.stderr.count("error[E0402]: sm_90a kernels do not serve head_dim = 7 yet") == 1
        assert done.stderr.count("error[") == 1 and "multiples of 8 from 8 to 256" in done.stderr


def test_the_option_takes_what_the_clause_takes() -> None:
    from attngen.options import Options
    from attngen.syntax.limits import HEAD_DIM

    assert Options.parse({"head_dim": HEAD_DIM}).head_dim == HEAD_DIM
    with pytest.raises(AttnError, match="E0503"):
        Options.parse({"head_dim": HEAD_DIM + 1})


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_seqlen_names_its_range(command: str, spec: Path) -> None:
    done = CliRunner().invoke(app, [command, str(spec), "--seqlen", "0"])
    assert done.exit_code == 2 and "from 1 to 16777215" in done.stderr and "found '0'" in done.stderr


def test_regen_names_the_folder() -> None:
    done = CliRunner().invoke(app, ["regen", "--check", "--folder", "/nope"])
    assert done.exit_code == 2 and "--folder /nope: there is no such folder" in done.stderr


@pytest.mark.parametrize(("option", "file", "other"), [("--png", "x.svg", "--svg"), ("--svg", "x.PNG", "--png")])
def test_a_picture_of_the_other_kind(option: str, file: str, other: str, spec: Path, tmp_path: Path) -> None:
    path = tmp_path / file
    done = CliRunner().invoke(app, ["explain", str(spec), option, str(path)])
    assert done.exit_code == 2 and f"write {other} {path}" in done.stderr and not path.exists()


@pytest.mark.parametrize(
    ("clause", "mend"),
    [("score = s ** 2", "`x * x`"), ("mask = q_idx <> kv_idx", "`!=`"), ("score = 2**s", "`exp(y * log(x))`")],
)
def test_operators_of_other_languages(clause: str, mend: str) -> None:
    (fault,) = check_text(SPEC.replace("}", f"  {clause}\n}}"))
    assert fault.code == "E0101" and mend in fault.helps[0]
