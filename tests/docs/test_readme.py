"""README.md: every block runs or is what the code writes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attngen.cli.regen import with_kernel_head
from attngen.syntax import format_text

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()


def block(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```\w*\n(.*?)```", TEXT, re.DOTALL)
    assert found, marker
    return found[1]


def test_fits_a_screen_or_two() -> None:
    assert len(TEXT.splitlines()) < 128


def test_spec_is_the_example() -> None:
    example = (ROOT / "examples" / "causal.attn").read_text()
    assert block("spec") == example[example.index("attn 1") :]
    assert format_text(block("spec")) == block("spec")


def test_kernel_head_is_what_the_compiler_writes() -> None:
    assert with_kernel_head(TEXT) == TEXT, "run `attngen regen`"


@pytest.mark.parametrize("code", re.findall(r"```python\n(import .*?)```", TEXT, re.DOTALL))
def test_python_blocks_run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code + "\nassert o.shape == q.shape and lse.shape == (2, 8, 300)\n"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_commands_are_two_and_name_real_things() -> None:
    commands = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    assert len(commands) == 2 and all(len(c.strip().splitlines()) == 1 for c in commands)
    assert "attngen compile examples/causal.attn -o kernel.py" in commands[0]
    assert "pytest" in commands[1] and commands[1] == block("test-command")
    for name in re.findall(r"examples/\w+\.attn", TEXT):
        assert (ROOT / name).is_file()


def test_no_number_without_a_measurement() -> None:
    """Speed is claimed only with its table: TFLOP/s appear in README only beside the machine they were measured on."""
    if "TFLOP" in TEXT:
        assert "H200" in TEXT
