"""T5 truncates 2 log2(n / 8) to buckets. MUFU.LG2 gave less than 3 for log2(8): such keys took the bucket before."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from attngen.emit.module import emit
from attngen.search import plan
from attngen.syntax import load_spec


@pytest.mark.dsl
@pytest.mark.parametrize("score", ["s + log2(1.0 + s * s)", "s + log(1.0 + s * s)", "s + sqrt(s * s)"])
def test_expressions_take_no_approximate_logarithm_or_root(score: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(emit(plan(load_spec(f"attn 1\nattention a {{\n  head_dim = 64\n  score = {score}\n}}\n"))).text)
    spec = importlib.util.spec_from_file_location("kernel_with_logarithm", path)
    assert spec is not None and spec.loader is not None
    kernel = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = kernel
    spec.loader.exec_module(kernel)
    ptx = kernel.compile_plan(0, f"--keep-ptx --dump-dir {tmp_path}").__ptx__
    assert len(re.findall(r"lg2\.approx", ptx)) == 2, "LSE of a thread's two rows, and no other"
    assert "sqrt.approx" not in ptx
