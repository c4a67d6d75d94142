"""compute: MMA shapes of one candidate tile, where P lives, and whether its fragments fit the registers."""

from __future__ import annotations

from attngen.ir.base import Node
from attngen.ir.expr import Apply, Atom, Expr, Load, walk
from attngen.ir.plan import ComputePlan, Rescale
from attngen.ir.spec import AttentionSpec
from attngen.passes.base import Reject
from attngen.targets import sm90


class Candidate(Node):
    """What the search enumerates; everything else follows."""

    warpgroups: int
    tile_n: int

    @property
    def name(self) -> str:
        return f"{64 * self.warpgroups}x{self.tile_n}"


def padded(head_dim: int) -> int:
    """Head dimension in shared memory and MMA: the next multiple of 16, WGMMA's k step."""
    return -(-head_dim // 16) * 16


def may_be_infinite(score: Expr) -> bool:
    """Whether a kept score could be -inf: it loads captured floats, divides, or takes a logarithm."""
    return any(
        (isinstance(n, Load) and n.type == "float") or (isinstance(n, Apply) and n.fn in ("div", "log", "log2"))
        for n in walk(score)
    )


def fragment_registers(candidate: Candidate, head_dim_v: int, elementwise: bool) -> int:
    """32-bit registers of one consumer thread for S (fp32), P (packed pairs), O (fp32) and the element coordinates."""
    s, p, o = candidate.tile_n // 2, candidate.tile_n // 4, padded(head_dim_v) // 2
    return s + p + o + (8 if elementwise else 0)


def plan_compute(spec: AttentionSpec, candidate: Candidate) -> ComputePlan | Reject:
    """Fix the MMA shapes of a candidate.

    Rewrite   (head dims, tile) -> m64 n{tile_n} k16 for Q K^T, m64 n{head_dim_v} k16 for P V with P from registers
    Keeps     the head dims' meaning: padding columns are zeros that TMA fills and clips
    Rejects   fragments that leave fewer registers than the loop's own state needs (they would spill)
    Sources   FlashAttention-3 (arXiv:2407.08608) section 3; docs/performance.md for the overhead
    """
    score = not isinstance(spec.score, Atom)
    registers = fragment_registers(candidate, spec.head_dim_v, score)
    limit = sm90.REGISTERS[candidate.warpgroups][1]
    if registers + sm90.REGISTER_OVERHEAD > limit:
        return Reject(
            "compute",
            f"registers {registers} + {sm90.REGISTER_OVERHEAD} of {limit}: "
            f"S {candidate.tile_n // 2}, P {candidate.tile_n // 4}, O {padded(spec.head_dim_v) // 2}"
            + (", score 8" if score else ""),
            (registers + sm90.REGISTER_OVERHEAD) / limit,
        )
    return ComputePlan(
        dtype=spec.dtype,
        tile_m=64 * candidate.warpgroups,
        tile_n=candidate.tile_n,
        warpgroups=candidate.warpgroups,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        head_dim_qk_padded=padded(spec.head_dim_qk),
        head_dim_v_padded=padded(spec.head_dim_v),
        rescale=Rescale.ON_GROWTH,
        guard_interior=score and may_be_infinite(spec.score),
        has_score=score,
    )
