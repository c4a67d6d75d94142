"""The search of the backward: tiles for every head dim, rejections with reasons, what no kernel serves yet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from large import TOO_LARGE, large
from test_search import DIMS, GAPS, MASKS, shown, written

from attngen.diag.codes import CODES
from attngen.diag.diagnostic import AttnError, Diagnostic
from attngen.emit.backward import emit_backward, kernel_id_of
from attngen.ir.backward import BackwardPlanSet
from attngen.ir.gradient import GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType
from attngen.passes.backward.choose import measured_lengths, of_one_wave, rates
from attngen.passes.backward.compute import Candidate
from attngen.plan_text_backward import turn_words
from attngen.search_backward import candidates, plan_backward
from attngen.syntax import load_spec
from attngen.targets import sm90
from attngen.verify.backward import faults, set_faults

SLOPES = "tensor x: f32[heads_q] grad\n  score = s * x[h]"
BIAS = "tensor x: f32[batch, heads_q, seqlen_q, seqlen_kv] grad\n  score = s + x[b, h, q_idx, kv_idx]"
DETERMINISTIC = "\n  backward { deterministic = true }"


def refused(s: AttentionSpec, target: str = sm90.NAME, captured: tuple[str, ...] = ()) -> tuple[Diagnostic, ...]:
    with pytest.raises(AttnError) as caught:
        plan_backward(s, target, captured=captured)
    return caught.value.diagnostics


@pytest.mark.parametrize("kind", MASKS)
def test_every_head_dim_has_a_plan(kind: str) -> None:
    for d, dv in DIMS:
        found = plan_backward(written(d, dv, MASKS[kind]))
        where = f"{kind} {d} {dv}"
        p = found.long_plan
        assert set_faults(found) == [] and found.gradient.contributions == (), where
        assert all(faults(q) == [] for q in (*found.plans, *found.others)), where
        assert not set(found.plans) & set(found.others) and (p.compute.head_dim_qk, p.compute.head_dim_v) == (d, dv), (
            where
        )
        assert p.memory.smem_bytes <= sm90.SMEM_BYTES, where
        assert p.memory.fragment_registers + sm90.REGISTER_OVERHEAD <= p.memory.register_limit, where


@pytest.mark.parametrize(
    ("d", "dv", "tile", "dq", "drains"),
    [
        (64, 64, "128x128", "rows", False),
        (72, 72, "128x128", "rows", False),
        (96, 96, "64x128", "columns", False),
        (128, 128, "80x128", "transposed", False),
        (192, 128, "48x128", "transposed", True),
        (256, 256, "64x2x64", "columns", False),
    ],
)
def test_the_tile_of_full_attention(d: int, dv: int, tile: str, dq: str, drains: bool) -> None:
    p = plan_backward(written(d, dv)).long_plan
    c = p.compute
    how = "transposed" if c.dq_transposed else "rows" if c.dq_by_rows else "columns"
    assert (p.name, how, c.drains) == (tile, dq, drains)
    assert c.splits_operands == tile.endswith("x64")


def test_operands_are_split_only_where_nothing_else_fits() -> None:
    for d, dv in DIMS:
        found = plan_backward(written(d, dv))
        split = [p.compute.splits_operands for p in (*found.plans, *found.others)]
        assert not split[0] or all(split), f"{d} {dv}"


def test_measurements_rank_full_attention() -> None:
    """A tile that no score weighs down and no turn holds up, in the order in which it was the faster one."""
    found = plan_backward(written(128))
    assert [p.name for p in found.plans] == ["64x128", "80x128"] and set_faults(found) == []
    short, long = (rates(p) or () for p in found.plans)
    lengths = measured_lengths(found.long_plan)
    assert found.limits == (max(n for n, a, b in zip(lengths, short, long, strict=True) if a < b),)
    assert found.step_cycles == () and "step_cycles" not in emit_backward(found).meta["backward"]
    for clauses in (DETERMINISTIC, MASKS["score"], "block_sparse { q = 128, kv = 128, lists = given }"):
        assert len(plan_backward(written(128, 128, clauses)).plans) == 1, clauses


def test_one_wave_takes_the_plan_whose_longest_walk_ends_first() -> None:
    """Measured, 8 heads of causal attention: 64 rows a step 1.03 times as fast at 512, 0.97 at 1K and 2K."""
    found = plan_backward(written(128, 128, MASKS["causal"]))
    tiles, cycles = [p.compute.tile_m for p in found.plans], list(found.step_cycles)
    assert tiles == [64, 80] and [of_one_wave(n, tiles, cycles) for n in (512, 1024, 2048)] == [0, 1, 1]
    assert emit_backward(found).meta["backward"]["step_cycles"] == cycles


def test_every_candidate_is_a_plan_or_has_a_reason() -> None:
    found = plan_backward(written(128))
    names = [c.name for c in candidates()]
    told = {p.name for p in (*found.plans, *found.others)} | {r.candidate for r in found.rejected}
    assert names == ["128x128", "112x128", "96x128", "80x128", "64x128", "48x128", "32x128", "64x2x64"]
    assert told == set(names) and len(names) == len(found.plans) + len(found.others) + len(found.rejected)
    reason = "registers 256 + 32 of 240: dK 64, dV 64, S and dP 128"
    assert (found.rejected[0].by, found.rejected[0].why) == ("compute", reason)
    assert Candidate(tile_m=80).name == "80x128"


def test_reasons() -> None:
    """One of each kind that a pass gives."""
    narrow = {r.candidate: r for r in plan_backward(written(72)).rejected}
    assert narrow["80x128"].why == "dQ^T = K^T dS^T takes head_dim_qk in multiples of 64, not 80"
    scored = {r.candidate: r for r in plan_backward(written(128, 128, MASKS["score"])).rejected}
    assert scored["80x128"].why == "registers 222 + 32 of 240: dK 64, dV 64, S and dP 80, expressions 14"
    wide = {r.candidate: r for r in plan_backward(written(64, 256)).rejected}
    assert {r.by for r in wide.values()} == {"compute"} and wide["64x128"].why.startswith("registers ")


def test_memory_rejects() -> None:
    """Registers decide first at every head dim that kernels serve: asked by itself, memory names its buffers."""
    from attngen.passes.backward.memory import plan_memory
    from attngen.passes.base import Reject

    c = plan_backward(written(128)).long_plan.compute.replace(tile_m=128)
    found = plan_memory(c)
    assert isinstance(found, Reject) and found.by == "memory"
    assert found.why == ("smem 323 KB of 227 KB: sK 32 KB, sV 32 KB, sQ 64 KB, sdO 64 KB, sdS 64 KB, sdQ 64 KB"), (
        found.why
    )


def test_deterministic_plans_count_turns() -> None:
    plain, counted = (plan_backward(written(64, 64, more)) for more in ("", DETERMINISTIC))
    assert (plain.deterministic, counted.deterministic) == (False, True)
    words = [p.plans[0].memory.workspace_per_tile for p in (plain, counted)]
    assert words == [128 * 66 + 4] * 2, "counters stand in every workspace: one of them counts KV tiles handed out"
    assert [turn_words(p) for p in (plain, counted)] == [0, 2]
    assert kernel_id_of(plain) != kernel_id_of(counted)


# ---- captured tensors ------------------------------------------------------------------------------------------------


def test_only_the_gradients_that_are_asked_for() -> None:
    s = written(64, 64, SLOPES + "\n  tensor y: f32[heads_q] grad\n  sink = y[h]")
    kinds = {n: [c.kind for c in plan_backward(s, captured=n).gradient.contributions] for n in ((), ("x",), ("x", "y"))}
    assert kinds == {(): [], ("x",): [GradientKind.COLUMN], ("x", "y"): [GradientKind.COLUMN, GradientKind.SINK]}
    assert len({kernel_id_of(plan_backward(s, captured=n)) for n in kinds}) == 3


def test_captured_gradients_take_registers() -> None:
    plain, asked = (plan_backward(written(64, 64, SLOPES), captured=n) for n in ((), ("x",)))
    extra = [p.plans[0].compute.expression_registers for p in (plain, asked)]
    assert extra[0] < extra[1] and plain.plans[0].compute.tile_m > asked.plans[0].compute.tile_m


# ---- what is not served ----------------------------------------------------------------------------------------------


def test_e0401_names_the_targets() -> None:
    (fault,) = refused(written(), "sm_80")
    assert (fault.code, fault.message) == ("E0401", "no kernels for target `sm_80`")


@pytest.mark.parametrize("name", GAPS)
def test_what_the_forward_does_not_serve_its_backward_does_not(name: str) -> None:
    s, what = GAPS[name]
    (fault,) = refused(s)
    assert (fault.code, fault.message) == ("E0402", f"sm_90a kernels do not serve {what} yet")


def test_e0402_of_an_epilogue_with_too_large_derivatives() -> None:
    (fault,) = refused(load_spec(large()))
    assert (fault.code, fault.message) == ("E0402", TOO_LARGE)
    assert shown(fault).startswith("(") and fault.helps


def test_e0402_of_a_deterministic_gradient_that_many_pairs_add_to() -> None:
    s = written(64, 64, BIAS + DETERMINISTIC)
    (fault,) = refused(s, captured=("x",))
    assert fault.code == "E0402"
    assert fault.message == (
        "sm_90a backward kernels do not serve a deterministic gradient of `x`, which many pairs add to, yet"
    )
    assert shown(fault).startswith("tensor x:") and fault.helps
    assert plan_backward(s).deterministic
    assert plan_backward(written(64, 64, SLOPES + DETERMINISTIC), captured=("x",)).deterministic


@pytest.mark.parametrize("clauses", [SLOPES, "tensor x: f32[batch, seqlen_q] grad\n  score = s * s * x[b, q_idx]"])
def test_captured_gradients_that_read_the_score_have_a_plan_at_every_head_dim(clauses: str) -> None:
    for d, dv in DIMS:
        p = plan_backward(written(d, dv, clauses), captured=("x",)).long_plan
        assert faults(p) == [], f"{d} {dv}"


def test_e0403_names_the_nearest_candidates_and_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sm90.REGISTERS, 2, (24, 184))
    (fault,) = refused(written(200, 200, SLOPES), captured=("x",))
    assert (fault.code, fault.message) == ("E0403", "no backward plan fits sm_90a for head dims 200 and 200")
    assert [n.split(":")[0] for n in fault.notes[:3]] == [
        f"{tile} was rejected by compute" for tile in ("64x2x64", "112x128", "96x128")
    ]
    assert "dQ^T = K^T dS^T takes head_dim_qk in multiples of 64, not 208" in fault.notes[1]
    assert fault.notes[3:] == ("8 candidates were tried and rejected",)
    assert fault.helps == ("gradients of this spec are computed on CPU tensors",)
    assert shown(fault) == "attention a"


@pytest.mark.parametrize("code", ["E0401", "E0402", "E0403"])
def test_codes_have_rows(code: str) -> None:
    assert CODES[code].summary


# ---- the value -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "clauses"), [(64, SLOPES), (256, MASKS["window"]), (128, MASKS["elementwise"])])
def test_a_plan_set_survives_json(d: int, clauses: str) -> None:
    found = plan_backward(written(d, d, clauses), captured=("x",))
    assert BackwardPlanSet.model_validate_json(found.model_dump_json()) == found


def test_equal_specs_have_equal_plans() -> None:
    assert plan_backward(written(64, 64, SLOPES)) == plan_backward(written(64, 64, SLOPES))


_EMITTED = """
from test_search_backward import BIAS, MASKS, SLOPES, emit_backward, plan_backward, written
for d, clauses in ((64, SLOPES), (64, BIAS), (256, MASKS["score"]), (128, MASKS["window"])):
    print(emit_backward(plan_backward(written(d, d, clauses), captured=("x",))).sha256)
"""


def test_the_same_text_in_every_process() -> None:
    """No order that a hash decides."""
    texts = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        made = subprocess.run([sys.executable, "-c", _EMITTED], capture_output=True, text=True, env=env, check=True)
        texts.append(made.stdout.split())
    here = emit_backward(plan_backward(written(64, 64, SLOPES), captured=("x",))).sha256
    assert texts[0] == texts[1] and len(set(texts[0])) == 4 and texts[0][0] == here


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\nfrom attngen.syntax import make_spec\nfrom attngen.search_backward import plan_backward\n"
        "from attngen.emit.backward import emit_backward\n"
        "emit_backward(plan_backward(make_spec('a', head_dim=64)))\n"
        "print(sorted({'torch', 'cutlass'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert made.stdout.strip() == "[]"


def test_fp16_and_bf16_differ_in_nothing_else() -> None:
    s = written(64)
    a, b = (plan_backward(s.replace(dtype=t)).plans[0] for t in (DType.BF16, DType.FP16))
    assert a.replace(compute=a.compute.replace(dtype=DType.FP16)) == b
