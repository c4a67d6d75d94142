"""given-blocks: the part of a mask that a listed tile still has to be tested for.

Rewrite   own and blocks[b, h, q_idx // q, kv_idx // kv]  -->  own, for tiles that lie inside one block
Keeps     the mask's value on every tile that a map names: there the block is listed
"""

from __future__ import annotations

from attngen.ir.expr import Apply, Expr, Load, const
from attngen.ir.functions import apply
from attngen.ir.spec import AttentionSpec


def inside_blocks(spec: AttentionSpec, tile_m: int, tile_n: int) -> Expr | None:
    """The mask without the block that holds a tile of this size; None where tiles and blocks cut one another."""
    blocks = spec.block_sparse
    if blocks is None or not blocks.given or blocks.q % tile_m or blocks.kv % tile_n:
        return None
    parts = _conjuncts(spec.mask)
    own = [e for e in parts if not _is_block(e, blocks.q, blocks.kv)]
    if len(own) == len(parts):
        return None
    total = own[0] if own else const(True)
    for e in own[1:]:
        total = apply("and", total, e)
    return total


def _conjuncts(e: Expr) -> list[Expr]:
    if isinstance(e, Apply) and e.fn == "and":
        return [part for a in e.args for part in _conjuncts(a)]
    return [e]


def _is_block(e: Expr, q: int, kv: int) -> bool:
    """An element of `blocks` that is the same for all pairs of a q x kv block."""
    if not isinstance(e, Load) or e.tensor != "blocks":
        return False
    row, column = (_divided(i) for i in e.indices[-2:]) if len(e.indices) >= 2 else (None, None)
    leading = all(i.kind == "atom" and i.name in ("b", "h", "h_kv") for i in e.indices[:-2])
    return leading and (row, column) == (("q_idx", q), ("kv_idx", kv))


def _divided(e: Expr) -> tuple[str, int] | None:
    """(atom, n) of `atom // n`."""
    if isinstance(e, Apply) and e.fn == "floordiv":
        x, n = e.args
        if x.kind == "atom" and n.kind == "const":
            return x.name, int(n.value)
    return None
