"""What names stand for while expressions are typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from attngen.diag.span import Span
from attngen.ir.expr import Expr
from attngen.ir.spec import ParamDecl, TensorDecl
from attngen.syntax import ast


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
