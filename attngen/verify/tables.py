"""verify: the tables of a mask in the emitted text, of either direction: filled once, before and apart from what reads
them. A failure is a bug in a template.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from attngen.ir.forms import MaskForm
from attngen.verify.ledger import dotted

_LAUNCH_DEPENDENTS = "cute.arch.griddepcontrol_launch_dependents"
_WAIT = "cute.arch.griddepcontrol_wait"


def table_faults(tree: ast.Module, owner: str, form: MaskForm, meta: object) -> Iterator[str]:
    """What the text says of tables that `form` does not, or the other way round."""
    stated = meta.get("tables", []) if isinstance(meta, dict) else []
    if stated != [{"name": t.name, "dims": list(t.dims)} for t in form.tables]:
        yield "ATTN_META lists other tables"
    methods = {
        n.name: n
        for scope in tree.body
        if isinstance(scope, ast.ClassDef) and scope.name == owner
        for n in scope.body
        if isinstance(n, ast.FunctionDef)
    }
    found = [n for n in methods if n == "tables_in" or n.startswith("fill_")]
    if len(found) != (len(form.tables) + 2 if form.tables else 0) or not {"tables_in", "fill_tables"} >= {*found[:2]}:
        yield f"{owner} has the methods {', '.join(found) or 'of no table'} for {len(form.tables)} tables"
    elif form.tables:
        for name in (n.removeprefix("fill_") for n in found[2:]):  # a name may have been changed for the kernel
            if _stored(methods[f"fill_{name}"]) != [f"p.{name}"]:
                yield f"{owner}.fill_{name} does not store p.{name}, or more"
        if _calls(methods["fill_tables"], _LAUNCH_DEPENDENTS) != 1:
            yield f"{owner}.fill_tables does not let the next grid begin"
        yield from _waits(methods["kernel"], owner)
        yield from _launches(methods["__call__"], owner)


def _stored(method: ast.AST) -> list[str]:
    targets = [t for n in ast.walk(method) if isinstance(n, ast.Assign) for t in n.targets]
    return [dotted(t.value) for t in targets if isinstance(t, ast.Subscript)]


def _calls(method: ast.AST, what: str) -> int:
    return sum(isinstance(n, ast.Call) and dotted(n.func) == what for n in ast.walk(method))


def _waits(kernel: ast.FunctionDef, owner: str) -> Iterator[str]:
    """Every thread waits for the grid before, ahead of any role."""
    for n in kernel.body:
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and dotted(n.value.func) == _WAIT:
            return
        if isinstance(n, ast.If) and any(_calls(n, f"self.{role}") for role in ("load", "consume")):
            break
    yield f"{owner}.kernel reads tables before it waits for them"


def _launches(call: ast.FunctionDef, owner: str) -> Iterator[str]:
    """The first launch fills the tables, alone under `build_tables != 0`; the main kernel may begin during it."""
    launches = [
        n for n in ast.walk(call) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
        and n.func.attr == "launch" and isinstance(n.func.value, ast.Call)
    ]  # fmt: skip
    launches.sort(key=lambda n: n.lineno)
    kernels = [dotted(n.func.value.func) for n in launches if isinstance(n.func, ast.Attribute)
               and isinstance(n.func.value, ast.Call)]  # fmt: skip
    guarded = [m for n in ast.walk(call) if isinstance(n, ast.If) and ast.unparse(n.test) == "build_tables != 0"
               for m in ast.walk(n) if m in launches]  # fmt: skip
    if kernels[:1] != ["fill"] or kernels.count("fill") != 1 or guarded != launches[:1]:
        yield f"{owner}: tables are filled by {', '.join(kernels) or 'nothing'}; `fill` comes first, if it is asked for"
    main = next((n for n, k in zip(launches, kernels, strict=True) if k == "kernel"), None)
    if main is None or not any(k.arg == "use_pdl" for k in main.keywords):
        yield f"{owner}.kernel is not launched to wait for the grid before"
