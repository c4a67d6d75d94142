"""Every example spec: dense meaning, blockwise execution, and every plan that the search made, tile by tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_three_way import assert_equal

from attngen import samples
from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec
from attngen.passes.mask_form import mask_form
from attngen.ref import blockwise, dense, interp
from attngen.ref.evaluate import evaluate
from attngen.search import plan
from attngen.syntax import load_all

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))
SPECS = [s for path in EXAMPLES for s in load_all(path)]
#: Those whose tiles follow from one interval per row, without tests of elements.
INTERVALS = [s for s in SPECS if (form := mask_form(s)).is_exact and len(form.clauses) == 1]
SIZES = [(300, 300), (70, 333), (333, 70), (1, 200)]


def narrow(s: AttentionSpec) -> AttentionSpec:
    """The same spec with small head dims: its plans keep their tiles."""
    return s.replace(head_dim_qk=12, head_dim_v=8)


def inputs(s: AttentionSpec, sq: int, skv: int):  # type: ignore[no-untyped-def]
    shape = samples.Shape(batch=2, heads_q=2, heads_kv=1, seqlen_q=sq, seqlen_kv=skv)
    q, k, v = (x.double() for x in samples.qkv(s, shape))
    return q, k, v, samples.params(s), samples.tensors(s, shape)


@pytest.mark.parametrize("s", SPECS, ids=[s.name for s in SPECS])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_example(s: AttentionSpec, size: tuple[int, int]) -> None:
    plans = plan(s).with_small
    s = narrow(s)
    q, k, v, params, tensors = inputs(s, *size)
    try:
        want = dense.attention(s, q, k, v, params, tensors)
    except AttnError as fault:  # a document of a query position before the first key: the spec needs Sq <= Skv
        assert fault.code == "E0650" and size[0] > size[1]
        return
    assert torch.isfinite(want.o).all()
    o, lse = blockwise.attention(s, q, k, v, params, tensors)
    assert_equal(o, want.o.to(o.dtype), 1e-11 if o.dtype == torch.float64 else 1e-2)
    assert_equal(lse, want.lse.float(), 1e-6)
    for p in plans:
        o, lse, trace = interp.run(p, s, q, k, v, params, tensors)
        assert_equal(o, want.o, 1e-10)
        assert_equal(lse, want.lse, 1e-10)
        assert len(trace.visits) > 0


@pytest.mark.parametrize("s", INTERVALS, ids=[s.name for s in INTERVALS])
def test_skips_pay(s: AttentionSpec) -> None:
    """A plan runs tiles that keep something, and one for rows that keep nothing; those kept whole run unmasked."""
    sq = skv = 1024
    shape = samples.Shape(batch=1, heads_q=1, heads_kv=1, seqlen_q=sq, seqlen_kv=skv)
    p = plan(s).plans[0]
    small = narrow(s)
    params, tensors = samples.params(s), samples.tensors(small, shape)
    q, k, v = (x.double() for x in samples.qkv(small, shape))
    _, _, trace = interp.run(p, small, q, k, v, params, tensors)
    at = {"b": torch.zeros(1, 1, 1, 1, dtype=torch.int64), "h": torch.zeros(1, 1, 1, 1, dtype=torch.int64)}
    from builders import positions

    env = {**positions(sq, skv), **at, **{n: torch.tensor(x) for n, x in params.items()}}
    keep = torch.broadcast_to(evaluate(s.mask, env, tensors), (1, 1, sq, skv))[0, 0]
    n = p.compute.tile_n
    live = sum(bool(keep[v.q_lo : v.q_hi + 1, v.tile.n_block * n : v.tile.n_block * n + n].any()) for v in trace.visits)
    full = sum(
        bool(keep[v.q_lo : v.q_hi + 1, v.tile.n_block * n : v.tile.n_block * n + n].all())
        and (v.tile.n_block + 1) * n <= skv
        for v in trace.visits
    )
    empty_rows = sum(1 for v in trace.visits if v.tile.n_block == 0 and v.tile.masked)
    assert len(trace.visits) - live <= empty_rows
    assert sum(not v.tile.masked for v in trace.visits) == full
