"""Launching: several launches in a row, PDL, names and source lines in reports, counts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dslkernels import compile_scale
from ptxcheck.compile import compile_file
from ptxcheck.hostcalls import Refused
from ptxcheck.launch import attngen_call, check
from ptxcheck.report import FaultFound

pytestmark = pytest.mark.dsl
GENERATED = Path(__file__).resolve().parents[2] / "generated"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_launches_follow_one_another(arch: str) -> None:
    """x * alpha + 1 over a strided vector; what lies between its elements stays."""
    whole = torch.arange(400.0)
    want = whole.clone()
    want[: 2 * 150 : 2] = want[: 2 * 150 : 2] * 2.5 + 1
    compiled = compile_scale(arch)
    for seed in range(3):
        x = whole.clone()
        report = check(compiled, x[: 2 * 150 : 2], 2.5, seed=seed)
        assert not report.faults and torch.equal(x, want)


def test_missing_grid_dependency() -> None:
    """With PDL, and no griddepcontrol.wait, the second launch reads what the first may not have written."""
    report = check(compile_scale(waits=False), torch.zeros(100), 2.0, collect=1, names=("x", "alpha"))
    (fault,) = report.faults
    assert fault.kind == "missing-grid-dependency" and "x[" in fault.message
    assert "dslkernels.py:" in fault.where


def test_faults_raise_unless_collected() -> None:
    compiled = compile_scale(waits=False)
    with pytest.raises(FaultFound, match="missing-grid-dependency"):
        check(compiled, torch.zeros(100), 2.0)


def test_arguments_are_checked_by_the_function_itself() -> None:
    compiled, x = compile_scale(), torch.zeros(64)
    with pytest.raises(Refused, match="dtype"):
        check(compiled, x.double(), 2.0)
    with pytest.raises(Refused, match="ndim"):
        check(compiled, x[None], 2.0)


def test_counts_of_a_forward() -> None:
    """`causal` with tiles of 128 x 128, 256 rows: three KV tiles, the plan's own arithmetic."""
    module, _ = compile_file(GENERATED / "causal.sm90.py", 0)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 256, 1, 128, generator=g).bfloat16() for _ in range(3))
    _, _, report = attngen_call(module, 0, q, k, v, measure=True)
    counters = report.counters
    kv_tiles, warpgroups, steps = 3, 2, 128 // 16
    assert counters.mma == {"wgmma m64n128k16.f32.bf16.bf16": kv_tiles * warpgroups * 2 * steps}
    tile = 128 * 128 * 2
    assert counters.copied == {"q": 2 * tile, "k": kv_tiles * tile, "v": kv_tiles * tile, "o": 2 * tile}
    elements = kv_tiles * 128 * 128
    assert elements <= counters.exponentials < 1.1 * elements  # and a rescale factor a row
    assert counters.instructions > 1000


def test_empty_calls_are_not_launched() -> None:
    module, _ = compile_file(GENERATED / "causal.sm90.py", 0)
    q, k = torch.zeros(1, 4, 1, 128).bfloat16(), torch.zeros(1, 0, 1, 128).bfloat16()
    with pytest.raises(ValueError, match="launches nothing"):
        attngen_call(module, 0, q, k, k)


def test_a_tile_counter_that_is_not_zero() -> None:
    """CTAs take tickets from where it stands: tiles are left out, and it is not set back."""
    _, code = compile_file(GENERATED / "causal.sm90.py", 0)
    q, k, v = (torch.zeros(1, 300, 1, 128).bfloat16() for _ in range(3))
    o, counter = torch.full_like(q, float("nan")), torch.tensor([7], dtype=torch.int32)
    check(code, q, k, v, o, torch.zeros(1, 1, 300), counter, 1.0, 1)
    assert o.isnan().any() and not o.isnan().all() and counter.item() == 8
