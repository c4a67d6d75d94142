"""T5 truncates 2 log2(n / 8) to buckets: neither MUFU.LG2 nor CUDA's float64 log2 promises 3 for log2(8).

On a GPU its kernel and its reference disagreed; both are whole at powers of two now.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from attngen.emit.module import emit
from attngen.ir.functions import FUNCTIONS
from attngen.search import plan
from attngen.syntax import load_spec


def test_the_reference_takes_whole_logarithms_of_powers_of_two() -> None:
    x = torch.cat([2.0 ** torch.arange(-40, 41).double(), torch.tensor([0.3, 0.7, 0.71, 5.0, 1e300]).double()])
    log2 = FUNCTIONS["log2"].dense
    assert torch.equal(log2(x)[:81], torch.arange(-40, 41).double())
    assert torch.allclose(log2(x), torch.log2(x), rtol=1e-15)
    ends = log2(torch.tensor([0.0, float("inf"), -1.0, float("nan")]).double())
    assert ends[0] == -float("inf") and ends[1] == float("inf") and ends[2:].isnan().all()


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
