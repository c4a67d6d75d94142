"""Backward plan sets with any tile, and what their execution must have done: for tests of what executes plans."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch

from attngen.ir.backward import BackwardPlanSet
from attngen.ir.expr import Load, atom
from attngen.ir.gradient import GradientKind
from attngen.ir.spec import AttentionSpec
from attngen.ir.types import Normalizer
from attngen.passes.epilogue import whole_form
from attngen.passes.mask_form import mask_form
from attngen.passes.mask_plan import plan_mask
from attngen.ref import dense, interp_backward
from attngen.ref.binding import bind
from attngen.ref.evaluate import Tensor, evaluate
from attngen.search_backward import plan_backward
from attngen.syntax import make_spec


@cache
def _some_plan() -> BackwardPlanSet:
    return plan_backward(make_spec("some", head_dim=64))


def alone(plans: BackwardPlanSet, name: str = "") -> BackwardPlanSet:
    """The set with one plan for all lengths: that of long calls, or the one of that name, chosen or not."""
    every = [*plans.plans, *plans.others]
    (plan,) = [p for p in every if p.name == name] if name else [plans.long_plan]
    return plans.replace(plans=(plan,), limits=(), others=tuple(p for p in every if p is not plan))


def make_plans(
    spec: AttentionSpec, tile_m: int, tile_n: int, *, deterministic: bool = False, test: str | None = None,
    kv_order: str = "ascending", grouped: bool = False, serpentine: bool = False,
) -> BackwardPlanSet:  # fmt: skip
    """One plan of `spec` with the given tile and the gradients of all its tensors; `test` None: what follows."""
    some = _some_plan()
    form, gradient, plan = mask_form(spec), whole_form(spec), some.long_plan
    mask = plan_mask(form, 1)
    return some.replace(
        spec=spec,
        gradient=gradient,
        deterministic=deterministic,
        plans=(
            plan.replace(
                compute=plan.compute.replace(tile_m=tile_m, tile_n=tile_n),
                mask=mask if test is None else mask.replace(test=test),
                schedule=plan.schedule.replace(kv_order=kv_order, grouped=grouped, serpentine=serpentine),
            ),
        ),
    )


def check(
    plans: BackwardPlanSet, q: Tensor, k: Tensor, v: Tensor, params: dict[str, Any], tensors: dict[str, Tensor],
    scale: float | None = None, seed: int = 0,
) -> interp_backward.Result:  # fmt: skip
    """Execute the plan: gradients as float64 autograd of the dense meaning has them, each kept pair in one step."""
    spec = plans.spec
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    learned = [c.tensor for c in plans.gradient.contributions]
    given = {n: t.detach().double().requires_grad_() if n in learned else t for n, t in tensors.items()}
    out = dense.attention(spec, *leaves, params, given, scale)
    g = torch.Generator().manual_seed(seed)
    do = torch.randn(out.o.shape, generator=g, dtype=torch.float64)
    dlse = torch.randn(out.lse.shape, generator=g, dtype=torch.float64)
    if spec.normalizer is not Normalizer.SOFTMAX:
        dlse.zero_()  # LSE comes from another kernel then
    loss = (out.o * do).sum() + (out.lse.masked_fill(out.lse == -torch.inf, 0.0) * dlse).sum()
    names = list(dict.fromkeys(learned))
    inputs = [*leaves, *(given[n] for n in names)]
    want = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else (None,) * len(inputs)
    before = dense.attention(spec.replace(epilogue=atom("o")), q, k, v, params, tensors, scale).o  # what is saved
    got = interp_backward.run(plans, q, k, v, before, out.lse.detach(), do, dlse, params, tensors, scale)
    captured = scattered(plans, got, q, k, v, params, tensors)
    for x, y, like in zip((got.dq, got.dk, got.dv, *(captured[n] for n in names)), want, inputs, strict=True):
        y = torch.zeros_like(like) if y is None else y
        size = 1 + float(y.abs().max())
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10 * size, equal_nan=False)
    check_trace(plans, got.trace, q, k, params, tensors)
    return got


def scattered(
    plans: BackwardPlanSet, got: interp_backward.Result, q: Tensor, k: Tensor, v: Tensor, params: dict[str, Any],
    tensors: dict[str, Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """Gradients of captured tensors from the buffers, as the host makes them: autograd of the elements read."""
    bound = bind(plans.spec, q, k, v, params, tensors)
    form = plans.gradient
    names = {c.tensor for c in form.contributions}
    leaves = {n: tensors[n].detach().double().requires_grad_() for n in names}
    loss = q.new_zeros((), dtype=torch.float64)
    for c, buffer in zip(form.contributions, got.extra, strict=True):
        if c.kind is GradientKind.ELEMENT:
            leaf = leaves[c.tensor]  # or broadcast, each of whose elements stands for several of the buffer
            loss = loss + ((leaf if leaf.shape == buffer.shape else leaf.expand(buffer.shape)) * buffer).sum()
            continue
        rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
        by_key = c.kind is GradientKind.COLUMN
        env = bound.env(k.shape[1], rows[:1] if by_key else rows, keys if by_key else None)
        weight = buffer.unsqueeze(-2) if by_key else buffer.unsqueeze(-1)
        if c.kind is GradientKind.OUTPUT:
            weight, env = buffer, {**env, "d": torch.arange(buffer.shape[-1]).view(1, 1, 1, -1)}
        decl = plans.spec.tensor(c.tensor)
        read = (
            plans.spec.sink
            if c.kind is GradientKind.SINK
            else Load(type=decl.dtype.type, tensor=c.tensor, dtype=decl.dtype, indices=c.indices)
        )
        assert read is not None
        expanded = {n: leaves[n].expand(t.shape) if n in leaves else t for n, t in bound.tensors.items()}
        used = weight != 0  # an index may lie outside where no pair passes anything
        value = evaluate(read, env, expanded, dtype=torch.float64, active=used)
        loss = loss + torch.where(used, value * weight, torch.zeros_like(weight)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if loss.requires_grad else ()
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(leaves.items(), grads, strict=False)}


def check_trace(
    plans: BackwardPlanSet, trace: interp_backward.Trace, q: Tensor, k: Tensor, params: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:  # fmt: skip
    """Each kept pair in one step, no step twice, unmasked steps kept throughout, turns of a query tile 0, 1, 2..."""
    b, sq, hq, _ = q.shape
    skv, hkv, m, n = k.shape[1], k.shape[2], trace.tile_m, trace.tile_n
    bound = bind(plans.spec, q, k, k.new_zeros(*k.shape[:3], plans.spec.head_dim_v), params, tensors)
    env = bound.env(skv, torch.arange(sq), torch.arange(skv))
    keep = torch.broadcast_to(bound.value(plans.spec.mask, env), (b, hq, sq, skv))
    visited = torch.zeros(b, hq, sq, skv, dtype=torch.int64)
    has_score = plans.gradient.score != atom("s")
    for s in trace.steps:
        at = s.batch, s.head, slice(s.m_block * m, (s.m_block + 1) * m), slice(s.n_block * n, (s.n_block + 1) * n)
        visited[at] += 1
        if not s.masked:
            assert keep[at].all() and (s.n_block + 1) * n <= skv
            assert not has_score or (s.m_block + 1) * m <= sq
    assert (visited[keep] == 1).all() and (visited <= 1).all()
    assert {(s.batch, s.head // (hq // hkv), s.n_block) for s in trace.steps} == {
        (i, j, x) for i in range(b) for j in range(hkv) for x in range(-(-skv // n))
    }
    turns: dict[tuple[int, int, int], list[int]] = {}
    for t in trace.turns:
        turns.setdefault(t[:3], []).append(t.number)
    assert all(numbers == list(range(len(numbers))) for numbers in turns.values())
    steps = Counter((s.batch, s.head, s.m_block) for s in trace.steps)
    if plans.deterministic:  # all steps of a query tile add, but the one of a KV tile that nobody sees
        assert all(0 <= steps[tile] - len(turns.get(tile, ())) <= -(-skv // n) for tile in steps)
        assert all(len(numbers) <= steps[tile] for tile, numbers in turns.items())
        assert sum(len(x) for x in turns.values()) >= len(trace.steps) - b * hkv * -(-skv // n)
    else:
        assert not turns
