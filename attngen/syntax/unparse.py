"""Surface nodes back to text: one clause, one expression, broken over lines where it is too wide."""

from __future__ import annotations

from attngen.ir.functions import FUNCTIONS
from attngen.syntax import ast
from attngen.syntax.printer import join

WIDTH = 100
_ATOM = 100
_NEG, _COMPARE = FUNCTIONS["neg"].precedence, FUNCTIONS["lt"].precedence


def expression(node: ast.SurfaceExpr) -> str:
    """One line, with the fewest parentheses."""
    return _text(node)[0]


def broken(node: ast.SurfaceExpr, column: int) -> list[str]:
    """The expression from `column` on: one line if it fits, else one operand of its loosest operator a line."""
    whole = expression(node)
    if column + len(whole) <= WIDTH:
        return [whole]
    pieces = _pieces(node)
    return pieces if len(pieces) > 1 else [whole]


def _pieces(node: ast.SurfaceExpr) -> list[str]:
    if isinstance(node, ast.Conditional):
        then, test, other = _at(node.then, 6), _at(node.test, 6), node.other
        rest = _pieces(other) if isinstance(other, ast.Conditional) else [expression(other)]
        return [then, f"if {test}", f"else {rest[0]}", *rest[1:]]
    if isinstance(node, ast.Compare):
        return [
            _at(node.first, _COMPARE + 1),
            *(f"{FUNCTIONS[op].infix} {_at(x, _COMPARE + 1)}" for op, x in node.rest),
        ]
    pieces: list[str] = []
    first: ast.SurfaceExpr = node
    strength = FUNCTIONS[node.op].precedence if isinstance(node, ast.Binary) else _ATOM
    while isinstance(first, ast.Binary) and FUNCTIONS[first.op].precedence == strength:
        pieces.append(f"{FUNCTIONS[first.op].infix} {_at(first.right, strength + 1)}")
        first = first.left
    return [_at(first, strength), *reversed(pieces)]


def _at(node: ast.SurfaceExpr, least: int) -> str:
    text, strength = _text(node)
    return text if strength >= least else f"({text})"


def _text(node: ast.SurfaceExpr) -> tuple[str, int]:
    if isinstance(node, ast.Number):
        return node.text, _NEG if node.text.startswith("-") else _ATOM
    if isinstance(node, ast.Bool):
        return ("true" if node.value else "false"), _ATOM
    if isinstance(node, ast.Name):
        return node.name, _ATOM
    if isinstance(node, ast.Call):
        return f"{node.name.text}({', '.join(map(expression, node.args))})", _ATOM
    if isinstance(node, ast.Load):
        return f"{node.name.text}[{', '.join(map(expression, node.indices))}]", _ATOM
    if isinstance(node, ast.Unary):
        return join(node.op, [_text(node.operand)], isinstance(node.operand, ast.Number))
    if isinstance(node, ast.Binary):
        return join(node.op, [_text(node.left), _text(node.right)])
    if isinstance(node, ast.Conditional):
        return join("where", [_text(node.test), _text(node.then), _text(node.other)])
    parts = [_at(node.first, _COMPARE + 1)]
    parts += [f"{FUNCTIONS[op].infix} {_at(x, _COMPARE + 1)}" for op, x in node.rest]
    return " ".join(parts), _COMPARE


def bounds(items: tuple[ast.Bound, ...]) -> str:
    """` >= 1`, ` in 1..8`, each with a blank before it."""
    text = ""
    for b in items:
        if b.low is not None and b.high is not None:
            text += f" in {expression(b.low)}..{expression(b.high)}"
        else:
            text += (
                f" >= {expression(b.low)}"
                if b.low is not None
                else f" <= {expression(b.high)}"
                if b.high is not None
                else ""
            )
    return text


def formal(f: ast.Formal) -> str:
    """`keys: int >= 1`."""
    return f.name.text + (f": {f.type.text}{bounds(f.bounds)}" if f.type else "")


def entry_value(e: ast.Entry) -> str:
    """The value of a block's entry."""
    v = e.value
    if isinstance(v, ast.Shape):
        return f"{v.first.text} x {v.second.text}"
    return v.text if isinstance(v, ast.Word) else expression(v)


def string(line: str) -> str:
    """A text in quotes."""
    return '"' + line.replace("\\", "\\\\").replace('"', '\\"') + '"'
