"""Wheel and sdist: what they hold, and that the wheel works installed in a venv of its own, run from another folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False, env=env
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """sdist from the checkout, wheel from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return {"wheel": next(out.glob("*.whl")), "sdist": next(out.glob("*.tar.gz"))}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh venv that holds the wheel and, through a .pth file, this environment's dependencies."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip())
    # Paths in a .pth file are searched after the venv's own, and their .pth files (editable installs) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        built["wheel"],
        cwd=folder,
    )
    return folder / "bin"


def wheel_names(built: dict[str, Path]) -> set[str]:
    return set(zipfile.ZipFile(built["wheel"]).namelist())


def test_wheel_has_code_and_data(built: dict[str, Path]) -> None:
    names = wheel_names(built)
    for path in (ROOT / "grammar").glob("*.attn"):
        assert f"attngen/_data/grammar/{path.name}" in names
    for folder in ("grammar", "templates", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert f"attngen/_data/{path.relative_to(ROOT)}" in names, path
    for path in (ROOT / "attngen").rglob("*"):
        if path.suffix in {".py", ".md", ".typed", ".json"}:
            assert str(path.relative_to(ROOT)) in names, path
    assert "attngen/py.typed" in names


def test_wheel_has_nothing_else(built: dict[str, Path]) -> None:
    assert {n.split("/")[0].split("-")[0] for n in wheel_names(built)} == {"attngen"}
    assert not [n for n in wheel_names(built) if n.endswith(".pyc") or "/tests/" in n]


def test_sdist_can_be_tested(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "pyproject.toml",
        "tests/conftest.py",
        "examples/causal.attn",
    ):
        assert name in names, name
    assert not [n for n in names if n.startswith((".venv", ".gpu", ".ci/work"))]


def test_metadata(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))).decode()
        scripts = wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode()
    assert "Requires-Python: >=3.11" in metadata and "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: nvidia-cutlass-dsl[cu13]==" in metadata
    assert "attngen = attngen.cli.main:main" in scripts


def test_installed_wheel_runs_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import attngen; print(attngen.__file__)", cwd=tmp_path).stdout
    assert str(installed.parent) in where, "the wheel is what is imported"
    spec = tmp_path / "mine.attn"
    spec.write_text(
        'attn 1\ninclude "std.attn"\nattention mine {\n  head_dim = 64\n  mask = causal and window(100)\n}\n'
    )
    run(installed / "attngen", "compile", spec, "-o", tmp_path / "kernel.py", cwd=tmp_path)
    compile((tmp_path / "kernel.py").read_text(), "kernel.py", "exec")
    assert "mask form" in run(installed / "attngen", "explain", spec, cwd=tmp_path).stdout
    assert "E0302" in run(installed / "attngen", "explain", "E0302", cwd=tmp_path).stdout
    run(installed / "attngen", "run", spec, "--cpu", "--seqlen", "70x90", cwd=tmp_path)


def test_installed_and_checkout_write_the_same_kernel(installed: Path, tmp_path: Path) -> None:
    spec = (ROOT / "examples" / "gpt_oss.attn").read_text()
    (tmp_path / "x.attn").write_text(spec)
    ours = run(sys.executable, "-m", "attngen", "compile", tmp_path / "x.attn", cwd=ROOT, PYTHONHASHSEED="3").stdout
    theirs = run(installed / "attngen", "compile", "x.attn", cwd=tmp_path, PYTHONHASHSEED="4").stdout
    assert ours == theirs
