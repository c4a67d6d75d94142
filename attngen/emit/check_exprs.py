"""Expressions as text for a kernel's self-check: torch for the dense formula, plain Python for the default scale."""

from __future__ import annotations

from attngen.emit.exprs import CutePrinter, safe_name
from attngen.ir.expr import Apply, Expr, Load, atoms_of, tensors_of
from attngen.ir.types import Type

_CALLS: dict[str, str] = {
    "floordiv": "floor_div", "mod": "torch.remainder", "exp": "torch.exp", "log": "torch.log", "log2": "log2",
    "sqrt": "torch.sqrt", "tanh": "torch.tanh", "sigmoid": "torch.sigmoid", "softplus": "torch.nn.functional.softplus",
    "floor": "torch.floor", "where": "torch.where", "abs": "torch.abs", "min": "torch.minimum", "max": "torch.maximum",
    "bit": "has_bit",
}  # fmt: skip
#: Atoms that are tensors in the self-check; the sizes are Python ints, params are Python numbers.
_TENSORS = frozenset(("b", "h", "h_kv", "q_idx", "kv_idx", "q_pos", "s", "o", "d", "sink_weight"))
#: The binding strength of a call, which needs no parentheses anywhere.
_TIGHT = 13


def is_number(e: Expr) -> bool:
    """Whether the self-check may hold `e` as a Python number: it reads sizes, params and parts only."""
    return not (atoms_of(e) & _TENSORS or tensors_of(e))


class TorchPrinter(CutePrinter):
    """Torch text (float64 and int64 tensors, broadcasting); what torch functions take is made a tensor first."""

    def lowered(self, e: Expr) -> Expr:
        """Nothing is lowered: the self-check says the formula as it stands."""
        return e

    def _print(self, e: Expr) -> tuple[str, int]:
        if isinstance(e, Load):
            self.used.add("take")
            indices = ", ".join(self._print(i)[0] for i in e.indices) or "0"
            loaded = f"take({safe_name(e.tensor)}, {indices})"
            return f"{loaded}.double()" if e.type is Type.FLOAT else loaded, _TIGHT
        return super()._print(e)

    def _apply(self, e: Apply) -> tuple[str, int]:
        if e.fn in ("int", "float"):
            return f"as_tensor({self._print(e.args[0])[0]}).{'long' if e.fn == 'int' else 'double'}()", _TIGHT
        if e.fn == "clamp":
            x, low, high = (self._tensor(a) for a in e.args)
            return f"torch.minimum(torch.maximum({x}, {low}), {high})", _TIGHT
        if e.fn in _CALLS:
            self.used.add(_CALLS[e.fn])
            return f"{_CALLS[e.fn]}({', '.join(self._tensor(a) for a in e.args)})", _TIGHT
        if e.fn == "not" and is_number(e.args[0]):  # `~True` is -2
            return f"~{self._tensor(e.args[0])}", _TIGHT - 2
        if e.fn == "div" and is_number(e):  # of Python numbers, a division by zero raises
            return f"({self._tensor(e.args[0])} / {self._tensor(e.args[1])})", _TIGHT
        return super()._apply(e)

    def _tensor(self, e: Expr) -> str:
        text = self._print(e)[0]
        made = isinstance(e, Apply) and e.fn in (*_CALLS, "int", "float", "clamp")
        return f"as_tensor({text})" if is_number(e) and not made else text


_SCALAR = {
    "exp": "math.exp({0})", "log": "math.log({0})", "log2": "math.log2({0})", "sqrt": "math.sqrt({0})",
    "tanh": "math.tanh({0})", "sigmoid": "(1.0 / (1.0 + math.exp(-({0}))))",
    "softplus": "(max({0}, 0.0) + math.log1p(math.exp(-abs({0}))))", "floor": "float(math.floor({0}))",
    "where": "({1} if {0} else {2})", "not": "(not ({0}))", "floordiv": "(({0}) // ({1}))", "mod": "(({0}) % ({1}))",
    "min": "min({0}, {1})", "max": "max({0}, {1})", "clamp": "min(max({0}, {1}), {2})", "abs": "abs({0})",
    "int": "int({0})", "float": "float({0})", "bit": "((({0}) >> (({1}) & 31)) & 1 == 1)",
}  # fmt: skip


class ScalarPrinter(CutePrinter):
    """Plain Python text of an expression over params and constants."""

    def lowered(self, e: Expr) -> Expr:
        """Nothing is lowered."""
        return e

    def _apply(self, e: Apply) -> tuple[str, int]:
        if e.fn in _SCALAR:
            return _SCALAR[e.fn].format(*(self._print(a)[0] for a in e.args)), _TIGHT
        return super()._apply(e)
