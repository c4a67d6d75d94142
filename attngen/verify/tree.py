"""verify: looking through an emitted text's syntax tree. Many rules read the same few methods: each is walked once."""

from __future__ import annotations

import ast
from typing import TypeVar, cast

Node = TypeVar("Node", bound=ast.AST)
#: Where a node remembers what is below it. A tree that was looked through does not change.
_BELOW = "_nodes_by_kind"


def every(kind: type[Node], tree: ast.AST | None) -> list[Node]:
    """The nodes of one kind among `tree` and all below it, in the order of `ast.walk`; of no tree, none."""
    if tree is None:
        return []
    if _BELOW not in vars(tree):
        vars(tree)[_BELOW] = _by_kind(tree)
    return cast("list[Node]", vars(tree)[_BELOW].get(kind, []))


def _by_kind(tree: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    nodes, kinds = [tree], dict[type[ast.AST], list[ast.AST]]()
    for node in nodes:  # which grows behind itself
        kinds.setdefault(node.__class__, []).append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif value.__class__ is list:
                nodes += [n for n in value if isinstance(n, ast.AST)]
    return kinds
