"""Break the emitted text of a backward in one place: the verifier of sources must name the fault."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from attngen.emit.backward import emit_backward
from attngen.ir.backward import BackwardPlanSet
from attngen.search_backward import plan_backward
from attngen.syntax import load_spec
from attngen.verify.backward_ledger import event, events, ledger_faults, wanted
from attngen.verify.backward_source import source_faults, verify_source
from attngen.verify.source import SourceError

CAUSAL = "mask = kv_idx <= q_pos"
SPECS = {
    "plain": f"head_dim = 128\n  {CAUSAL}",
    "turns": f"head_dim = 64\n  {CAUSAL}\n  backward {{ deterministic = true }}",
    "wide": f"head_dim = 256\n  {CAUSAL}",
    "wide_turns": "head_dim = 256\n  score = 30.0 * tanh(s / 30.0)\n  backward { deterministic = true }",
    "captured": "head_dim = 64, v = 40\n  dtype = fp16\n  tensor z: f32[heads_q] grad\n  tensor x: f32[heads_q] grad\n"
    "  tensor r: f32[seqlen_q] grad\n  tensor t: f32[9] grad\n  sink = z[h]\n"
    "  score = s * x[h] + r[q_idx] + t[min(abs(q_idx - kv_idx), 8)]",
}  # fmt: skip


@cache
def emitted(name: str) -> tuple[str, BackwardPlanSet]:
    spec = load_spec(f"attn 1\nattention {name} {{\n  {SPECS[name]}\n}}\n")
    plans = plan_backward(spec, captured=[t.name for t in spec.tensors])
    return emit_backward(plans).text, plans


@pytest.mark.parametrize("name", SPECS)
def test_emitted_text_has_no_fault(name: str) -> None:
    text, plans = emitted(name)
    assert source_faults(text, plans) == []
    assert events(ast.parse(text)) == wanted(plans)


def test_the_specs_reach_every_branch_of_the_ledger() -> None:
    sets = [emitted(name)[1] for name in SPECS]
    kinds = {(s.plans[0].compute.splits_operands, s.deterministic) for s in sets}
    assert kinds == {(a, b) for a in (True, False) for b in (True, False)}
    assert any(s.gradient.contributions for s in sets)


M = "AttentionBackward"
K_FULL = "    cute.arch.mbarrier_wait(rings.k_full, 0)\n"
#: Name -> (spec, what stands once in its text, what takes its place, the fault).
BROKEN: dict[str, tuple[str, str, str, str]] = {
    # the ledger, role by role
    "K arrivals": (
        "plain", "mbarrier_init(rings.k_full, 1)", "mbarrier_init(rings.k_full, 2)",
        f"{M}.kernel: `rings.k_full init 2` stands 1 times",
    ),
    "q arrivals": (
        "plain", "mbarrier_init(ring.empty + s, warps)", "mbarrier_init(ring.empty + s, 4)",
        f"{M}.kernel: `ring.empty init warps` stands 0 times",
    ),
    "ds arrivals": (
        "wide", "mbarrier_init(rings.ds.full + s, 4)", "mbarrier_init(rings.ds.full + s, warps)",
        f"{M}.kernel: `rings.ds.full init 4` stands 0 times",
    ),
    "dq arrivals": (
        "plain", "mbarrier_init(rings.dq_empty + s, 1)", "mbarrier_init(rings.dq_empty + s, 4)",
        f"{M}.kernel: `rings.dq_empty init 1` stands 0 times",
    ),
    "p arrivals": (
        "wide", "mbarrier_init(rings.p.empty + s, 4)", "mbarrier_init(rings.p.empty + s, 1)",
        f"{M}.kernel: `rings.p.empty init 4` stands 0 times",
    ),
    "warps of a ring": (
        "plain", "        warps = 4 * self.warpgroups\n", "        warps = self.warpgroups\n",
        "warps is self.warpgroups, the plan has 4 * self.warpgroups",
    ),
    "K not announced": (
        "plain", "mbarrier_arrive_and_expect_tx(bar, ", "mbarrier_arrive(bar, ", f"{M}.load: `bar announce` stands 0",
    ),
    "walk not published": (
        "plain", "            cute.arch.mbarrier_arrive(rings.walk_full)\n", "            pass\n",
        f"{M}.load: `rings.walk_full arrive` stands 0 times",
    ),
    "Q overwritten": (
        "plain", "            ring.wait_free(i)\n", "", f"{M}.load_step: `ring wait_free` stands 0 times",
    ),
    "statistics not loaded": (
        "plain", "bulk_load(staged.iterator + stage * self.tile_m, statistics, statistics_bytes, ring.full + stage)",
        "pass", f"{M}.load_step: `ring.full load` stands 1 times, the ledger asks for 2",
    ),
    "statistics on another mbarrier": (
        "plain", "statistics_bytes, ring.full + stage)", "statistics_bytes, ring.empty + stage)",
        f"{M}.load_step: `ring.empty load` stands 1 times",
    ),
    "dQ read while written": (
        "plain", "cute.arch.mbarrier_wait(rings.dq_full + slot, ", "max(rings.dq_full + slot, ",
        f"{M}.add_dq: `rings.dq_full wait` stands 0 times",
    ),
    "dQ slot given back unread": (
        "plain", "    cute.arch.cp_async_bulk_wait_group(0, read=True)\n                cute.arch.mbarrier_arrive",
        "    cute.arch.mbarrier_arrive", f"{M}.add_dq: `bulk wait 0 read=True` stands 0 times",
    ),
    "dQ not in memory at the end": (
        "plain", "            cute.arch.cp_async_bulk_wait_group(0)\n", "            pass\n",
        f"{M}.add_dq: `bulk wait 0` stands 0 times",
    ),
    "dQ not committed": (
        "plain", "            cute.arch.cp_async_bulk_commit_group()\n                cute", "            cute",
        f"{M}.add_dq: `bulk commit` stands 0 times",
    ),
    "turn not acquired": (
        "turns", '        while seen != before:\n            seen = cute.arch.load(counter, Int32, sem="acquire", '
        'scope="gpu")\n', "", f"{M}.wait_turn: `counter load acquire gpu` stands 1 times, the ledger asks for 2",
    ),
    "turn relaxed": (
        "turns", 'cute.arch.atomic_add(counter, Int32(1), sem="release", scope="gpu")',
        'cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")',
        f"{M}.pass_turn: `counter atomic_add release gpu` stands 0 times",
    ),
    "turn passed on too early": (
        "turns", "        cute.arch.cp_async_bulk_wait_group(0)  # not only read\n",
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        f"{M}.pass_turn: `bulk wait 0` stands 0 times",
    ),
    "proxies not ordered": (
        "turns", "        fence_proxy_global()  # the sums before ours were asynchronous, like ours\n", "",
        f"{M}.wait_turn: `fence global` stands 0 times",
    ),
    "added without a turn": (
        "turns", "                    self.wait_turn(counter, before)\n", "", f"{M}.add_dq: `wait_turn` stands 0 times",
    ),
    "added before its turn": (
        "turns", "return n_max - 1 - n_block, ", "return n_block - n_min, ",
        f"{M}.turn: KV tiles in the order n_block - n_min, the plan says descending",
    ),
    "launched after its turn": (
        "turns", "return p.n_blocks - 1 - place, ", "return place, ",
        f"{M}.tile_coords: KV tiles in the order place, the plan says descending",
    ),
    "launched in another order": (
        "plain", "return place, ", "return p.n_blocks - 1 - place, ",
        f"{M}.tile_coords: KV tiles in the order p.n_blocks - 1 - place, the plan says ascending",
    ),
    "K not waited for": (
        "plain", "        cute.arch.mbarrier_wait(rings.k_full, 0)\n", "",
        f"{M}.consume: `rings.k_full wait` stands 0 times",
    ),
    "Q not waited for": ("plain", "        rings.q.wait(i)\n", "", f"{M}.front: `rings.q wait` stands 0 times"),
    "dO not waited for": ("plain", "        rings.do.wait(i)\n", "", f"{M}.front: `rings.do wait` stands 0 times"),
    "waits for the other ring": (
        "plain", "        rings.do.wait(i)\n", "        rings.q.wait(i)\n", f"{M}.front: `rings.q wait` stands 2 times",
    ),
    "dS overwritten": (
        "plain", "            rings.ds.wait_free(i)\n", "", f"{M}.front: `rings.ds wait_free` stands 0 times",
    ),
    "dS not published": (
        "plain", "            publish(rings.ds.full + ds_stage, w.lane)\n", "            pass\n",
        f"{M}.front: `rings.ds.full publish` stands 0 times",
    ),
    "dS arrived without a fence": (
        "plain", "publish(rings.ds.full + ds_stage, w.lane)", "arrive_if(rings.ds.full + ds_stage, w.lane == 0)",
        f"{M}.front: `rings.ds.full arrive` stands 1 times, the ledger asks for 0",
    ),
    "registers not fenced": (
        "plain", "        warpgroup.fence()\n        if self.wants_dv:\n", "        if self.wants_dv:\n",
        f"{M}.front: `wgmma fence` stands 1 times, the ledger asks for 2",
    ),
    "dP not waited for": (
        "plain", "        if self.wants_ds:\n            warpgroup.wait_group(0)\n        if first:\n",
        "        if first:\n", f"{M}.front: `wgmma wait 0` stands",
    ),
    "second never starts": (
        "plain", "            cute.arch.barrier_arrive(barrier_id=BARRIER_STAGGER, number_of_threads=256)\n",
        "            pass\n", f"{M}.let_second_start: `BARRIER_STAGGER arrive 256` stands 0 times",
    ),
    "dS not waited for": ("plain", "        rings.ds.wait(i)\n", "", f"{M}.back: `rings.ds wait` stands 0 times"),
    "dS given back in use": (
        "plain", "        warpgroup.wait_group(0)\n        arrive_if(rings.ds.empty + ds_stage, w.lane == 0)\n",
        "        arrive_if(rings.ds.empty + ds_stage, w.lane == 0)\n", f"{M}.back: `wgmma wait 0` stands",
    ),
    "dS not given back": (
        "plain", "        arrive_if(rings.ds.empty + ds_stage, w.lane == 0)\n", "",
        f"{M}.back: `rings.ds.empty arrive` stands 0 times",
    ),
    "dQ staged over another": (
        "plain", "cute.arch.mbarrier_wait(rings.dq_empty + slot, ", "max(rings.dq_empty + slot, ",
        f"{M}.back: `rings.dq_empty wait` stands 0 times",
    ),
    "K read while overwritten": (
        "plain", "cute.arch.barrier(barrier_id=BARRIER_STORE, number_of_threads=128 * self.warpgroups)  # K and V are "
        "dead\n", "pass\n", f"{M}.store_dkv: `BARRIER_STORE sync 128 * self.warpgroups` stands 1 times",
    ),
    "dK stored before it is written": (
        "plain", "        cute.arch.fence_view_async_shared()\n        cute.arch.barrier(",
        "        cute.arch.barrier(", f"{M}.store_dkv: `fence shared` stands 0 times",
    ),
    "exit before the store": (
        "plain", "cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the stores", "pass",
        f"{M}.store_dkv: `bulk wait 0 read=True` stands 0 times",
    ),
    "P overwritten": (
        "wide", "            rings.p.wait_free(i)\n", "", f"{M}.front_dv: `rings.p wait_free` stands 0 times",
    ),
    "P read before it is there": (
        "wide", "rings.p.wait(i)", "max(i)", f"{M}.front_dk: `rings.p wait` stands 0 times",
    ),
    "turn of split operands": (
        "wide_turns", "        cute.arch.fence_acq_rel_gpu()\n", "",
        f"{M}.pass_turn: `fence gpu` stands 0 times",
    ),
    "ring never waits": (
        "plain", "        cute.arch.mbarrier_wait(self.empty + i % self.stages, ((i // self.stages) & 1) ^ 1)\n",
        "        pass\n", "Ring.wait_free: `self.empty wait` stands 0 times",
    ),
    "publish without a fence": (
        "plain", "    cute.arch.fence_view_async_shared()\n    cute.arch.sync_warp()\n", "    cute.arch.sync_warp()\n",
        "publish: `fence shared` stands 0 times",
    ),
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
        "plain", "        cute.arch.griddepcontrol_wait()\n        seqlen_q, heads_q = cute.size(mdQ",
        "        seqlen_q, heads_q = cute.size(mdQ", f"{M}.finish: `grid wait` stands 0 times",
    ),
    "finish waits late": (
        "plain", "    cute.arch.griddepcontrol_wait()\n        seqlen_q, heads_q = cute.size(mdQ",
        "    cute.autovec_copy(workspace, workspace)\n        cute.arch.griddepcontrol_wait()\n"
        "        seqlen_q, heads_q = cute.size(mdQ",
        f"{M}.finish: cute.autovec_copy stands before the wait for the grid before",
    ),
    "prepare overlaps the call before": (
        "plain", "grid=[q_tiles, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream\n",
        "grid=[q_tiles, 1, 1], block=[ROW_THREADS, 1, 1], stream=stream, use_pdl=True\n",
        "launches (kernel, programmatic) [('prepare', True)",
    ),
    "kernel in line": (
        "plain", "min_blocks_per_mp=1, use_pdl=True", "min_blocks_per_mp=1", "('kernel', False)",
    ),
    "finish not launched": ("plain", "finish(workspace, mdQ", "prepare(workspace, mdQ", "('kernel', True), ('prepare'"),
    # numbers and names
    "barrier number": ("plain", "BARRIER_STORE = 1", "BARRIER_STORE = 3", "BARRIER_STORE is 3, the plan says 1"),
    "stagger number": ("plain", "BARRIER_STAGGER = 2", "BARRIER_STAGGER = 1", "BARRIER_STAGGER is 1, the plan says 2"),
    "own number": ("wide", "BARRIER_OWN = 2", "BARRIER_OWN = 4", "BARRIER_OWN is 4, the plan says 2"),
    "turn number": ("wide_turns", "BARRIER_TURN = 4", "BARRIER_TURN = 2", "BARRIER_TURN is 2, the plan says 4"),
    "barrier of another kind": (
        "plain", "BARRIER_STORE = 1", "BARRIER_TURN = 4\nBARRIER_STORE = 1", "BARRIER_TURN is defined, the plan has no",
    ),
    "barrier lost": ("plain", "BARRIER_STORE = 1", "BARRIER = 1", "BARRIER_STORE is defined 0 times"),
    "stages of dS": ("plain", "DS_STAGES = 2", "DS_STAGES = 3", "DS_STAGES is 3, the plan says 2"),
    "stages of P": ("wide", "P_STAGES = 2", "P_STAGES = 1", "P_STAGES is 1, the plan says 2"),
    "turn words": ("turns", "TURN_WORDS = 4", "TURN_WORDS = 2", "TURN_WORDS is 2, the plan says 4"),
    "tile_m": ("plain", "        tile_m=80,", "        tile_m=64,", "PLANS[0].tile_m is 64, the plan says 80"),
    "stages": ("plain", "        q_stages=2,", "        q_stages=3,", "PLANS[0].q_stages is 3, the plan says 2"),
    "transposed": (
        "plain", "        dq_transposed=True,", "        dq_transposed=False,", "PLANS[0].dq_transposed is False",
    ),
    "registers": (
        "plain", "consumer_registers=240", "consumer_registers=232", "PLANS[0].consumer_registers is 232",
    ),
    "plan lost": ("plain", "PLANS = (\n", "PLANS = (\n    TilePlan(),\n", "PLANS has 2 entries, the plan 1"),
    "limits": ("plain", "LIMITS = ()", "LIMITS = (1024,)", "LIMITS is (1024,), the plan says ()"),
    "head dim": ("captured", "HEAD_DIM_V = 48", "HEAD_DIM_V = 40", "HEAD_DIM_V is 40, the plan says 48"),
    "element": ("captured", "ELEMENT = cutlass.Float16", "ELEMENT = cutlass.BFloat16", "ELEMENT is cutlass.BFloat16"),
    "constant twice": ("plain", "LOG2E = ", "LOG2E = 0.0\nLOG2E = ", "LOG2E is defined 2 times"),
    "sQ twice": (
        "plain", "        sQ = storage.sQ", "        sQ = None\n        sQ = storage.sQ",
        "sQ is defined 2 times in kernel",
    ),
    "sV as sK": ("plain", "        sV = storage.sV", "        sK = storage.sV", "sV is defined 0 times in kernel"),
    "sdS elsewhere": (
        "plain", "        ds_stage = i % DS_STAGES\n        acc_dq", "        sdS = i\n        acc_dq",
        "sdS is defined 1 times in kernel, 2 in all",
    ),
    "buffer lost": (
        "plain", "    sdS: cute.struct.Align[cute.struct.MemRange[ELEMENT, cute.cosize(layout_ds)], 1024]\n", "\n",
        "shared memory holds mbarriers, steps, dq_tiles, sLSE, sD, sK, sV, sQ, sdO, sdQ, the plan",
    ),
    "mbarriers": (
        "plain", "num_mbarriers = 3 + 2 * (", "num_mbarriers = 2 + 2 * (", "num_mbarriers is 18, the plan has 19",
    ),
    "mbarriers of split operands": (
        "wide", "+ DS_STAGES + P_STAGES)", "+ DS_STAGES)", "num_mbarriers is 15, the plan has 19",
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
    spec, old, new, fault = BROKEN[name]
    text, plans = emitted(spec)
    assert text.count(old) == 1, f"the corruption names text that stands {text.count(old)} times"
    found = source_faults(text.replace(old, new), plans)
    assert any(fault in f for f in found), found


def test_a_fault_is_raised() -> None:
    text, plans = emitted("plain")
    broken = text.replace("        rings.q.wait(i)\n", "")
    with pytest.raises(SourceError, match=r"plain: AttentionBackward.front: `rings.q wait` stands 0 times"):
        verify_source(broken, plans, ast.parse(broken))


@pytest.mark.parametrize("name", SPECS)
def test_every_synchronising_line_is_needed(name: str) -> None:
    """Remove each statement that synchronises, one at a time: the ledger misses every one of them."""
    text, plans = emitted(name)
    tree = ast.parse(text)
    calls = [
        n for n in ast.walk(tree)
        if isinstance(n, ast.Expr | ast.Assign) and isinstance(n.value, ast.Call) and event(n.value)
    ]  # fmt: skip
    assert len(calls) > 40
    lines = text.splitlines(keepends=True)
    for n in calls:
        kept = [*lines[: n.lineno - 1], " " * n.col_offset + "pass\n", *lines[n.end_lineno :]]
        assert ledger_faults(ast.parse("".join(kept)), plans) != [], ast.unparse(n)


def test_plans_of_any_kind_say_their_meta() -> None:
    """Sizes that the callable allocates by are the plan's."""
    text, plans = emitted("turns")
    for old in (f'"smem_bytes": {plans.plans[0].memory.smem_bytes}', '"workspace_per_tile": ', '"tile_n": 128'):
        at = text.index('"backward": {')
        broken = text[:at] + text[at:].replace(old, old + "1" if old[-1].isdigit() else old + "9", 1)
        assert any("ATTN_META states other plans than" in f for f in source_faults(broken, plans)), old
