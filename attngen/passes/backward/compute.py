"""compute: MMA shapes of one backward candidate, how dQ is shared out, and whether the fragments fit the registers."""

from __future__ import annotations

from collections.abc import Iterable

from attngen.ir.backward import BackwardCompute
from attngen.ir.base import Node
from attngen.ir.expr import Apply, Expr, Load, Param, atoms_of, walk
from attngen.ir.forms import MaskForm
from attngen.ir.gradient import GradientForm, GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.passes.base import Reject
from attngen.passes.compute import CAPTURED_REGISTERS, COORDINATE_REGISTERS, padded
from attngen.passes.mask_plan import element_test
from attngen.targets import sm90

WARPGROUPS = 2
#: Sums and addresses of captured gradients in flight, and what reductions element by element take beside (fitted to
#: compiled kernels: less spills).
GAIN_REGISTERS = 32
ELEMENT_REGISTERS = 32
#: What each part of a score and its slope holds, beyond the first ones, which the fragments' own registers bear.
PART_REGISTERS = 2
FREE_PARTS = 8
#: What the limits of a union of intervals hold where nothing else is evaluated element by element.
CLAUSE_REGISTERS = 8
#: Query rows of a step at most where a pair's element is read at a key that is looked up (lists of keys), and at head
#: dims above 64, where other rows than 64 can be had: taller tiles spilled 64 to 516 bytes, since an index and an
#: address wait with each element.
LOOKED_UP_TILE_M, LOOKED_UP_WIDE = 64, 48
#: What expressions get at least, where a tile can be had that leaves it.
FEW_REGISTERS = 8


#: Weights without a reference: of a thread's tile_m elements of P, one in so many is a register more (P and its slope
#: are made side by side; fitted to compiled kernels: no spill).
WEIGHT_SHARE = {Normalizer.SIGMOID: 4, Normalizer.RELU: 8}


class Candidate(Node):
    """What the search enumerates; everything else follows."""

    tile_m: int
    splits_operands: bool = False
    #: Registers for element-wise expressions; None: all that they hold. With fewer a few words spill: the search gives
    #: fewer where no candidate is left.
    for_expressions: int | None = None

    @property
    def tile_n(self) -> int:
        return 64 * WARPGROUPS  # of one CTA, or of the two of a cluster

    @property
    def name(self) -> str:
        return f"{self.tile_m}x2x64" if self.splits_operands else f"{self.tile_m}x{self.tile_n}"


def expression_registers(form: MaskForm, gradient: GradientForm, has_score: bool) -> int:
    """What element-wise expressions hold beside the fragments: coordinates, captured values, parts of long scores."""
    exprs = [gradient.score, gradient.slope] if has_score else []
    exprs += [e for c in gradient.in_kernel for e in (c.coefficient, *c.indices)]
    if element_test(form) == "elements":
        exprs.append(form.mask)
    walk_of_union = CLAUSE_REGISTERS if len(form.clauses) > 1 else 0
    if not exprs:
        return walk_of_union
    nodes = {n for e in exprs for n in walk(e)}
    captured = sum(isinstance(n, Load | Param) for n in nodes)
    parts = sum(isinstance(n, Apply) for n in nodes) if has_score and not gradient.is_identity else 0
    gains = GAIN_REGISTERS if gradient.in_kernel else 0
    elements = ELEMENT_REGISTERS if any(c.kind is GradientKind.ELEMENT for c in gradient.in_kernel) else 0
    held = COORDINATE_REGISTERS + CAPTURED_REGISTERS * captured + gains + elements
    return held + PART_REGISTERS * max(parts - FREE_PARTS, 0)


def looks_up(exprs: Iterable[Expr]) -> bool:
    """Whether an element for each pair is read at a key that another element names."""
    loads = (n for e in exprs for n in walk(e) if isinstance(n, Load) and {"kv_idx", "q_idx"} <= atoms_of(n))
    return any(isinstance(inner, Load) for n in loads for i in n.indices for inner in walk(i))


def plan_compute(
    spec: AttentionSpec, form: MaskForm, gradient: GradientForm, candidate: Candidate
) -> BackwardCompute | Reject:
    """Fix the MMA shapes of a candidate.

    Rewrite   (head dims, tile_m) -> S^T, dP^T m64 n{tile_m}; dV m64 n{head_dim_v} and dK m64 n{head_dim_qk} with their
              left operands from registers, dP with V from there where it fits; dQ by rows (tile_m = 128), by columns
              (64), transposed (head_dim_qk a multiple of 64); with split operands dQ by columns, a quarter to each
              warpgroup of the two CTAs
    Keeps     the head dims' meaning: padding columns are zeros that TMA fills and clips
    Rejects   tiles whose dQ no WGMMA shape covers; fragments that leave too few registers
    Sources   FlashAttention-3 (arXiv:2407.08608) appendix B; docs/performance.md for dQ one step behind
    """
    m, n, splits = candidate.tile_m, candidate.tile_n, candidate.splits_operands
    qk, v = padded(spec.head_dim_qk), padded(spec.head_dim_v)
    if splits:
        qk = -(-qk // 32) * 32  # a quarter of the columns is an N of WGMMA
    transposed = m not in (64, 64 * WARPGROUPS)
    if transposed and (qk % 64 or splits):
        return Reject("compute", f"dQ^T = K^T dS^T takes head_dim_qk in multiples of 64, not {qk}", 2.0)
    most = LOOKED_UP_WIDE if max(qk, v) > 64 and not qk % 64 else LOOKED_UP_TILE_M
    if m > most and not splits and looks_up((gradient.score, *(c.coefficient for c in gradient.in_kernel))):
        return Reject("compute", f"elements at keys that are looked up: at most {most} rows a step", 2.0)
    has_score = gradient.score.kind != "atom"
    extra = expression_registers(form, gradient, has_score)
    if candidate.for_expressions is not None:
        extra = min(extra, candidate.for_expressions)
    extra += m // WEIGHT_SHARE[spec.normalizer] if spec.normalizer in WEIGHT_SHARE else 0
    sums = max(qk, v) // 2 if splits else (qk + v) // 2
    dq = m * qk // (128 * WARPGROUPS * (2 if splits else 1))  # fp32 words of a thread
    if gradient.in_kernel and gradient.keeps_score and not splits:
        extra += m // 2  # S itself, for the derivatives (with split operands it takes the place of P)
    scores = sums + m + extra  # S and dP; or dP and P
    overlapped = sums + (m // 4 if splits else m // 2) + dq  # P and dS packed, operands of dV and dK that still run
    room = sm90.REGISTERS[WARPGROUPS][1] - sm90.REGISTER_OVERHEAD
    drains = overlapped > room
    needed = max(scores, sums + dq if drains else overlapped)
    if needed > room:
        return Reject(
            "compute",
            f"registers {needed} + {sm90.REGISTER_OVERHEAD} of {sm90.REGISTERS[WARPGROUPS][1]}: dK {qk // 2}, "
            f"dV {v // 2}, S and dP {m}" + (f", expressions {extra}" if extra else ""),
            needed / room,
        )
    return BackwardCompute(
        dtype=spec.dtype,
        tile_m=m,
        tile_n=n,
        warpgroups=WARPGROUPS,
        head_dim_qk=spec.head_dim_qk,
        head_dim_v=spec.head_dim_v,
        head_dim_qk_padded=qk,
        head_dim_v_padded=v,
        splits_operands=splits,
        dq_transposed=transposed,
        drains=drains,
        v_in_registers=not splits and needed + v // 4 <= room,
        has_score=has_score,
        expression_registers=extra,
    )


def fragment_registers(c: BackwardCompute) -> int:
    """Registers of a consumer thread at its fullest point: dK, dV and the larger of (S, dP) and (P, dS, dQ)."""
    qk, v, m = c.head_dim_qk_padded, c.head_dim_v_padded, c.tile_m
    sums = max(qk, v) // 2 if c.splits_operands else (qk + v) // 2
    dq = m * qk // (128 * c.dq_parts)
    packed = m // 4 if c.splits_operands else m // 2
    held = sums + (v // 4 if c.v_in_registers else 0)
    return held + max(m + c.expression_registers, dq if c.drains else packed + dq)
