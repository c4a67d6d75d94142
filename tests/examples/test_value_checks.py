"""Closed forms, in the callable that `build` gives (on CPU tensors) and in the execution of every plan."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from ways import Way, values, ways

import attngen
from attngen.ir.spec import AttentionSpec
from attngen.jit.notice import AttngenNotice
from attngen.syntax import load_spec

CAUSAL = "mask = kv_idx <= q_pos"


def spec_of(body: str) -> AttentionSpec:
    return load_spec(f'attn 1\ninclude "std.attn"\nattention a {{\n  head_dim = 16\n  {body}\n}}\n')


def close(way: Way, o: torch.Tensor | None = None, lse: torch.Tensor | None = None) -> None:
    if o is not None:
        assert way.o.shape == o.shape
        assert float((way.o - o).abs().max()) <= way.tolerance * max(1.0, float(o.abs().max())), way.name
    if lse is not None:
        finite = torch.isfinite(lse)
        assert torch.equal(way.lse[~finite], lse[~finite])
        assert float((way.lse - lse)[finite].abs().max()) <= max(way.tolerance / 100, 1e-9), way.name


def qkv(sq: int = 70, skv: int = 90, hq: int = 2, hkv: int = 1, batch: int = 1) -> tuple[torch.Tensor, ...]:
    return values(batch, sq, hq, 16), values(batch, skv, hkv, 16, seed=1), values(batch, skv, hkv, 16, seed=2)


def same(one: str, other: str, **more: dict[str, object]) -> None:
    """Two specs give the same O and LSE in every execution, `more` the params and tensors of the first."""
    q, k, v = qkv()
    for a, b in zip(ways(spec_of(one), q, k, v, **more), ways(spec_of(other), q, k, v), strict=False):
        close(a, b.o, b.lse)


def test_one_key_and_a_sink() -> None:
    """(a) O = v sigmoid(s - z), LSE = log(e^s + e^z)."""
    q, k, v = qkv(5, 1, 4, 2)
    z = torch.tensor([0.5, -1.0, 2.0, 0.0])
    score = torch.einsum("bqhd,bkhd->bhq", q, k.repeat_interleave(2, 2)) / 4
    sink = z.double().view(1, 4, 1)
    want = torch.sigmoid(score - sink).transpose(1, 2)[..., None] * v.repeat_interleave(2, 2)
    spec = spec_of("tensor sinks: f32[heads_q]\n  sink = sinks[h]")
    for way in ways(spec, q, k, v, tensors={"sinks": z}):
        close(way, want, torch.logaddexp(score, sink.expand_as(score)))


@pytest.mark.parametrize("normalizer", ["sigmoid", "relu"])
def test_identical_keys_without_a_normaliser(normalizer: str) -> None:
    """(b) over S identical keys O = S sigmoid(s + b) v."""
    q, k, v = qkv(9, 1)
    score = torch.einsum("bqhd,bkd->bqh", q, k[:, :, 0]) / 4 - 0.5
    weight = torch.sigmoid(score) if normalizer == "sigmoid" else torch.relu(score)
    want = 37 * weight[..., None] * v
    k, v = k.expand(-1, 37, -1, -1), v.expand(-1, 37, -1, -1)
    spec = spec_of(f"param bias: float = -0.5\n  score = s + bias\n  normalizer = {normalizer}")
    for way in ways(spec, q, k, v):
        close(way, want)


def test_a_row_constant_shifts_lse_alone() -> None:
    """(c) both forms of ALiBi agree, and LSE differs by the constant."""
    q, k, v = qkv()
    slopes = torch.tensor([0.25, 0.0625])
    shift = slopes.double().view(1, 2, 1) * (torch.arange(70) + 20)
    tensors = {"slopes": slopes}
    declared = f"tensor slopes: f32[heads_q]\n  {CAUSAL}\n  "
    by_distance = ways(spec_of(f"{declared}score = alibi(s, slopes[h])"), q, k, v, tensors=tensors)
    by_column = ways(spec_of(f"{declared}score = s + slopes[h] * float(kv_idx)"), q, k, v, tensors=tensors)
    for a, b in zip(by_distance, by_column, strict=False):
        close(a, b.o, b.lse - shift)


def test_a_constant_of_minus_100_keeps_gradients_finite() -> None:
    """(c) LSE near -100: the same O and the same gradients."""
    grads = []
    for score in ("s", "s - 100.0"):
        q, k, v = (x.bfloat16().requires_grad_() for x in qkv())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttngenNotice)
            o, lse = attngen.build(spec_of(f"{CAUSAL}\n  score = {score}"))(q, k, v, return_lse=True)
        grads.append([*torch.autograd.grad(o.float().square().sum() + lse.sum(), (q, k, v)), o])
    for a, b in zip(*grads, strict=True):
        assert bool(a.isfinite().all()) and float((a - b).detach().abs().max()) <= 0.02 * float(a.detach().abs().max())


def test_a_softcap_without_bound_is_none() -> None:
    """(d)"""
    same(f"param cap: float = 1e7\n  score = softcap(s, cap)\n  {CAUSAL}", CAUSAL)


@pytest.mark.parametrize("keys", [90, 2**31 - 1])
def test_a_window_as_long_as_the_keys_is_causal(keys: int) -> None:
    """(e)"""
    same("param keys: int >= 1\n  mask = causal and window(keys)", CAUSAL, params={"keys": keys})


def test_documents_are_calls_of_their_own() -> None:
    """(f) packed documents, by id."""
    lengths = [1, 40, 29]
    doc = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    q, k, v = qkv(70, 70)
    packed = spec_of("tensor doc: i32[batch, seqlen_kv] sorted\n  mask = causal and document(doc)")
    for way in ways(packed, q, k, v, tensors={"doc": doc}):
        pieces = zip(*(x.split(lengths, 1) for x in (q, k, v)), strict=True)
        alone = [next(w for w in ways(spec_of(CAUSAL), *piece) if w.tolerance == way.tolerance) for piece in pieces]
        close(way, torch.cat([w.o for w in alone], 1), torch.cat([w.lse for w in alone], -1))


def test_heads_of_a_group_permute() -> None:
    """(g)"""
    q, k, v = qkv(hq=6, hkv=2)
    order = [2, 0, 1, 4, 5, 3]
    plain, permuted = (list(ways(spec_of(CAUSAL), x, k, v)) for x in (q, q[:, :, order]))
    for a, b in zip(plain, permuted, strict=True):
        close(b, a.o[:, :, order], a.lse[:, order])


def test_ones_give_ones() -> None:
    """(h) V = 1 gives O = 1, or 1 minus the sink's share; rows without a key 0."""
    q, k, v = qkv(90, 70)
    one = torch.ones_like(v)
    rows = (torch.arange(90) >= 20).double()
    for way in ways(spec_of(CAUSAL), q, k, one):
        close(way, rows.view(1, 90, 1, 1).expand_as(way.o))
        assert bool((way.lse[..., :20] == -math.inf).all())
    for way in ways(spec_of(f"{CAUSAL}\n  sink = 1.0"), q, k, one):
        share = 1 - torch.exp(1 - way.lse)
        close(way, share.transpose(1, 2)[..., None].expand_as(way.o))
        assert bool(((way.lse[..., :20] - 1).abs() < 1e-6).all())
