"""verify: facts checked on the emitted text of a backward against its plan (see `verify.source`).

A failure is a bug in a template, never the fault of a user.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from attngen.ir.backward import LEAST_SHARE, BackwardPlan, BackwardPlanSet
from attngen.ir.types import DType
from attngen.source import parse_python
from attngen.verify.backward_ledger import CONSUMER_WARPS, event, kernel_path, ledger_faults
from attngen.verify.backward_shares import share_faults
from attngen.verify.backward_zeroes import zero_faults
from attngen.verify.ledger import dotted
from attngen.verify.source import SourceError, general_faults, meta_of, unparsable
from attngen.verify.tables import LAUNCHED, kernels_of, table_faults
from attngen.verify.tree import every

CLASS = "AttentionBackward"
_ELEMENT = {DType.BF16: "cutlass.BFloat16", DType.FP16: "cutlass.Float16"}
#: Constant -> the named barrier of the plan whose number it is.
_BARRIERS = {
    "BARRIER_STORE": "store of warpgroup 0",
    "BARRIER_STAGGER": "stagger",
    "BARRIER_OWN": "own sum of warpgroup 0",
    "BARRIER_TURN": "turn of warpgroup 0",
}
_TENSORS = ("sQ", "sdO", "sK", "sV", "sdS")
#: Statements that every thread of a kernel must reach, in this order, before anything else of the kind stands; those of
#: the main kernel are `backward_ledger.kernel_path`.
_PATHS = {
    "prepare": ("grid launch",),
    "finish": ("grid wait",),
}
#: Launches in order, and whether each may begin before the one before it has ended.
_LAUNCHES = {"prepare": False, "kernel": True, "finish": True}


def verify_source(text: str, plan_set: BackwardPlanSet, tree: ast.Module) -> None:
    """Check the emitted text. Raises: SourceError."""
    found = source_faults(text, plan_set, tree)
    if found:
        raise SourceError(f"{plan_set.spec.name}: " + "; ".join(found))


def source_faults(text: str, plan_set: BackwardPlanSet, tree: ast.Module | None = None) -> list[str]:
    """Everything wrong with the text."""
    try:
        tree = tree or parse_python(text)
        compile(tree, "<generated>", "exec")
    except (SyntaxError, ValueError) as fault:
        return [unparsable(fault)]
    methods = _methods(tree)
    return [
        *general_faults(text, tree),
        *_names(tree, methods, plan_set),
        *_numbers(tree, plan_set),
        *dict.fromkeys(fault for p in plan_set.plans for fault in _storage(tree, methods, p)),
        *_paths(methods, plan_set.plans[0]),
        *_launches(methods, plan_set),
        *table_faults(tree, CLASS, plan_set.plans[0].mask.form, meta_of(tree)),
        *_turns(methods, plan_set),
        *zero_faults(methods, plan_set),
        *share_faults(methods, plan_set),
        *ledger_faults(tree, plan_set),
    ]


def _methods(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Methods of the kernel class by name."""
    owner = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == CLASS), None)
    return {n.name: n for n in owner.body if isinstance(n, ast.FunctionDef)} if owner else {}


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from ((n.id, node.value) for n in every(ast.Name, target))


def _stored(node: ast.AST) -> Counter[str]:
    """How often each name is assigned."""
    targets = [t for n in every(ast.Assign, node) for t in n.targets]
    return Counter(n.id for t in targets for n in every(ast.Name, t))


def _names(tree: ast.Module, methods: Mapping[str, ast.FunctionDef], plan_set: BackwardPlanSet) -> Iterator[str]:
    """Definitions that must stand once."""
    module = Counter(name for name, _ in _constants(tree))
    wanted = {"ATTN_META", "ELEMENT", "PLANS", "LIMITS", *_planned(plan_set)}
    for word in sorted(wanted | module.keys()):
        if module[word] != 1:
            yield f"{word} is defined {module[word]} times"
    for word in sorted(_BARRIERS.keys() & module.keys() - wanted):
        yield f"{word} is defined, the plan has no such barrier"
    here = _stored(methods["kernel"]) if "kernel" in methods else Counter()
    anywhere = _stored(tree)
    peer = ("sPeerK",) if plan_set.plans[0].compute.cluster > 1 else ()
    for word in (*_TENSORS, *peer):
        if here[word] != 1 or anywhere[word] != 1:
            yield f"{word} is defined {here[word]} times in kernel, {anywhere[word]} in all"


def _planned(plan_set: BackwardPlanSet) -> dict[str, Any]:
    """Numbers at the top of the module."""
    p = plan_set.plans[0]
    c, m = p.compute, p.memory
    barriers = {b.name: b.id for b in p.schedule.named_barriers}
    return {
        "HEAD_DIM_QK": c.head_dim_qk_padded,
        "HEAD_DIM_V": c.head_dim_v_padded,
        "LIMITS": plan_set.limits,
        "DS_STAGES": m.ds_stages,
        **({"P_STAGES": m.p_stages} if c.splits_operands else {}),
        "WALK_STAGES": next(pipe.stages for pipe in p.schedule.pipelines if pipe.name == "walk"),
        **({"LEAST_SHARE": LEAST_SHARE} if p.schedule.shares_walks else {}),
        "COUNTER_WORDS": m.workspace_per_tile - c.tile_m * (c.head_dim_qk_padded + 2),
        **{constant: barriers[name] for constant, name in _BARRIERS.items() if name in barriers},
    }


def _numbers(tree: ast.Module, plan_set: BackwardPlanSet) -> Iterator[str]:
    """Numbers of the text that differ from the plan's."""
    values = dict(_constants(tree))
    first = plan_set.plans[0].compute
    for name, value in _planned(plan_set).items():
        if name in values and _literal(values[name]) != value:
            yield f"{name} is {ast.unparse(values[name])}, the plan says {value}"
    if "ELEMENT" in values and dotted(values["ELEMENT"]) != _ELEMENT[first.dtype]:
        yield f"ELEMENT is {ast.unparse(values['ELEMENT'])}, the plan says {_ELEMENT[first.dtype]}"
    calls = every(ast.Call, values.get("PLANS"))
    if len(calls) != len(plan_set.plans):
        yield f"PLANS has {len(calls)} entries, the plan {len(plan_set.plans)}"
    for i, (call, p) in enumerate(zip(calls, plan_set.plans, strict=False)):
        stated, planned = {k.arg or "**": _literal(k.value) for k in call.keywords}, _tile(p, plan_set)
        for field in sorted(stated.keys() | planned.keys()):
            if stated.get(field) != planned.get(field):
                yield f"PLANS[{i}].{field} is {stated.get(field)}, the plan says {planned.get(field)}"
    yield from _meta(_literal(values["ATTN_META"]) if "ATTN_META" in values else None, plan_set)


def _tile(p: BackwardPlan, plan_set: BackwardPlanSet) -> dict[str, Any]:
    """Fields of one entry of PLANS."""
    c, m = p.compute, p.memory
    own = {
        "dq_stages": m.dq_stages,
        "dq_transposed": c.dq_transposed,
        "v_in_registers": c.v_in_registers,
        "drains": c.drains,
    }
    own = {} if c.splits_operands else own
    return {
        "tile_m": c.tile_m,
        "warpgroups": c.warpgroups,
        "q_stages": m.q_stages,
        "do_stages": m.do_stages,
        **({"q_columns": m.q_columns, "do_columns": m.do_columns} if plan_set.pads_rows else {}),
        **own,
        **({} if plan_set.spec.layout.is_ragged else {"grouped": p.schedule.grouped}),
        "producer_registers": p.schedule.roles[0].registers,
        "consumer_registers": p.schedule.roles[-1].registers,
    }


def _meta(meta: Any, plan_set: BackwardPlanSet) -> Iterator[str]:
    """ATTN_META["backward"], which the callable sizes its buffers by."""
    if not isinstance(meta, dict) or not isinstance(meta.get("backward"), dict):
        yield "ATTN_META is no plain literal with an entry `backward`"
        return
    if meta.get("name") != plan_set.spec.name or meta.get("direction") != "backward":
        yield "ATTN_META names another spec or direction"
    stated = meta["backward"]
    plans = [
        (
            p.name, p.compute.tile_m, p.compute.tile_n, p.launch.cluster[0], p.launch.threads, p.memory.smem_bytes,
            p.memory.workspace_per_tile, p.part_words or None,
        )
        for p in plan_set.plans
    ]  # fmt: skip
    keys = ("name", "tile_m", "tile_n", "cluster", "threads", "smem_bytes", "workspace_per_tile", "part_words")
    if [tuple(p.get(k) for k in keys) for p in stated.get("plans", ())] != plans:
        yield f"ATTN_META states other plans than {plans}"
    cycles = list(plan_set.step_cycles) or None
    if stated.get("step_cycles") != cycles:
        yield f"ATTN_META states steps of {stated.get('step_cycles')} cycles, the plans {cycles}"
    if stated.get("limits") != list(plan_set.limits) or stated.get("deterministic") != plan_set.deterministic:
        yield "ATTN_META states other limits, or another determinism"
    gradients = [(c.tensor, c.kind.value) for c in plan_set.gradient.contributions]
    if [(g.get("tensor"), g.get("kind")) for g in stated.get("gradients", ())] != gradients:
        yield f"ATTN_META states other gradients than {gradients}"


def _storage(tree: ast.Module, methods: Mapping[str, ast.FunctionDef], p: BackwardPlan) -> Iterator[str]:
    """Shared memory holds what the plan lays out, in its order, and as many mbarriers as there are stages."""
    fields = [
        n.target.id
        for scope in every(ast.ClassDef, tree)
        if scope.name == "SharedStorage"
        for n in scope.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    tags = ["ticket"] if p.compute.splits_operands else ["dq_tiles"]
    wanted = ["mbarriers", "walks", "steps", *tags, "sLSE", "sD", *(b.name for b in p.memory.buffers)]
    if fields != wanted:
        yield f"shared memory holds {', '.join(fields)}, the plan {', '.join(wanted)}"
    n = p.compute.warpgroups
    per_warpgroup = {"dq": n}
    mbarriers = sum(
        pipe.stages * per_warpgroup.get(pipe.name, 1) * (2 if pipe.empty_arrivals else 1)
        for pipe in p.schedule.pipelines
    )
    numbers = {
        "plan.q_stages": p.memory.q_stages, "plan.do_stages": p.memory.do_stages, "plan.dq_stages": p.memory.dq_stages,
        "DS_STAGES": p.memory.ds_stages, "P_STAGES": p.memory.p_stages, "self.warpgroups": n,
        "WALK_STAGES": next(pipe.stages for pipe in p.schedule.pipelines if pipe.name == "walk"),
    }  # fmt: skip
    for name, value, found in (
        ("num_mbarriers", mbarriers, _assigned(methods, "__call__", "num_mbarriers")),
        ("warps", CONSUMER_WARPS, _assigned(methods, "kernel", "warps")),
    ):
        said = [_evaluated(e, numbers) if name == "num_mbarriers" else ast.unparse(e) for e in found]
        if said != [value]:
            yield f"{name} is {', '.join(map(str, said)) or 'nowhere'}, the plan has {value}"


def _assigned(methods: Mapping[str, ast.FunctionDef], method: str, name: str) -> list[ast.expr]:
    """Every value that a method gives a name."""
    nodes = every(ast.Assign, methods.get(method))
    return [n.value for n in nodes if any(dotted(t) == name for t in n.targets)]


def _evaluated(e: ast.expr, numbers: Mapping[str, int]) -> int | str:
    """Sums and products of known numbers; the text of anything else."""
    if isinstance(e, ast.Constant) and isinstance(e.value, int):
        return e.value
    if isinstance(e, ast.BinOp) and isinstance(e.op, ast.Add | ast.Mult):
        a, b = _evaluated(e.left, numbers), _evaluated(e.right, numbers)
        if isinstance(a, int) and isinstance(b, int):
            return a + b if isinstance(e.op, ast.Add) else a * b
    return numbers.get(dotted(e), ast.unparse(e))


def _paths(methods: Mapping[str, ast.FunctionDef], p: BackwardPlan) -> Iterator[str]:
    """Waits for the grid before stand on every path, once, before what they protect."""
    parts = {"add_parts": ("grid wait",)} if p.schedule.shares_walks else {}
    for name, wanted in (_PATHS | parts | {"kernel": kernel_path(p)}).items():
        body = methods[name].body if name in methods else []
        steps = [(e, n.lineno) for n in body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
                 and (e := event(n.value) or "") in wanted]  # fmt: skip
        if tuple(e for e, _ in steps) != wanted:
            yield f"{CLASS}.{name}: on every path {', '.join(wanted)}, found {', '.join(e for e, _ in steps) or 'none'}"
            continue
        line = dict(steps).get("grid wait")
        early = [
            dotted(n.func) for n in every(ast.Call, methods[name])
            if line and n.lineno < line and dotted(n.func) in _READERS
        ]  # fmt: skip
        if early:
            yield f"{CLASS}.{name}: {early[0]} stands before the wait for the grid before"


#: Calls that read what the kernel before has written, or may.
_READERS = frozenset(("self.load", "self.reduce", "self.consume", "cute.autovec_copy", "cute.copy"))


#: The KV tile that is handed out in a place, and how many tiles add before it.
_KV_ORDER = {
    "ascending": ("place", "n_block - n_min"),
    "descending": ("p.n_blocks - 1 - place", "n_max - 1 - n_block"),
}


def _turns(methods: Mapping[str, ast.FunctionDef], plan_set: BackwardPlanSet) -> Iterator[str]:
    """KV tiles are handed out in the plan's order, and add in that order: in another one a call never ends."""
    order = plan_set.plans[0].schedule.kv_order
    serpentine = plan_set.plans[0].schedule.serpentine and not plan_set.spec.layout.is_ragged
    if ("descends" in methods) != serpentine:
        yield f"{CLASS}: a {'straight' if serpentine else 'serpentine'} walk, the plan says the other one"
    places, mapped = list(zip(("tile_coords", "turn"), _KV_ORDER[order], strict=True)), plan_set.plans[0].mask.map
    if mapped is not None:  # turns are counted, in an order that one method says
        places[1] = ("turn_place", "n_block" if order == "ascending" else "p.n_blocks - 1 - n_block")
    for name, said in places[: 1 + plan_set.deterministic]:
        returns = [n.value for n in every(ast.Return, methods.get(name))]
        found = [ast.unparse(r.elts[0] if isinstance(r, ast.Tuple) else r) for r in returns if r is not None]
        if found != [said]:
            yield f"{CLASS}.{name}: KV tiles in the order {', '.join(found) or 'of nothing'}, the plan says {order}"


def _launches(methods: Mapping[str, ast.FunctionDef], plan_set: BackwardPlanSet) -> Iterator[str]:
    """Which kernels are launched, in which order, which may overlap the one before, and how many CTAs a cluster has."""
    nodes = sorted(every(ast.Call, methods.get("__call__")), key=lambda n: n.lineno)
    p, found = plan_set.plans[0], []
    first = [] if p.mask.map is None else ["map_tiles", *(["transpose_map"] if plan_set.deterministic else [])]
    for n in nodes:
        if isinstance(n.func, ast.Attribute) and n.func.attr == "launch" and isinstance(n.func.value, ast.Call):
            given = {k.arg: _literal(k.value) for k in n.keywords}
            cluster = tuple(given.get("cluster", (1, 1, 1)))
            found.append((dotted(n.func.value.func), given.get("use_pdl", False), cluster))
    tables = {LAUNCHED[k]: False for k in kernels_of(p.mask.form)}
    launches = {**tables, **dict.fromkeys(first, False), **_LAUNCHES}
    if p.schedule.shares_walks:
        del launches["finish"]
        launches |= {"add_parts": True, "finish": True}
    wanted = [(k, pdl, p.launch.cluster if k == "kernel" else (1, 1, 1)) for k, pdl in launches.items()]
    if found != wanted:
        yield f"launches (kernel, programmatic, cluster) {found}, not {wanted}"


def _literal(e: ast.expr) -> Any:
    try:
        return ast.literal_eval(e)
    except ValueError:
        return None
