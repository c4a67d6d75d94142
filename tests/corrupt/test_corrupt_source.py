"""Break the emitted text in one place: the verifier of sources must name the fault."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from attngen.emit.module import emit
from attngen.ir.plan import PlanSet
from attngen.search import plan
from attngen.syntax import load_spec
from attngen.verify.ledger import events, wanted
from attngen.verify.source import SourceError, source_faults, verify_source

SPECS = {
    "causal": "head_dim = 128\n  mask = kv_idx <= q_pos",
    "runs": "head_dim = 64\n  mask = kv_idx <= q_pos and (q_pos - kv_idx < 99 or kv_idx < 4)",
    "in_q": "head_dim = 256\n  mask = kv_idx <= q_pos and q_pos - kv_idx < 99\n  schedule { tile = 128 x 80 }",
    "alone": "head_dim = 64\n  mask = kv_idx <= q_pos\n  schedule { tile = 64 x 128 }",
    "full": "head_dim = 72, v = 40\n  dtype = fp16\n  schedule { tile = 192 x 96 }",
    "pairs": "head_dim = 64\n  mask = kv_idx <= q_pos\n  schedule { tile = 128 x 128, cluster = 2 x 1 }",
}


@cache
def emitted(name: str) -> tuple[str, PlanSet]:
    plans = plan(load_spec(f"attn 1\nattention {name} {{\n  {SPECS[name]}\n}}\n"))
    return emit(plans).text, plans


@pytest.mark.parametrize("name", SPECS)
def test_emitted_text_has_no_fault(name: str) -> None:
    text, plans = emitted(name)
    assert source_faults(text, plans) == []
    assert events(ast.parse(text)) == wanted(plans.plans[0])


def test_the_specs_reach_every_branch_of_the_ledger() -> None:
    first = {name: emitted(name)[1].plans[0] for name in SPECS}
    assert {p.mask.walk for p in first.values()} == {"interval", "runs"}
    assert {p.memory.o_in_q for p in first.values()} == {True, False}
    assert {p.schedule.pingpong for p in first.values()} == {True, False}
    assert {p.mask.ranges_per_warpgroup for p in first.values()} == {True, False}
    assert {p.launch.pairs_ctas for p in first.values()} == {True, False}


METHOD = "AttentionForward"
#: Name -> (spec, what stands once in its text, what takes its place, the fault).
BROKEN: dict[str, tuple[str, str, str, str]] = {
    "no k release in step": (
        "causal", "        warpgroup.wait_group(1)\n        rings.k.release(i)\n", "        warpgroup.wait_group(1)\n",
        f"{METHOD}.step: `rings.k release` stands 0 times",
    ),
    "no v release in step": (
        "causal", "        rings.v.release(i - 1)\n", "", f"{METHOD}.step: `rings.v release` stands 0 times",
    ),
    "no v wait in step": (
        "causal", "        rings.v.wait(i - 1)\n", "", f"{METHOD}.step: `rings.v wait` stands 0 times",
    ),
    "v release twice": (
        "causal", "        rings.v.release(i - 1)\n", "        rings.v.release(i - 1)\n" * 2,
        f"{METHOD}.step: `rings.v release` stands 2 times, the ledger asks for 1",
    ),
    "waits for the other ring": (
        "causal", "        rings.v.wait(i - 1)\n", "        rings.k.wait(i - 1)\n",
        f"{METHOD}.step: `rings.k wait` stands 2 times",
    ),
    "release in the producer": (
        "causal", "        ring.acquire(i, ", "        rings.k.release(i)\n        ring.acquire(i, ",
        f"{METHOD}.load_kv: `rings.k release` stands 1 times, the ledger asks for 0",
    ),
    "no acquire": (
        "causal", "        ring.acquire(i, cute.size(dst, mode=[0]) * ELEMENT_BYTES)\n", "",
        f"{METHOD}.load_kv: `ring acquire` stands 0 times",
    ),
    "k filled as v": (
        "causal", "            self.load_kv(t.tma_k, rings.k, tKgK, tKsK, n_block - 1, i + 1)\n",
        "            self.load_kv(t.tma_k, rings.v, tKgK, tKsK, n_block - 1, i + 1)\n",
        f"{METHOD}.load_tile: `rings.k fill` stands 1 times, the ledger asks for 2",
    ),
    "q not announced": (
        "causal", "mbarrier_arrive_and_expect_tx(rings.q_full + wg, ", "mbarrier_arrive(rings.q_full + wg, ",
        f"{METHOD}.load_tile: `rings.q_full announce` stands 0 times",
    ),
    "q not waited for": (
        "causal", "        cute.arch.mbarrier_wait(rings.q_full + wg, phase)\n", "",
        f"{METHOD}.attend: `rings.q_full wait` stands 0 times",
    ),
    "q not given back": (
        "causal", "            cute.arch.mbarrier_arrive(rings.q_empty + wg)\n", "            pass\n",
        f"{METHOD}.attend: `rings.q_empty arrive` stands 0 times",
    ),
    "q given back before the store": (
        "in_q", "        rings.v.wait(i)\n        warpgroup.fence()\n",
        "        cute.arch.mbarrier_arrive(rings.q_empty + wg)\n        rings.v.wait(i)\n        warpgroup.fence()\n",
        f"{METHOD}.attend: `rings.q_empty arrive` stands 1 times, the ledger asks for 0",
    ),
    "q_empty renamed": (
        "causal", "            cute.arch.mbarrier_arrive(rings.q_empty + wg)\n",
        "            cute.arch.mbarrier_arrive(rings.q_full + wg)\n",
        f"{METHOD}.attend: `rings.q_full arrive` stands 1 times",
    ),
    "mailbox not published": (
        "causal", "            cute.arch.mbarrier_arrive(mailbox.full)\n", "            pass\n",
        f"{METHOD}.tell: `mailbox.full arrive` stands 0 times",
    ),
    "mailbox overwritten": (
        "causal", "        cute.arch.mbarrier_wait(mailbox.empty, (taken & 1) ^ 1)\n", "",
        f"{METHOD}.tell: `mailbox.empty wait` stands 0 times",
    ),
    "mailbox not awaited": (
        "causal", "        cute.arch.mbarrier_wait(mailbox.full, phase)\n", "",
        f"{METHOD}.hear: `mailbox.full wait` stands 0 times",
    ),
    "mailbox not given back": (
        "causal", "            cute.arch.mbarrier_arrive(mailbox.empty)\n", "            pass\n",
        f"{METHOD}.hear: `mailbox.empty arrive` stands 0 times",
    ),
    "q arrivals": (
        "causal", "cute.arch.mbarrier_init(rings.q_empty + wg, 4)", "cute.arch.mbarrier_init(rings.q_empty + wg, 1)",
        f"{METHOD}.kernel: `rings.q_empty init 4` stands 0 times",
    ),
    "ring arrivals": (
        "causal", "cute.arch.mbarrier_init(ring.empty + s, warps)", "cute.arch.mbarrier_init(ring.empty + s, 1)",
        f"{METHOD}.kernel: `ring.empty init 1` stands 1 times",
    ),
    "warps of a ring": (
        "causal", "self.kv_stages, 4 * self.warpgroups",
        "self.kv_stages, self.warpgroups", "warps is self.warpgroups, the ledger asks for",
    ),
    "mailbox arrivals": (
        "causal", "cute.arch.mbarrier_init(mailbox.full, 1)", "cute.arch.mbarrier_init(mailbox.full, 2)",
        f"{METHOD}.kernel: `mailbox.full init 2` stands 1 times",
    ),
    "no barrier after the inits": (
        "causal", "        cute.arch.barrier()\n", "", f"{METHOD}.kernel: `cta sync` stands 0 times",
    ),
    "given back to one CTA": (
        "pairs", "cute.arch.map_dsmem_ptr(empty, lane % 2)", "cute.arch.map_dsmem_ptr(empty, 0)",
        "Ring.__init__: `empty mapped to 0` stands 1 times",
    ),
    "arrivals of one CTA": (
        "pairs", "cute.arch.mbarrier_init(ring.empty + s, 2 * warps)", "cute.arch.mbarrier_init(ring.empty + s, warps)",
        f"{METHOD}.kernel: `ring.empty init warps` stands 1 times",
    ),
    "leaves before the other": (
        "pairs", "        cute.arch.cluster_arrive()  # ", "        # ",
        f"{METHOD}.kernel: `cluster arrive` stands 0 times",
    ),
    "no cluster": (
        "pairs", "            cluster=[2, 1, 1],\n", "", "__call__: cluster is none, the plan says [2, 1, 1]",
    ),
    "a cluster": (
        "causal", "min_blocks_per_mp=1,\n", "min_blocks_per_mp=1,\n            cluster=[2, 1, 1],\n",
        "__call__: cluster is [2, 1, 1], the plan says none",
    ),
    "half a tile for one": (
        "pairs", "mcast_mask=cutlass.Int16(3)", "mcast_mask=cutlass.Int16(1)", "load_kv: K and V go to CTAs",
    ),
    "turn not passed on": (
        "causal", "        w.turn.pass_on()\n        warpgroup.wait_group(1)\n", "        warpgroup.wait_group(1)\n",
        f"{METHOD}.step: `turn pass_on` stands 0 times",
    ),
    "nobody begins": (
        "causal", "            cute.arch.barrier_arrive(barrier_id=BARRIER_TURN, number_of_threads=256)\n",
        "            pass\n", f"{METHOD}.consume: `BARRIER_TURN arrive 256` stands 0 times",
    ),
    "turns of one warpgroup": (
        "alone", "        rings.k.wait(i)\n        warpgroup.fence()\n        gemm(w.mma_qk, w.acc_s, w.frag_q, "
        "w.frag_k[None, None, None, i % self.kv_stages], False)\n        rings.v",
        "        rings.k.wait(i)\n        w.turn.wait()\n        warpgroup.fence()\n        gemm(w.mma_qk, "
        "w.acc_s, w.frag_q, w.frag_k[None, None, None, i % self.kv_stages], False)\n        rings.v",
        f"{METHOD}.step: `turn wait` stands 1 times, the ledger asks for 0",
    ),
    "threads of a turn": (
        "causal", "cute.arch.barrier(barrier_id=BARRIER_TURN + self.own, number_of_threads=256)",
        "cute.arch.barrier(barrier_id=BARRIER_TURN + self.own, number_of_threads=128)",
        "Turn.wait: `BARRIER_TURN sync 128` stands 1 times",
    ),
    "ring never waits": (
        "full", "        cute.arch.mbarrier_wait(self.empty + stage, phase ^ 1)\n", "",
        "Ring.acquire: `self.empty wait` stands 0 times",
    ),
    "ring releases the wrong side": (
        "full", "            cute.arch.mbarrier_arrive(self.empty + i % self.stages)\n",
        "            cute.arch.mbarrier_arrive(self.full + i % self.stages)\n",
        "Ring.release: `self.full arrive` stands 1 times",
    ),
    "barrier number": ("causal", "BARRIER_STORE = 5", "BARRIER_STORE = 2", "BARRIER_STORE is 2, the plan says 5"),
    "turn number": ("causal", "BARRIER_TURN = 1", "BARRIER_TURN = 0", "BARRIER_TURN is 0, the plan says 1"),
    "sQ twice": (
        "causal", "        sQ = storage.sQ", "        sQ = None\n        sQ = storage.sQ",
        "sQ is defined 2 times in kernel",
    ),
    "sV as sK": ("causal", "        sV = storage.sV", "        sK = storage.sV", "sK is defined 2 times in kernel"),
    "sO elsewhere": (
        "causal", "        p = w.p\n        o_factor = []\n",
        "        p = w.p\n        sO = []\n        o_factor = []\n",
        "sO is defined 1 times in kernel, 2 in all",
    ),
    "buffer lost": (
        "causal", "            sO: cute.struct.Align[cute.struct.MemRange[ELEMENT, cute.cosize(layout_o)], 1024]\n", "",
        "shared memory holds mbarriers, mailbox, sQ, sK, sV, the plan",
    ),
    "tile_n": ("full", "tile_n=96", "tile_n=112", "PLANS[0].tile_n is 112, the plan says 96"),
    "stages": ("full", "        kv_stages=4,", "        kv_stages=5,", "PLANS[0].kv_stages is 5, the plan says 4"),
    "registers": ("full", "consumer_registers=160", "consumer_registers=168", "consumer_registers is 168"),
    "plan lost": ("full", "PLANS = (\n", "PLANS = (\n    TilePlan(),\n", "PLANS has 2 entries, the plan 1"),
    "limits": ("causal", "LIMITS = (2048,)", "LIMITS = (1024,)", "LIMITS is (1024,), the plan says (2048,)"),
    "head dim": ("full", "HEAD_DIM_V = 40", "HEAD_DIM_V = 64", "HEAD_DIM_V is 64, the plan says 40"),
    "row of q": ("full", "COLUMNS_QK = 96", "COLUMNS_QK = 128", "COLUMNS_QK is 128, the plan says 96"),
    "row of v": ("full", "COLUMNS_V = 64", "COLUMNS_V = 48", "COLUMNS_V is 48, the plan says 64"),
    "element": ("full", "ELEMENT = cutlass.Float16", "ELEMENT = cutlass.BFloat16", "ELEMENT is cutlass.BFloat16"),
    "constant twice": ("full", "LN2 = ", "LN2 = 0.0\nLN2 = ", "LN2 is defined 2 times"),
    "constant lost": ("full", "BARRIER_STORE = 5", "BARRIER = 5", "BARRIER_STORE is defined 0 times"),
    "meta": ("full", '"name": "full"', '"name": "other"', "ATTN_META names another spec"),
    "meta plans": ("full", '{"name": "192x96"', '{"name": "64x96"', "ATTN_META lists other plans"),
    "meta computed": (
        "full", '    "kernel_id": ', '    "more": sorted([]),\n    "kernel_id": ', "ATTN_META is no plain literal",
    ),
    "import": ("full", "import copy\n", "import copy\nimport os\n", "imports os"),
    "import from": ("full", "import copy\n", "import copy\nfrom subprocess import run\n", "imports subprocess"),
    "import within": ("full", "    import torch\n", "    import torch, socket\n", "imports socket"),
    "import relative": ("full", "import copy\n", "import copy\nfrom . import other\n", "imports a neighbour"),
    "postponed annotations": (
        "full", "import copy\n", "import copy\n\nfrom __future__ import annotations\n", "does not parse",
    ),
    "eval": ("full", "LN2 = math.log(2.0)", 'LN2 = eval("math.log(2.0)")', "calls eval"),
    "exec": ("full", "    main()\n", '    exec("main()")\n', "calls exec"),
    "open": ("full", "    import torch\n", '    import torch\n    open("x")\n', "calls open"),
    "__import__": ("full", "    import torch\n", '    torch = __import__("torch")\n', "calls __import__"),
    "runs on import": ("full", "LN2 = math", 'print("hello")\nLN2 = math', "runs on import: Expr"),
    "loop on import": ("full", "LN2 = math", "for _ in (): pass\nLN2 = math", "runs on import: For"),
    "method twice": (
        "full", "    def heads_last(self", "    def pack_p(self):\n        pass\n\n    def heads_last(self",
        "defines pack_p twice",
    ),
    "function twice": ("full", "def fma(", "def select():\n    pass\n\n\ndef fma(", "defines select twice"),
    "long line": ("full", "import copy\n", "import copy  # " + "x" * 120 + "\n", "is longer than 120"),
    "syntax": ("full", "import copy\n", "import copy copy\n", "does not parse"),
    "argument twice": ("full", "def exp2(x):", "def exp2(x, x):", "does not parse"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_is_named(name: str) -> None:
    spec, old, new, fault = BROKEN[name]
    text, plans = emitted(spec)
    assert text.count(old) == 1, f"the corruption names text that stands {text.count(old)} times"
    broken = text.replace(old, new)
    found = source_faults(broken, plans)
    assert any(fault in f for f in found), found
    with pytest.raises(SourceError, match=spec):
        verify_source(broken, plans)


def test_postponed_annotations_at_the_top() -> None:
    text, plans = emitted("full")
    doc_end = text.index('"""\n', 3) + 4
    broken = text[:doc_end] + "from __future__ import annotations\n" + text[doc_end:]
    assert "postponed annotations break @cute.struct" in source_faults(broken, plans)


@pytest.mark.parametrize("name", SPECS)
def test_every_synchronising_line_is_needed(name: str) -> None:
    """Remove each line that synchronises, one at a time: the ledger misses every one of them."""
    text, plans = emitted(name)
    lines = text.splitlines(keepends=True)
    words = ("rings.k.", "rings.v.", "mbarrier_arrive", "mbarrier_wait(", "turn.wait()", "pass_on()", "arch.barrier",
             "arrive_at(", "cluster_wait(", "cluster_arrive_relaxed(", "store_async")  # fmt: skip
    inside = range(next(i for i, line in enumerate(lines) if line.startswith("class Ring")), len(lines))
    calls = [
        i for i in inside
        if any(w in lines[i] for w in words) and lines[i].rstrip().endswith(")") and "def " not in lines[i]
    ]  # fmt: skip
    assert len(calls) > 20
    for i in calls:
        indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        broken = "".join([*lines[:i], f"{indent}pass\n", *lines[i + 1 :]])
        assert source_faults(broken, plans) != [], lines[i]


def test_text_of_a_spec_is_not_taken_for_code() -> None:
    """A doc string that looks like the kernel's own lines raises no fault."""
    doc = "self.next rings.q_empty + wg postponed from __future__ import x; ELEMENT = 3; rings.k.release(i) exec('x')"
    plans = plan(load_spec(f'attn 1\n"{doc}"\nattention talk {{\n  head_dim = 64\n}}\n'))
    text = emit(plans).text
    assert source_faults(text, plans) == [] and "rings.k.release(i) exec" in " ".join(text.split())
