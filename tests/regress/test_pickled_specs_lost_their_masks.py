"""A spec that had been hashed was pickled with its hash, which means nothing in another process: `bench --jobs`
planned such specs in other processes, found no interval in any mask, and kept kernels that walked over every tile."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from attngen.emit.backward import emit_backward
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
THERE = """
import pickle, sys
from attngen.emit.backward import emit_backward
from attngen.search_backward import plan_backward
spec = pickle.load(open(sys.argv[1], "rb"))
sys.stdout.write(emit_backward(plan_backward(spec)).text)
"""


def test_a_hashed_spec_means_the_same_in_another_process(tmp_path: Path) -> None:
    spec = load_spec(EXAMPLES / "causal.attn")
    assert hash(spec) == hash(spec.replace()) and spec == spec.replace()
    file = tmp_path / "spec.pickle"
    file.write_bytes(pickle.dumps(spec))
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", THERE, str(file)],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert there.stdout == emit_backward(plan_backward(spec)).text


def test_only_fields_travel() -> None:
    spec = load_spec(EXAMPLES / "causal.attn")
    hash(spec)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec and "_hash" not in vars(pickle.loads(pickle.dumps(spec.mask)))
