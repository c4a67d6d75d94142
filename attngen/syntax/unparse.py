"""Surface nodes back to text: one clause, one expression, broken over lines where it is too wide."""

from __future__ import annotations

from attngen.ir.functions import FUNCTIONS
from attngen.syntax import ast
from attngen.syntax.printer import join

#: Longest line that is not broken (a name or text that is longer stays whole).
WIDTH = 120
_ATOM = 100
_NEG, _COMPARE = FUNCTIONS["neg"].precedence, FUNCTIONS["lt"].precedence


def expression(node: ast.SurfaceExpr) -> str:
    """One line, with the fewest parentheses."""
    return _text(node)[0]


def broken(node: ast.SurfaceExpr, column: int, tail: int = 0) -> list[str]:
    """The expression from `column` on, with `tail` more characters behind it.

    One line if it fits, else one operand of its loosest operator (one argument of a call) a line, and so on inside.
    Lines after the first are indented to stand under it: their blanks count from `column`.
    """
    whole = expression(node)
    if column + len(whole) + tail <= WIDTH:
        return [whole]
    if isinstance(node, ast.Call | ast.Load):
        return _arguments(node, column, tail)
    if isinstance(node, ast.Unary):
        sign = "not " if node.op == "not" else "-"
        return _prefixed(sign, node.operand, FUNCTIONS[node.op].precedence, column, tail)
    parts = _parts(node)
    if len(parts) == 1:
        return [whole]
    lines: list[str] = []
    for i, (word, operand, least) in enumerate(parts):
        lines += _prefixed(word, operand, least, column, tail if i == len(parts) - 1 else 0)
    return lines


def _prefixed(word: str, node: ast.SurfaceExpr, least: int, column: int, tail: int) -> list[str]:
    """An operand behind its operator, in parentheses where its binding strength asks for them."""
    inside = _text(node)[1] < least
    head = word + "(" * inside
    first, *rest = broken(node, column + len(head), tail + inside)
    lines = [head + first, *(" " * len(head) + line for line in rest)]
    lines[-1] += ")" * inside
    return lines


def _arguments(node: ast.Call | ast.Load, column: int, tail: int) -> list[str]:
    is_call = isinstance(node, ast.Call)
    args = node.args if isinstance(node, ast.Call) else node.indices
    head = node.name.text + ("(" if is_call else "[")
    lines: list[str] = []
    for i, arg in enumerate(args):
        last = i == len(args) - 1
        piece = broken(arg, column + len(head), tail + 1 if last else 1)
        piece[-1] += (")" if is_call else "]") if last else ","
        lines += [(head if i == 0 and j == 0 else " " * len(head)) + line for j, line in enumerate(piece)]
    return lines or [head + ")"]


def _parts(node: ast.SurfaceExpr) -> list[tuple[str, ast.SurfaceExpr, int]]:
    """Operands of the loosest operator, each with the operator before it and the strength it must bind with."""
    if isinstance(node, ast.Conditional):
        rest = _parts(node.other) if isinstance(node.other, ast.Conditional) else [("", node.other, 5)]
        return [("", node.then, 6), ("if ", node.test, 6), ("else " + rest[0][0], *rest[0][1:]), *rest[1:]]
    if isinstance(node, ast.Compare):
        rest = [(f"{FUNCTIONS[op].infix} ", x, _COMPARE + 1) for op, x in node.rest]
        return [("", node.first, _COMPARE + 1), *rest]
    parts: list[tuple[str, ast.SurfaceExpr, int]] = []
    first: ast.SurfaceExpr = node
    strength = FUNCTIONS[node.op].precedence if isinstance(node, ast.Binary) else _ATOM
    while isinstance(first, ast.Binary) and FUNCTIONS[first.op].precedence == strength:
        parts.append((f"{FUNCTIONS[first.op].infix} ", first.right, strength + 1))
        first = first.left
    return [("", first, strength), *reversed(parts)]


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
