"""Typed expressions, shared by mask, score, bounds, sink, scale and epilogue.

Five node kinds. Operators, comparisons and the conditional are functions of `functions.FUNCTIONS` like any other, so
a pass that walks expressions meets `Apply` and no special cases. Build with `apply`, `const`, `atom`: they insert
the int-to-float conversions and compute types, so that every node's `type` is final.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt

from attngen.ir.base import Node
from attngen.ir.types import DType, Type

#: Index atoms and sizes, all `int`; `s` is the score and `o` one output element, both `float`; `d` is the output
#: column. `q_lo`, `q_hi`, `kv_lo`, `kv_hi` (first and last query row and key of a tile) appear only in bounds and tests
#: of tiles, `sink_weight` (exp(sink - LSE) of a row, what the sink has of its softmax) in epilogues of chained kernels
#: (`passes.chained`): never in a spec's text.
ATOMS: dict[str, Type] = {
    **dict.fromkeys(
        ("b", "h", "h_kv", "q_idx", "kv_idx", "q_pos", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "batch", "d"),
        Type.INT,
    ),
    **dict.fromkeys(("q_lo", "q_hi", "kv_lo", "kv_hi"), Type.INT),
    "s": Type.FLOAT,
    "o": Type.FLOAT,
    "sink_weight": Type.FLOAT,
}


class Const(Node):
    """A literal: `4096`, `0.5`, `true`."""

    kind: Literal["const"] = "const"
    type: Type
    value: StrictBool | StrictInt | StrictFloat


class Atom(Node):
    """An index or size that the language provides: `kv_idx`, `seqlen_kv`."""

    kind: Literal["atom"] = "atom"
    type: Type
    name: str


class Param(Node):
    """A run-time scalar declared by the spec: `window`."""

    kind: Literal["param"] = "param"
    type: Type
    name: str


class Load(Node):
    """One element of a captured tensor: `bias[b, h, q_idx, kv_idx]`. Every index is an int."""

    kind: Literal["load"] = "load"
    type: Type
    tensor: str
    dtype: DType
    indices: tuple[Expr, ...]


class Apply(Node):
    """A function of `FUNCTIONS` applied to arguments of exactly the types it takes."""

    kind: Literal["apply"] = "apply"
    type: Type
    fn: str
    args: tuple[Expr, ...]


Expr = Annotated[Const | Atom | Param | Load | Apply, Field(discriminator="kind")]
for _node in (Load, Apply):
    _node.model_rebuild()


def const(value: bool | int | float, **span: object) -> Const:
    """A literal of the type that `value` has in Python."""
    kind = Type.BOOL if isinstance(value, bool) else Type.INT if isinstance(value, int) else Type.FLOAT
    return Const(type=kind, value=value, **span)


def atom(name: str, **span: object) -> Atom:
    """An atom of `ATOMS`."""
    return Atom(type=ATOMS[name], name=name, **span)


def children(e: Expr) -> tuple[Expr, ...]:
    """Direct operands."""
    if isinstance(e, Apply):
        return e.args
    return e.indices if isinstance(e, Load) else ()


def walk(e: Expr) -> Iterator[Expr]:
    """Every node, parents first."""
    stack = [e]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(children(node)))


def rewrite(e: Expr, f: Callable[[Expr], Expr]) -> Expr:
    """Rebuild bottom-up: `f` sees each node after its operands were rewritten. Spans are kept."""
    if isinstance(e, Apply):
        args = tuple(rewrite(a, f) for a in e.args)
        if args != e.args:
            e = e.replace(args=args)
    elif isinstance(e, Load):
        indices = tuple(rewrite(a, f) for a in e.indices)
        if indices != e.indices:
            e = e.replace(indices=indices)
    return f(e)


def substitute(e: Expr, table: dict[str, Expr]) -> Expr:
    """Replace atoms and params by name."""
    return rewrite(e, lambda n: table.get(n.name, n) if isinstance(n, Atom | Param) else n)


def atoms_of(e: Expr) -> frozenset[str]:
    """Names of the atoms that `e` reads."""
    return frozenset(n.name for n in walk(e) if isinstance(n, Atom))


def params_of(e: Expr) -> frozenset[str]:
    """Names of the params that `e` reads."""
    return frozenset(n.name for n in walk(e) if isinstance(n, Param))


def tensors_of(e: Expr) -> frozenset[str]:
    """Names of the captured tensors that `e` reads."""
    return frozenset(n.tensor for n in walk(e) if isinstance(n, Load))
