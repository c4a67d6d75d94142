"""What a forward and backward of O(N) memory hold at their peak, from shapes alone, to set beside what was measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from attngen.bench.cells import Cell

_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes. `inputs` (q, k, v, dO, captured tensors) are there before; the others are made by one step.

    `square` is what no step may hold: one seqlen_q x seqlen_kv matrix of every query head, in the spec's dtype.
    """

    inputs: int
    output: int
    gradients: int
    dq_fp32: int
    statistics: int
    square: int

    @property
    def made(self) -> int:
        """O, gradients, the fp32 sums of dQ, and the row statistics."""
        return self.output + self.gradients + self.dq_fp32 + self.statistics

    def as_json(self) -> dict[str, int]:
        """All of it, with the sum."""
        return {**asdict(self), "made": self.made}


def expected(cell: Cell, captured: dict[str, Any]) -> Memory:
    """Memory of one step: gradients of q, k and v; LSE is saved, and D and the scaled LSE are made beside it."""
    spec = cell.spec
    width = {"bf16": 2, "fp16": 2}.get(spec.dtype.value, _FP32)
    rows, keys = cell.batch * cell.heads_q * cell.seqlen_q, cell.batch * cell.heads_kv * cell.seqlen_kv
    q, k, v, o = (
        width * n * d
        for n, d in (
            (rows, spec.head_dim_qk), (keys, spec.head_dim_qk), (keys, spec.head_dim_v), (rows, spec.head_dim_v)
        )
    )  # fmt: skip
    given = sum(x.numel() * x.element_size() for x in captured.values())
    return Memory(
        inputs=q + k + v + o + given,
        output=o,
        gradients=q + k + v,
        dq_fp32=_FP32 * rows * spec.head_dim_qk,
        statistics=3 * _FP32 * rows,
        square=width * rows * cell.seqlen_kv,
    )


def megabytes(count: float) -> str:
    """Megabytes (10^6) as text, gigabytes from ten on."""
    return f"{count / 1e9:.1f} GB" if count >= 1e10 else f"{count / 1e6:.0f} MB"
