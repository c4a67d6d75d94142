"""A full disk behind stdout was reported as a bug in attngen, exit 70."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_stdout_on_a_full_disk(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attngen", "fmt", "-"],
            input=b"attn 1\nattention a {\n  head_dim = 64\n}\n",
            stdout=full, stderr=subprocess.PIPE, check=False, timeout=120, cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 3
    assert b"bug" not in done.stderr
    assert b"No space left on device" in done.stderr
