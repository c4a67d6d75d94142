"""`-v` said that it logs stages and times, and logged nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = "attn 1\n\nattention a {\n  head_dim = 64\n}\n"
STAGES = re.compile(r"attngen\.(\w+): \1 done in [0-9.]+ ms")


def compiled(tmp_path: Path, *flags: str, **environ: str) -> str:
    path = tmp_path / "a.attn"
    path.write_text(SPEC)
    done = subprocess.run(
        [sys.executable, "-m", "attngen", *flags, "compile", str(path), "-o", os.devnull],
        capture_output=True,
        text=True,
        env={**{k: v for k, v in os.environ.items() if k != "ATTNGEN_LOG"}, **environ},
        cwd=Path(__file__).parents[2],
        check=True,
    )
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "environ"), [(("-v",), {}), ((), {"ATTNGEN_LOG": "info"}), (("-v",), {"ATTNGEN_LOG": "debug"})]
)
def test_each_stage_once_with_its_time(flags: tuple[str, ...], environ: dict[str, str], tmp_path: Path) -> None:
    said = compiled(tmp_path, *flags, **environ)
    assert STAGES.findall(said) == ["spec", "plan", "emit"]
    assert "rejected by" not in said


@pytest.mark.parametrize(
    ("flags", "environ"), [(("-vv",), {}), ((), {"ATTNGEN_LOG": "debug"}), (("-vv",), {"ATTNGEN_LOG": "error"})]
)
def test_details(flags: tuple[str, ...], environ: dict[str, str], tmp_path: Path) -> None:
    said = compiled(tmp_path, *flags, **environ)
    assert STAGES.findall(said) == ["spec", "plan", "emit"]
    assert re.search(r"attngen\.plan: 64x256 was rejected by \w+: ", said) and "attngen.plan: chosen: " in said


def test_silence_by_default(tmp_path: Path) -> None:
    assert "attngen." not in compiled(tmp_path)
