"""Executes a BackwardPlan tile by tile, as its kernels walk it, in float64: lost and doubled tiles without a GPU.

Same tiles (rows and keys past the end read as zeros, LSE = inf there), same walk (`ir.backward`), masks only in masked
steps, one masked step for a KV tile that no query sees, P from LSE. KV tiles run in the order of their launch; where
the plan set is deterministic, each waits for its turn at every query tile, and a turn that is not next is an error: the
kernel would wait for ever, or add twice. What a kernel would get wrong comes out wrong here: an unmasked step that
holds a dropped pair counts it. Rounding is not imitated.
Sources: FlashAttention-2 (arXiv:2307.08691), algorithm 2; ordered turns: FlashAttention-3's deterministic backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from attngen.ir.backward import BackwardPlanSet, BackwardSchedule
from attngen.ir.expr import Atom
from attngen.ir.gradient import OF_ROWS, Contribution, GradientKind
from attngen.ir.types import Normalizer
from attngen.passes.epilogue import epilogue_slope, has_epilogue
from attngen.ref.binding import Binding, bind
from attngen.ref.evaluate import Tensor
from attngen.ref.interp import kept
from attngen.ref.tables import with_tables
from attngen.ref.walk import mapped

LOG2_E = 1.4426950408889634


class Step(NamedTuple):
    """Query tile `m_block` of a query head against KV tile `n_block`, and whether its pairs are tested."""

    batch: int
    head: int
    m_block: int
    n_block: int
    masked: bool


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


def launch_order(
    schedule: BackwardSchedule, n_blocks: int, heads_kv: int, batch: int, workers: int
) -> Iterator[tuple[int, int, int]]:
    """(batch element, KV head, n_block) of KV tiles in the order in which they are handed out to `workers` SMs."""
    pairs = [(b, h_kv) for b in range(batch) for h_kv in range(heads_kv)]
    size = schedule.group_pairs(len(pairs), n_blocks, workers)
    order = range(n_blocks) if schedule.kv_order == "ascending" else range(n_blocks - 1, -1, -1)
    for start in range(0, len(pairs), size):
        for n in order:
            for b, h_kv in pairs[start : start + size]:
                yield b, h_kv, n


class _Execution:
    def __init__(
        self, plans: BackwardPlanSet, bound: Binding, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
    ) -> None:
        self.plan, self.plans = plans.plans[plans.index(bound.q.shape[1], bound.sets[0].parts[0].k.shape[1])], plans
        self.bound = with_tables(bound, self.plan.mask.form)
        c = self.plan.compute
        self.tile_m, self.tile_n = c.tile_m, c.tile_n
        self.batch, self.seqlen_q, self.heads_q, self.heads_kv = bound.sizes
        part = bound.sets[0].parts[0]
        self.seqlen_kv = part.k.shape[1]
        self.m_blocks, self.n_blocks = -(-self.seqlen_q // c.tile_m), -(-self.seqlen_kv // c.tile_n)
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
        workers = max(workers // self.plan.compute.cluster, 1)  # CTAs, or clusters of them, that take KV tiles
        schedule, pairs = self.plan.schedule, self.heads_kv * self.batch
        ctas, group = min(self.n_blocks * pairs, workers), schedule.group_pairs(pairs, self.n_blocks, workers)
        for tile, (b, h_kv, n) in enumerate(launch_order(schedule, self.n_blocks, self.heads_kv, self.batch, workers)):
            even = schedule.wave(tile, group * self.n_blocks, ctas) % 2 == 0
            self.kv_tile(b, h_kv, n, descends=even)
        dq, dk = self.dq * self.bound.scale, self.dk * self.bound.scale
        return Result(
            dq[:, :, : self.seqlen_q].transpose(1, 2),
            dk[:, :, : self.seqlen_kv].transpose(1, 2),
            self.dv[:, :, : self.seqlen_kv].transpose(1, 2),
            self.extra,
            self.trace,
        )

    def kv_tile(self, b: int, h_kv: int, n: int, descends: bool) -> None:
        """One KV tile: the query tiles of every query head of the KV head that see the tile. `descends`: serpentine."""
        group = self.heads_q // self.heads_kv
        heads = range(h_kv * group, (h_kv + 1) * group)
        steps = [s for h in heads for s in self.steps(b, h, n)] or [Step(b, heads[0], 0, n, True)]
        if self.plan.schedule.serpentine and group > 1:
            steps.sort(key=lambda s: -s.m_block if descends else s.m_block)  # stable: heads stay in their order
        for s in steps:
            self.trace.steps.append(s)
            self.step(s, h_kv)

    def steps(self, b: int, h: int, n: int) -> Iterator[Step]:
        for m in range(self.m_blocks):
            start, stop = self.live(b, h, m)[n]
            if start:
                whole = (m + 1) * self.tile_m <= self.seqlen_q
                yield Step(b, h, m, n, not (stop and (whole or isinstance(self.plans.gradient.score, Atom))))

    def live(self, b: int, h: int, m: int) -> list[tuple[bool, bool]]:
        """Of each KV tile, whether the walk takes it for these rows, and whether some clause keeps it whole.

        Where turns are counted, they are counted over all tiles from the first to the last that some clause touches.
        """
        if (b, h, m) in self.known:
            return self.known[b, h, m]
        if self.plan.mask.walk == "map":
            self.known[b, h, m] = self.mapped(b, h, m)
            return self.known[b, h, m]
        n = self.tile_n
        env = self.env(b, h, range(0))
        lo, hi = m * self.tile_m, min((m + 1) * self.tile_m, self.seqlen_q) - 1
        env |= {"q_lo": torch.tensor(lo), "q_hi": torch.tensor(hi)}
        touched, kept = [False] * self.n_blocks, [False] * self.n_blocks
        for t in self.plan.mask.form.bounds:
            low, low_max, up_min, up = (
                int(self.bound.bound(e, env).flatten()[0]) for e in (t.lower_min, t.lower_max, t.upper_min, t.upper_max)
            )
            for i in range(self.n_blocks):
                touched[i] |= low // n <= i < -(-up // n)
                kept[i] |= -(-low_max // n) <= i < up_min // n
        if self.plans.deterministic and any(touched):
            first, last = touched.index(True), self.n_blocks - touched[::-1].index(True)
            touched = [first <= i < last for i in range(self.n_blocks)]
        self.known[b, h, m] = list(zip(touched, kept, strict=True))
        return self.known[b, h, m]

    def mapped(self, b: int, h: int, m: int) -> list[tuple[bool, bool]]:
        """`live` of a walk by map."""
        rows = range(m * self.tile_m, min((m + 1) * self.tile_m, self.seqlen_q))
        kept = self.bound.value(self.bound.spec.mask, self.env(b, h, rows, range(self.seqlen_kv)))
        some, every = mapped(kept.expand(1, 1, len(rows), self.seqlen_kv)[0, 0], len(rows), self.tile_n)
        return list(zip(some[0].tolist(), every[0].tolist(), strict=True))

    @cached_property
    def known(self) -> dict[tuple[int, int, int], list[tuple[bool, bool]]]:
        """What `live` has found."""
        return {}

    def env(self, b: int, h: int, rows: range, keys: range | None = None) -> dict[str, Tensor]:
        """Atoms and params of one head, laid out (1, 1, rows, keys)."""
        env = self.bound.env(
            self.seqlen_kv,
            torch.arange(rows.start, rows.stop),
            None if keys is None else torch.arange(keys.start, keys.stop),
            torch.tensor([b]),
        )
        return {**env, "h": env["h"][:, h : h + 1], "h_kv": env["h_kv"][:, h : h + 1]}

    def step(self, s: Step, h_kv: int) -> None:
        """S = Q K^T, P from LSE, dP = dO V^T, dS; dV, dK, and dQ in its turn."""
        gradient = self.plans.gradient
        rows = range(s.m_block * self.tile_m, (s.m_block + 1) * self.tile_m)
        keys = range(s.n_block * self.tile_n, (s.n_block + 1) * self.tile_n)
        at_q, at_kv = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        q, do = self.q[s.batch, s.head, at_q], self.do[s.batch, s.head, at_q]
        k, v = self.k[s.batch, h_kv, at_kv], self.v[s.batch, h_kv, at_kv]
        env = self.env(s.batch, s.head, rows, keys)
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
        touched = [t for t, _ in self.live(s.batch, s.head, s.m_block)]
        if not touched[s.n_block]:  # the one step of a KV tile that no query sees
            return False
        descends = self.plan.schedule.kv_order == "descending"
        number = sum(touched[s.n_block + 1 :]) if descends else sum(touched[: s.n_block])
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
