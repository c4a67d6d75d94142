"""tile-test: what a mask says about a whole tile of rows and keys.

Rewrite   mask  -->  (near, every, some) over the ends of a tile: interval arithmetic of `tile_bounds`, with keys that
          move as well as rows, and with the least and largest element of the part of a captured tensor that a tile
          reads; `near` without
Keeps     soundness: where `every` holds all pairs are kept, where `some` does not hold none is
Falls     back to undecided (every = false, some = true) for what has no bounds: floats past a comparison of elements,
          divisors that move
"""

from __future__ import annotations

from dataclasses import replace

from attngen.ir.expr import Expr, Load, Param, atom, atoms_of, rewrite
from attngen.ir.functions import apply
from attngen.ir.simplify import negate, simplify
from attngen.ir.spec import AttentionSpec
from attngen.ir.tile_map import KNOWN, LEAST, MOST, IndexRange, LoadRange, TileMap, TileTest
from attngen.ir.types import Type
from attngen.passes.facts import Q_HI, Q_LO, Facts, facts_of, moves
from attngen.passes.tile_bounds import bounds_of, truth_of

KV_LO, KV_HI = atom("kv_lo"), atom("kv_hi")
#: What moves inside a tile.
TILE = {"q_idx": (Q_LO, Q_HI), "kv_idx": (KV_LO, KV_HI)}
#: The name of a param that stands for an element that is loaded; no spec can write it.
ELEMENT = "%load_"


def tile_test(spec: AttentionSpec, mask: Expr | None = None) -> TileTest:
    """The test of `spec.mask`, or of another mask of the same spec."""
    return _Draft(facts_of(spec)).test(spec.mask if mask is None else mask)


class _Draft:
    """Loads that were met so far, innermost first, and what moves."""

    def __init__(self, facts: Facts) -> None:
        self.base = facts
        self.moving: dict[str, tuple[Expr, Expr]] = dict(TILE)
        self.elements: dict[Load, Expr] = {}
        self.loads: list[LoadRange] = []

    @property
    def facts(self) -> Facts:
        return replace(self.base, moving=dict(self.moving))

    def test(self, mask: Expr) -> TileTest:
        _, near = truth_of(simplify(mask), self.facts)
        every, some = truth_of(simplify(rewrite(mask, self.element)), self.facts)
        for x in self.loads:
            known = Param(type=Type.BOOL, name=f"{KNOWN}{x.number}")
            every, some = apply("and", known, every), apply("or", negate(known), some)
        return TileTest(near=simplify(near), loads=tuple(self.loads), every=simplify(every), some=simplify(some))

    def element(self, e: Expr) -> Expr:
        """A load that moves becomes a param that moves between the ends of a range."""
        if not isinstance(e, Load) or not moves(e, self.facts):
            return e
        if e not in self.elements:
            name = f"{ELEMENT}{len(self.elements)}"
            ends = self.ends(e)
            if ends is None:
                return e
            self.moving[name] = ends
            self.elements[e] = Param(type=e.type, name=name)
        return self.elements[e]

    def ends(self, e: Load) -> tuple[Expr, Expr] | None:
        """Least and largest element; None where an index has no bounds."""
        axes = []
        for i in e.indices:
            b = bounds_of(i, self.facts)
            if b.low is None or b.high is None:
                return None
            axes.append(IndexRange(first=b.low, last=b.high))
        if e.tensor in self.base.sorted and not any(moves(i, self.facts) for i in e.indices[:-1]):
            first = e.replace(indices=(*(a.first for a in axes[:-1]), axes[-1].first))
            return first, e.replace(indices=(*first.indices[:-1], axes[-1].last))
        number = len(self.loads)
        self.loads.append(LoadRange(number=number, tensor=e.tensor, type=e.type, axes=tuple(axes)))
        low, high = (Param(type=e.type, name=f"{name}{number}") for name in (LEAST, MOST))
        return low, high


def tile_map(spec: AttentionSpec, mask: Expr | None = None) -> TileMap:
    """The map that a `block_sparse` kernel walks by."""
    mask = spec.mask if mask is None else mask
    atoms = atoms_of(mask)
    per_batch = "b" in atoms or spec.layout.is_ragged  # sequences have lengths of their own
    return TileMap(test=tile_test(spec, mask), per_batch=per_batch, per_head=bool(atoms & {"h", "h_kv"}))
