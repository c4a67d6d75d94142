"""verify: facts checked on the emitted text against its plan.

A failure is a bug in a template, never the fault of a user. Everything is read from the syntax tree: what a spec says
in its doc string or in a name cannot look like code.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from typing import Any

from attngen.ir.backward import BackwardPlanSet
from attngen.ir.plan import PlanSet
from attngen.ir.types import DType
from attngen.source import parse_python
from attngen.verify.ledger import dotted, ledger_faults
from attngen.verify.tables import table_faults
from attngen.verify.tree import every

LINE_LENGTH = 120
_IMPORTS = {"copy", "math", "sys", "dataclasses", "types", "cuda", "cutlass", "torch", "time"}
_CALLS = {"exec", "eval", "compile", "open", "input", "breakpoint", "globals", "setattr", "delattr", "__import__"}
_ELEMENT = {DType.BF16: "cutlass.BFloat16", DType.FP16: "cutlass.Float16"}
#: What the module must define, once.
_MODULE = ("ATTN_META", "ELEMENT", "HEAD_DIM_QK", "HEAD_DIM_V", "PLANS", "LIMITS")
#: Shared-memory tensors, defined once, in `kernel`.
_BUFFERS = ("sQ", "sK", "sV", "sO")


class SourceError(AssertionError):
    """The emitted text breaks a rule of generated files."""


def parsed(text: str, plan_set: PlanSet | BackwardPlanSet) -> ast.Module:
    """The emitted text as a syntax tree. Raises: SourceError."""
    try:
        return parse_python(text)
    except (SyntaxError, ValueError) as fault:
        raise SourceError(f"{plan_set.spec.name}: {unparsable(fault)}") from fault


def unparsable(fault: SyntaxError | ValueError) -> str:
    """The fault of a text that is no Python, with its line."""
    return f"line {fault.lineno if isinstance(fault, SyntaxError) else 0} does not parse: {fault}"


def verify_source(text: str, plan_set: PlanSet, tree: ast.Module | None = None) -> None:
    """Check the emitted text: it parses, imports and calls only what it may, and says what its plan says.

    `tree`: the text, parsed already (the value of a string literal aside). Raises: SourceError.
    """
    found = source_faults(text, plan_set, tree)
    if found:
        raise SourceError(f"{plan_set.spec.name}: " + "; ".join(found))


def source_faults(text: str, plan_set: PlanSet, tree: ast.Module | None = None) -> list[str]:
    """Everything wrong with the text."""
    try:
        tree = tree or parse_python(text)
        compile(tree, "<generated>", "exec")
    except (SyntaxError, ValueError) as fault:
        return [unparsable(fault)]
    return [
        *general_faults(text, tree),
        *_names(tree, plan_set),
        *_numbers(tree, plan_set),
        *table_faults(tree, "AttentionForward", plan_set.plans[0].mask.form, meta_of(tree)),
        *ledger_faults(tree, plan_set.plans[0], plan_set.spec.layout.is_ragged),
        *_clusters(tree, plan_set.plans[0].launch.cluster),
    ]


def general_faults(text: str, tree: ast.Module) -> list[str]:
    """What is wrong with the text of any kernel: imports, calls, what runs on import, doubles, long lines."""
    return [*_reach(tree), *_statements(tree), *_twice(tree), *_long_lines(text)]


def _long_lines(text: str) -> list[str]:
    long = [i for i, line in enumerate(text.splitlines(), 1) if len(line) > LINE_LENGTH]
    return [f"line {i} is longer than {LINE_LENGTH}" for i in long[:3]]


def _reach(tree: ast.Module) -> Iterator[str]:
    """Imports and calls outside the allow-lists."""
    modules = [a.name for node in every(ast.Import, tree) for a in node.names]
    modules += [node.module or "" for node in every(ast.ImportFrom, tree)]
    for root in (name.split(".")[0] for name in modules):
        if root == "__future__":
            yield "postponed annotations break @cute.struct"
        elif root not in _IMPORTS:
            yield f"imports {root or 'a neighbour'}"
    for call in every(ast.Call, tree):
        if isinstance(call.func, ast.Name) and call.func.id in _CALLS:
            yield f"calls {call.func.id}"


def _statements(tree: ast.Module) -> Iterator[str]:
    """At module level stand a docstring, imports, constants, definitions and the main guard; nothing runs on import."""
    for i, node in enumerate(tree.body):
        doc = i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        guard = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        plain = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef | ast.ClassDef)
        if not (doc or guard or plain):
            yield f"line {node.lineno} runs on import: {type(node).__name__}"


def _twice(tree: ast.Module) -> Iterator[str]:
    """Functions and classes that one scope defines twice."""
    scopes: list[ast.Module | ast.ClassDef | ast.FunctionDef] = [tree]
    for scope in scopes + every(ast.ClassDef, tree) + every(ast.FunctionDef, tree):
        names = Counter(n.name for n in scope.body if isinstance(n, ast.FunctionDef | ast.ClassDef))
        yield from (f"defines {n} twice" for n, count in sorted(names.items()) if count > 1)


def _names(tree: ast.Module, plan_set: PlanSet) -> Iterator[str]:
    """Definitions that must stand once."""
    module = Counter(n for node in tree.body if isinstance(node, ast.Assign) for n in _targets(node))
    turn = ["BARRIER_TURN"] if plan_set.plans[0].schedule.pingpong else []
    store = ["BARRIER_STORE"] if plan_set.plans[0].memory.stages_o else []
    for word in sorted({*_MODULE, *store, *turn, *module}):
        if module[word] != 1:
            yield f"{word} is defined {module[word]} times"
    kernel = _method(tree, "AttentionForward", "kernel")
    anywhere = Counter(n for node in every(ast.Assign, tree) for n in _targets(node))
    here = Counter(n for node in every(ast.Assign, kernel) for n in _targets(node))
    stages_o = plan_set.plans[0].memory.stages_o
    for word in _BUFFERS if stages_o else _BUFFERS[:-1]:
        # the branch of `own buffer or Q's` is taken by the template: one definition is left
        if here[word] != 1 or anywhere[word] != 1:
            yield f"{word} is defined {here[word]} times in kernel, {anywhere[word]} in all"
    own = stages_o and not plan_set.plans[0].memory.o_in_q
    fields = [
        n.target.id
        for scope in every(ast.ClassDef, tree)
        if scope.name == "SharedStorage"
        for n in scope.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    ]
    ticket = ["ticket"] if plan_set.plans[0].launch.pairs_ctas else []
    wanted = ["mbarriers", "mailbox", *ticket, "sQ", *(["sO"] if own else []), "sK", "sV"]
    wanted += ["sDistance"] if any(b.name == "sDistance" for b in plan_set.plans[0].memory.buffers) else []
    if fields != wanted:
        yield f"shared memory holds {', '.join(fields)}, the plan {', '.join(wanted)}"


def _targets(node: ast.Assign) -> list[str]:
    return [n.id for t in node.targets for n in every(ast.Name, t) if isinstance(n.ctx, ast.Store)]


def _method(tree: ast.Module, owner: str, name: str) -> ast.AST:
    for scope in tree.body:
        if isinstance(scope, ast.ClassDef) and scope.name == owner:
            for node in scope.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node
    return ast.Module(body=[], type_ignores=[])


def _numbers(tree: ast.Module, plan_set: PlanSet) -> Iterator[str]:
    """Numbers of the text that differ from the plan's."""
    values = {
        n.targets[0].id: n.value for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    }
    first, memory = plan_set.plans[0].compute, plan_set.plans[0].memory
    barriers = {b.name: b.id for b in plan_set.plans[0].schedule.named_barriers}
    wanted: dict[str, Any] = {
        "HEAD_DIM_QK": first.head_dim_qk_padded,
        "HEAD_DIM_V": first.head_dim_v_padded,
        "COLUMNS_QK": memory.columns_qk,
        "COLUMNS_V": memory.columns_v,
        "LIMITS": plan_set.limits,
        "GROWTH": first.growth,
        "HEADROOM": first.headroom,
        "REFERENCE": first.reference,
        "BARRIER_STORE": barriers.get("store of warpgroup 0", 5),
        "BARRIER_TURN": barriers.get("turn of warpgroup 0", 1),
    }
    for name, value in wanted.items():
        if name in values and _literal(values[name]) != value:
            yield f"{name} is {ast.unparse(values[name])}, the plan says {value}"
    if "ELEMENT" in values and dotted(values["ELEMENT"]) != _ELEMENT[first.dtype]:
        yield f"ELEMENT is {ast.unparse(values['ELEMENT'])}, the plan says {_ELEMENT[first.dtype]}"
    calls = every(ast.Call, values.get("PLANS"))
    if len(calls) != len(plan_set.plans):
        yield f"PLANS has {len(calls)} entries, the plan {len(plan_set.plans)}"
    groups = any(p.schedule.l2_group_bytes for p in plan_set.plans)
    for i, (call, p) in enumerate(zip(calls, plan_set.plans, strict=False)):
        stated = {k.arg or "**": _literal(k.value) for k in call.keywords}
        planned = {
            "warpgroups": p.compute.warpgroups,
            "tile_n": p.compute.tile_n,
            "kv_stages": p.memory.kv_stages,
            "producer_registers": p.schedule.roles[0].registers,
            "consumer_registers": p.schedule.roles[-1].registers,
            **({"l2_group_bytes": p.schedule.l2_group_bytes} if groups else {}),
        }
        for field in sorted(stated.keys() | planned.keys()):
            if stated.get(field) != planned.get(field):
                yield f"PLANS[{i}].{field} is {stated.get(field)}, the plan says {planned.get(field)}"
    meta = _literal(values["ATTN_META"]) if "ATTN_META" in values else None
    if not isinstance(meta, dict):
        yield "ATTN_META is no plain literal"
    elif meta.get("name") != plan_set.spec.name or meta.get("limits") != list(plan_set.limits):
        yield "ATTN_META names another spec or other limits"
    elif [p.get("name") for p in meta.get("plans", ())] != [p.name for p in plan_set.plans]:
        yield "ATTN_META lists other plans"


def _clusters(tree: ast.Module, ctas: tuple[int, int, int]) -> Iterator[str]:
    """The launch's clusters, and the CTAs that K and V are sent to."""
    said = {
        k.arg: ast.unparse(k.value)
        for name in ("__call__", "load_kv")
        for n in every(ast.Call, _method(tree, "AttentionForward", name))
        for k in n.keywords
        if k.arg in ("cluster", "mcast_mask")
    }
    pairs = ctas != (1, 1, 1)
    wanted = {"cluster": str(list(ctas)), "mcast_mask": f"cutlass.Int16({2 ** ctas[0] - 1})"} if pairs else {}
    if said.get("cluster") != wanted.get("cluster"):
        yield f"__call__: cluster is {said.get('cluster', 'none')}, the plan says {wanted.get('cluster', 'none')}"
    if said.get("mcast_mask") != wanted.get("mcast_mask"):
        yield f"load_kv: K and V go to CTAs {said.get('mcast_mask', 'own')}, the plan has {ctas[0]} in a cluster"


def meta_of(tree: ast.Module) -> Any:
    """ATTN_META of the text, None where it is no plain literal."""
    found = [n.value for n in tree.body if isinstance(n, ast.Assign) and dotted(n.targets[0]) == "ATTN_META"]
    return _literal(found[0]) if found else None


def _literal(e: ast.expr) -> Any:
    try:
        return ast.literal_eval(e)
    except ValueError:
        return None
