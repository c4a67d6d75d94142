"""What is measured: one cell is a spec at one shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.ir.spec import AttentionSpec
    from attngen.samples import Shape

    #: Captured tensors of a call by name, on the CPU.
    Captured = Callable[[Shape], dict[str, Any]]

#: Tokens in a batch and model width of the usual attention benchmarks: batch TOKENS / seqlen, heads WIDTH / head_dim.
TOKENS, WIDTH = 32768, 2048


@dataclass(frozen=True)
class Cell:
    """Shapes of one measurement: q (batch, seqlen_q, heads_q, d), k and v (batch, seqlen_kv, heads_kv, d).

    `title` stands in the table in place of the spec's name. `rising`: scores grow along the walk, from the last key to
    the first, by more than a KV tile may without rescaling O.
    """

    spec: AttentionSpec
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    title: str = ""
    rising: bool = False

    @property
    def label(self) -> str:
        """Short text for a table row."""
        d, dv = self.spec.head_dim_qk, self.spec.head_dim_v
        dims = f"d{d}" if d == dv else f"d{d}/{dv}"
        length = (
            _short(self.seqlen_q)
            if self.seqlen_q == self.seqlen_kv
            else f"{_short(self.seqlen_q)}x{_short(self.seqlen_kv)}"
        )
        heads = f"h{self.heads_q}" if self.heads_q == self.heads_kv else f"h{self.heads_q}/{self.heads_kv}"
        turns = " deterministic" if self.spec.backward.deterministic else ""
        return f"{self.title or self.spec.name} {dims} {length} b{self.batch} {heads}{turns}"

    def flops(self, kept_pairs: float, *, backward: bool = False) -> float:
        """Floating-point operations of the matrix products, kept pairs only (`kept_pairs` a batch and head).

        Two in the forward; five in the backward, where S, dQ and dK have the extent of q, dP and dV that of v.
        """
        qk, v = self.spec.head_dim_qk, self.spec.head_dim_v
        return 2.0 * self.batch * self.heads_q * kept_pairs * (3 * qk + 2 * v if backward else qk + v)


@dataclass(frozen=True)
class Work:
    """A cell with the values of its params, and of its captured tensors where they are not drawn from the seed."""

    cell: Cell
    params: dict[str, Any] = field(default_factory=dict)
    captured: Captured | None = None


def _short(n: int) -> str:
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)


def usual_cell(spec: AttentionSpec, seqlen: int, *, group: int = 1) -> Cell:
    """The cell of the usual grid: 32 K tokens in all, model width 2048 (192 counts as 128)."""
    heads = max(1, WIDTH // min(spec.head_dim_v, spec.head_dim_qk))
    return Cell(spec, max(1, TOKENS // seqlen), heads, max(1, heads // group), seqlen, seqlen)


def with_shape(cell: Cell, **changes: int | None) -> Cell:
    """`cell` with the shapes that were given."""
    return replace(cell, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
