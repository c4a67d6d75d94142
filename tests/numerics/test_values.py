"""Closed forms and published counts: the dense meaning against plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from builders import CAUSAL, MASKS, QP, SK, B, D, H, K, O, P, Q, S, W, f, load, param, positions, spec
from cases import ALL_MASKS, F32, SLOPES, qkv
from test_three_way import assert_equal

from attngen.ir.types import DType, Normalizer, Type
from attngen.passes.mask_form import mask_form
from attngen.ref import blockwise, dense
from attngen.ref.evaluate import evaluate
from attngen.ref.tables import table_values

BIAS_C = param("cap", Type.FLOAT)


def test_one_key_and_a_sink() -> None:
    """(a) O = v sigmoid(s - z), LSE = log(e^s + e^z)."""
    s = spec(sink=load("sinks", H, dtype=F32), tensors=("sinks",))
    q, k, v = qkv(s, 2, 3, 1, 4, 2)
    z = torch.randn(4, dtype=torch.float64)
    got = dense.attention(s, q, k, v, tensors={"sinks": z})
    score = torch.einsum("bqhd,bkhd->bhq", q, k.repeat_interleave(2, 2)) / math.sqrt(8)
    assert_equal(got.lse, torch.logaddexp(score, z.view(1, 4, 1).expand_as(score)), 1e-12)
    share = torch.sigmoid(score - z.view(1, 4, 1)).transpose(1, 2)
    assert_equal(got.o, share[..., None] * v.repeat_interleave(2, 2), 1e-12)


def test_sigmoid_of_identical_keys() -> None:
    """(b) sigmoid attention over S identical keys is S sigmoid(s + b) v, one key relu(s) v."""
    for normalizer, fn in ((Normalizer.SIGMOID, torch.sigmoid), (Normalizer.RELU, torch.relu)):
        s = spec(score=S + BIAS_C, normalizer=normalizer)
        q, k, v = qkv(s, 1, 5, 1, 2, 2)
        k, v = k.expand(-1, 37, -1, -1), v.expand(-1, 37, -1, -1)
        score = torch.einsum("bqhd,bhd->bqh", q, k[:, 0]) / math.sqrt(8) - 0.5
        want = 37 * fn(score)[..., None] * v[:, :1]
        assert_equal(dense.attention(s, q, k, v, {"cap": -0.5}).o, want, 1e-12)
        assert_equal(blockwise.attention(s, q, k, v, {"cap": -0.5})[0], want, 1e-12)


def test_row_constant() -> None:
    """(c) a constant added to a row leaves O and shifts LSE by it: both ALiBi forms agree."""
    q, k, v = qkv(spec(), 1, 6, 9, 2, 1)
    slopes = {"slopes": torch.tensor([0.5, 0.25])}
    distance = dense.attention(spec(CAUSAL, S - SLOPES * (QP - K), tensors=("slopes",)), q, k, v, tensors=slopes)
    column = dense.attention(spec(CAUSAL, S + SLOPES * K, tensors=("slopes",)), q, k, v, tensors=slopes)
    assert_equal(distance.o, column.o, 1e-12)
    shift = slopes["slopes"].view(1, 2, 1).double() * (torch.arange(6) + 3)
    assert_equal(column.lse - distance.lse, shift, 1e-12)


def test_large_constant_keeps_gradients_finite() -> None:
    """(c) with a constant of -100."""
    q, k, v = (x.requires_grad_() for x in qkv(spec(), 1, 6, 9, 2, 1))
    plain = torch.autograd.grad(dense.attention(spec(CAUSAL), q, k, v).o.square().sum(), (q, k, v))
    shifted = torch.autograd.grad(dense.attention(spec(CAUSAL, S - 100.0), q, k, v).o.square().sum(), (q, k, v))
    for a, b in zip(plain, shifted, strict=True):
        assert_equal(a, b, 1e-11)


def test_softcap_to_infinity() -> None:
    """(d)"""
    q, k, v = qkv(spec(), 1, 6, 9, 2, 1)
    capped = dense.attention(spec(CAUSAL, f("tanh", S / BIAS_C) * BIAS_C), q, k, v, {"cap": 1e6})
    assert_equal(capped.o, dense.attention(spec(CAUSAL), q, k, v).o, 1e-9)


def test_wide_window_is_causal() -> None:
    """(e) also for the largest int32."""
    q, k, v = qkv(spec(), 1, 6, 9, 2, 1)
    want = dense.attention(spec(CAUSAL), q, k, v).o
    for window in (9, 2**31 - 1):
        assert_equal(dense.attention(spec(MASKS["window"]), q, k, v, {"window": window}).o, want, 0)
        assert_equal(blockwise.attention(spec(MASKS["window"]), q, k, v, {"window": window})[0], want, 1e-12)


def test_documents_are_separate_calls() -> None:
    """(f)"""
    lengths = [1, 7, 4]
    doc = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    s = spec(CAUSAL & (load("doc", B, QP) == load("doc", B, K)), tensors=("doc",))
    q, k, v = qkv(s, 1, 12, 12, 2, 1)
    got = dense.attention(s, q, k, v, tensors={"doc": doc})
    parts = [dense.attention(spec(CAUSAL), *(x.split(lengths, 1)[i] for x in (q, k, v))) for i in range(3)]
    assert_equal(got.o, torch.cat([p.o for p in parts], 1), 1e-12)
    assert_equal(got.lse, torch.cat([p.lse for p in parts], -1), 1e-12)


def test_heads_of_a_group_permute() -> None:
    """(g)"""
    q, k, v = qkv(spec(), 1, 6, 9, 6, 2)
    order = [2, 0, 1, 4, 5, 3]
    a = dense.attention(spec(CAUSAL), q[:, :, order], k, v).o
    assert_equal(a, dense.attention(spec(CAUSAL), q, k, v).o[:, :, order], 0)


def test_ones() -> None:
    """(h) V = 1 gives O = 1, or 1 minus the sink's share; empty rows 0."""
    q, k, v = qkv(spec(), 1, 9, 6, 2, 1)
    one = torch.ones_like(v)
    got = dense.attention(spec(CAUSAL), q, k, one)
    rows = torch.where(torch.arange(9) < 3, 0.0, 1.0).double()
    assert_equal(got.o, rows.view(1, 9, 1, 1).expand_as(got.o), 1e-12)
    assert (got.lse[..., :3] == -torch.inf).all()
    with_sink = dense.attention(spec(CAUSAL, sink=f("float", 1)), q, k, one)
    share = 1 - torch.exp(1 - with_sink.lse)
    assert_equal(with_sink.o, share.transpose(1, 2)[..., None].expand_as(got.o), 1e-12)
    assert (with_sink.lse[..., :3] == 1).all()


def test_against_torch() -> None:
    """SDPA, an implementation that is not ours, with GQA and a top-left causal mask."""
    q, k, v = qkv(spec(dv=5), 2, 7, 9, 4, 2)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert_equal(dense.attention(spec(K <= Q, dv=5), q, k, v).o, want, 1e-12)
    bhsd = dense.attention_bhsd(spec(K <= Q, dv=5), *(x.transpose(1, 2) for x in (q, k, v)))
    assert_equal(bhsd.o.transpose(1, 2), want, 1e-12)


def test_branches() -> None:
    """Differential attention: O = softmax_1 V - lambda softmax_2 V."""
    from attngen.ir.spec import Branch

    one, two = (
        Branch(name=n, score=S.e, mask=m.e, weight=w.e)
        for n, m, w in (("a", CAUSAL, f("float", 1)), ("b", K < 4, -BIAS_C))
    )
    s = spec(branches=(one, two))
    (q1, k1, v), (q2, k2, _) = qkv(s, 1, 6, 9, 4, 2), qkv(s, 1, 6, 9, 4, 2, seed=1)
    a, b = dense.attention(spec(CAUSAL), q1, k1, v), dense.attention(spec(K < 4), q2, k2, v)
    got = dense.attention(s, (q1, q2), (k1, k2), v, {"cap": 0.3})
    assert_equal(got.o, a.o - 0.3 * b.o, 1e-12)
    assert_equal(got.lse, torch.stack([a.lse, b.lse]), 1e-12)
    o, lse = blockwise.attention(s, (q1, q2), (k1, k2), v, {"cap": 0.3})
    assert_equal(o, got.o, 1e-12)
    assert_equal(lse, got.lse.float(), 1e-6)


def test_segments() -> None:
    """A segment shares the softmax: the same as keys side by side."""
    from attngen.ir.spec import Segment

    s = spec(CAUSAL, segments=(Segment(name="memory", score=(S + 0.5).e, mask=(K < 3).e),))
    q, k, v = qkv(s, 1, 6, 9, 2, 1)
    _, km, vm = qkv(s, 1, 6, 5, 2, 1, seed=1)
    both = spec((K < 3) | ((K >= 5) & (K - 5 <= Q + 3)), S + f("where", K < 5, 0.5, 0.0))
    want = dense.attention(both, q, torch.cat([km, k], 1), torch.cat([vm, v], 1))
    got = dense.attention(s, q, k, v, segments={"memory": (km, vm)})
    assert_equal(got.o, want.o, 1e-12)
    assert_equal(got.lse, want.lse, 1e-12)
    o, lse = blockwise.attention(s, q, k, v, segments={"memory": (km, vm)})
    assert_equal(o, want.o, 1e-12)
    assert_equal(lse, want.lse.float(), 1e-6)


def test_view_epilogue_max_logit() -> None:
    """V as columns of K; a gate and a column index in the epilogue; the largest kept score."""
    gate = load("gate", B, Q, H, D, dtype=F32)
    s = spec(CAUSAL, epilogue=O * f("sigmoid", gate), tensors=("gate",), v_view_start=2, dv=4, max_logit=True)
    q, k, _ = qkv(s, 1, 9, 6, 2, 1)
    g = torch.randn(1, 9, 2, 4, dtype=torch.float64)
    want = dense.attention(spec(CAUSAL, dv=4), q, k, k[..., 2:6])
    got = dense.attention(s, q, k, None, tensors={"gate": g})
    assert_equal(got.o, want.o * g.sigmoid(), 1e-12)
    assert_equal(blockwise.attention(s, q, k, None, tensors={"gate": g})[0], got.o, 1e-12)
    scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / math.sqrt(8)
    scores = scores.masked_fill(torch.arange(6) > torch.arange(9)[:, None] - 3, -torch.inf)
    assert got.max_logit is not None
    assert_equal(got.max_logit, scores.amax(-1), 1e-12)


def test_blockwise_dtypes() -> None:
    """Output in the dtype of q or the one asked for; error within the rule."""
    from attngen.ref.compare import assert_close

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        s = spec(CAUSAL, d=64)
        q, k, v = qkv(s, 2, 100, 130, 4, 2, dtype=dtype)
        o, lse = blockwise.attention(s, q, k, v)
        assert o.dtype == dtype and lse.dtype == torch.float32
        found = assert_close(o, s, q, k, v, lse=lse)
        assert found.lse_error < 1e-5
        with pytest.raises(AssertionError, match="error"):
            assert_close(o * 1.05, s, q, k, v)
        with pytest.raises(AssertionError, match="LSE"):
            assert_close(o, s, q, k, v, lse=lse + 0.01)
    assert (
        blockwise.attention(spec(CAUSAL, d=64, out_dtype=DType.F32), q.half(), k.half(), v.half())[0].dtype
        == torch.float32
    )


def count(
    mask: object, sq: int = 1000, skv: int = 1000, tensors: dict[str, torch.Tensor] | None = None, **params: int
) -> int:
    """Kept pairs of one head, from the mask and, where it has no residual, from its intervals."""
    tensors = tensors or {}
    env = positions(sq, skv, **params)
    brute = int(torch.broadcast_to(evaluate(mask.e, env, tensors), (1, 1, sq, skv)).sum())  # type: ignore[attr-defined]
    form = mask_form(spec(mask, tensors=tuple(tensors)))
    rows = torch.zeros(sq, skv, dtype=torch.bool)
    tensors = {**tensors, **table_values(form.tables, env, tensors)}
    if form.is_exact:
        for c in form.clauses:
            low, up, on = (
                torch.broadcast_to(torch.tensor(d) if e is None else evaluate(e, env, tensors), (1, 1, sq, 1))[0, 0]
                for e, d in ((c.lower, 0), (c.upper, skv), (c.rows, True))
            )
            key = torch.arange(skv)
            rows |= (key >= low) & (key < up) & on
        assert int(rows.sum()) == brute
    return brute


def test_golden_counts() -> None:
    """Kept pairs per head, counted independently (1000 x 1000 unless said)."""
    assert count(CAUSAL) == 500500
    assert count(CAUSAL, 300, 1000) == 255150
    assert count(K <= Q, 300, 1000) == 45150
    assert count(CAUSAL, 1000, 300) == 45150
    assert count(MASKS["window"], window=128) == 119872
    assert count(CAUSAL & (QP - K <= W), window=128) == 120744
    assert count(MASKS["two_sided"], window=64) == 124840
    assert count(MASKS["chunk_const"]) == 125716
    assert count(MASKS["chunk"], size=256) == 125716
    assert count(MASKS["prefix"], prefix=257) == 533396
    assert count(MASKS["block_causal"], size=32) == 515904
    assert count(ALL_MASKS["bd3lm"], 512, 512, prefix=256, size=16) == 69632
    assert count(MASKS["left_pad"], tensors={"start": torch.tensor([100])}) == 405450


def test_golden_counts_of_data_dependent_masks() -> None:
    lengths = torch.tensor([1, 127, 128, 200, 300, 244])
    doc = torch.repeat_interleave(torch.arange(6, dtype=torch.int32), lengths)[None]
    same = load("doc", B, QP) == load("doc", B, K)
    assert count(CAUSAL & same, tensors={"doc": doc}) == 111525
    assert count(same, tensors={"doc": doc}) == 222050
    starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths).to(torch.int32)[None]
    assert count(MASKS["first"], tensors={"first": starts}) == 111525
    globals_ = torch.zeros(1, 1000, dtype=torch.bool)
    globals_[0, [0, 1, 2, 500]] = True
    assert count(ALL_MASKS["longformer"], tensors={"flag": globals_, "row_flag": globals_}, window=64) == 132180


def test_golden_counts_of_grids() -> None:
    """BigBird without random blocks, shifted Swin windows, NATTEN."""
    last = SK // 64 - 1
    qb, kb = Q // 64, K // 64
    # first and last block rows see everything
    bigbird = (f("abs", qb - kb) <= 1) | (kb == 0) | (kb == last) | (qb == 0) | (qb == last)
    assert count(bigbird, 1024, 1024) == 409600

    def region(i: object) -> object:
        band = f("where", i < 7, 0, f("where", i < 11, 1, 2))  # type: ignore[operator]
        return band

    def cell(n: object) -> tuple[object, object]:
        return n // 14, n % 14  # type: ignore[operator]

    (qy, qx), (ky, kx) = cell(Q), cell(K)
    swin = (qy // 7 == ky // 7) & (qx // 7 == kx // 7) & (region(qy) == region(ky)) & (region(qx) == region(kx))
    assert count(swin, 196, 196) == 5476
    (qy, qx), (ky, kx) = (Q // 16, Q % 16), (K // 16, K % 16)
    natten = (f("abs", ky - f("clamp", qy, 2, 13)) <= 2) & (f("abs", kx - f("clamp", qx, 2, 13)) <= 2)
    assert count(natten, 256, 256) == 6400


def test_golden_count_of_a_tree() -> None:
    """7 nodes, parents [-1, 0, 0, 1, 1, 2, 5], after a prefix of 100 keys: the matrix is read only past the prefix."""
    from attngen.ir.spec import TensorDecl

    parents = [-1, 0, 0, 1, 1, 2, 5]
    ancestors = torch.zeros(7, 7, dtype=torch.bool)
    for i in range(7):
        j = i
        while j >= 0:
            ancestors[i, j] = True
            j = parents[j]
    tree = (K < P) | load("tree", Q, K - P, dtype=DType.BOOL)
    kept = evaluate(tree.e, positions(7, 107, prefix=100), {"tree": ancestors})
    assert int(kept.sum()) == 718
    s = spec(tree).replace(tensors=(TensorDecl(name="tree", dtype=DType.BOOL, dims=("nodes", "nodes")),))
    form = mask_form(s)
    assert len(form.clauses) == 2 and [c.residual is None for c in form.clauses] == [True, False]
