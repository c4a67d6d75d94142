"""Checks on defs that need no call: unknown names, calls of nothing, recursion. Unused defs are checked too."""

from __future__ import annotations

from collections.abc import Iterator

from attngen.ir.expr import ATOMS
from attngen.ir.types import Type
from attngen.syntax import ast, words
from attngen.syntax.collect import Faults
from attngen.syntax.declare import literal
from attngen.syntax.faults import closest, quoted
from attngen.syntax.scope import Scope


def check_defs(scope: Scope, faults: Faults) -> None:
    """Check every def of `scope`."""
    uses = {name: _check(define, scope, faults) for name, define in scope.defs.items()}
    _check_recursion(uses, scope, faults)


def walk(node: ast.SurfaceExpr) -> Iterator[ast.SurfaceExpr]:
    """Every surface node, parents first."""
    stack = [node]
    while stack:
        n = stack.pop()
        yield n
        stack.extend(reversed(children(n)))


def children(n: ast.SurfaceExpr) -> tuple[ast.SurfaceExpr, ...]:
    """Direct operands."""
    if isinstance(n, ast.Call):
        return n.args
    if isinstance(n, ast.Load):
        return n.indices
    if isinstance(n, ast.Unary):
        return (n.operand,)
    if isinstance(n, ast.Binary):
        return (n.left, n.right)
    if isinstance(n, ast.Compare):
        return (n.first, *(x for _, x in n.rest))
    return (n.test, n.then, n.other) if isinstance(n, ast.Conditional) else ()


def _check(define: ast.Define, scope: Scope, faults: Faults) -> dict[str, ast.SurfaceExpr]:
    """Report what the body cannot mean; return the defs it uses."""
    formals = {f.name.text for f in define.formals or ()}
    for formal in define.formals or ():
        _check_formal(formal, faults)
    constants = ("head_dim", "head_dim_v")
    uses: dict[str, ast.SurfaceExpr] = {}
    for node in walk(define.body):
        if isinstance(node, ast.Name) and node.name not in formals:
            if node.name in scope.defs and node.name not in ATOMS:
                uses.setdefault(node.name, node)
            elif (node.name not in ATOMS or node.name in words.HIDDEN_ATOMS) and node.name not in constants:
                meant = closest(node.name, [*formals, *ATOMS, *scope.defs])
                help_ = words.FOREIGN.get(node.name) or (
                    f"did you mean `{meant}`?" if meant else f"make `{node.name}` an argument of `{define.name.text}`"
                )
                faults.add(
                    "E0201",
                    f"unknown name `{node.name}` in def `{define.name.text}`",
                    node.span,
                    "not an argument, an atom or a def",
                    notes=("a def sees its own arguments, the atoms and other defs, not what an attention declares",),
                    helps=(help_,),
                )
        elif isinstance(node, ast.Call) and not words.callable_name(node.name.text):
            if node.name.text in scope.defs:
                uses.setdefault(node.name.text, node)
            else:
                name = node.name
                helps = (words.call_help(name.text, scope.defs),)
                faults.add("E0202", f"unknown function `{name.text}`", name.span, "not defined", helps=helps)
        elif isinstance(node, ast.Load) and node.name.text not in formals:
            faults.add(
                "E0201",
                f"unknown tensor `{node.name.text}` in def `{define.name.text}`",
                node.name.span,
                "not an argument",
                notes=("a def sees its own arguments, the atoms and other defs, not what an attention declares",),
                helps=(f"make `{node.name.text}` an argument of `{define.name.text}`",),
            )
    return uses


def _check_formal(formal: ast.Formal, faults: Faults) -> None:
    kinds = (*Type, "tensor")
    if formal.type is None:
        return
    if formal.type.text not in kinds:
        meant = closest(formal.type.text, kinds)
        faults.add(
            "E0217",
            f"unknown type `{formal.type.text}` of argument `{formal.name.text}`",
            formal.type.span,
            "not a type",
            helps=(f"did you mean `{meant}`?" if meant else f"write {quoted(kinds)}",),
        )
    elif formal.bounds and formal.type.text not in ("int", "float"):
        faults.add(
            "E0217",
            f"a {formal.type.text} has no bounds (`{formal.name.text}`)",
            formal.bounds[0].span,
            "nothing to bound",
            helps=("remove the bound",),
        )
    else:
        for bound in formal.bounds:
            for side in (bound.low, bound.high):
                if side is not None:
                    literal(side, Type(formal.type.text), f"a bound of `{formal.name.text}`", faults)


def _check_recursion(uses: dict[str, dict[str, ast.SurfaceExpr]], scope: Scope, faults: Faults) -> None:
    """Depth-first over the use graph, without recursion; the first def of each circle is reported."""
    done: set[str] = set()
    for start in uses:
        path: list[str] = []
        stack: list[tuple[str, Iterator[str]]] = []
        if start not in done:
            path.append(start)
            stack.append((start, iter(uses[start])))
        while stack:
            name, rest = stack[-1]
            child = next(rest, None)
            if child is None:
                stack.pop()
                path.pop()
                done.add(name)
            elif child in path:
                circle = path[path.index(child) :]
                head = scope.defs[child]
                faults.add(
                    "E0221",
                    f"def `{child}` uses itself",
                    head.name.span,
                    "defined through itself",
                    notes=(" uses ".join([*circle, child]),),
                    helps=("defs are inlined, so they cannot recurse; write the expression out",),
                )
            elif child not in done:
                path.append(child)
                stack.append((child, iter(uses[child])))
