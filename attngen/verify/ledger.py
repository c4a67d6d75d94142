"""verify: the synchronisation of the emitted text against the plan's ledger, call by call.

Every wait, release, announcement and arrival is written once, in the role that the plan gives it. `events` reads
them from the text, `wanted` derives them from the plan; the two must be equal, method by method.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping

from attngen.ir.plan import KernelPlan
from attngen.ir.tile_map import TileMap, inner_loads
from attngen.verify.tree import every

Events = dict[str, Counter[str]]
#: Arrivals that the rings of K and V and the mailbox wait for, as the text spells `4 * warpgroups`.
CONSUMER_WARPS = "4 * self.warpgroups"

#: Call -> (what it does, index of the argument that names the barrier).
_BARRIER_CALLS = {
    "cute.arch.mbarrier_wait": "wait",
    "cute.arch.mbarrier_arrive": "arrive",
    "cute.arch.mbarrier_arrive_and_expect_tx": "announce",
    "cute.arch.mbarrier_init": "init",
    "arrive_at": "arrive in cluster",
}
#: Calls of a cluster that say all by their name.
_CLUSTER_CALLS = {
    "cute.arch.cluster_arrive": "cluster arrive",
    "cute.arch.cluster_arrive_relaxed": "cluster arrive relaxed",
    "cute.arch.cluster_wait": "cluster wait",
}
_NAMED_CALLS = {"cute.arch.barrier": "sync", "cute.arch.barrier_arrive": "arrive"}
_METHODS = ("rings.k.", "rings.v.", "ring.acquire", "turn.wait", "turn.pass_on", "w.turn.wait", "w.turn.pass_on")


def events(tree: ast.Module) -> Events:
    """Synchronising calls of each method of the kernel class and of its helpers, named `what is meant` + operation."""
    found: Events = {}
    for scope in tree.body:
        if isinstance(scope, ast.ClassDef):
            for method in scope.body:
                if isinstance(method, ast.FunctionDef):
                    seen = Counter(e for n in every(ast.Call, method) if (e := _event(n)))
                    if seen:
                        found[f"{scope.name}.{method.name}"] = seen
    return found


def _event(call: ast.Call) -> str | None:
    name = dotted(call.func)
    if name in _BARRIER_CALLS and call.args:
        event = f"{_base(call.args[0])} {_BARRIER_CALLS[name]}"
        return f"{event} {ast.unparse(call.args[1])}" if _BARRIER_CALLS[name] == "init" else event
    if name in _NAMED_CALLS:
        given = {k.arg: k.value for k in call.keywords}
        barrier = _base(given["barrier_id"]) if "barrier_id" in given else "cta"
        threads = f" {ast.unparse(given['number_of_threads'])}" if "number_of_threads" in given else ""
        return f"{barrier} {_NAMED_CALLS[name]}{threads}"
    if name in _CLUSTER_CALLS:
        return _CLUSTER_CALLS[name]
    if name == "cute.arch.store_async_dsmem":
        return f"{_base(call.args[2])} store at {ast.unparse(call.args[3])}"
    if name == "cute.arch.map_dsmem_ptr":
        return f"{_base(call.args[0])} mapped to {ast.unparse(call.args[1])}"
    if name == "self.load_kv" and len(call.args) > 1:
        return f"{dotted(call.args[1])} fill"
    if name.startswith(_METHODS):
        owner, _, operation = name.removeprefix("w.").rpartition(".")
        return f"{owner} {operation}"
    return None


def _base(e: ast.expr) -> str:
    """`rings.q_full + wg` -> `rings.q_full`; what is mapped to another CTA, by its own name."""
    if isinstance(e, ast.Call) and e.args:
        return _base(e.args[0])
    return dotted(e.left) if isinstance(e, ast.BinOp) else dotted(e)


def dotted(e: ast.expr) -> str:
    """`a.b.c` of an attribute chain; empty for anything else."""
    if isinstance(e, ast.Name):
        return e.id
    return f"{dotted(e.value)}.{e.attr}" if isinstance(e, ast.Attribute) else ""


def assigned(method: ast.FunctionDef | None, name: str) -> list[str]:
    """Every value that a method gives a name, as text."""
    return [ast.unparse(n.value) for n in every(ast.Assign, method) if any(dotted(t) == name for t in n.targets)]


def said_faults(
    methods: Mapping[str, ast.FunctionDef],
    values: Mapping[str, Mapping[str, str]],
    conditions: Mapping[str, str],
    planned: bool,
) -> Iterator[str]:
    """Where a text does not say what it must: by method the value of each name, and the one `if` of a condition.

    Where it is not `planned`, the text says none of it.
    """
    for method, names in values.items():
        for name, value in names.items():
            found = assigned(methods.get(method), name)
            if found != ([value] if planned else []):
                said, wanted = ", ".join(found) or "nowhere", value if planned else "none"
                yield f"{method}: {name} is {said}, the plan says {wanted}"
    for method, condition in conditions.items():
        times = sum(ast.unparse(n.test) == condition for n in every(ast.If, methods.get(method)))
        if times != int(planned):
            yield f"{method}: `if {condition}` stands {times} times, the plan says {int(planned)}"


def wanted(plan: KernelPlan, ragged: bool = False) -> Events:
    """The calls that the plan's ledger asks for. `ragged`: a tile map has nothing that warps share."""
    arrivals = {p.name: p.empty_arrivals for p in plan.schedule.pipelines}
    threads = {"store": 128, "turn": 256}
    q_arrive = Counter({"rings.q_empty arrive": 1})
    own = not plan.memory.o_in_q
    runs = plan.mask.walk == "runs"
    turn = Counter({"turn wait": 1, "turn pass_on": 1} if plan.schedule.pingpong else {})
    both = Counter({f"rings.{ring} {operation}": 1 for ring in "kv" for operation in ("wait", "release")})
    first = Counter({"rings.k wait": 1, "rings.k release": 1})
    last = Counter({"rings.v wait": 1, "rings.v release": 1})
    methods: Events = {
        "kernel": Counter(
            {
                "rings.q_full init 1": 1,
                f"rings.q_empty init {arrivals['q']}": 1,
                "ring.full init 1": 1,
                "ring.empty init warps": 1,
                "mailbox.full init 1": 1,
                "mailbox.empty init warps": 1,
                "cta sync": 1,
            }
        ),
        "tell": Counter({"mailbox.empty wait": 1, "mailbox.full arrive": 1}),
        "load_tile": Counter(
            {"rings.q_empty wait": 1, "rings.q_full announce": 1, "rings.k fill": 2, "rings.v fill": 2}
        ),
        "load_kv": Counter({"ring acquire": 1}),
        "hear": Counter({"mailbox.full wait": 1, "mailbox.empty arrive": 1}),
        "attend": last + Counter({"rings.q_full wait": 1}) + (q_arrive if own else Counter()),
        "first_tile": first,
        "step": both + turn,
        "store_o": (Counter({f"BARRIER_STORE sync {threads['store']}": 2}) if plan.memory.stages_o else Counter())
        + (Counter() if own else q_arrive),
    }
    if plan.mask.ranges_per_warpgroup and not runs:
        methods["pass_tile"] = both + turn
    if plan.mask.map is not None:
        methods |= map_calls(plan.mask.map, by_rows=True, ragged=ragged)
    if plan.schedule.pingpong:
        methods["consume"] = Counter({f"BARRIER_TURN arrive {threads['turn']}": 1})
    classes = {f"AttentionForward.{name}": calls for name, calls in methods.items()}
    classes["Ring.acquire"] = Counter({"self.empty wait": 1, "self.full announce": 1})
    classes["Ring.wait"] = Counter({"self.full wait": 1})
    classes["Ring.release"] = Counter({"self.empty arrive": 1})
    if plan.launch.pairs_ctas:
        _of_pairs(classes)
    if plan.schedule.pingpong:
        classes["Turn.wait"] = Counter({f"BARRIER_TURN sync {threads['turn']}": 1})
        classes["Turn.pass_on"] = Counter({f"BARRIER_TURN arrive {threads['turn']}": 1})
    return classes


def map_calls(tile_map: TileMap, *, by_rows: bool, ragged: bool) -> Events:
    """Barriers of a CTA that makes a tile map: before undecided tiles are read, and before their bits change; where its
    warps share boxes, after these are put.
    """
    shares = not ragged and bool(inner_loads(tile_map.test, by_rows=by_rows))
    return {"look_at_group": Counter({"cta sync": 1 + shares}), "decide": Counter({"cta sync": 1})}


def _of_pairs(classes: Events) -> None:
    """What a cluster changes: K and V are given back to both CTAs, CTA 0 tells tickets, both begin and end as one."""
    kernel = classes["AttentionForward.kernel"]
    kernel -= Counter({"cta sync": 1, "ring.empty init warps": 1})
    kernel += Counter({f"rings.ticket_{end} init 1": 1 for end in ("full", "empty")})
    kernel += Counter(["ring.empty init 2 * warps", "cluster arrive relaxed", "cluster arrive"])
    kernel["cluster wait"] = 2
    classes["AttentionForward.pass_ticket"] = Counter(
        [
            "rings.ticket_empty wait",
            "rings.ticket_full store at 1",
            "rings.ticket_full announce",
            "rings.ticket_full wait",
            "rings.ticket_empty mapped to 0",
            "rings.ticket_empty arrive in cluster",
        ]
    )
    classes["Ring.__init__"] = Counter({"empty mapped to lane % 2": 1})
    classes["Ring.release"] = Counter({"self.empty_of arrive in cluster": 1})


def ledger_faults(tree: ast.Module, plan: KernelPlan, ragged: bool = False) -> list[str]:
    """Every method whose synchronising calls are not those of the ledger."""
    found, ledger = events(tree), wanted(plan, ragged)
    out = []
    for method in sorted(found.keys() | ledger.keys()):
        has, asks = found.get(method, Counter()), ledger.get(method, Counter())
        for event in sorted(has.keys() | asks.keys()):
            if has[event] != asks[event]:
                out.append(f"{method}: `{event}` stands {has[event]} times, the ledger asks for {asks[event]}")
    for count in _consumer_warps(tree):
        if count != CONSUMER_WARPS:
            out.append(f"AttentionForward.kernel: warps is {count}, the ledger asks for {CONSUMER_WARPS}")
    return out


def _consumer_warps(tree: ast.Module) -> list[str]:
    """Every value that the name `warps`, the arrivals of a ring's empty barriers, is given."""
    found = []
    for node in every(ast.Assign, tree):
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(node.targets[0].elts, node.value.elts, strict=False)
            found += [ast.unparse(value) for target, value in pairs if dotted(target) == "warps"]
    return found
