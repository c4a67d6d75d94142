"""compute: MMA shapes of one candidate tile, where P lives, and whether its fragments fit the registers."""

from __future__ import annotations

import math
from collections.abc import Iterable

from attngen.ir.base import Node
from attngen.ir.expr import Atom, Expr, Load, Param, atoms_of, walk
from attngen.ir.forms import MaskForm
from attngen.ir.plan import ComputePlan, Maxima, Rescale
from attngen.ir.score import COLUMN, KV_0, LOAD, RAW, SCALE, ScoreForm
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import DType, Normalizer
from attngen.passes.base import Reject
from attngen.passes.cost import element_cycles, score_work
from attngen.passes.mask_plan import element_test, loaded_limits
from attngen.passes.score_bound import score_bound
from attngen.passes.score_form import ONE, score_form
from attngen.targets import sm90

#: By the dtype of P, in log2 units: how far scores may outgrow their row's reference before it is raised, and how far
#: above the maximum a new one lies. P and its sums are as precise anywhere between 2**-56 and 2**48, for bf16 has the
#: exponents of fp32; products with V hold where V lies between 2**-60 and 2**60. fp16 ends at 2**16, and is precise
#: from 2**-14 on.
GROWTH = {DType.BF16: (48.0, 56.0), DType.FP16: (8.0, 0.0)}
#: How far from 0 bounded scores may lie for one reference, log2 units, and the log2 of the greatest P: the least P is
#: 2**(greatest - 2 * reach), whose products with V fp32 holds, and fp16 P is precise from 2**-14 on.
REACH = {DType.BF16: (72.5, 48.0), DType.FP16: (14.0, 14.0)}
#: Row and column numbers, and intermediate values of one element.
COORDINATE_REGISTERS = 8
#: Bounds of one clause of a union and its share of the run's state (fitted to compiled kernels: less spills).
WALK_REGISTERS = 8
#: A param, or a captured value that does not move with the column, with what is derived from it; two warpgroups have
#: room for that.
CAPTURED_REGISTERS = 6
#: Addresses of loads that move with the column.
ADDRESS_REGISTERS = 16
#: Maxima are those of ints where the softmax's cycles are at least this share of the products'.
INT_MAXIMA = 0.9


LOG2E = math.log2(math.e)


class Candidate(Node):
    """What the search enumerates; everything else follows."""

    warpgroups: int
    tile_n: int
    #: Count what ptxas may hoist out of element-wise expressions. The search drops it where too few candidates are
    #: left: ptxas hoists less when it has less, at worst it spills a few words outside the loops.
    hoisting: bool = True
    #: None: by the rule of `maxima_of`.
    maxima: Maxima | None = None

    @property
    def name(self) -> str:
        return f"{64 * self.warpgroups}x{self.tile_n}"


def padded(head_dim: int) -> int:
    """Head dimension that products sum over: the next multiple of 16, WGMMA's k step."""
    return -(-head_dim // 16) * 16


def columns_of_o(head_dim_v: int) -> int:
    """Head dimension of the values in P V: the next multiple of 8, WGMMA's n step."""
    return -(-head_dim_v // 8) * 8


def fragment_registers(candidate: Candidate, head_dim_v: int, expressions: int) -> int:
    """32-bit registers of one consumer thread for S (fp32), P (packed pairs), O (fp32) and the expressions."""
    s, p, o = candidate.tile_n // 2, candidate.tile_n // 4, columns_of_o(head_dim_v) // 2
    return s + p + o + expressions


def expression_registers(exprs: Iterable[Expr], candidate: Candidate) -> int:
    """What element-wise expressions hold: coordinates, and loads that ptxas keeps in flight.

    A thread owns tile_n / 4 columns of two rows. A load that moves with the column is hoisted for all of them, one
    register a column, two where it moves with the row as well; with the wide budget of one or two warpgroups ptxas
    hoists the 64-bit addresses too (fitted to compiled kernels: no spill in any example).
    """
    exprs = tuple(exprs)
    if not exprs:
        return 0
    captured = {n for e in exprs for n in walk(e) if isinstance(n, Load | Param)} - {RAW, SCALE, COLUMN, KV_0}
    captured = {n for n in captured if not _is_stream(n)}
    loads = {n for n in captured if isinstance(n, Load) and "kv_idx" in atoms_of(n)}
    if not candidate.hoisting:
        return COORDINATE_REGISTERS
    tight = candidate.warpgroups > 2
    held = COORDINATE_REGISTERS + (CAPTURED_REGISTERS * len(captured - loads) if tight else 0)
    if not loads:
        return held
    rowwise = any(atoms_of(n) & {"q_idx", "q_pos"} for n in loads)
    in_flight = candidate.tile_n // 2 if rowwise else candidate.tile_n // 4
    if tight:
        return held + in_flight
    return held + ADDRESS_REGISTERS + (2 * in_flight if rowwise else in_flight)


def row_registers(form: ScoreForm) -> int:
    """What a score holds beside its elements' coordinates: values of a row, two of them where the row moves them.

    The scale and the factor take the place of the softmax's own.
    """
    values = [t.value for t in form.terms if not _places(t.value)]
    held = [form.shift, form.slope, *(t.factor for t in form.terms), *(n for v in values for n in _captured(v))]
    once = {e for e in held if e is not None and e != ONE}
    return sum(1 + _moves_with_row(e) for e in once) + (form.scale is not None and _moves_with_row(form.scale))


def _moves_with_row(e: Expr) -> bool:
    return not atoms_of(e).isdisjoint(("q_idx", "q_pos"))


def _places(e: Expr) -> bool:
    """Whether an element's value reads where the element is."""
    return not atoms_of(e).isdisjoint(("kv_idx", "q_idx", "q_pos")) or COLUMN in walk(e)


def _captured(e: Expr) -> list[Expr]:
    return [n for n in walk(e) if isinstance(n, Load | Param) and n not in (RAW, SCALE) and not _is_stream(n)]


def _is_stream(e: Expr) -> bool:
    return isinstance(e, Param) and e.name.startswith(LOAD.format(""))


def stream_registers(form: ScoreForm, candidate: Candidate) -> int:
    """What is asked for while Q K^T runs: tile_n / 4 columns, of two rows where they differ; halves lie in pairs."""
    columns = candidate.tile_n // 4
    held = sum(columns * (1 + s.by_row) // (1 if s.dtype.bits == 32 else 2) for s in form.streams)
    return held + (COORDINATE_REGISTERS if form.streams or form.distance is not None else 0)


def walk_registers(form: MaskForm) -> int:
    """What the walk over the runs of a union holds across the loop: the tile bounds of every clause, and the run's."""
    return WALK_REGISTERS * len(form.clauses) if len(form.clauses) > 1 else 0


def maxima_of(spec: AttentionSpec) -> Maxima:
    """How row maxima are taken unless a tuned plan says otherwise.

    Of ints, half the instructions, where the softmax takes as long as the products, or nearly: there they are in the
    way. Of floats where products hide them, and where the score itself waits for the special-function unit (tanh):
    maxima run beside it (measured: docs/performance.md).
    """
    mma, exp, issue = element_cycles(spec, padded(spec.head_dim_qk), columns_of_o(spec.head_dim_v))
    waits = score_work(spec)[1] > 0
    return Maxima.INTS if exp + issue >= INT_MAXIMA * mma and not waits else Maxima.FLOATS


def plan_compute(spec: AttentionSpec, form: MaskForm, candidate: Candidate) -> ComputePlan | Reject:
    """Fix the MMA shapes of a candidate.

    Rewrite   (head dims, tile) -> m64 n{tile_n} k16 for Q K^T, m64 n{head_dim_v} k16 for P V with P from registers
    Keeps     the head dims' meaning: padding columns are zeros that TMA fills and clips
    Rejects   fragments that leave fewer registers than the loop's own state needs (they would spill)
    Sources   FlashAttention-3 (arXiv:2407.08608) section 3; docs/performance.md for the overhead
    """
    score, softmax = not isinstance(spec.score, Atom), spec.normalizer is Normalizer.SOFTMAX
    elementwise = [form.mask] if element_test(form) == "elements" else []
    if score:
        split = score_form(spec.score, "kv", spec)
        elementwise += [t.value for t in split.terms if _places(t.value)]
    walking = WALK_REGISTERS if spec.block_sparse is not None else walk_registers(form)  # a lane's words of a map
    expressions = expression_registers(elementwise, candidate) + walking + 2 * len(loaded_limits(form))
    if score:
        expressions += row_registers(split) + stream_registers(split, candidate)
    registers = fragment_registers(candidate, spec.head_dim_v, expressions)
    limit = sm90.REGISTERS[candidate.warpgroups][1]
    (growth, headroom), (reach, greatest) = GROWTH[spec.dtype], REACH[spec.dtype]
    bound = score_bound(spec) * LOG2E
    rescale = Rescale.NEVER if not softmax else Rescale.ON_GROWTH
    if softmax and bound <= reach and not spec.max_logit:  # which takes maxima anyway
        rescale = Rescale.BOUNDED
    grows = rescale is Rescale.ON_GROWTH
    maxima = candidate.maxima or maxima_of(spec)
    if not grows or spec.max_logit:  # no maxima, or their exact values in each tile
        maxima = Maxima.FLOATS
    if registers + sm90.REGISTER_OVERHEAD > limit:
        return Reject(
            "compute",
            f"registers {registers} + {sm90.REGISTER_OVERHEAD} of {limit}: "
            f"S {candidate.tile_n // 2}, P {candidate.tile_n // 4}, O {columns_of_o(spec.head_dim_v) // 2}"
            + (f", expressions {expressions}" if expressions else ""),
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
        head_dim_v_padded=columns_of_o(spec.head_dim_v),
        rescale=rescale,
        maxima=maxima,
        growth=growth if grows else 0.0,
        headroom=headroom if grows else 0.0,
        reference=max(bound - greatest, 0.0) if rescale is Rescale.BOUNDED else 0.0,
        has_score=score,
        expression_registers=expressions,
    )
