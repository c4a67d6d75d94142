"""Executes a BackwardPlan tile by tile, as its kernels walk it, in float64: lost and doubled tiles without a GPU.

Same tiles (rows and keys past the end read as zeros, LSE = inf there), same walk (`ir.backward`), masks only in masked
steps, one masked step for a KV tile that no query sees, P from LSE. KV tiles run in the order of their launch; where
the plan set is deterministic, each waits for its turn at every query tile, and a turn that is not next is an error: the
kernel would wait for ever, or add twice. What a kernel would get wrong comes out wrong here: an unmasked step that
holds a dropped pair counts it. Rounding is not imitated.
Sources: FlashAttention-2 (arXiv:2307.08691), algorithm 2; ordered turns: FlashAttention-3's deterministic backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attngen.ir.backward import BackwardPlanSet
from attngen.ir.expr import Atom
from attngen.ir.gradient import OF_ROWS, Contribution, GradientKind
from attngen.ir.types import Normalizer
from attngen.passes.epilogue import epilogue_slope, has_epilogue
from attngen.ref.binding import Binding, bind
from attngen.ref.evaluate import Tensor
from attngen.ref.interp import kept
from attngen.ref.tables import with_tables
from attngen.ref.walk_backward import Step, Walk

LOG2_E = 1.4426950408889634


class Turn(NamedTuple):
    """A KV tile's addition to dQ of a query tile: the `number`th, from 0."""

    batch: int
    head: int
    m_block: int
    number: int


class TurnError(AssertionError):
    """A KV tile would add to a query tile out of turn."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Every step in the order of execution, and where deterministic every turn."""

    tile_m: int
    tile_n: int
    steps: list[Step] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)


class Result(NamedTuple):
    """dq (B, Sq, Hq, D), dk (B, Skv, Hkv, D), dv (B, Skv, Hkv, Dv), float64; the buffers of captured gradients; steps.

    `extra`: one for each contribution of the plan set's gradient: sink and row (B, Hq, Sq), column (B, Hq, Skv),
    element in the tensor's declared shape, output (B, Hq, Sq, Dv), output_row (B, Hq, Sq).
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    extra: tuple[Tensor, ...]
    trace: Trace


@torch.no_grad()
def run(
    plans: BackwardPlanSet,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    params: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    workers: int = 132,
) -> Result:
    """Run the plan that serves these lengths: gradients of a loss that has `do` and `dlse` (None: zero) for o and lse.

    q (B, Sq, Hq, D), k and v (B, Skv, Hkv, D[v]), o (before the epilogue) and do (B, Sq, Hq, Dv), lse and dlse
    (B, Hq, Sq), at least one row and one key: a call without is not launched. `workers`: SMs of the GPU, which say how
    heads are grouped. Where the normaliser needs no LSE, the kernel reads neither lse nor dlse.
    Raises: TurnError; ValueError for a call that is not launched; E0650 to E0652 as the dense meaning does.
    """
    bound = bind(plans.spec, q, k, v, params, tensors, scale)
    if not q.numel() or not k.numel():
        raise ValueError("a call without rows or keys launches nothing")
    return _Execution(plans, bound, o.double(), lse.double(), do.double(), dlse).all(workers)


class _Execution:
    def __init__(
        self, plans: BackwardPlanSet, bound: Binding, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
    ) -> None:
        self.plan, self.plans = plans.plans[plans.index(bound.q.shape[1], bound.sets[0].parts[0].k.shape[1])], plans
        self.bound = with_tables(bound, self.plan.mask.form)
        self.walk = Walk(plans, self.plan, self.bound)
        self.tile_m, self.tile_n = self.walk.tile_m, self.walk.tile_n
        self.batch, self.seqlen_q, self.heads_q, _ = bound.sizes
        self.seqlen_kv, self.m_blocks = self.walk.seqlen_kv, self.walk.m_blocks
        c, part = self.plan.compute, bound.sets[0].parts[0]
        self.trace = Trace(c.tile_m, c.tile_n)
        self.q = self.padded(bound.q, c.tile_m)
        self.k, self.v = self.padded(part.k, c.tile_n), self.padded(part.v, c.tile_n)
        self.dq, self.dk, self.dv = (torch.zeros_like(x) for x in (self.q, self.k, self.v))
        self.counters = torch.zeros(self.batch, self.heads_q, self.m_blocks, dtype=torch.int64)
        self.extra = tuple(self.buffer(x) for x in plans.gradient.contributions)
        do = self.before_epilogue(o, do)
        self.do = self.padded(do, c.tile_m)
        self.lse, self.delta = self.prepare(o, lse, do, dlse)

    def before_epilogue(self, o: Tensor, do: Tensor) -> Tensor:
        """dO before the epilogue; what captured tensors gain through it goes to their buffers."""
        spec = self.plans.spec
        if not has_epilogue(spec):
            return do
        columns = torch.arange(o.shape[-1]).view(1, 1, 1, -1)
        env = self.bound.env(self.seqlen_kv, torch.arange(self.seqlen_q))
        env = {**env, "o": o.transpose(1, 2), "d": columns}
        do = do.transpose(1, 2)
        for c, buffer in zip(self.plans.gradient.contributions, self.extra, strict=True):
            if c in self.plans.gradient.of_epilogue:
                gained = do * self.bound.value(c.coefficient, env)
                buffer.copy_(gained if c.kind is GradientKind.OUTPUT else gained.sum(-1))
        return (do * self.bound.value(epilogue_slope(spec), env)).transpose(1, 2)

    @staticmethod
    def padded(x: Tensor, tile: int) -> Tensor:
        """(B, S, H, D) to (B, H, whole tiles, D), zeros past the end."""
        rows = -(-x.shape[1] // tile) * tile
        out = x.new_zeros(x.shape[0], x.shape[2], rows, x.shape[3])
        out[:, :, : x.shape[1]] = x.transpose(1, 2)
        return out

    def buffer(self, c: Contribution) -> Tensor:
        if c.kind is GradientKind.ELEMENT:
            return torch.zeros(self.bound.tensors[c.tensor].shape, dtype=torch.float64)
        if c.kind is GradientKind.OUTPUT:
            return torch.zeros(self.batch, self.heads_q, self.seqlen_q, self.v.shape[-1], dtype=torch.float64)
        length = self.seqlen_kv if c.kind is GradientKind.COLUMN else self.seqlen_q
        return torch.zeros(self.batch, self.heads_q, length, dtype=torch.float64)

    def prepare(self, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
        """LSE in log2 units and D of whole tiles (B, H, rows), inf and 0 where there is nothing; gradients of sinks."""
        empty = lse == -torch.inf
        delta = (o * do).sum(-1).transpose(1, 2) - (0.0 if dlse is None else dlse.double())
        delta = torch.where(empty, torch.zeros_like(delta), delta)
        lse_log2 = torch.where(empty, torch.full_like(lse, torch.inf), lse * LOG2_E)
        for c, buffer in zip(self.plans.gradient.contributions, self.extra, strict=True):
            sink = self.bound.sets[0].sink
            if c.kind is GradientKind.SINK and sink is not None:
                env = self.bound.env(self.seqlen_kv, torch.arange(self.seqlen_q))
                value = torch.broadcast_to(self.bound.value(sink, env), (*lse.shape, 1)).squeeze(-1)
                buffer.copy_(-(value * LOG2_E - lse_log2).exp2() * delta)
        rows = self.m_blocks * self.tile_m
        whole = lse.new_full((self.batch, self.heads_q, rows), torch.inf), lse.new_zeros(self.batch, self.heads_q, rows)
        whole[0][:, :, : self.seqlen_q], whole[1][:, :, : self.seqlen_q] = lse_log2, delta
        return whole

    def all(self, workers: int) -> Result:
        for h_kv, steps in self.walk.kv_tiles(workers):
            for s in steps:
                self.trace.steps.append(s)
                self.step(s, h_kv)
        dq, dk = self.dq * self.bound.scale, self.dk * self.bound.scale
        return Result(
            dq[:, :, : self.seqlen_q].transpose(1, 2),
            dk[:, :, : self.seqlen_kv].transpose(1, 2),
            self.dv[:, :, : self.seqlen_kv].transpose(1, 2),
            self.extra,
            self.trace,
        )

    def step(self, s: Step, h_kv: int) -> None:
        """S = Q K^T, P from LSE, dP = dO V^T, dS; dV, dK, and dQ in its turn."""
        gradient = self.plans.gradient
        rows = range(s.m_block * self.tile_m, (s.m_block + 1) * self.tile_m)
        keys = range(s.n_block * self.tile_n, (s.n_block + 1) * self.tile_n)
        at_q, at_kv = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        q, do = self.q[s.batch, s.head, at_q], self.do[s.batch, s.head, at_q]
        k, v = self.k[s.batch, h_kv, at_kv], self.v[s.batch, h_kv, at_kv]
        env = self.walk.env(s.batch, s.head, rows, keys)
        # rows and keys past the end have no meaning: a kernel clamps what it reads for them
        exists = (env["q_idx"] < self.seqlen_q) & (env["kv_idx"] < self.seqlen_kv)
        keep = kept(self.bound, self.plan.mask, env, exists) if s.masked else exists
        env["s"] = (q @ k.T)[None, None] * self.bound.scale
        z = env["s"]
        if not isinstance(gradient.score, Atom):
            z = torch.broadcast_to(self.bound.value(gradient.score, env, active=keep), z.shape)
        if s.masked:
            # rows past the end: LSE = inf drops them where no score is evaluated
            dropped = ~keep if not isinstance(gradient.score, Atom) else ~(keep | (env["q_idx"] >= self.seqlen_q))
            z = z.masked_fill(dropped, -torch.inf)
        p, slope = self.weights(z, s, at_q)
        delta = 0.0 if self.separate else self.delta[s.batch, s.head, at_q, None]
        dz = slope * ((do @ v.T) - delta)
        self.contribute(s, dz, env, keep)
        ds = dz if gradient.is_identity else self.product(dz, self.bound.value(gradient.slope, env, active=keep))
        p, ds = p[0, 0], ds[0, 0]
        self.dv[s.batch, h_kv, at_kv] += p.T @ do
        self.dk[s.batch, h_kv, at_kv] += ds.T @ q
        if self.takes_turn(s):
            self.dq[s.batch, s.head, at_q] += ds @ k

    @property
    def separate(self) -> bool:
        """No other key moves a weight: no LSE, no D."""
        return self.plans.spec.normalizer is not Normalizer.SOFTMAX

    def weights(self, z: Tensor, s: Step, rows: slice) -> tuple[Tensor, Tensor]:
        """P, and what turns dP - D into dz."""
        if not self.separate:
            p = (z * LOG2_E - self.lse[s.batch, s.head, rows, None]).exp2()
            return p, p
        if self.plans.spec.normalizer is Normalizer.SIGMOID:
            p = z.sigmoid()
            return p, p * (1 - p)
        p = z.clamp_min(0.0)
        return p, (p > 0).to(p.dtype)

    def takes_turn(self, s: Step) -> bool:
        """Whether the step adds to dQ; in a deterministic plan, count it."""
        if not self.plans.deterministic:
            return True
        number = self.walk.turn(s)
        if number is None:
            return False
        counter = self.counters[s.batch, s.head, s.m_block]
        if number != counter:
            raise TurnError(f"{s} has turn {number}, {int(counter)} are done")
        counter += 1
        self.trace.turns.append(Turn(s.batch, s.head, s.m_block, number))
        return True

    @staticmethod
    def product(dz: Tensor, factor: Tensor) -> Tensor:
        """dz * factor, 0 where dz is: the factor may be infinite where nothing passes."""
        return torch.where(dz == 0, torch.zeros_like(dz), dz * factor)

    def contribute(self, s: Step, dz: Tensor, env: Mapping[str, Tensor], keep: Tensor) -> None:
        """Add dz * coefficient of each captured tensor: to the sums of rows or of columns, or to its elements."""
        for c, buffer in zip(self.plans.gradient.contributions, self.extra, strict=True):
            if c.kind in OF_ROWS:
                continue
            # (1, 1, tile_m, tile_n), zero past the end: no pair there passes anything
            values = self.product(dz, self.bound.value(c.coefficient, env, active=keep))
            if c.kind is GradientKind.ELEMENT:
                places = tuple(
                    torch.broadcast_to(self.bound.value(i, env, active=keep), values.shape).clamp(0, n - 1)
                    for i, n in zip(c.indices, buffer.shape, strict=True)
                )
                buffer.index_put_(places, values, accumulate=True)
                continue
            by_row = c.kind is GradientKind.ROW
            start = (s.m_block * self.tile_m) if by_row else (s.n_block * self.tile_n)
            sums = values[0, 0].sum(1 if by_row else 0)
            room = buffer[s.batch, s.head, start : start + len(sums)]
            room += sums[: len(room)]
