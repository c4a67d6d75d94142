"""Dense meaning, blockwise execution and plan execution agree, and the plan visits what it must."""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import PARAMS, positions, spec
from cases import ALL_MASKS, SCORES, SINKS, qkv, tensors_for
from plans import make_plan

from attngen.ir.expr import tensors_of
from attngen.ir.plan import KernelPlan
from attngen.ir.spec import AttentionSpec
from attngen.ref import blockwise, dense, interp
from attngen.ref.evaluate import evaluate

TILE_M, TILE_N = 128, 16
#: Around the tiles, and the empty cases.
SIZES = [(0, 5), (5, 0), (1, 1), (15, 16), (16, 17), (17, 15), (64, 64), (65, 63), (1, 130), (130, 1), (129, 49)]
HEADS = [(4, 4), (4, 2), (4, 1), (3, 1)]
VALUES = {"window": 7, "prefix": 20, "size": 5, "cap": 3.0}


def make(mask: str, score: str = "none", sink: str = "none", d: int = 8, dv: int = 8) -> AttentionSpec:
    e = [ALL_MASKS[mask].e, SCORES[score].e, *([SINKS[sink].e] if SINKS[sink] is not None else [])]
    names = tuple(sorted(frozenset().union(*(tensors_of(x) for x in e))))
    return spec(
        ALL_MASKS[mask], SCORES[score], sink=SINKS[sink], tensors=names, d=d, dv=dv, name=f"{mask}_{score}_{sink}"
    )


def grid() -> list[tuple[str, str, str, tuple[int, int], tuple[int, int]]]:
    """Every mask at every size; scores, sinks and head counts take turns."""
    turns = itertools.cycle(itertools.product(SCORES, SINKS, HEADS))
    return [(m, *(turn := next(turns))[:2], size, turn[2]) for m in ALL_MASKS for size in SIZES]


def assert_equal(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    """Equal to `tolerance`, infinities exactly, no NaN."""
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=False)


def check_trace(
    trace: interp.Trace,
    s: AttentionSpec,
    plan: KernelPlan,
    tensors: dict[str, torch.Tensor],
    b: int,
    sq: int,
    skv: int,
    h: int,
) -> None:
    """Every kept pair visited once, unmasked tiles kept throughout, no tile twice, every row with a first tile."""
    env = positions(sq, skv, b, h, **{p.name: VALUES[p.name] for p in PARAMS if p.name != "cap"})
    keep = torch.broadcast_to(evaluate(s.mask, env, tensors), (b, h, sq, skv))
    visited = torch.zeros(b, h, sq, skv, dtype=torch.int64)
    rows_seen = torch.zeros(sq, dtype=torch.bool)
    n = plan.compute.tile_n
    for v in trace.visits:
        at = (
            slice(v.batch.start, v.batch.stop), slice(v.heads.start, v.heads.stop),
            slice(v.q_lo, v.q_hi + 1), slice(v.tile.n_block * n, v.tile.n_block * n + n),
        )  # fmt: skip
        visited[at] += 1
        rows_seen[v.q_lo : v.q_hi + 1] = True
        if not v.tile.masked:
            assert keep[at].all() and (v.tile.n_block + 1) * n <= skv
    assert (visited[keep] == 1).all() and (visited <= 1).all()
    assert rows_seen.all() or not skv


@pytest.mark.parametrize(("mask", "score", "sink", "size", "heads"), grid())
def test_agree(mask: str, score: str, sink: str, size: tuple[int, int], heads: tuple[int, int]) -> None:
    s = make(mask, score, sink, dv=12)
    (sq, skv), (hq, hkv), b = size, heads, 2
    q, k, v = qkv(s, b, sq, skv, hq, hkv)
    t = tensors_for(s, b, sq, skv, hq)
    want = dense.attention(s, q, k, v, VALUES, t)
    assert torch.isfinite(want.o).all()
    assert want.o.shape == (b, sq, hq, 12) and want.lse.shape == (b, hq, sq)

    o, lse = blockwise.attention(s, q, k, v, VALUES, t)
    assert_equal(o, want.o, 1e-11)
    assert_equal(lse, want.lse.float(), 1e-6)

    plan = make_plan(s, TILE_M, TILE_N)
    o, lse, trace = interp.run(plan, s, q, k, v, VALUES, t)
    assert_equal(o, want.o, 1e-11)
    assert_equal(lse, want.lse, 1e-11)
    check_trace(trace, s, plan, t, b, sq, skv, hq)


@pytest.mark.parametrize("mask", ALL_MASKS)
@pytest.mark.parametrize("tile", [(64, 8), (128, 48), (192, 176)])
def test_tiles_and_tests(mask: str, tile: tuple[int, int]) -> None:
    """Any tile, both element tests, ranges by CTA or by warpgroup, references that move often or seldom: one result."""
    s = make(mask, "bias")
    b, sq, skv, h = 1, 200, 190, 2
    q, k, v = qkv(s, b, sq, skv, h, 1, seed=3)
    t = tensors_for(s, b, sq, skv, h, seed=3)
    want = dense.attention(s, q * 9, k, v, VALUES, t)  # peaked: references move
    for test, ranges, growth, headroom in (("elements", True, 0.0, 0.0), (None, False, 8.0, 5.0)):
        plan = make_plan(s, *tile, test=test, ranges_per_warpgroup=ranges, growth=growth, headroom=headroom)
        o, lse, trace = interp.run(plan, s, q * 9, k, v, VALUES, t)
        assert_equal(o, want.o, 1e-10)
        assert_equal(lse, want.lse, 1e-10)
        check_trace(trace, s, plan, t, b, sq, skv, h)


def test_references_with_headroom_are_raised_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that rise by 17 log2 units a tile: a row's reference moves once in growth + headroom of them, from the
    first one on, which lies above its tile's maximum as every later one does."""
    s = make("full")
    q, k, v = qkv(s, 1, 64, 640, 1, 1, seed=3)
    tiles, rise, growth, headroom = 640 // 80, 17.0, 32.0, 32.0
    k.zero_()
    k[0, :, 0, 0] = torch.arange(640, 0, -1) * (rise / 80 / interp.LOG2_E)
    q[..., 0] = q.shape[-1] ** 0.5
    plan = make_plan(s, 64, 80, growth=growth, headroom=headroom)
    references, softmax = [], interp._Execution.softmax

    def noted(self, state, scores, values):
        made = softmax(self, state, scores, values)
        references.append(made.reference)
        return made

    monkeypatch.setattr(interp._Execution, "softmax", noted)
    o, _, _ = interp.run(plan, s, q, k, v, VALUES, {})
    assert_equal(o, dense.attention(s, q, k, v, VALUES, {}).o, 1e-10)
    moved = sum((a != b).int() for a, b in itertools.pairwise(references)).max()
    assert len(references) == tiles and 1 <= moved <= (tiles - 1) * rise / (growth + headroom)


def test_blocks_of_blockwise() -> None:
    """More than one block of rows and of keys, dead and full blocks among them."""
    for mask in ("causal", "window", "sink_tokens", "left_pad", "longformer", "prefix"):
        s = make(mask, "alibi", "per_head")
        q, k, v = qkv(s, 2, 700, 1300, 2, 1)
        t = tensors_for(s, 2, 700, 1300, 2)
        want = dense.attention(s, q, k, v, VALUES, t)
        o, lse = blockwise.attention(s, q, k, v, VALUES, t)
        assert_equal(o, want.o, 1e-11)
        assert_equal(lse, want.lse.float(), 1e-6)


def test_wrong_bound_shows() -> None:
    """An unmasked tile that holds a dropped key comes out wrong: the plan execution does not repair plans."""
    from attngen.ir.expr import const
    from attngen.ir.functions import apply

    s = make("causal")
    q, k, v = qkv(s, 1, 64, 64, 1, 1)
    plan = make_plan(s, 64, 16)
    t = plan.mask.form.bounds[0]
    wide = t.replace(upper_min=apply("add", t.upper_min, const(16)))
    bad = plan.replace(mask=plan.mask.replace(form=plan.mask.form.replace(bounds=(wide,))))
    good, _, _ = interp.run(plan, s, q, k, v)
    wrong, _, _ = interp.run(bad, s, q, k, v)
    assert (good - wrong).abs().max() > 1e-2


def test_infinity_in_an_unmasked_tile() -> None:
    """-inf scores in the first unmasked tile leave a row without a reference, not NaN."""
    s = make("full", "log_bias")
    q, k, v = qkv(s, 1, 16, 32, 1, 1)
    t = {"bias": torch.cat([torch.ones(1, 1, 16, 16), torch.zeros(1, 1, 16, 16)], -1)}
    want = dense.attention(s, q, k, v, tensors=t)
    o, lse, _ = interp.run(make_plan(s, 64, 16), s, q, k, v, tensors=t)
    assert_equal(o, want.o, 1e-11)
    assert_equal(lse, want.lse, 1e-11)
