"""verify: facts checked on the emitted text against its plan.

A failure is a bug in a template, never the fault of a user.
"""

from __future__ import annotations

import ast
import re

from attngen.ir.plan import PlanSet

_IMPORTS = {"copy", "math", "sys", "dataclasses", "types", "cuda", "cutlass", "torch", "time"}
_ONCE = ("sQ", "sK", "sV", "sO", "BARRIER_TURN", "BARRIER_STORE", "ELEMENT", "PLANS", "LIMITS", "ATTN_META")
LINE_LENGTH = 120


class SourceError(AssertionError):
    """The emitted text breaks a rule of generated files."""


def verify_source(text: str, plan_set: PlanSet) -> None:
    """Check the emitted text: it parses, imports only what it may, and its barriers match the plan's ledger.

    Raises: SourceError.
    """
    found = source_faults(text, plan_set)
    if found:
        raise SourceError(f"{plan_set.spec.name}: " + "; ".join(found))


def source_faults(text: str, plan_set: PlanSet) -> list[str]:
    """Everything wrong with the text."""
    out: list[str] = []
    try:
        tree = ast.parse(text)
        compile(text, "<generated>", "exec")
    except SyntaxError as fault:
        return [f"line {fault.lineno} does not parse: {fault.msg}"]
    for node in ast.walk(tree):
        roots: list[str] = []
        if isinstance(node, ast.Import):
            roots = [a.name.split(".")[0] for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            roots = [(node.module or "").split(".")[0]]
        out += [f"imports {r}" for r in roots if r not in _IMPORTS]
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"exec", "eval", "open", "__import__"}
        ):
            out.append(f"calls {node.func.id}")
    for scope in (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef)):
        names = [n.name for n in scope.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        out += [f"defines {n} twice" for n in sorted(set(names)) if names.count(n) > 1]
    for word in _ONCE[4:]:
        assigned = len(re.findall(rf"^{word} = ", text, re.M))
        if assigned != 1:
            out.append(f"{word} is defined {assigned} times")
    # the ledger: every pipeline is acquired or announced by the producer and released by the consumers
    load, rest = _method(text, "load_tile") + _method(text, "load_kv") + _method(text, "load"), text
    for ring in ("k", "v"):
        if f"rings.{ring}," not in load:
            out.append(f"producer never fills pipeline {ring}")
        if f"rings.{ring}.wait(" not in rest or f"rings.{ring}.release(" not in rest:
            out.append(f"consumers never wait for or release pipeline {ring}")
    if rest.count("rings.q_empty + wg") != 1:
        out.append("Q slices are not given back exactly once")
    wanted = plan_set.plans[0].schedule.pingpong
    if ("self.next" in text) != wanted:
        out.append("ping-pong differs from the plan")
    out += [
        f"line {i} is longer than {LINE_LENGTH}"
        for i, line in enumerate(text.splitlines(), 1)
        if len(line) > LINE_LENGTH
    ][:3]
    if "postponed" in text or "from __future__" in text:
        out.append("postponed annotations break @cute.struct")
    return out


def _method(text: str, name: str) -> str:
    found = re.search(rf"^    def {name}\(.*?(?=^    (?:@|def )|^\S|\Z)", text, re.M | re.S)
    return found.group(0) if found else ""
