"""Types an expression: names looked up, defs and lets inlined, conversions inserted. Faults are collected, not raised.

Inlining is hygienic by construction: an argument is typed where the call stands and enters the body as a finished value, and a
body sees its arguments, the atoms and other defs, never the params, tensors and lets of the attention that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from attngen.diag.diagnostic import Label, error
from attngen.diag.span import Span
from attngen.ir.expr import ATOMS, Const, Expr, Param, atom, const
from attngen.ir.expr import Load as LoadNode
from attngen.ir.functions import FUNCTIONS, apply, to_float
from attngen.ir.spec import ParamDecl, TensorDecl
from attngen.ir.types import Type
from attngen.syntax import ast, limits, words
from attngen.syntax.collect import Faults
from attngen.syntax.faults import closest
from attngen.syntax.scope import Scope


class Typed(NamedTuple):
    """A typed expression with its size and depth as a tree (shared parts count each time they appear)."""

    expr: Expr
    size: int = 1
    depth: int = 1


Value = Typed | TensorDecl


@dataclass(frozen=True, slots=True)
class Call:
    """A def being inlined: its arguments and the chain of calls that led to it."""

    define: ast.Define
    args: Mapping[str, Value | None]
    at: Span
    outer: Call | None = None


@dataclass(slots=True)
class Names:
    """What an attention block declares, by name; `constants` are `head_dim` and `head_dim_v`."""

    params: dict[str, ParamDecl] = field(default_factory=dict)
    tensors: dict[str, TensorDecl] = field(default_factory=dict)
    lets: dict[str, ast.Let] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    #: Declared with a fault that is already reported: using them is no second fault.
    broken: set[str] = field(default_factory=set)


class Typer:
    """Types the expressions of one attention block."""

    def __init__(self, scope: Scope, names: Names, faults: Faults) -> None:
        self.scope, self.names, self.faults = scope, names, faults
        self.visits = self.depth = 0
        self.call: Call | None = None
        self._lets: dict[str, Typed | None] = {}
        self._open_lets: list[str] = []
        #: Bounds that formals of defs put on the params given to them.
        self.param_bounds: dict[str, list[tuple[ast.Bound, ast.Formal, Span]]] = {}

    def type(self, node: ast.SurfaceExpr) -> Typed | None:
        """The typed form of `node`, or None where a fault was recorded."""
        self.visits += 1
        self.depth += 1
        try:
            if self.visits > limits.VISITS or self.depth > limits.DEPTH:
                self._too_large(node.span)
            return _RULES[type(node)](self, node)
        finally:
            self.depth -= 1

    def let(self, name: str) -> Typed | None:
        """The value of a `let`, typed once."""
        if name not in self._lets:
            let = self.names.lets[name]
            if name in self._open_lets:
                circle = " reads ".join([*self._open_lets[self._open_lets.index(name) :], name])
                self.faults.add("E0221", f"let `{name}` reads itself", let.name.span, "defined through itself", notes=(circle,),
                                helps=("a `let` is a name for a finished expression; break the circle",))  # fmt: skip
                return None
            self._open_lets.append(name)
            call, self.call = self.call, None
            self._lets[name] = self.type(let.value)
            self.call = call
            self._open_lets.pop()
        return self._lets[name]

    def fault(self, code: str, message: str, at: Span, label: str = "", **more: object) -> None:
        """Record a fault; inside a def, the calls that led there are shown too."""
        also = list(more.pop("also", ()))  # type: ignore[call-overload]
        call = self.call
        while call is not None and len(also) < 3:
            also.append(Label(call.at, f"in this use of `{call.define.name.text}`"))
            call = call.outer
        self.faults.add(code, message, at, label, also=also, **more)  # type: ignore[arg-type]

    # -- leaves ---------------------------------------------------------------------------------------------------

    def _number(self, node: ast.Number) -> Typed | None:
        if isinstance(node.value, int) and node.value > limits.INT32_MAX:
            self.fault("E0111", f"number {node.value} does not fit a 32-bit int", node.span, "out of range",
                       helps=("positions are 32-bit; write a float (`1.0e10`) where a number is meant",))  # fmt: skip
            return None
        return Typed(const(node.value, span=node.span))

    def _bool(self, node: ast.Bool) -> Typed | None:
        return Typed(const(node.value, span=node.span))

    def _name(self, node: ast.Name) -> Typed | None:
        value = self.lookup(node)
        if isinstance(value, TensorDecl):
            self.fault("E0215", f"tensor `{node.name}` is used without an index", node.span, "a whole tensor, not a number",
                       helps=(f"read one element: `{node.name}[{words.example_index(value)}]`",))  # fmt: skip
            return None
        return value

    def lookup(self, node: ast.Name) -> Value | None:
        """What a bare name stands for."""
        name, span = node.name, node.span
        if self.call is not None and name in self.call.args:
            return self.call.args[name]
        names = self.names
        if self.call is None:
            if name in names.params:
                return Typed(Param(type=names.params[name].type, name=name, span=span))
            if name in names.tensors:
                return names.tensors[name]
            if name in names.lets:
                return self.let(name)
            if name in names.broken:
                return None
        if name in names.constants:
            return Typed(const(names.constants[name], span=span))
        if name in ATOMS and name not in words.HIDDEN_ATOMS:
            return Typed(atom(name, span=span))
        define = self.scope.defs.get(name)
        if define is not None:
            return self._inline(define, (), span, bare=True)
        self._unknown(name, span)
        return None

    def _unknown(self, name: str, span: Span) -> None:
        helps, notes = [], []
        if name in words.FOREIGN:
            helps.append(words.FOREIGN[name])
        elif name in FUNCTIONS and words.callable_name(name):
            helps.append(f"`{name}` is a function: `{name}(…)`")
        else:
            meant = closest(name, self._visible())
            helps.append(f"did you mean `{meant}`?" if meant else "declare it with `param`, `tensor` or `let`, or define it with `def`")
        if self.call is not None and (name in self.names.params or name in self.names.tensors or name in self.names.lets):
            notes.append("a def sees its own arguments, the atoms and other defs, not what an attention declares")
            helps = [f"make `{name}` an argument of `{self.call.define.name.text}`"]
        if name in self.scope.attentions:
            notes.append(f"`{name}` names an attention block")
        self.fault("E0201", f"unknown name `{name}`", span, "not declared", notes=notes, helps=helps)

    def _visible(self) -> list[str]:
        local = [*self.call.args] if self.call else [*self.names.params, *self.names.tensors, *self.names.lets]
        return [*local, *(a for a in ATOMS if a not in words.HIDDEN_ATOMS), *self.names.constants, *self.scope.defs, "true", "false"]

    # -- operators ------------------------------------------------------------------------------------------------

    def _unary(self, node: ast.Unary) -> Typed | None:
        return self._apply(node.op, (self.type(node.operand),), node.span, (node.operand,))

    def _binary(self, node: ast.Binary) -> Typed | None:
        return self._apply(node.op, (self.type(node.left), self.type(node.right)), node.span, (node.left, node.right))

    def _compare(self, node: ast.Compare) -> Typed | None:
        left, surface, result, ok = self.type(node.first), node.first, None, True
        for op, right_node in node.rest:
            right = self.type(right_node)
            step = self._apply(op, (left, right), surface.span.to(right_node.span), (surface, right_node))
            ok = ok and step is not None
            if step is not None:
                result = step if result is None else self._apply("and", (result, step), node.span, (node, right_node))
            left, surface = right, right_node
        return result if ok else None

    def _conditional(self, node: ast.Conditional) -> Typed | None:
        parts = (node.test, node.then, node.other)
        return self._apply("where", tuple(self.type(p) for p in parts), node.span, parts)

    def _apply(
        self, fn: str, args: tuple[Typed | None, ...], span: Span, nodes: tuple[ast.SurfaceExpr, ...]
    ) -> Typed | None:  # fmt: skip
        done = [a for a in args if a is not None]
        if len(done) < len(args):
            return None
        try:
            result = apply(fn, *(a.expr for a in done), span=span)
        except TypeError:
            self._mistyped(fn, [a.expr.type for a in done], span, nodes)
            return None
        return self._sized(result, 1 + sum(a.size for a in done), 1 + max(a.depth for a in done), span)

    def _sized(self, e: Expr, size: int, depth: int, span: Span) -> Typed:
        if size > limits.NODES or depth > limits.DEPTH:
            self._too_large(span)
        return Typed(e, size, depth)

    def _too_large(self, span: Span) -> None:
        outer = self.call
        while outer is not None:
            span, outer = outer.at, outer.outer
        raise error("E0108", "expression too large after inlining", at=span, label="grows past the bound here",
                    notes=(f"at most {limits.NODES} operations, {limits.DEPTH} deep, {limits.VISITS} steps of inlining",),
                    helps=("put what is large into a captured `tensor`, or group a long chain with parentheses",))  # fmt: skip

    def _mistyped(self, fn: str, types: list[Type], span: Span, nodes: tuple[ast.SurfaceExpr, ...]) -> None:
        shown = words.operator(fn)
        wrong = words.wrong_operand(fn, types)
        labels = [Label(n.span, f"`{t}`") for n, t in zip(nodes, types, strict=True)]
        at = labels.pop(wrong) if wrong is not None else Label(span, "")
        text = f"this has type {at.text}" if at.text else " and ".join(f"`{t}`" for t in types)
        given = words.listed(types)
        self.fault("E0301", f"{shown} does not take {given}", at.span, text, helps=words.type_help(fn, types))

    # -- calls and loads ------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> Typed | None:
        name = node.name.text
        if words.callable_name(name):
            wanted = words.arity(name)
            args = tuple(self.type(a) for a in node.args)
            if len(args) != wanted:
                self._arity(node, wanted, words.signature(name))
                return None
            return self._apply(name, args, node.span, node.args)
        define = self.scope.defs.get(name)
        if define is not None:
            formals = define.formals
            if formals is None or len(formals) != len(node.args):
                shown = f"{name}({', '.join(f.name.text for f in formals)})" if formals is not None else name
                self._arity(node, len(formals) if formals is not None else None, shown, define)
                return None
            return self._inline(define, node.args, node.span)
        self._not_callable(node)
        for arg in node.args:
            if not (isinstance(arg, ast.Name) and arg.name in self.names.tensors):
                self.type(arg)
        return None

    def _not_callable(self, node: ast.Call) -> None:
        name, span = node.name.text, node.name.span
        if self.call is None and name in self.names.tensors:
            self.fault("E0202", f"tensor `{name}` is called like a function", span, "not a function",
                       helps=(f"index it with brackets: `{name}[…]`",))  # fmt: skip
            return
        known = [*(n for n in FUNCTIONS if words.callable_name(n)), *self.scope.defs]
        meant = closest(name, known)
        helps = [f"did you mean `{meant}`?"] if meant else ["define it with `def`"]
        if name in words.LIBRARY and "std.attn" not in helps[0]:
            helps = ['add `include "std.attn"` at the top of the file']
        if name in words.FOREIGN:
            helps = [words.FOREIGN[name]]
        self.fault("E0202", f"unknown function `{name}`", span, "not defined", helps=helps)

    def _arity(self, node: ast.Call, wanted: int | None, shown: str, define: ast.Define | None = None) -> None:
        also = [Label(define.name.span, "defined here")] if define else []
        if wanted is None:
            self.fault("E0211", f"`{shown}` takes no arguments and no parentheses", node.span, "write the bare name", also=also,
                       helps=(f"write `{shown}`",))  # fmt: skip
            return
        count = "1 argument" if wanted == 1 else f"{wanted} arguments"
        self.fault("E0211", f"`{node.name.text}` takes {count}, {len(node.args)} given", node.span, f"expected `{shown}`", also=also,
                   helps=(f"write `{shown}`",))  # fmt: skip

    def _inline(self, define: ast.Define, nodes: tuple[ast.SurfaceExpr, ...], at: Span, bare: bool = False) -> Typed | None:
        if bare and define.formals is not None:
            shown = f"{define.name.text}({', '.join(f.name.text for f in define.formals)})"
            self.fault("E0211", f"`{define.name.text}` needs its arguments", at, f"expected `{shown}`",
                       also=(Label(define.name.span, "defined here"),), helps=(f"write `{shown}`",))  # fmt: skip
            return None
        call, chain = self.call, []
        while call is not None:
            chain.append(call.define.name.text)
            if call.define is define:
                circle = " uses ".join([*reversed(chain), define.name.text])
                self.faults.add("E0221", f"def `{define.name.text}` uses itself", define.name.span, "defined through itself",
                                notes=(circle,), helps=("defs are inlined, so they cannot recurse; write the expression out",))  # fmt: skip
                return None
            call = call.outer
        args: dict[str, Value | None] = {}
        for formal, node in zip(define.formals or (), nodes, strict=True):
            args[formal.name.text] = self._argument(formal, node)
        outer, self.call = self.call, Call(define, args, at, self.call)
        try:
            result = self.type(define.body)
        finally:
            self.call = outer
        return result

    def _argument(self, formal: ast.Formal, node: ast.SurfaceExpr) -> Value | None:
        value = self.lookup(node) if isinstance(node, ast.Name) else self.type(node)
        kind = formal.type.text if formal.type else None
        if value is None or kind is None:
            return value
        if (kind == "tensor") != isinstance(value, TensorDecl):
            found = "a tensor" if isinstance(value, TensorDecl) else f"`{value.expr.type}`"
            want = "the name of a tensor" if kind == "tensor" else f"`{kind}`"
            self.fault("E0301", f"argument `{formal.name.text}` must be {want}, found {found}", node.span, f"this is {found}",
                       also=(Label(formal.span, "declared here"),),
                       helps=("read one element of the tensor: `name[…]`",) if kind != "tensor" else ("declare it with `tensor`",))  # fmt: skip
            return None
        if isinstance(value, TensorDecl):
            return value
        if kind == "float" and value.expr.type is Type.INT:
            return Typed(to_float(value.expr), value.size + 1, value.depth + 1)
        if value.expr.type != kind:
            self.fault("E0301", f"argument `{formal.name.text}` must be `{kind}`, found `{value.expr.type}`", node.span,
                       f"this has type `{value.expr.type}`", also=(Label(formal.span, "declared here"),),
                       helps=words.convert_help(value.expr.type, kind))  # fmt: skip
            return None
        for bound in formal.bounds:
            self._bounded(value.expr, bound, formal, node.span)
        return value

    def _bounded(self, e: Expr, bound: ast.Bound, formal: ast.Formal, at: Span) -> None:
        if isinstance(e, Param):
            self.param_bounds.setdefault(e.name, []).append((bound, formal, at))
        elif isinstance(e, Const):
            low, high = words.range_of((bound,))
            if (low is not None and e.value < low) or (high is not None and e.value > high):
                self.fault("E0310", f"argument `{formal.name.text}` must be {words.interval(low, high)}, found {e.value}", at,
                           "out of range", also=(Label(formal.span, "declared here"),), notes=words.negative_note(e.value),
                           helps=(f"give a value that is {words.interval(low, high)}",))  # fmt: skip

    def _load(self, node: ast.Load) -> Typed | None:
        value = self.lookup(ast.Name(node.name.text, node.name.span))
        indices = [self.type(i) for i in node.indices]
        if value is None:
            return None
        name = node.name.text
        if not isinstance(value, TensorDecl):
            self.fault("E0215", f"`{name}` is not a tensor", node.name.span, f"a `{value.expr.type}`, not a tensor",
                       helps=(f"use it without an index, or declare it with `tensor {name}: f32[…]`",))  # fmt: skip
            return None
        if len(indices) != len(value.dims):
            dims = ", ".join(map(str, value.dims))
            self.fault("E0212", f"tensor `{value.name}` has {words.count(len(value.dims), 'axis', 'axes')}, {words.count(len(indices), 'index', 'indices')} given",
                       node.span, f"`{value.name}` is [{dims}]", helps=(f"write `{value.name}[{words.example_index(value)}]`",))  # fmt: skip
            return None
        ok = [self._index(value, axis, i, n) for axis, (i, n) in enumerate(zip(indices, node.indices, strict=True))]
        done = [i for i in indices if i is not None]
        if not all(ok) or len(done) < len(indices):
            return None
        e = LoadNode(type=value.dtype.type, tensor=value.name, dtype=value.dtype, indices=tuple(i.expr for i in done), span=node.span)
        return self._sized(e, 1 + sum(i.size for i in done), 1 + max(i.depth for i in done), node.span)

    def _index(self, tensor: TensorDecl, axis: int, index: Typed | None, node: ast.SurfaceExpr) -> bool:
        if index is None:
            return False
        if index.expr.type is not Type.INT:
            self.fault("E0213", f"an index must be `int`, found `{index.expr.type}`", node.span, f"this has type `{index.expr.type}`",
                       notes=("ints are positions; no value turns into a position by itself",),
                       helps=words.convert_help(index.expr.type, "int"))  # fmt: skip
            return False
        extent = tensor.dims[axis]
        if isinstance(index.expr, Const) and (index.expr.value < 0 or (isinstance(extent, int) and index.expr.value >= extent)):
            label = f"axis {axis} of `{tensor.name}` has extent {extent}" if isinstance(extent, int) else "indices count from 0"
            self.fault("E0214", f"index {index.expr.value} is outside of axis {axis} of `{tensor.name}`", node.span, label,
                       helps=(f"use 0 to {extent - 1}",) if isinstance(extent, int) else ("there is no counting from the end",))  # fmt: skip
            return False
        return True


_RULES: dict[type, Callable[[Typer, ast.SurfaceExpr], Typed | None]] = {
    ast.Number: Typer._number, ast.Bool: Typer._bool, ast.Name: Typer._name, ast.Unary: Typer._unary, ast.Binary: Typer._binary,
    ast.Compare: Typer._compare, ast.Conditional: Typer._conditional, ast.Call: Typer._call, ast.Load: Typer._load,
}  # type: ignore[dict-item]  # fmt: skip
