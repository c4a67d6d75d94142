"""How many keys a row keeps at most, where params and lengths say so: a window makes a long sequence a short walk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attngen.ir.expr import Expr, atoms_of, params_of, tensors_of
from attngen.ir.spec import AttentionSpec
from attngen.passes.mask_form import mask_form
from attngen.ref.evaluate import evaluate

#: What a row may read of a call to bound its keys: the same for all heads and batch elements.
_ATOMS = {"q_idx", "q_pos", "seqlen_q", "seqlen_kv"}


@dataclass(frozen=True, slots=True)
class Reach:
    """The bounds of each clause of a mask, and which params (by their place among the spec's) they read."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    bounds: tuple[tuple[Expr, Expr], ...]

    @staticmethod
    def of(spec: AttentionSpec) -> Reach | None:
        """None where some clause has no lower bound, or one that reads tensors or heads: lengths alone count then."""
        if spec.block_sparse is not None:
            return None
        bounds = []
        for clause in mask_form(spec).clauses:
            if clause.lower is None or clause.upper is None:
                return None
            if any(tensors_of(e) or atoms_of(e) - _ATOMS for e in (clause.lower, clause.upper)):
                return None
            bounds.append((clause.lower, clause.upper))
        read = frozenset().union(*(params_of(e) for pair in bounds for e in pair))
        names = tuple(p.name for p in spec.params)
        places = tuple(i for i, n in enumerate(names) if n in read)
        return Reach(tuple(names[i] for i in places), places, tuple(bounds)) if bounds else None

    def keys(self, values: Sequence[int | float | bool], seqlen_q: int, seqlen_kv: int) -> int:
        """Keys of the row in the middle or of the last row, whichever keeps more; `values` of the params in `names`."""
        rows = torch.tensor([seqlen_q // 2, seqlen_q - 1])
        env = {n: torch.tensor(v) for n, v in zip(self.names, values, strict=True)}
        env |= {"q_idx": rows, "q_pos": rows + seqlen_kv - seqlen_q}
        env |= {"seqlen_q": torch.tensor(seqlen_q), "seqlen_kv": torch.tensor(seqlen_kv)}
        kept = sum(
            (evaluate(upper, env).clamp(max=seqlen_kv) - evaluate(lower, env).clamp(min=0)).clamp(min=0)
            for lower, upper in self.bounds
        )
        return min(seqlen_kv, max(1, int(torch.as_tensor(kept).max())))
