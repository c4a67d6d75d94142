"""Types expressions: names looked up, defs and lets inlined, conversions inserted. Faults are collected, not raised."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attngen.diag.diagnostic import Label, error
from attngen.diag.span import Span
from attngen.ir.expr import Const, Expr, const
from attngen.ir.functions import apply as apply_function
from attngen.ir.spec import TensorDecl
from attngen.ir.types import Type
from attngen.syntax import ast, inline, limits, words
from attngen.syntax.collect import Faults
from attngen.syntax.scope import Scope
from attngen.syntax.values import Call, Names, Typed


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
                self.faults.add(
                    "E0221",
                    f"let `{name}` reads itself",
                    let.name.span,
                    "defined through itself",
                    notes=(circle,),
                    helps=("a `let` is a name for a finished expression; break the circle",),
                )
                return None
            self._open_lets.append(name)
            call, self.call = self.call, None
            self._lets[name] = self.type(let.value)
            self.call = call
            self._open_lets.pop()
        return self._lets[name]

    def fault(
        self,
        code: str,
        message: str,
        at: Span,
        label: str = "",
        *,
        also: Sequence[Label] = (),
        notes: Sequence[str] = (),
        helps: Sequence[str] = (),
    ) -> None:
        """Record a fault; inside a def, the calls that led there are shown too."""
        also = list(also)
        call = self.call
        while call is not None and len(also) < 3:
            also.append(Label(call.at, f"in this use of `{call.define.name.text}`"))
            call = call.outer
        self.faults.add(code, message, at, label, also=also, notes=notes, helps=helps)

    # -- leaves ---------------------------------------------------------------------------------------------------

    def _number(self, node: ast.Number) -> Typed | None:
        if isinstance(node.value, int) and node.value > limits.INT32_MAX:
            self.fault(
                "E0111",
                f"number {node.value} does not fit a 32-bit int",
                node.span,
                "out of range",
                helps=("positions are 32-bit; write a float (`1.0e10`) where a number is meant",),
            )
            return None
        return Typed(const(node.value, span=node.span))

    def _bool(self, node: ast.Bool) -> Typed | None:
        return Typed(const(node.value, span=node.span))

    def _name(self, node: ast.Name) -> Typed | None:
        value = inline.lookup(self, node)
        if isinstance(value, TensorDecl):
            self.fault(
                "E0215",
                f"tensor `{node.name}` is used without an index",
                node.span,
                "a whole tensor, not a number",
                helps=(f"read one element: `{node.name}[{words.example_index(value)}]`",),
            )
            return None
        return value

    # -- operators ------------------------------------------------------------------------------------------------

    def _unary(self, node: ast.Unary) -> Typed | None:
        return self.apply(node.op, (self.type(node.operand),), node.span, (node.operand,))

    def _binary(self, node: ast.Binary) -> Typed | None:
        return self.apply(node.op, (self.type(node.left), self.type(node.right)), node.span, (node.left, node.right))

    def _compare(self, node: ast.Compare) -> Typed | None:
        left, surface, result, ok = self.type(node.first), node.first, None, True
        for op, right_node in node.rest:
            right = self.type(right_node)
            step = self.apply(op, (left, right), surface.span.to(right_node.span), (surface, right_node))
            ok = ok and step is not None
            if step is not None:
                result = step if result is None else self.apply("and", (result, step), node.span, (node, right_node))
            left, surface = right, right_node
        return result if ok else None

    def _conditional(self, node: ast.Conditional) -> Typed | None:
        parts = (node.test, node.then, node.other)
        return self.apply("where", tuple(self.type(p) for p in parts), node.span, parts)

    def apply(
        self, fn: str, args: tuple[Typed | None, ...], span: Span, nodes: tuple[ast.SurfaceExpr, ...]
    ) -> Typed | None:
        done = [a for a in args if a is not None]
        if len(done) < len(args):
            return None
        if fn in _DIVISIONS and isinstance(by := done[1].expr, Const) and not by.value and by.type is not Type.BOOL:
            self._by_zero(fn, nodes[1].span)
            return None
        try:
            result = apply_function(fn, *(a.expr for a in done), span=span)
        except TypeError:
            self._mistyped(fn, [a.expr.type for a in done], span, nodes)
            return None
        return self.sized(result, 1 + sum(a.size for a in done), 1 + max(a.depth for a in done), span)

    def sized(self, e: Expr, size: int, depth: int, span: Span) -> Typed:
        if size > limits.NODES or depth > limits.DEPTH:
            self._too_large(span)
        return Typed(e, size, depth)

    def _too_large(self, span: Span) -> None:
        outer = self.call
        while outer is not None:
            span, outer = outer.at, outer.outer
        raise error(
            "E0108",
            "expression too large after inlining",
            at=span,
            label="grows past the bound here",
            notes=(f"at most {limits.NODES} operations, {limits.DEPTH} deep, {limits.VISITS} steps of inlining",),
            helps=("put what is large into a captured `tensor`, or group a long chain with parentheses",),
        )

    def _by_zero(self, fn: str, at: Span) -> None:
        self.fault(
            "E0312",
            f"{words.operator(fn)} divides by zero",
            at,
            "this is zero",
            notes=("the quotient has no value",),
            helps=("divide by another number; to drop a key, write the condition into `mask`",),
        )

    def _mistyped(self, fn: str, types: list[Type], span: Span, nodes: tuple[ast.SurfaceExpr, ...]) -> None:
        shown = words.operator(fn)
        wrong = words.wrong_operand(fn, types)
        labels = [Label(n.span, f"`{t}`") for n, t in zip(nodes, types, strict=True)]
        at = labels.pop(wrong) if wrong is not None else Label(span, "")
        text = f"this has type {at.text}" if at.text else " and ".join(f"`{t}`" for t in types)
        given = words.listed(types)
        self.fault("E0301", f"{shown} does not take {given}", at.span, text, helps=words.type_help(fn, types))


_DIVISIONS = ("div", "floordiv", "mod")
#: What types a node, by the node's class.
_RULES: dict[type, Callable[[Typer, Any], Typed | None]] = {
    ast.Number: Typer._number,
    ast.Bool: Typer._bool,
    ast.Name: Typer._name,
    ast.Unary: Typer._unary,
    ast.Binary: Typer._binary,
    ast.Compare: Typer._compare,
    ast.Conditional: Typer._conditional,
    ast.Call: inline.call,
    ast.Load: inline.load,
}
