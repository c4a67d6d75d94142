"""verify: the synchronisation of an emitted backward against its plan, call by call (see `verify.ledger`).

`events` reads every call that waits, arrives, announces, fences or starts a copy from the text; `wanted` derives them
from the plan, a method a line or two; the two must be equal. To extend: a call that synchronises gets a row in one of
the tables below, and its places a row in `wanted`.
"""

from __future__ import annotations

import ast
from collections import Counter

from attngen.ir.backward import BackwardPlan, BackwardPlanSet
from attngen.verify.ledger import Events, dotted, map_calls
from attngen.verify.tables import kernels_of
from attngen.verify.tree import every

#: Arrivals of all consumer warps, as the text spells them.
CONSUMER_WARPS = "4 * self.warpgroups"
#: Calls whose first argument names an mbarrier.
_ON_BARRIER = {
    "cute.arch.mbarrier_wait": "wait",
    "cute.arch.mbarrier_arrive": "arrive",
    "cute.arch.mbarrier_arrive_and_expect_tx": "announce",
    "cute.arch.mbarrier_init": "init",
    "arrive_if": "arrive",
    "arrive_at": "arrive in cluster",
    "publish": "publish",
}
_NAMED = {"cute.arch.barrier": "sync", "cute.arch.barrier_arrive": "arrive"}
#: Calls that say all by their name and arguments.
_PLAIN = {
    "cute.arch.griddepcontrol_wait": "grid wait",
    "cute.arch.griddepcontrol_launch_dependents": "grid launch",
    "cute.arch.mbarrier_init_fence": "init fence",
    "cute.arch.fence_view_async_shared": "fence shared",
    "cute.arch.fence_acq_rel_gpu": "fence gpu",
    "fence_proxy_global": "fence global",
    "cute.arch.sync_warp": "warp sync",
    "cute.arch.cp_async_bulk_commit_group": "bulk commit",
    "cute.arch.cp_async_bulk_wait_group": "bulk wait",
    "bulk_add": "bulk add",
    "warpgroup.fence": "wgmma fence",
    "warpgroup.commit_group": "wgmma commit",
    "warpgroup.wait_group": "wgmma wait",
    "self.wait_for_first": "wait_for_first",
    "self.let_second_start": "let_second_start",
    "self.wait_turn": "wait_turn",
    "self.pass_turn": "pass_turn",
    "self.wait_zeroed": "wait_zeroed",
    "self.zero_part": "zero_part",
    "self.next_tile": "next_tile",
    "self.take_ticket": "take_ticket",
    "self.read_ticket": "read_ticket",
    "cute.arch.cluster_arrive": "cluster arrive",
    "cute.arch.cluster_arrive_relaxed": "cluster arrive relaxed",
    "cute.arch.cluster_wait": "cluster wait",
}
_WITH_ARGUMENTS = frozenset(("bulk wait", "wgmma wait"))


def events(tree: ast.Module) -> Events:
    """Synchronising calls of every function and method: `what is meant` + operation, counted; loops over rings too."""
    found: Events = {}
    for scope in tree.body:
        owner = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
        for method in scope.body if isinstance(scope, ast.ClassDef) else [scope]:
            if isinstance(method, ast.FunctionDef):
                seen = Counter(e for n in every(ast.Call, method) if (e := event(n)))
                seen.update(e for n in every(ast.For, method) if (e := _rings(n)))
                if seen:
                    found[owner + method.name] = seen
    return found


def event(call: ast.Call) -> str | None:
    """What a call does to others, or None."""
    name, given = dotted(call.func), {k.arg: k.value for k in call.keywords}
    if name in _ON_BARRIER and call.args:
        operation = _ON_BARRIER[name]
        count = f" {ast.unparse(call.args[1])}" if operation == "init" else ""
        return f"{_base(call.args[0])} {operation}{count}"
    if name in _NAMED:
        threads = f" {ast.unparse(given['number_of_threads'])}" if "number_of_threads" in given else ""
        return f"{_base(given['barrier_id']) if 'barrier_id' in given else 'cta'} {_NAMED[name]}{threads}"
    if name in _PLAIN:
        operation = _PLAIN[name]
        said = [ast.unparse(a) for a in (*call.args, *call.keywords)] if operation in _WITH_ARGUMENTS else []
        return " ".join([operation, *said])
    if name in ("bulk_load", "send"):
        return f"{_base(call.args[3])} {name.removeprefix('bulk_')}"
    if name == "cute.arch.store_async_dsmem":
        return f"{_base(call.args[2])} store at {ast.unparse(call.args[3])}"
    if name == "cute.arch.map_dsmem_ptr":
        return f"{_base(call.args[0])} mapped to {ast.unparse(call.args[1])}"
    if "tma_bar_ptr" in given:
        return f"{_base(given['tma_bar_ptr'])} load"
    if name in ("cute.arch.atomic_add", "cute.arch.load") and "sem" in given:
        return f"{_base(call.args[0])} {name.rpartition('.')[2]} " + " ".join(
            str(_literal(given[k])) for k in ("sem", "scope") if k in given
        )
    owner, _, operation = name.rpartition(".")
    return f"{owner} {operation}" if operation in ("wait", "wait_free") and owner else None


def _rings(loop: ast.For) -> str | None:
    """`for ring in (rings.k, rings.v)`, or with what belongs to each beside it -> `ring of rings.k, rings.v`."""
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    if dotted(target) != "ring" or not isinstance(loop.iter, ast.Tuple):
        return None
    return "ring of " + ", ".join(dotted(e.elts[0] if isinstance(e, ast.Tuple) else e) for e in loop.iter.elts)


def _base(e: ast.expr) -> str:
    """`rings.q.full + stage` -> `rings.q.full`; `map_dsmem_ptr(rings.q.full, 0)`, too."""
    if isinstance(e, ast.Call) and e.args:
        return _base(e.args[0])
    return dotted(e.left) if isinstance(e, ast.BinOp) else dotted(e)


def _literal(e: ast.expr) -> object:
    return e.value if isinstance(e, ast.Constant) else ast.unparse(e)


def _count(*names: str) -> Counter[str]:
    return Counter(names)


def wanted(plan_set: BackwardPlanSet) -> Events:
    """The calls that the plan's ledger asks for."""
    splits, deterministic = plan_set.plans[0].compute.splits_operands, plan_set.deterministic
    methods = _split_operands(deterministic) if splits else _own_keys(deterministic)
    methods |= _zeroing(plan_set, methods)
    methods["kernel"] = _kernel(plan_set)
    methods["prepare"] = _count("grid launch")
    methods["finish"] = _count("grid wait")
    if plan_set.plans[0].schedule.shares_walks:
        methods["add_parts"] = _count("grid wait", "grid launch")
    if (tile_map := plan_set.plans[0].mask.map) is not None:
        methods |= map_calls(tile_map, by_rows=False, ragged=plan_set.spec.layout.is_ragged)
    for kernel in kernels_of(plan_set.plans[0].mask.form)[-1:]:
        methods[f"fill_{kernel}"] = _count("grid launch")
    if plan_set.spec.layout.is_ragged and splits:  # numbers that no tile has are passed over
        methods["load"] = _count("next_tile", "next_tile")
        methods["draw"] = _count("handed_out atomic_add relaxed gpu")
        methods["take_ticket"] -= methods["draw"]
    elif plan_set.spec.layout.is_ragged:
        methods["next_there"] = _count("next_tile", "next_tile")
    else:  # the first one by ticket, too: others wait for it
        methods["load"] = _count("next_tile", "next_tile")
    if not splits:
        methods["next_tile"] = _count("handed_out atomic_add relaxed gpu")
    methods["tell"] = _count("rings.walk wait_free", "rings.walk.full arrive")
    methods["told"] = _count("rings.walk wait", "warp sync", "rings.walk.empty arrive")
    loaded = "rings.k, rings.peer_k" if splits else "rings.v, rings.k"
    methods["load_kv"] = _count(f"ring of {loaded}", "ring wait_free", "ring.full announce", "ring.full load")
    if splits:
        methods["load_kv"] += _count("rings.v wait_free", "rings.v.full announce", "rings.v.full load")
    methods["load_step"] = _count("ring of rings.q, rings.do", "ring wait_free", "ring.full announce")
    methods["load_step"] += _count("ring.full load", "ring.full load")
    found = {f"AttentionBackward.{name}": calls for name, calls in methods.items()}
    found["Ring.wait"] = _count("self.full wait")
    found["Ring.wait_free"] = _count("self.empty wait")
    found["publish"] = _count("fence shared", "warp sync", "bar arrive")
    found["gemm"] = _count("wgmma commit")
    return found


def _kernel(plan_set: BackwardPlanSet) -> Counter[str]:
    """Every mbarrier by its arrivals, then the CTA and the grid before it."""
    p = plan_set.plans[0]
    warps = 4 * p.compute.warpgroups
    loops: tuple[tuple[str, ...], ...] = (("k", "v", "q", "do"),)
    if p.compute.splits_operands:
        loops = (("k", "v", "peer_k", "ticket"), ("q", "do", "walk"))
    n = p.compute.warpgroups
    spelled = {warps: "warps", 2 * warps: "2 * warps"}
    spelled |= {warps + n: "warps + self.warpgroups", warps + n + 1: "warps + self.warpgroups + 1"}
    calls: Counter[str] = Counter()
    for names in (*loops, *((q.name,) for q in p.schedule.pipelines if not any(q.name in loop for loop in loops))):
        place = f"rings.{names[0]}." if names not in loops else "ring."
        place = {"rings.dq.": "rings.dq_"}.get(place, place)
        inits = set()
        for pipe in (q for q in p.schedule.pipelines if q.name in names):
            for side, arrivals in (("full", pipe.full_arrivals), ("empty", pipe.empty_arrivals)):
                inits.add(f"{place}{side} init {spelled.get(arrivals, arrivals)}")
        calls += Counter(inits)
        if names in loops:
            calls += _count("ring of " + ", ".join(f"rings.{name}" for name in names))
    return calls + _count("init fence", *kernel_path(p))


def kernel_path(p: BackwardPlan) -> tuple[str, ...]:
    """What every thread of the main kernel does, in this order: two CTAs start and end together."""
    grid = ("grid wait", "grid launch")
    if p.compute.cluster == 1:
        return ("cta sync", *grid)
    return ("cluster arrive relaxed", "cluster wait", *grid, "cluster arrive", "cluster wait")


def _release(*rings: str) -> tuple[str, ...]:
    return tuple(f"rings.{r}.empty arrive" for r in rings)


def _own_keys(deterministic: bool) -> Events:
    """Warpgroups with 64 keys each; dQ leaves through shared memory and a reducer warp."""
    methods: Events = {
        "consume_tile": _count(
            "rings.k wait", "rings.v wait", "warp sync", "rings.v.empty arrive", "rings.v.empty arrive",
            "rings.k.empty arrive",
        ),
        "front": _count(
            "wait_for_first", "rings.q wait", "wgmma fence", "rings.do wait", "wgmma wait 1", "wgmma wait 0",
            "wgmma wait 0", "let_second_start", "rings.ds wait_free", "wgmma fence", "rings.ds.full publish",
            "warp sync", "wgmma wait 0", *_release("do", "q"),
        ),
        "wait_for_first": _count("BARRIER_STAGGER sync 256"),
        "let_second_start": _count("BARRIER_STAGGER arrive 256"),
        "back": _count(
            "rings.ds wait", "wgmma wait 0", *_release("do", "q"), "wgmma fence", "wgmma wait 0",
            "wgmma wait 1 + self.wants_dk", "wgmma wait 0 + self.wants_dk", *_release("do", "ds", "q"),
            "rings.dq_empty wait", "rings.dq_full publish", "wgmma wait 0",
        ),
        "stage_sum": _count("rings.dq_empty wait", "rings.dq_full publish"),
        "reduce": _count(
            "rings.dq_full wait", "bulk add", "bulk commit", "bulk wait 0 read=True", "rings.dq_empty arrive",
            "warp sync",
            "rings.dq_full wait", "bulk commit", "bulk wait 0 read=True", "warp sync", "rings.dq_empty arrive",
            "bulk wait 0",
        ),
    }  # fmt: skip
    if deterministic:
        methods["reduce"] += _count("wait_turn", "pass_turn")
        methods["wait_turn"] = _count("counter load acquire gpu", "counter load acquire gpu", "fence global")
        methods["pass_turn"] = _count("bulk wait 0", "fence global", "counter atomic_add release gpu")
    return methods


def _zeroing(plan_set: BackwardPlanSet, methods: Events) -> Events:
    """A warp that zeroes dQ ahead, part by part, and the reducers' wait for all parts of theirs."""
    if not plan_set.plans[0].schedule.zeroes_ahead:
        return {}
    return {
        "reduce": methods["reduce"] + _count("wait_zeroed"),
        "zero_ahead": _count("zero_part"),
        "zero_part": _count("fence global", "warp sync", "counter atomic_add release gpu"),
        "wait_zeroed": _count("counter load acquire gpu", "counter load acquire gpu", "fence global"),
    }


def _split_operands(deterministic: bool) -> Events:
    """One warpgroup owns dV, the other dK, of the same 64 keys; P goes from one to the other, dQ from registers.

    dS goes to the other CTA, too: its warps' arrivals and bytes complete a stage, and both CTAs' give it back.
    """
    drain = ("wgmma wait 0", *_release("do", "q"))
    methods: Events = {
        "take_tile": _count(
            "rings.k wait", "rings.v wait", "rings.peer_k wait", "BARRIER_STORE arrive 256",
            "BARRIER_STORE sync 256", *_release("v", "k", "peer_k"),
        ),
        "state": _count("rings.ds.empty mapped to lane % 2"),
        "state_dk": _count("words mapped to t.rank ^ 1", "rings.ds.full mapped to t.rank ^ 1"),
        "next_tile": _count("take_ticket", "read_ticket"),
        "take_ticket": _count(
            "rings.ticket wait_free", "handed_out atomic_add relaxed gpu", "rings.ticket.full store at 1"
        ),
        "read_ticket": _count(
            "rings.ticket.full announce", "rings.ticket wait", "warp sync", "rings.ticket.empty mapped to 0",
            "rings.ticket.empty arrive in cluster",
        ),
        "step_dv": _count(
            "rings.q wait", "wgmma fence", "wgmma wait 0", "rings.p wait_free", "warp sync", "rings.p.full arrive",
            "rings.do wait", "wgmma fence", *drain,
        ),
        "step_dk": _count(
            "rings.q wait", "rings.do wait", "wgmma fence", "rings.p wait", "warp sync", "rings.p.empty arrive",
            "wgmma wait 0", "rings.ds wait_free", "rings.ds.full publish", "w.ds_full send", "warp sync",
            "wgmma fence", *drain,
        ),
        "start_dq": _count("rings.ds wait", "wgmma fence"),
        "add_dq": _count("wgmma wait int(behind)", "w.ds_empty arrive in cluster"),
        "store_sum": _count(
            "fence shared", "BARRIER_OWN sync 128", "bulk commit", "bulk wait 0 read=True", "warp sync"
        ),
    }  # fmt: skip
    if deterministic:
        methods["add_dq"] += _count("wait_turn", "pass_turn")
        methods["wait_turn"] = _count("counter load acquire gpu", "counter load acquire gpu", "barrier sync 128")
        methods["pass_turn"] = _count("fence gpu", "barrier sync 128", "counter atomic_add release gpu")
    return methods


def ledger_faults(tree: ast.Module, plan_set: BackwardPlanSet) -> list[str]:
    """Every method whose synchronising calls are not those of the ledger."""
    found, ledger = events(tree), wanted(plan_set)
    out = []
    for method in sorted(found.keys() | ledger.keys()):
        has, asks = found.get(method, Counter()), ledger.get(method, Counter())
        for what in sorted(has.keys() | asks.keys()):
            if has[what] != asks[what]:
                out.append(f"{method}: `{what}` stands {has[what]} times, the ledger asks for {asks[what]}")
    return out
