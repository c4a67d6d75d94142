"""Backwards as sm_90a machine code, without a GPU: no serialised WGMMA, no spill, registers and shared memory as
planned, and all three kernels that wait for each other.

Every example with all gradients that kernels serve, and a few head dims and clauses that no example has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ptxcheck.compile import compile_backward, load_text
from test_grid import CAUSAL, CLAUSES

from attngen.directions import plan_gradients
from attngen.emit.backward import emit_backward
from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.ir.expr import tensors_of
from attngen.ir.gradient import GradientKind
from attngen.search_backward import plan_backward
from attngen.syntax import load_all, load_spec
from attngen.targets import sm90
from attngen.verify import machine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [s for f in sorted((ROOT / "examples").glob("*.attn")) for s in load_all(f)]
#: Bytes that a kernel may store and load where its score or mask is evaluated element by element or reads a tensor: a
#: few words; and where fragments take all registers that are left, outside the walk (head dims 72 and 80, whose next
#: tile spills nothing and is a tenth slower). All others spill none.
SPILL_BUDGET, FULL_BUDGET = 64, 28
#: Blocks that spill more, all of it in their element-wise terms: divisions by run-time sizes, atomics into a table with
#: a mask by windows, a block's bool for each pair of a tile that it cuts. Bytes as they are, so that more is found.
HEAVY = {"bigbird_lists": 64, "dinat": 620, "swin": 76, "swin_shifted": 348}
pytestmark = [
    pytest.mark.dsl,
    pytest.mark.skipif(machine.tool("ptxas") is None, reason="needs the development tools: pip install 'attngen[dev]'"),
]


def check(plans: BackwardPlanSet) -> None:
    """Every plan of the file."""
    module = load_text(emit_backward(plans).text, plans.spec.name)
    for index, p in enumerate(plans.plans):
        check_plan(plans, p, compile_backward(module, plan=index).machine_code)


def check_plan(plans: BackwardPlanSet, p: BackwardPlan, code: machine.MachineCode) -> None:
    where = f"{plans.spec.name}, plan {p.name}"
    assert code.serialized == (), f"{where}: {code.serialized}"
    full = p.memory.fragment_registers + sm90.REGISTER_OVERHEAD >= p.memory.register_limit
    budget = FULL_BUDGET if full else 0
    if p.compute.expression_registers or tensors_of(plans.spec.mask):
        budget = SPILL_BUDGET
    budget = HEAVY.get(plans.spec.name, budget)
    assert code.spill_bytes <= budget, f"{where}: {code.spill_bytes} bytes of spills, {budget} allowed"
    assert code.stack_bytes <= budget, f"{where}: {code.stack_bytes} bytes of stack, {budget} allowed"
    assert code.registers <= p.launch.launch_registers, f"{where}: {code.registers} registers at launch"
    # the launch asks for all of it
    assert code.static_smem_bytes == 0 and p.memory.smem_bytes <= sm90.SMEM_BYTES
    ops = code.opcodes
    assert ops["USETMAXREG"] == 2, f"{where}: register reallocation stands {ops['USETMAXREG']} times"
    # main and finish wait for the grid before, prepare and main let the next one start, and what fills tables does
    shares = int(p.schedule.shares_walks)  # what adds up the parts does both
    starts = 2 + bool(p.mask.form.tables) + shares
    assert (ops["ACQBULK"], ops["PREEXIT"]) == (2 + shares, starts), f"{where}: waits for grids"
    assert ops["UTMALDG"] >= 4 and ops["UTMASTG"] >= 2, f"{where}: TMA is not in use"
    rings = not p.compute.splits_operands
    assert (ops.get("UBLKRED", 0) >= p.compute.warpgroups) == rings, f"{where}: bulk reductions of dQ"
    assert code.opcodes["HGMMA"] >= wgmmas(p), f"{where}: {ops['HGMMA']} WGMMA of {wgmmas(p)}"


def wgmmas(p: BackwardPlan) -> int:
    """Steps of k of one step of the walk: S, dP, dV, dK, dQ."""
    c = p.compute
    qk, v, m, n = (x // 16 for x in (c.head_dim_qk_padded, c.head_dim_v_padded, c.tile_m, c.tile_n))
    return qk + v + 2 * m + n


@pytest.mark.parametrize("spec", EXAMPLES, ids=lambda s: s.name)
def test_example(spec) -> None:
    found = plan_gradients(spec, sm90.NAME)
    assert found.plans is not None, found.notes
    check(found.plans)


@pytest.mark.parametrize(
    ("clause", "d", "dv"),
    [
        ("causal", 8, 8), ("window", 72, 40), ("score", 96, 96),
        ("elements", 256, 256), ("score", 192, 128), ("functions", 64, 64), ("score", 256, 256),
    ],
    ids=str,
)  # fmt: skip
def test_grid(clause: str, d: int, dv: int) -> None:
    """Tiles that share out dQ otherwise, drained GEMMs, split operands with a score."""
    spec = load_spec(f"attn 1\nattention {clause} {{\n  head_dim = {d}, v = {dv}\n  {CLAUSES[clause]}\n}}\n")
    check(plan_backward(spec))


@pytest.mark.parametrize("d", [128, 256])
def test_deterministic(d: int) -> None:
    text = f"attn 1\nattention turns {{\n  head_dim = {d}\n  {CAUSAL}\n  backward {{ deterministic = true }}\n}}\n"
    check(plan_backward(load_spec(text)))


def test_captured_gradients() -> None:
    """Sums of columns, rows and elements at once, and a sink's."""
    clauses = (
        "tensor x: f32[heads_q] grad\n  tensor r: f32[seqlen_q] grad\n  tensor t: f32[9] grad\n  sink = x[h]\n"
        f"  score = s * x[h] + r[q_idx] + t[min(abs(q_idx - kv_idx), 8)]\n  {CAUSAL}"
    )
    plans = plan_backward(
        load_spec(f"attn 1\nattention summed {{\n  head_dim = 64\n  {clauses}\n}}\n"), captured=("x", "r", "t")
    )
    of_epilogues = {GradientKind.OUTPUT, GradientKind.OUTPUT_ROW}
    assert {c.kind for c in plans.gradient.contributions} == set(GradientKind) - of_epilogues
    check(plans)
