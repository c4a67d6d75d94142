"""Break one synchronising place of a backward's text: the ledger must name the fault."""

from __future__ import annotations

import ast

import pytest
from backward_texts import SPECS, M, assert_named, emitted

from attngen.verify.backward_ledger import event, events, ledger_faults, wanted
from attngen.verify.backward_source import source_faults

#: How a dQ tile, and a part of dV or dK, is read by the copy that takes it away.
STORED = "                    cute.arch.cp_async_bulk_commit_group()\n                    cute.arch."
STORED += "cp_async_bulk_wait_group(0, read=True)\n                    cute.arch.sync_warp()\n"
#: Name -> (spec, what stands once in its text, what takes its place, the fault).
BROKEN: dict[str, tuple[str, str, str, str]] = {
    "K arrivals": (
        "wide", "mbarrier_init(ring.full, 1)", "mbarrier_init(ring.full, 2)",
        f"{M}.kernel: `ring.full init 2` stands 1 times",
    ),
    "K given back by all": (
        "wide", "mbarrier_init(ring.empty, 1)", "mbarrier_init(ring.empty, warps)",
        f"{M}.kernel: `ring.empty init 1` stands 0 times",
    ),
    "K beside the rings of a step": (
        "plain", "for ring in (rings.k, rings.v, rings.q, rings.do):", "for ring in (rings.v, rings.q, rings.do):",
        f"{M}.kernel: `ring of rings.k, rings.v, rings.q, rings.do` stands 0 times",
    ),
    "reducers forgotten": (
        "turns", "mbarrier_init(rings.walk.empty + s, warps + self.warpgroups)",
        "mbarrier_init(rings.walk.empty + s, warps)",
        f"{M}.kernel: `rings.walk.empty init warps + self.warpgroups` stands 0 times",
    ),
    "zeroer forgotten": (
        "plain", "mbarrier_init(rings.walk.empty + s, warps + self.warpgroups + 1)",
        "mbarrier_init(rings.walk.empty + s, warps + self.warpgroups)",
        f"{M}.kernel: `rings.walk.empty init warps + self.warpgroups + 1` stands 0 times",
    ),
    "lag too short": (
        "plain", "zero_lag = group_heads + cute.ceil_div(workers, n_blocks)",
        "zero_lag = cute.ceil_div(workers, n_blocks)",
        "__call__: zero_lag is cute.ceil_div(workers, n_blocks), the plan says group_heads",
    ),
    "waits for the wrong heads": (
        "plain", "if (head_batch >= p.zero_lag) & (lane == 0):", "if (head_batch > p.zero_lag) & (lane == 0):",
        "wait_zeroed: `if (head_batch >= p.zero_lag) & (lane == 0)` stands 0 times",
    ),
    "no wait for the zeros": (
        "plain", "self.wait_zeroed(p, b * p.heads_dkv + h_dkv, lane)", "pass",
        f"{M}.reduce: `wait_zeroed` stands 0 times",
    ),
    "zeros counted before they are ordered": (
        "plain", "        fence_proxy_global()  # what adds to these words is asynchronous\n", "",
        f"{M}.zero_part: `fence global` stands 0 times",
    ),
    "a step of a walk left out": (
        "even", "shared_tiles = select(shares > 1, rest, 0)", "shared_tiles = select(shares > 1, 0, rest)",
        "__call__: shared_tiles is select(shares > 1, 0, rest), the plan says select(shares > 1, rest, 0)",
    ),
    "parts of another tile": (
        "even", "first = number * shares", "first = number", "add_parts: first is number, the plan says number",
    ),
    "parts summed before they are there": (
        "even", "block, _, _ = cute.arch.block_idx()\n        cute.arch.griddepcontrol_wait()\n",
        "block, _, _ = cute.arch.block_idx()\n", f"{M}.add_parts: `grid wait` stands 0 times",
    ),
    "q arrivals": (
        "plain", "mbarrier_init(ring.empty + s, warps)", "mbarrier_init(ring.empty + s, 4)",
        f"{M}.kernel: `ring.empty init warps` stands 0 times",
    ),
    "ds arrivals": (
        "wide", "mbarrier_init(rings.ds.empty + s, 2 * warps)", "mbarrier_init(rings.ds.empty + s, warps)",
        f"{M}.kernel: `rings.ds.empty init 2 * warps` stands 0 times",
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
        "plain", "mbarrier_arrive_and_expect_tx(ring.full, ", "mbarrier_arrive(ring.full, ",
        f"{M}.load_kv: `ring.full announce` stands 0",
    ),
    "walk not published": (
        "plain", "            cute.arch.mbarrier_arrive(rings.walk.full + stage)\n", "            pass\n",
        f"{M}.tell: `rings.walk.full arrive` stands 0 times",
    ),
    "walk overwritten": (
        "plain", "        rings.walk.wait_free(j)\n", "", f"{M}.tell: `rings.walk wait_free` stands 0 times",
    ),
    "walk not waited for": (
        "plain", "        rings.walk.wait(j)\n", "", f"{M}.told: `rings.walk wait` stands 0 times",
    ),
    "walk given back unread": (
        "plain", "        cute.arch.sync_warp()\n        arrive_if(rings.walk.empty + stage, lane == 0)\n",
        "        arrive_if(rings.walk.empty + stage, lane == 0)\n", f"{M}.told: `warp sync` stands 0 times",
    ),
    "walk not given back": (
        "plain", "        arrive_if(rings.walk.empty + stage, lane == 0)\n", "",
        f"{M}.told: `rings.walk.empty arrive` stands 0 times",
    ),
    "K overwritten": (
        "plain", "            ring.wait_free(j)\n", "", f"{M}.load_kv: `ring wait_free` stands 0 times",
    ),
    "K not given back": (
        "plain", "        arrive_if(rings.k.empty, w.lane == 0)\n", "",
        f"{M}.consume_tile: `rings.k.empty arrive` stands 0 times",
    ),
    "V given back for K": (
        "plain", "        arrive_if(rings.k.empty, w.lane == 0)\n", "        arrive_if(rings.v.empty, w.lane == 0)\n",
        f"{M}.consume_tile: `rings.v.empty arrive` stands 3 times, the ledger asks for 2",
    ),
    "V loaded in K's place": (
        "plain", "(rings.k, t.tma_k, t.mK, t.sK, HEAD_DIM_QK),", "(rings.v, t.tma_k, t.mK, t.sK, HEAD_DIM_QK),",
        f"{M}.load_kv: `ring of rings.v, rings.k` stands 0 times",
    ),
    "KV tile taken twice": (
        "plain", 'cute.arch.atomic_add(handed_out, Int32(1), sem="relaxed", scope="gpu")',
        'cute.arch.load(handed_out, Int32, sem="relaxed", scope="gpu")',
        f"{M}.next_tile: `handed_out atomic_add relaxed gpu` stands 0 times",
    ),
    "held before it runs": (
        "turns", "        tile = self.next_tile(p, tidx)  # not the CTA's number: ", "        pass  # ",
        f"{M}.load: `next_tile` stands 1 times, the ledger asks for 2",
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
        f"{M}.reduce: `rings.dq_full wait` stands 1 times",
    ),
    "dQ slot given back unread": (
        "plain", "    cute.arch.cp_async_bulk_wait_group(0, read=True)\n                    cute.arch.mbarrier_arrive",
        "    cute.arch.mbarrier_arrive", f"{M}.reduce: `bulk wait 0 read=True` stands 1 times, the ledger asks for 2",
    ),
    "dQ slot not given back": (
        "plain", "cute.arch.mbarrier_arrive(rings.dq_empty + slot)", "pass",
        f"{M}.reduce: `rings.dq_empty arrive` stands 1 times",
    ),
    "dQ not in memory at the end": (
        "plain", "        cute.arch.cp_async_bulk_wait_group(0)\n", "        pass\n",
        f"{M}.reduce: `bulk wait 0` stands 0 times",
    ),
    "dQ not committed": (
        "plain", "bulk_add(to, staged, words * 4)\n                    cute.arch.cp_async_bulk_commit_group()\n",
        "bulk_add(to, staged, words * 4)\n", f"{M}.reduce: `bulk commit` stands 1 times, the ledger asks for 2",
    ),
    "dK not committed": (
        "plain", STORED, STORED.partition("\n")[2], f"{M}.reduce: `bulk commit` stands 1 times, the ledger asks for 2",
    ),
    "dK slot given back unread": (
        "plain", STORED, "\n".join(STORED.split("\n")[::2]) + "\n",
        f"{M}.reduce: `bulk wait 0 read=True` stands 1 times, the ledger asks for 2",
    ),
    "dK slot given back by a lane that has not waited": (
        "plain", STORED, "\n".join(STORED.split("\n")[:2]) + "\n", f"{M}.reduce: `warp sync` stands 1 times",
    ),
    "dK slot not given back": (
        "plain", "arrive_if(rings.dq_empty + (wg * stages + stage), lane == 0)", "pass",
        f"{M}.reduce: `rings.dq_empty arrive` stands 1 times",
    ),
    "dK read while written": (
        "plain", "cute.arch.mbarrier_wait(rings.dq_full + (wg * stages + stage), ",
        "max(rings.dq_full + (wg * stages + stage), ", f"{M}.reduce: `rings.dq_full wait` stands 1 times",
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
        "turns", "                        self.wait_turn(counter, before)\n", "",
        f"{M}.reduce: `wait_turn` stands 0 times",
    ),
    "added before its turn": (
        "turns", "return n_max - 1 - n_block, ", "return n_block - n_min, ",
        f"{M}.turn: KV tiles in the order n_block - n_min, the plan says descending",
    ),
    "launched after its turn": (
        "turns", "return p.n_blocks - 1 - place, ", "return place, ",
        f"{M}.tile_coords: KV tiles in the order place, the plan says descending",
    ),
    "straight walk": (
        "plain", "    def descends(self, tile, p):", "    def falls(self, tile, p):",
        "AttentionBackward: a straight walk, the plan says the other one",
    ),
    "launched in another order": (
        "plain", "return place, ", "return p.n_blocks - 1 - place, ",
        f"{M}.tile_coords: KV tiles in the order p.n_blocks - 1 - place, the plan says ascending",
    ),
    "K not waited for": (
        "plain", "        rings.k.wait(j)\n", "", f"{M}.consume_tile: `rings.k wait` stands 0 times",
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
        "plain", "            warpgroup.wait_group(0)\n        if first:\n            self.let_second_start",
        "            pass\n        if first:\n            self.let_second_start",
        f"{M}.front: `wgmma wait 0` stands",
    ),
    "second never starts": (
        "plain", "            cute.arch.barrier_arrive(barrier_id=BARRIER_STAGGER, number_of_threads=256)\n",
        "            pass\n", f"{M}.let_second_start: `BARRIER_STAGGER arrive 256` stands 0 times",
    ),
    "dS not waited for": ("plain", "        rings.ds.wait(i)\n", "", f"{M}.back: `rings.ds wait` stands 0 times"),
    "dS given back in use": (
        "plain", "            warpgroup.wait_group(0 + self.wants_dk)  # dQ\n", "",
        f"{M}.back: `wgmma wait 0 + self.wants_dk` stands 0 times",
    ),
    "dO given back in use": (
        "plain", "            warpgroup.wait_group(1 + self.wants_dk)  # dV\n", "",
        f"{M}.back: `wgmma wait 1 + self.wants_dk` stands 0 times",
    ),
    "Q given back in use": (
        "plain", "            warpgroup.wait_group(0)  # dK\n", "", f"{M}.back: `wgmma wait 0` stands 2 times",
    ),
    "dS not given back": (
        "plain", "        arrive_if(rings.ds.empty + ds_stage, w.lane == 0)\n", "",
        f"{M}.back: `rings.ds.empty arrive` stands 0 times",
    ),
    "dQ staged over another": (
        "plain", "cute.arch.mbarrier_wait(rings.dq_empty + slot, phase_of(use, stages) ^ 1)", "pass",
        f"{M}.back: `rings.dq_empty wait` stands 0 times",
    ),
    "dK staged over another": (
        "plain", "cute.arch.mbarrier_wait(rings.dq_empty + slot, phase_of(use, self.plan.dq_stages) ^ 1)", "pass",
        f"{M}.stage_sum: `rings.dq_empty wait` stands 0 times",
    ),
    "dK not published": (
        "plain", "        cute.copy(tiled, slice_.retile(frag), to)\n        publish(rings.dq_full + slot, w.lane)\n",
        "        cute.copy(tiled, slice_.retile(frag), to)\n",
        f"{M}.stage_sum: `rings.dq_full publish` stands 0 times",
    ),
    "K read while overwritten": (
        "wide", "        cute.arch.barrier(barrier_id=BARRIER_STORE + w.wg, number_of_threads=256)", "        pass",
        f"{M}.take_tile: `BARRIER_STORE sync 256` stands 0 times",
    ),
    "V given back by the other": (
        "wide", "            arrive_if(rings.v.empty, (w.warp_in_wg == 0) & (w.lane == 0))\n", "",
        f"{M}.take_tile: `rings.v.empty arrive` stands 0 times",
    ),
    "dK stored before it is written": (
        "wide", "        cute.arch.fence_view_async_shared()\n        cute.arch.barrier(barrier_id=BARRIER_OWN",
        "        cute.arch.barrier(barrier_id=BARRIER_OWN", f"{M}.store_sum: `fence shared` stands 0 times",
    ),
    "V overwritten while it is stored from": (
        "wide", "cute.arch.cp_async_bulk_wait_group(0, read=True)\n            cute.arch.sync_warp()  # whoever",
        "cute.arch.sync_warp()  # whoever", f"{M}.store_sum: `bulk wait 0 read=True` stands 0 times",
    ),
    "V given back by a lane that has not waited": (
        "wide", "            cute.arch.sync_warp()  # whoever", "            pass  # whoever",
        f"{M}.store_sum: `warp sync` stands 0 times",
    ),
    "P overwritten": (
        "wide", "            rings.p.wait_free(i)\n", "", f"{M}.step_dv: `rings.p wait_free` stands 0 times",
    ),
    "P read before it is there": (
        "wide", "rings.p.wait(i)", "max(i)", f"{M}.step_dk: `rings.p wait` stands 0 times",
    ),
    "dS not sent": (
        "wide", "            send(w.ds_to + place", "            max(w.ds_to + place",
        f"{M}.step_dk: `w.ds_full send` stands 0 times",
    ),
    "dS given back to this CTA alone": (
        "wide", "arrive_at(w.ds_empty + stage_of(i, DS_STAGES), w.lane < 2)", "arrive_if(rings.ds.empty, w.lane == 0)",
        f"{M}.add_dq: `w.ds_empty arrive in cluster` stands 0 times",
    ),
    "dS given back twice to this CTA": (
        "wide", "cute.arch.map_dsmem_ptr(rings.ds.empty, lane % 2)", "cute.arch.map_dsmem_ptr(rings.ds.empty, t.rank)",
        f"{M}.state: `rings.ds.empty mapped to lane % 2` stands 0 times",
    ),
    "K of the other CTA not waited for": (
        "wide", "            rings.peer_k.wait(j)\n", "            pass\n",
        f"{M}.take_tile: `rings.peer_k wait` stands 0 times",
    ),
    "ticket kept": (
        "wide", "arrive_at(cute.arch.map_dsmem_ptr(rings.ticket.empty, 0), lane == 0)", "pass",
        f"{M}.read_ticket: `rings.ticket.empty arrive in cluster` stands 0 times",
    ),
    "ticket overwritten": (
        "wide", "        rings.ticket.wait_free(j)\n", "",
        f"{M}.take_ticket: `rings.ticket wait_free` stands 0 times",
    ),
    "a CTA of a cluster ends early": (
        "wide", "        cute.arch.cluster_arrive()  # the other CTA still signals barriers of this one\n", "",
        f"{M}.kernel: `cluster arrive` stands 0 times",
    ),
    "no cluster": ("wide", "cluster=[2, 1, 1],", "", "launches (kernel, programmatic, cluster)"),
    "turn of split operands": (
        "wide_turns", "        cute.arch.fence_acq_rel_gpu()\n", "",
        f"{M}.pass_turn: `fence gpu` stands 0 times",
    ),
    "ring never waits": (
        "plain",
        "        cute.arch.mbarrier_wait(self.empty + stage_of(i, self.stages), phase_of(i, self.stages) ^ 1)\n",
        "        pass\n", "Ring.wait_free: `self.empty wait` stands 0 times",
    ),
    "publish without a fence": (
        "plain", "    cute.arch.fence_view_async_shared()\n    cute.arch.sync_warp()\n", "    cute.arch.sync_warp()\n",
        "publish: `fence shared` stands 0 times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_fault_is_named(name: str) -> None:
    assert_named(BROKEN[name])


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


@pytest.mark.parametrize("name", SPECS)
def test_every_synchronising_line_is_needed(name: str) -> None:
    """Remove each statement that synchronises, one at a time: the ledger misses every one of them."""
    text, plans = emitted(name)
    tree = ast.parse(text)
    fields = (getattr(n, name, None) for n in ast.walk(tree) for name in ("body", "orelse"))
    bodies = [b for b in fields if type(b) is list]
    calls = [
        (body, at, n) for body in bodies for at, n in enumerate(body)
        if isinstance(n, ast.Expr | ast.Assign) and isinstance(n.value, ast.Call) and event(n.value)
    ]  # fmt: skip
    assert len(calls) > 40
    for body, at, n in calls:
        body[at] = ast.Pass()
        assert ledger_faults(tree, plans) != [], ast.unparse(n)
        body[at] = n
