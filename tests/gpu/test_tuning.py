"""Tuning on a GPU: kernels are compiled side by side and timed, the choice is kept, and a build follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attngen import api, search, tuned
from attngen.bench import tune_grid
from attngen.bench.cells import Cell, Work
from attngen.bench.tune_gpu import Gpu
from attngen.syntax import load_spec

pytestmark = pytest.mark.gpu
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_tune_keep_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.settings import settings

    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        spec = load_spec(EXAMPLES / "causal.attn")
        lengths = (256, 1024)
        row = tune_grid.row_of("causal/causal", [Work(Cell(spec, 2, 4, 2, n, n)) for n in lengths])
        gpu = Gpu("sm_90a", rounds=2, jobs=8)
        ((_, found),) = tune_grid.tune_all([row], gpu, "sm_90a", torch.cuda.get_device_name(), candidates=3)
        assert all(t > 0.0 for r in found.record.rates for t in r.tflops)
        tuned.keep(tmp_path, "sm_90a", found.record)
        attn = api.build(spec)
        assert tuple(map(search.choice_of, attn.plans)) == found.record.plans
        q, k, v = (torch.randn(1, 300, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True
        ).transpose(1, 2)
        assert (attn(q, k, v).double() - want).norm() < 0.01 * want.norm()
    finally:
        settings.cache_clear()
