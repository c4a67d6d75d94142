"""Names, calls and loads: what each stands for, defs inlined.

Inlining is hygienic by construction: an argument is typed where the call stands and enters the body as a finished
value, and a body sees its arguments, the atoms and other defs, never what the attention that calls it declares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attngen.diag.diagnostic import Label
from attngen.diag.span import Span
from attngen.ir.expr import ATOMS, Const, Expr, Param, atom, const
from attngen.ir.expr import Load as LoadNode
from attngen.ir.functions import FUNCTIONS, to_float
from attngen.ir.spec import TensorDecl
from attngen.ir.types import Type
from attngen.syntax import ast, words
from attngen.syntax.faults import closest
from attngen.syntax.values import Call, Typed, Value

if TYPE_CHECKING:
    from attngen.syntax.typing import Typer


def lookup(t: Typer, node: ast.Name) -> Value | None:
    """What a bare name stands for."""
    name, span = node.name, node.span
    if t.call is not None and name in t.call.args:
        return t.call.args[name]
    names = t.names
    if t.call is None:
        if name in names.params:
            return Typed(Param(type=names.params[name].type, name=name, span=span))
        if name in names.tensors:
            return names.tensors[name]
        if name in names.lets:
            return t.let(name)
        if name in names.broken:
            return None
    if name in names.constants:
        return Typed(const(names.constants[name], span=span))
    if name in ATOMS and name not in words.HIDDEN_ATOMS:
        return Typed(atom(name, span=span))
    define = t.scope.defs.get(name)
    if define is not None:
        return inline(t, define, (), span, bare=True)
    unknown(t, name, span)
    return None


def unknown(t: Typer, name: str, span: Span) -> None:
    """A name that nothing declares: say what was probably meant."""
    helps, notes = [], []
    if name in words.FOREIGN:
        helps.append(words.FOREIGN[name])
    elif name in FUNCTIONS and words.callable_name(name):
        helps.append(f"`{name}` is a function: `{name}(…)`")
    else:
        meant = closest(name, visible(t))
        helps.append(
            f"did you mean `{meant}`?"
            if meant
            else "declare it with `param`, `tensor` or `let`, or define it with `def`"
        )
    if t.call is not None and (name in t.names.params or name in t.names.tensors or name in t.names.lets):
        notes.append("a def sees its own arguments, the atoms and other defs, not what an attention declares")
        helps = [f"make `{name}` an argument of `{t.call.define.name.text}`"]
    elif name in words.LIBRARY:
        helps = ['add `include "std.attn"` at the top of the file']
    if name in t.scope.attentions:
        notes.append(f"`{name}` names an attention block")
    t.fault("E0201", f"unknown name `{name}`", span, "not declared", notes=notes, helps=helps)


def visible(t: Typer) -> list[str]:
    """Names that an expression may read at this place."""
    local = [*t.call.args] if t.call else [*t.names.params, *t.names.tensors, *t.names.lets]
    return [
        *local,
        *(a for a in ATOMS if a not in words.HIDDEN_ATOMS),
        *t.names.constants,
        *t.scope.defs,
        "true",
        "false",
    ]


def call(t: Typer, node: ast.Call) -> Typed | None:
    """Type `f(…)`: a function of the table, or a def to inline."""
    name = node.name.text
    if words.callable_name(name):
        wanted = words.arity(name)
        args = tuple(t.type(a) for a in node.args)
        if len(args) != wanted:
            arity(t, node, wanted, words.signature(name))
            return None
        return t.apply(name, args, node.span, node.args)
    define = t.scope.defs.get(name)
    if define is not None:
        formals = define.formals
        if formals is None or len(formals) != len(node.args):
            shown = f"{name}({', '.join(f.name.text for f in formals)})" if formals is not None else name
            arity(t, node, len(formals) if formals is not None else None, shown, define)
            return None
        return inline(t, define, node.args, node.span)
    not_callable(t, node)
    for arg in node.args:
        if not (isinstance(arg, ast.Name) and arg.name in t.names.tensors):
            t.type(arg)
    return None


def not_callable(t: Typer, node: ast.Call) -> None:
    """A call of something that cannot be called."""
    name, span = node.name.text, node.name.span
    if t.call is None and name in t.names.tensors:
        t.fault(
            "E0202",
            f"tensor `{name}` is called like a function",
            span,
            "not a function",
            helps=(f"index it with brackets: `{name}[…]`",),
        )
        return
    t.fault("E0202", f"unknown function `{name}`", span, "not defined", helps=(words.call_help(name, t.scope.defs),))


def arity(t: Typer, node: ast.Call, wanted: int | None, shown: str, define: ast.Define | None = None) -> None:
    """A wrong number of arguments; `wanted` is None for a def used without parentheses."""
    also = [Label(define.name.span, "defined here")] if define else []
    if wanted is None:
        t.fault(
            "E0211",
            f"`{shown}` takes no arguments and no parentheses",
            node.span,
            "write the bare name",
            also=also,
            helps=(f"write `{shown}`",),
        )
        return
    count = "1 argument" if wanted == 1 else f"{wanted} arguments"
    t.fault(
        "E0211",
        f"`{node.name.text}` takes {count}, {len(node.args)} given",
        node.span,
        f"expected `{shown}`",
        also=also,
        helps=(f"write `{shown}`",),
    )


def inline(
    t: Typer, define: ast.Define, nodes: tuple[ast.SurfaceExpr, ...], at: Span, bare: bool = False
) -> Typed | None:
    """The body of a def over its arguments, typed where the call stands."""
    if bare and define.formals is not None:
        shown = f"{define.name.text}({', '.join(f.name.text for f in define.formals)})"
        t.fault(
            "E0211",
            f"`{define.name.text}` needs its arguments",
            at,
            f"expected `{shown}`",
            also=(Label(define.name.span, "defined here"),),
            helps=(f"write `{shown}`",),
        )
        return None
    call, chain = t.call, []
    while call is not None:
        chain.append(call.define.name.text)
        if call.define is define:
            circle = " uses ".join([*reversed(chain), define.name.text])
            t.faults.add(
                "E0221",
                f"def `{define.name.text}` uses itself",
                define.name.span,
                "defined through itself",
                notes=(circle,),
                helps=("defs are inlined, so they cannot recurse; write the expression out",),
            )
            return None
        call = call.outer
    args: dict[str, Value | None] = {}
    for formal, node in zip(define.formals or (), nodes, strict=True):
        args[formal.name.text] = argument(t, formal, node)
    outer, t.call = t.call, Call(define, args, at, t.call)
    try:
        result = t.type(define.body)
    finally:
        t.call = outer
    return result


def argument(t: Typer, formal: ast.Formal, node: ast.SurfaceExpr) -> Value | None:
    """One argument of a def: a typed value, or a tensor by name."""
    value = lookup(t, node) if isinstance(node, ast.Name) else t.type(node)
    kind = formal.type.text if formal.type else None
    if value is None or kind is None:
        return value
    if (kind == "tensor") != isinstance(value, TensorDecl):
        found = "a tensor" if isinstance(value, TensorDecl) else f"`{value.expr.type}`"
        want = "the name of a tensor" if kind == "tensor" else f"`{kind}`"
        t.fault(
            "E0301",
            f"argument `{formal.name.text}` must be {want}, found {found}",
            node.span,
            f"this is {found}",
            also=(Label(formal.span, "declared here"),),
            helps=("declare it with `tensor`" if kind == "tensor" else "read one element of the tensor: `name[…]`",),
        )
        return None
    if isinstance(value, TensorDecl):
        return value
    if kind == "float" and value.expr.type is Type.INT:
        return Typed(to_float(value.expr), value.size + 1, value.depth + 1)
    if value.expr.type != kind:
        t.fault(
            "E0301",
            f"argument `{formal.name.text}` must be `{kind}`, found `{value.expr.type}`",
            node.span,
            f"this has type `{value.expr.type}`",
            also=(Label(formal.span, "declared here"),),
            helps=words.convert_help(value.expr.type, kind),
        )
        return None
    for bound in formal.bounds:
        bounded(t, value.expr, bound, formal, node.span)
    return value


def bounded(t: Typer, e: Expr, bound: ast.Bound, formal: ast.Formal, at: Span) -> None:
    """Check a literal against a bound of a formal; leave the bound with a param for its declaration."""
    if isinstance(e, Param):
        t.param_bounds.setdefault(e.name, []).append((bound, formal, at))
    elif isinstance(e, Const):
        low, high = words.range_of((bound,))
        if (low is not None and e.value < low) or (high is not None and e.value > high):
            t.fault(
                "E0310",
                f"argument `{formal.name.text}` must be {words.interval(low, high)}, found {e.value}",
                at,
                "out of range",
                also=(Label(formal.span, "declared here"),),
                notes=words.negative_note(e.value),
                helps=(f"give a value that is {words.interval(low, high)}",),
            )


def load(t: Typer, node: ast.Load) -> Typed | None:
    """Type `t[…]`: one int index for each axis."""
    value = lookup(t, ast.Name(node.name.text, node.name.span))
    indices = [t.type(i) for i in node.indices]
    if value is None:
        return None
    name = node.name.text
    if not isinstance(value, TensorDecl):
        t.fault(
            "E0215",
            f"`{name}` is not a tensor",
            node.name.span,
            f"a `{value.expr.type}`, not a tensor",
            helps=(f"use it without an index, or declare it with `tensor {name}: f32[…]`",),
        )
        return None
    if len(indices) != len(value.dims):
        dims = ", ".join(map(str, value.dims))
        axes, given = words.count(len(value.dims), "axis", "axes"), words.count(len(indices), "index", "indices")
        t.fault(
            "E0212",
            f"tensor `{value.name}` has {axes}, {given} given",
            node.span,
            f"`{value.name}` is [{dims}]",
            helps=(f"write `{value.name}[{words.example_index(value)}]`",),
        )
        return None
    ok = [index(t, value, axis, i, n) for axis, (i, n) in enumerate(zip(indices, node.indices, strict=True))]
    done = [i for i in indices if i is not None]
    if not all(ok) or len(done) < len(indices):
        return None
    e = LoadNode(
        type=value.dtype.type, tensor=value.name, dtype=value.dtype, indices=tuple(i.expr for i in done), span=node.span
    )
    return t.sized(e, 1 + sum(i.size for i in done), 1 + max(i.depth for i in done), node.span)


def index(t: Typer, tensor: TensorDecl, axis: int, index: Typed | None, node: ast.SurfaceExpr) -> bool:
    """Whether an index is an int and, where it is a literal, inside its axis."""
    if index is None:
        return False
    if index.expr.type is not Type.INT:
        t.fault(
            "E0213",
            f"an index must be `int`, found `{index.expr.type}`",
            node.span,
            f"this has type `{index.expr.type}`",
            notes=("ints are positions; no value turns into a position by itself",),
            helps=words.convert_help(index.expr.type, "int"),
        )
        return False
    extent = tensor.dims[axis]
    if isinstance(index.expr, Const) and (
        index.expr.value < 0 or (isinstance(extent, int) and index.expr.value >= extent)
    ):
        label = (
            f"axis {axis} of `{tensor.name}` has extent {extent}" if isinstance(extent, int) else "indices count from 0"
        )
        t.fault(
            "E0214",
            f"index {index.expr.value} is outside of axis {axis} of `{tensor.name}`",
            node.span,
            label,
            helps=(f"use 0 to {extent - 1}",) if isinstance(extent, int) else ("there is no counting from the end",),
        )
        return False
    return True
