"""verify: the tables of a mask in the emitted text, of either direction: filled once, before and apart from what reads
them. A failure is a bug in a template.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attngen.ir.forms import MaskForm
from attngen.ir.tables import Extreme, axes_of
from attngen.verify.ledger import dotted
from attngen.verify.tree import every

_LAUNCH_DEPENDENTS = "cute.arch.griddepcontrol_launch_dependents"
_WAIT = "cute.arch.griddepcontrol_wait"


def table_faults(tree: ast.Module, owner: str, form: MaskForm, meta: object) -> Iterator[str]:
    """What the text says of tables that `form` does not, or the other way round."""
    stated = meta.get("tables", []) if isinstance(meta, dict) else []
    if stated != [{"name": t.name, "dims": axes_of(t)} for t in form.tables]:
        yield "ATTN_META lists other tables"
    methods = {
        n.name: n
        for scope in tree.body
        if isinstance(scope, ast.ClassDef) and scope.name == owner
        for n in scope.body
        if isinstance(n, ast.FunctionDef)
    }
    kernels = {f"fill_{k}": k for k in kernels_of(form)}
    found = [n for n in methods if n.startswith("fill_")]
    filled = [n.removeprefix("fill_") for n in found if n not in kernels]
    if len(filled) != len(form.tables) or not kernels.keys() <= {*found} or ("tables_in" in methods) != bool(kernels):
        yield f"{owner} has the methods {', '.join(found) or 'of no table'} for {len(form.tables)} tables"
    elif form.tables:
        for name in filled:  # a name may have been changed for the kernel
            if _stored(methods[f"fill_{name}"]) != [f"p.{name}"]:
                yield f"{owner}.fill_{name} does not store p.{name}, or more"
        for kernel, last in zip(kernels, (*[False] * (len(kernels) - 1), True), strict=True):
            if _calls(methods[kernel], _LAUNCH_DEPENDENTS) != last:
                yield f"{owner}.{kernel} does not let the next grid begin, or too early"
        yield from _waits(methods["kernel"], owner)
        yield from _launches(methods["__call__"], owner, [LAUNCHED[k] for k in kernels.values()])


#: Kernels that fill tables, in the order of their launches, and the name by which `__call__` launches each.
LAUNCHED = {"tables": "fill", "extremes": "extremes"}


def kernels_of(form: MaskForm) -> list[str]:
    """Which of `LAUNCHED` a form needs."""
    wanted = {"extremes" if isinstance(t, Extreme) else "tables" for t in form.tables}
    return [k for k in LAUNCHED if k in wanted]


def _stored(method: ast.AST) -> list[str]:
    targets = [t for n in every(ast.Assign, method) for t in n.targets]
    return [dotted(t.value) for t in targets if isinstance(t, ast.Subscript)]


def _calls(method: ast.AST, what: str) -> int:
    return sum(dotted(n.func) == what for n in every(ast.Call, method))


def _waits(kernel: ast.FunctionDef, owner: str) -> Iterator[str]:
    """Every thread waits for the grid before, ahead of any role."""
    for n in kernel.body:
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and dotted(n.value.func) == _WAIT:
            return
        if isinstance(n, ast.If) and any(_calls(n, f"self.{role}") for role in ("load", "consume")):
            break
    yield f"{owner}.kernel reads tables before it waits for them"


def _launches(call: ast.FunctionDef, owner: str, wanted: list[str]) -> Iterator[str]:
    """The first launches fill the tables, alone under `build_tables != 0`; the main kernel may begin during them."""
    launches = [
        n for n in every(ast.Call, call) if isinstance(n.func, ast.Attribute)
        and n.func.attr == "launch" and isinstance(n.func.value, ast.Call)
    ]  # fmt: skip
    launches.sort(key=lambda n: n.lineno)
    kernels = [dotted(n.func.value.func) for n in launches if isinstance(n.func, ast.Attribute)
               and isinstance(n.func.value, ast.Call)]  # fmt: skip
    guarded = [m for n in every(ast.If, call) if ast.unparse(n.test) == "build_tables != 0"
               for m in every(ast.Call, n) if m in launches]  # fmt: skip
    count = len(wanted)
    if kernels[:count] != wanted or {*wanted} & {*kernels[count:]} or guarded != launches[:count]:
        first = ", ".join(f"`{w}`" for w in wanted)
        yield f"{owner} launches {', '.join(kernels) or 'nothing'}; {first} comes first, if it is asked for"
    main = next((n for n, k in zip(launches, kernels, strict=True) if k == "kernel"), None)
    if main is None or not any(k.arg == "use_pdl" for k in main.keywords):
        yield f"{owner}.kernel is not launched to wait for the grid before"
