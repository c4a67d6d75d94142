"""Break the emitted text of a backward in one place: the verifier of sources must name the fault."""

from __future__ import annotations

import ast

import pytest
from backward_texts import M, assert_named, emitted

from attngen.verify.backward_source import source_faults, verify_source
from attngen.verify.source import SourceError

#: Name -> (spec, what stands once in its text, what takes its place, the fault).
BROKEN: dict[str, tuple[str, str, str, str]] = {
    # the grids
    "kernel does not wait": (
        "plain", "        cute.arch.griddepcontrol_wait()  # the row statistics and the zeroed dQ of `prepare`\n", "",
        f"{M}.kernel: `grid wait` stands 0 times",
    ),
    "kernel waits on one path": (
        "plain", "        cute.arch.griddepcontrol_wait()  # the row statistics and the zeroed dQ of `prepare`\n",
        "        if warp_idx == 0:\n            cute.arch.griddepcontrol_wait()\n",
        f"{M}.kernel: on every path cta sync, grid wait, grid launch, found cta sync, grid launch",
    ),
    "finish does not wait": (
        "plain", "        cute.arch.griddepcontrol_wait()\n        rows_q, heads_q = cute.size(mdQ",
        "        rows_q, heads_q = cute.size(mdQ", f"{M}.finish: `grid wait` stands 0 times",
    ),
    "finish waits late": (
        "plain", "    cute.arch.griddepcontrol_wait()\n        rows_q, heads_q = cute.size(mdQ",
        "    cute.autovec_copy(workspace, workspace)\n        cute.arch.griddepcontrol_wait()\n"
        "        rows_q, heads_q = cute.size(mdQ",
        f"{M}.finish: cute.autovec_copy stands before the wait for the grid before",
    ),
    "prepare overlaps the call before": (
        "plain", "grid=[q_tiles, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream\n",
        "grid=[q_tiles, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream, use_pdl=True\n",
        "launches (kernel, programmatic, cluster) [('prepare', True, ",
    ),
    "kernel in line": (
        "plain", "stream=stream, min_blocks_per_mp=1, use_pdl=True,",
        "stream=stream, min_blocks_per_mp=1,", "('kernel', False, ",
    ),
    "finish not launched": ("plain", "finish(workspace, mdQ", "prepare(workspace, mdQ", "(1, 1, 1)), ('prepare'"),
    # numbers and names
    "barrier number": ("wide", "BARRIER_STORE = 1", "BARRIER_STORE = 7", "BARRIER_STORE is 7, the plan says 1"),
    "stagger number": ("plain", "BARRIER_STAGGER = 1", "BARRIER_STAGGER = 2", "BARRIER_STAGGER is 2, the plan says 1"),
    "own number": ("wide", "BARRIER_OWN = 3", "BARRIER_OWN = 4", "BARRIER_OWN is 4, the plan says 3"),
    "turn number": ("wide_turns", "BARRIER_TURN = 5", "BARRIER_TURN = 2", "BARRIER_TURN is 2, the plan says 5"),
    "barrier of another kind": (
        "plain", "BARRIER_STAGGER = 1", "BARRIER_TURN = 4\nBARRIER_STAGGER = 1",
        "BARRIER_TURN is defined, the plan has no",
    ),
    "barrier lost": ("wide", "BARRIER_STORE = 1", "BARRIER = 1", "BARRIER_STORE is defined 0 times"),
    "stages of walks": ("plain", "WALK_STAGES = 2", "WALK_STAGES = 3", "WALK_STAGES is 3, the plan says 2"),
    "stages of dS": ("plain", "DS_STAGES = 2", "DS_STAGES = 3", "DS_STAGES is 3, the plan says 2"),
    "stages of P": ("wide", "P_STAGES = 2", "P_STAGES = 1", "P_STAGES is 1, the plan says 2"),
    "counter words": ("turns", "COUNTER_WORDS = 4", "COUNTER_WORDS = 2", "COUNTER_WORDS is 2, the plan says 4"),
    "tile_m": ("plain", "        tile_m=80,", "        tile_m=64,", "PLANS[1].tile_m is 64, the plan says 80"),
    "stages": ("turns", "        q_stages=2,", "        q_stages=3,", "PLANS[0].q_stages is 3, the plan says 2"),
    "transposed": (
        "plain", "        dq_transposed=True,", "        dq_transposed=False,", "PLANS[1].dq_transposed is False",
    ),
    "registers": (
        "turns", "consumer_registers=240", "consumer_registers=232", "PLANS[0].consumer_registers is 232",
    ),
    "plan lost": ("turns", "PLANS = (\n", "PLANS = (\n    TilePlan(),\n", "PLANS has 2 entries, the plan 1"),
    "limits": ("turns", "LIMITS = ()", "LIMITS = (1024,)", "LIMITS is (1024,), the plan says ()"),
    "other steps": ("plain", "[3929, 4620]", "[4620, 3929]", "ATTN_META states steps of [4620, 3929] cycles"),
    "another limit": ("plain", "LIMITS = (1536,)", "LIMITS = (2048,)", "LIMITS is (2048,), the plan says (1536,)"),
    "head dim": ("captured", "HEAD_DIM_V = 48", "HEAD_DIM_V = 40", "HEAD_DIM_V is 40, the plan says 48"),
    "element": ("captured", "ELEMENT = cutlass.Float16", "ELEMENT = cutlass.BFloat16", "ELEMENT is cutlass.BFloat16"),
    "constant twice": ("plain", "LOG2E = ", "LOG2E = 0.0\nLOG2E = ", "LOG2E is defined 2 times"),
    "sQ twice": (
        "plain", "        sQ = storage.sQ", "        sQ = None\n        sQ = storage.sQ",
        "sQ is defined 2 times in kernel",
    ),
    "sV as sK": ("plain", "        sV = storage.sV", "        sK = storage.sV", "sV is defined 0 times in kernel"),
    "sdS elsewhere": (
        "plain", "        ds_stage, acc_dq, drains = stage_of", "        sdS = ds_stage, acc_dq, drains = stage_of",
        "sdS is defined 1 times in kernel, 2 in all",
    ),
    "buffer lost": (
        "plain", "    sdS: cute.struct.Align[cute.struct.MemRange[ELEMENT, cute.cosize(layout_ds)], 1024]\n", "\n",
        "shared memory holds mbarriers, walks, steps, dq_tiles, sLSE, sD, sK, sV, sQ, sdO, sdQ, the plan",
    ),
    "mbarriers": (
        "plain", "2 + WALK_STAGES + plan.q_stages", "1 + WALK_STAGES + plan.q_stages",
        "num_mbarriers is 22, the plan has 24",
    ),
    "mbarriers of split operands": (
        "wide", "+ DS_STAGES + P_STAGES", "+ DS_STAGES", "num_mbarriers is 22, the plan has 26",
    ),
    # ATTN_META
    "meta name": ("plain", '"name": "plain"', '"name": "other"', "ATTN_META names another spec"),
    "meta direction": ("plain", '"direction": "backward"', '"direction": "forward"', "ATTN_META names another spec"),
    "meta determinism": ("turns", '"deterministic": True', '"deterministic": False', "another determinism"),
    "meta computed": ("plain", '    "kernel_id": ', '    "more": sorted([]),\n    "kernel_id": ', "no plain literal"),
    "meta gradients": ("captured", '"kind": "row"', '"kind": "column"', "ATTN_META states other gradients than"),
    # rules of all generated files
    "import": ("plain", "import copy\n", "import copy\nimport os\n", "imports os"),
    "eval": ("plain", "LOG2E = math.log2(math.e)", 'LOG2E = eval("math.log(2.0)")', "calls eval"),
    "runs on import": ("plain", "LOG2E = math", 'print("hello")\nLN2 = math', "runs on import: Expr"),
    "method twice": (
        "plain", "    def heads_last(self", "    def smem_layout(self):\n        pass\n\n    def heads_last(self",
        "defines smem_layout twice",
    ),
    "long line": ("plain", "import copy\n", "import copy  # " + "x" * 120 + "\n", "is longer than 120"),
    "syntax": ("plain", "import copy\n", "import copy copy\n", "does not parse"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_is_named(name: str) -> None:
    assert_named(BROKEN[name])


def test_a_fault_is_raised() -> None:
    text, plans = emitted("plain")
    broken = text.replace("        rings.q.wait(i)\n", "")
    with pytest.raises(SourceError, match=r"plain: AttentionBackward.front: `rings.q wait` stands 0 times"):
        verify_source(broken, plans, ast.parse(broken))


def test_plans_of_any_kind_say_their_meta() -> None:
    """Sizes that the callable allocates by are the plan's."""
    text, plans = emitted("turns")
    for old in (f'"smem_bytes": {plans.plans[0].memory.smem_bytes}', '"workspace_per_tile": ', '"tile_n": 128'):
        at = text.index('"backward": {')
        broken = text[:at] + text[at:].replace(old, old + "1" if old[-1].isdigit() else old + "9", 1)
        assert any("ATTN_META states other plans than" in f for f in source_faults(broken, plans)), old
