"""The blockwise gradients against float64 autograd of the dense meaning: dq, dk, dv and captured tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CAUSAL, QP, B, D, H, K, O, Q, S, f, load, spec, x
from cases import ALL_MASKS, SCORES, SINKS, qkv, tensors_for
from test_three_way import VALUES, make
from torch.autograd import gradcheck

from attngen import samples
from attngen.cli.numeric import self_attention
from attngen.diag.diagnostic import AttnError
from attngen.ir.spec import AttentionSpec, Branch, Segment
from attngen.ir.types import DType, Normalizer
from attngen.ref import blockwise, dense
from attngen.ref.backward import Gradients, attention_backward
from attngen.syntax import load_all, load_spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
Tensor = torch.Tensor
F32 = DType.F32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows and of keys, and several lanes, at the lengths of these tests."""
    monkeypatch.setattr(blockwise, "ROWS", 16)
    monkeypatch.setattr(blockwise, "KEYS", 24)
    monkeypatch.setattr(blockwise, "SCORES", 2 * 2 * 16 * 24)


def leaves(items: Any) -> Any:
    """Float64 leaves of the floating-point tensors in a tensor, tuple or dict."""
    if isinstance(items, Mapping):
        return {n: leaves(t) for n, t in items.items()}
    if isinstance(items, tuple):
        return tuple(leaves(t) for t in items)
    if items is None or not items.is_floating_point():
        return items
    return items.detach().double().requires_grad_()


def flat(items: Any) -> list[Tensor]:
    """The tensors in it, in order."""
    if isinstance(items, Mapping):
        return [t for x in items.values() for t in flat(x)]
    return [t for x in items for t in flat(x)] if isinstance(items, tuple) else [] if items is None else [items]


def compare(
    s: AttentionSpec, q: Any, k: Any, v: Any, tensors: Mapping[str, Tensor], *, params: Mapping[str, Any] | None = None,
    scale: float | None = None, segments: Mapping[str, Any] | None = None, with_dlse: bool = True,
) -> Gradients:  # fmt: skip
    """Both backwards of one random loss over o and lse, which must agree; gradients at empty rows of lse are NaN."""
    q, k, v, tensors, segments = (leaves(i) for i in (q, k, v, dict(tensors), dict(segments or {})))
    params = VALUES if params is None else params
    out = dense.attention(s, q, k, v, params, tensors, scale, segments)
    g = torch.Generator().manual_seed(5)
    do = torch.randn(out.o.shape, generator=g, dtype=torch.float64)
    dlse = torch.randn(out.lse.shape, generator=g, dtype=torch.float64) * with_dlse
    kept = torch.isfinite(out.lse)
    loss = (out.o * do).sum() + (out.lse[kept] * dlse[kept]).sum()
    learned = {t.name: tensors[t.name] for t in s.tensors if t.grad}
    inputs = flat((q, k, v, learned, segments))
    want = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else (None,) * len(inputs)
    found = attention_backward(
        s, q, k, v, out.o.detach(), out.lse.detach(), do, dlse.masked_fill(~kept, torch.nan) if with_dlse else None,
        params, tensors, scale, segments=segments,
    )  # fmt: skip
    assert set(found.captured) == set(learned)
    got = flat((found.dq, found.dk, found.dv, {n: found.captured[n] for n in learned}, found.segments))
    assert len(got) == len(want)
    for a, b, like in zip(got, want, inputs, strict=True):
        b = torch.zeros_like(like) if b is None else b
        assert a.shape == like.shape and not a.requires_grad
        size = 1 + float(b.abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11 * size, equal_nan=False)
    if not s.branches:
        assert (found.dq.transpose(1, 2)[~kept] == 0).all()
    return found


SIZES = [(1, 1), (1, 50), (50, 1), (37, 29), (29, 61), (16, 24), (64, 48), (5, 70)]
HEADS = [(4, 4), (4, 2), (4, 1), (3, 1)]


def grid() -> list[tuple[str, str, str, tuple[int, int], tuple[int, int]]]:
    """Every mask with every score; sinks, sizes and head counts take turns."""
    turns = itertools.cycle(itertools.product(SINKS, SIZES, HEADS))
    return [(m, c, *next(turns)) for m in ALL_MASKS for c in SCORES]


@pytest.mark.parametrize(("mask", "score", "sink", "size", "heads"), grid())
def test_masks_and_scores(mask: str, score: str, sink: str, size: tuple[int, int], heads: tuple[int, int]) -> None:
    s = make(mask, score, sink, dv=12)
    q, k, v = qkv(s, 2, *size, *heads)
    compare(s, q, k, v, tensors_for(s, 2, *size, heads[0]))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("counts", [(2, 4, 2), (0, 4, 2), (2, 0, 0)])
@pytest.mark.parametrize("sink", ["none", "per_head"])
def test_zero_lengths(size: tuple[int, int], counts: tuple[int, int, int], sink: str) -> None:
    """Nothing to do is no error: zeros in the shapes of the inputs."""
    s = make("causal", "alibi", sink)
    b, hq, hkv = counts
    q, k, v = qkv(s, b, *size, hq, hkv)
    t = tensors_for(s, b, *size, hq)
    o, lse = (
        blockwise.attention(s, q, k, v, VALUES, t) if b and hq else (torch.zeros_like(q), q.new_zeros(b, hq, size[0]))
    )
    found = attention_backward(s, q, k, v, o, lse, torch.ones_like(o), torch.ones_like(lse), VALUES, t)
    for g, like in ((found.dq, q), (found.dk, k), (found.dv, v)):
        assert g.shape == like.shape and not g.any()
    assert found.captured["slopes"].shape == t["slopes"].shape and not found.captured["slopes"].any()
    if sink == "per_head" and size == (5, 0) and b and hq:
        # each row's weight is all the sink's: dLSE/dsink = 1
        assert (found.captured["sinks"] == b * size[0]).all()


def zoo(declarations: str, score: str = "s", **clauses: str) -> AttentionSpec:
    """A small spec as it is written; every float tensor is declared `grad`."""
    lines = [line.strip() for line in declarations.split(";") if line.strip()]
    lines = [f"{line} grad" if "f32" in line or "bf16" in line else line for line in lines]
    body = "\n".join(f"  {line}" for line in (*lines, f"score = {score}", *(f"{n} = {e}" for n, e in clauses.items())))
    return load_spec(f'attn 1\ninclude "std.attn"\nattention a {{\n  head_dim = 6\n{body}\n}}\n')


ZOO: dict[str, AttentionSpec] = {
    "softcap": zoo("param cap: float = 2.0", "softcap(s, cap)"),
    "softcap twice": zoo("", "softcap(3.0 * softcap(s, 2.0), 5.0)"),
    "alibi": zoo("tensor m: f32[heads_q]", "alibi(s, m[h])", mask="causal"),
    "alibi per kv head": zoo("tensor m: f32[batch, heads_kv]", "alibi(s, m[b, h_kv])", mask="window(9)"),
    "bias": zoo("tensor x: f32[batch, heads_q, seqlen_q, seqlen_kv]", "biased(s, x)"),
    "bias of rows": zoo("tensor x: f32[batch, heads_q, seqlen_q]", "s * x[b, h, q_idx]"),
    "bias of keys": zoo("tensor x: f32[batch, seqlen_kv]", "key_biased(s, x)", mask="causal"),
    "bias capped": zoo("tensor x: bf16[batch, heads_q, seqlen_q, seqlen_kv]", "softcap(biased(s, x), 1.5)"),
    "t5": zoo("tensor x: f32[32, heads_q]", "s + x[t5_bucket_two_sided(32, 20), h]"),
    "t5 causal": zoo("tensor x: f32[32, heads_q]", "s + x[t5_bucket(32, 20), h]", mask="causal"),
    "distances": zoo("tensor x: f32[140]", "s + x[q_pos - kv_idx + 70]"),
    "swin": zoo(
        "tensor x: f32[15, 15, heads_q]",
        "s + x[q_idx % 8 - kv_idx % 8 + 7, min(q_idx // 8, 7) - min(kv_idx // 8, 7) + 7, h]",
    ),
    "documents": zoo("tensor doc: i32[batch, seqlen_kv]; tensor x: f32[64]", "s + x[doc[b, kv_idx]]"),
    "documents of rows": zoo(
        "tensor doc: i32[batch, seqlen_kv]; tensor x: f32[64, 64]",
        "s + x[doc[b, clamp(q_pos, 0, seqlen_kv - 1)], doc[b, kv_idx]]",
    ),
    "temperature": zoo("tensor t: f32[heads_q]", "s * exp(t[h])"),
    "temperature of rows": zoo("tensor t: f32[batch, seqlen_q]", "s * softplus(t[b, q_idx])", mask="causal"),
    "forgetting": zoo("tensor g: f32[batch, heads_q, seqlen_kv]", "forgetting(s, g)", mask="causal and q_pos >= 0"),
    "rank one": zoo(
        "tensor r: f32[batch, heads_q, seqlen_q]; tensor c: f32[batch, heads_q, seqlen_kv]",
        "s + r[b, h, q_idx] * c[b, h, kv_idx]",
    ),
    "twice": zoo("tensor x: f32[heads_q]", "s * x[h] + tanh(x[h] * s) - x[0]"),
    "both ways": zoo("tensor x: f32[batch, 70]", "s + x[b, q_idx] * x[b, kv_idx]"),
    "mask only": zoo("tensor x: f32[batch, seqlen_kv]; tensor y: f32[heads_q]", "s + y[h]", mask="x[b, kv_idx] > 0.0"),
    "mask and score": zoo("tensor x: f32[batch, seqlen_kv]", "s + x[b, kv_idx]", mask="x[b, kv_idx] > -0.5"),
    "sink": zoo("tensor z: f32[heads_q]", sink="z[h]", mask="causal"),
    "sink of rows": zoo("tensor z: f32[batch, heads_q, seqlen_q]", sink="2.0 * z[b, h, q_idx]", mask="causal"),
    "sink, twice": zoo("tensor z: f32[heads_q]", sink="z[h] * z[h] + z[0]"),
    "sink and score": zoo("tensor z: f32[heads_q]", "s * z[h]", sink="exp(z[h])", mask="window(5)"),
    "log": zoo("tensor x: f32[batch, seqlen_kv]", "s + log(max(x[b, kv_idx], 0.0))"),
    "log of s": zoo("", "log(1.0 + exp(s)) + log2(2.0 + s * s)"),
    "sqrt": zoo("tensor x: f32[heads_q]", "sqrt(abs(s) + exp(x[h])) * 2.0 - abs(s)"),
    "where": zoo("tensor x: f32[heads_q]", "s * x[h] if s > 0.1 else min(s, x[h]) - sigmoid(s)"),
    "clamped": zoo("tensor x: f32[heads_q]", "clamp(s, -0.5, exp(x[h]))"),
    "steps": zoo("tensor x: f32[heads_q]", "s + floor(s) + float(int(x[h] * 3.0))"),
    "gate": zoo("tensor g: f32[batch, seqlen_q, heads_q, head_dim_v]", "s", mask="causal", epilogue="gated(o, g)"),
    "gate in the score too": zoo("tensor g: f32[heads_q]", "s * g[h]", epilogue="o * o * g[h] + g[0] * float(d)"),
    "constant": zoo("", "0.5 * float(kv_idx)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("size", [(37, 61), (61, 29), (1, 9), (9, 1)])
def test_zoo(name: str, size: tuple[int, int]) -> None:
    s = ZOO[name]
    if self_attention(s) and size[0] > size[1]:
        size = size[1], size[0]
    shape = samples.Shape(2, 4, 2, *size)
    found = compare(s, *samples.qkv(s, shape), samples.tensors(s, shape), params=samples.params(s))
    if 1 not in size:  # one key has all the weight whatever its score
        reached = {n for n, g in found.captured.items() if g.any()}
        assert reached == set(found.captured) - {"mask only": {"x"}, "steps": {"x"}}.get(name, set())


def test_extent_one_axes_receive_sums() -> None:
    """A tensor given with extent 1 gets the sum over that axis, whatever indices its declaration is read with."""
    s = ZOO["bias"]
    shape = samples.Shape(2, 4, 2, 37, 29)
    for extents in itertools.product((1, 2), (1, 4), (1, 37), (1, 29)):
        bias = torch.randn(extents, generator=torch.Generator().manual_seed(1))
        assert compare(s, *samples.qkv(s, shape), {"x": bias}, params={}).captured["x"].shape == extents


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.attn")), ids=lambda p: p.stem)
def test_examples(file: Path) -> None:
    small = {
        "window": 19,
        "keys": 20,
        "cap": 2.0,
        "block": 12,
        "chunk": 24,
        "half": 11,
        "q_offset": 40,
        "kv_offset": 29,
    }
    for s in load_all(file):
        params = samples.params(s, {p.name: small[p.name] for p in s.params if p.name in small})
        for size in ((53, 53), (1, 40), (30, 71), *(() if self_attention(s) else ((60, 23),))):
            shape = samples.Shape(1, 4, 2, *size)
            compare(s, *samples.qkv(s, shape), samples.tensors(s, shape), params=params, with_dlse=size[0] != 53)


@pytest.mark.parametrize("level", [-100.0, 100.0])
@pytest.mark.parametrize("score", ["none", "softcap", "alibi"])
def test_far_from_zero(level: float, score: str) -> None:
    """LSE near -100 and +100, in fp32: exponentials are relative to it."""
    s = spec(CAUSAL, SCORES[score] + x(level), sink=x(level), tensors=("slopes",) if score == "alibi" else ())
    q, k, v = qkv(s, 2, 40, 50, 4, 2)
    t = tensors_for(s, 2, 40, 50, 4)
    found = compare(s, q, k, v, t)
    out = dense.attention(s, q, k, v, VALUES, t)
    assert (out.lse - level).abs().max() < 20
    narrow = [i.float() for i in (q, k, v)]
    o, lse = blockwise.attention(s, *narrow, VALUES, t)
    g = torch.Generator().manual_seed(5)
    do = torch.randn(o.shape, generator=g, dtype=torch.float64).float()
    dlse = torch.randn(lse.shape, generator=g, dtype=torch.float64).float()
    again = attention_backward(s, *narrow, o, lse, do, dlse, VALUES, t)
    for a, b in zip(flat(tuple(again)), flat(tuple(found)), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normalizer", [Normalizer.SIGMOID, Normalizer.RELU])
@pytest.mark.parametrize("score", SCORES)
def test_other_normalizers(normalizer: Normalizer, score: str) -> None:
    """Weights without a sum over the row; LSE keeps its meaning and its gradient."""
    s = make("left_pad", score).replace(normalizer=normalizer)
    q, k, v = qkv(s, 2, 37, 50, 4, 2)
    compare(s, q, k, v, tensors_for(s, 2, 37, 50, 4))


def test_branches() -> None:
    """Two score sets over one V, each with its own score, mask, sink and learned weight; an epilogue behind both."""
    gate, slope, sink = load("gate", B, Q, H, D, dtype=F32), load("slopes", H, dtype=F32), load("sinks", H, dtype=F32)
    branches = (
        Branch(name="a", score=(S - slope * (QP - K)).e, mask=CAUSAL.e, sink=sink.e, weight=x(1.0).e),
        Branch(name="b", score=(f("tanh", S) * slope).e, mask=(QP - K < 9).e, weight=(-f("exp", slope)).e),
    )
    for epilogue in (O, O * f("sigmoid", gate)):
        s = spec(branches=branches, epilogue=epilogue, tensors=("slopes", "sinks", "gate"))
        t = tensors_for(s, 2, 37, 29, 4)
        one, two = qkv(s, 2, 37, 29, 4, 2), qkv(s, 2, 37, 29, 4, 2, seed=1)
        found = compare(s, (one[0], two[0]), (one[1], two[1]), one[2], t)
        assert isinstance(found.dq, tuple) and isinstance(found.dk, tuple)
        # one tensor in both places has two gradients
        compare(s, (one[0], one[0]), (one[1], one[1]), one[2], t)


def test_segments() -> None:
    """Further keys under the same softmax, shorter than the call's own, with their own score and mask."""
    extra = (
        Segment(name="memory", score=(S * load("slopes", H, dtype=F32)).e, mask=(K != 3).e),
        Segment(name="sinks_", score=S.e, mask=x(True).e),
    )
    s = spec(CAUSAL, f("tanh", S) * 2.0, segments=extra, sink=load("sinks", H, dtype=F32), tensors=("slopes", "sinks"))
    q, k, v = qkv(s, 2, 37, 29, 4, 2)
    _, *memory = qkv(s, 2, 1, 31, 4, 2, seed=1)
    _, *few = qkv(s, 2, 1, 4, 4, 2, seed=2)
    segments = {"memory": tuple(memory), "sinks_": tuple(few)}
    found = compare(s, q, k, v, tensors_for(s, 2, 37, 29, 4), segments=segments)
    assert all(g.any() for pair in found.segments.values() for g in pair)


def test_v_as_a_view_of_k() -> None:
    s = spec(CAUSAL, S, d=12, dv=8, v_view_start=3)
    q, k, _ = qkv(s, 2, 37, 29, 4, 1)
    assert compare(s, q, k, None, {}).dv is None


def test_scale_of_the_call() -> None:
    s = make("causal", "softcap")
    q, k, v = qkv(s, 2, 37, 29, 4, 2)
    compare(s, q, k, v, {}, scale=0.7)
    compare(s, q, k, v, {}, scale=0.0)
    compare(s, q, k, v, {}, scale=-0.3)


def test_scores_without_a_value() -> None:
    """-inf where kept, poles where dropped: no gradient passes there, and no NaN reaches anything."""
    bias = load("bias", B, H, Q, K, dtype=F32)
    for score in (S + bias, S * f("log", bias), S + f("sqrt", bias), S / bias, S + f("log", f("max", bias, 0.0))):
        s = spec(CAUSAL & (K != 2), score, tensors=("bias",))
        q, k, v = qkv(s, 2, 37, 41, 2, 1)
        values = torch.rand(2, 2, 37, 41, generator=torch.Generator().manual_seed(1)) + 0.5
        values[..., 2] = 0.0  # a pole of all but the first, under keys that the mask drops
        if score.e == (S + bias).e:
            values[:, :, :, ::5] = -torch.inf
            values[:, 1, 3] = -torch.inf  # a row that is left with nothing
        found = compare(s, q, k, v, {"bias": values})
        assert all(torch.isfinite(g).all() for g in flat(tuple(found)))


def test_kept_keys_of_score_minus_infinity_next_to_a_pole() -> None:
    """log(0) at kept keys has slope 1 / 0: dz is 0 there, and so is what it gives."""
    bias = load("bias", B, H, Q, K, dtype=F32)
    s = spec(CAUSAL, S + f("log", bias), tensors=("bias",))
    q, k, v = qkv(s, 1, 9, 9, 1, 1)
    values = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(1)) + 0.5
    values[0, 0, 5, 3] = 0.0
    found = compare(s, q, k, v, {"bias": values})
    assert found.captured["bias"][0, 0, 5, 3] == 0 and found.captured["bias"][0, 0, 5, 2] != 0


def test_rows_that_a_kernel_took_for_empty() -> None:
    """A kernel counts scores that fp32 does not resolve as -inf: LSE is -inf beside finite scores, and decides."""
    s = make("causal", "alibi", "per_head")
    q, k, v = qkv(s, 2, 37, 41, 4, 2)
    t = tensors_for(s, 2, 37, 41, 4)
    out = dense.attention(s, q, k, v, VALUES, t)
    do, empty = torch.ones_like(out.o), torch.zeros(2, 4, 37, dtype=torch.bool)
    empty[:, 1, ::3] = True
    rows = empty.transpose(1, 2).unsqueeze(-1)
    o, lse = out.o.masked_fill(rows, 0.0), out.lse.masked_fill(empty, -torch.inf)
    found = attention_backward(s, q, k, v, o, lse, do, out.lse, VALUES, t)
    assert all(torch.isfinite(g).all() for g in flat(tuple(found)))
    assert not found.dq.masked_select(rows).any() and found.dq.masked_select(~rows).any()
    # as if those rows had no gradient
    without = attention_backward(
        s, q, k, v, out.o, out.lse, do.masked_fill(rows, 0.0), out.lse.masked_fill(empty, 0.0), VALUES, t
    )
    for a, b in zip(flat(tuple(found)), flat(tuple(without)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


NAMES = ("q", "k", "v", "slopes", "sinks")


@pytest.mark.parametrize("wanted", [c for n in range(6) for c in itertools.combinations(NAMES, n)], ids="+".join)
def test_only_what_is_wanted(wanted: tuple[str, ...]) -> None:
    """The same numbers, and None or nothing for the rest."""
    s = make("causal", "alibi", "per_head")
    q, k, v = qkv(s, 2, 37, 29, 4, 2)
    t = tensors_for(s, 2, 37, 29, 4)
    out = dense.attention(s, q, k, v, VALUES, t)
    do, dlse = torch.ones_like(out.o), torch.zeros_like(out.lse)
    every = attention_backward(s, q, k, v, out.o, out.lse, do, dlse, VALUES, t)
    found = attention_backward(s, q, k, v, out.o, out.lse, do, None, VALUES, t, wanted=wanted)
    for name in "qkv":
        got, want = getattr(found, f"d{name}"), getattr(every, f"d{name}")
        assert got is None if name not in wanted else torch.equal(got, want)
    assert set(found.captured) == {*wanted} - {*"qkv"}
    assert all(torch.equal(g, every.captured[n]) for n, g in found.captured.items())


def test_unknown_wanted() -> None:
    s = make("left_pad", "alibi")
    q, k, v = qkv(s, 1, 4, 4, 1, 1)
    t = tensors_for(s, 1, 4, 4, 1)
    o, lse = blockwise.attention(s, q, k, v, VALUES, t)
    for name in ("start", "nothing"):
        with pytest.raises(AttnError, match=name) as caught:
            attention_backward(s, q, k, v, o, lse, o, lse, VALUES, t, wanted=("q", name))
        assert caught.value.code == "E0651"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", ["none", "softcap", "bias"])
def test_narrow_inputs_by_the_error_rule(dtype: torch.dtype, score: str) -> None:
    """From rounded o and fp32 LSE, as a call saves them: at most twice the error of plain torch code, and 2 ulps."""
    s = make("causal", score, "per_head")
    q, k, v = qkv(s, 2, 70, 90, 4, 2, dtype=dtype)
    t = tensors_for(s, 2, 70, 90, 4)
    do = torch.randn(2, 70, 4, 8, generator=torch.Generator().manual_seed(3)).to(dtype)

    def torchs(run: Any, kind: torch.dtype) -> list[Tensor]:
        inputs = [i.to(kind).detach().requires_grad_() for i in (q, k, v)]
        learned = {
            n: i.clone().to(torch.float64 if kind is torch.float64 else i.dtype).requires_grad_() for n, i in t.items()
        }
        o = run(s, *inputs, VALUES, learned).o
        return list(torch.autograd.grad(o, [*inputs, *learned.values()], do.to(o.dtype)))

    exact, plain = torchs(dense.attention, torch.float64), torchs(dense.same_dtype, dtype)
    o, lse = blockwise.attention(s, q, k, v, VALUES, t)
    found = attention_backward(s, q, k, v, o, lse, do, None, VALUES, t)
    for got, reference, yardstick in zip(flat(tuple(found)), exact, plain, strict=True):
        assert got.dtype == yardstick.dtype
        ulp = float(torch.finfo(got.dtype).eps * reference.abs().max())
        allowed = 2 * float((yardstick.double() - reference).abs().max()) + 2 * ulp
        assert float((got.double() - reference).abs().max()) <= allowed


@pytest.mark.parametrize(
    "s",
    [
        zoo("tensor x: f32[batch, heads_q, seqlen_q, seqlen_kv]", "softcap(biased(s, x), 2.0)", mask="causal"),
        zoo("tensor m: f32[heads_q]; tensor z: f32[heads_q]", "alibi(s, m[h])", mask="window(3)", sink="z[h]"),
        zoo("tensor x: f32[11]", "s * exp(x[q_pos - kv_idx + 5]) + sqrt(abs(s) + 1.0)"),
        zoo("tensor g: f32[batch, seqlen_q, heads_q, head_dim_v]", "log(s * s + 1.0)", epilogue="gated(o, g)"),
        zoo("tensor x: f32[heads_q]", "s * x[h]", normalizer="sigmoid", mask="causal"),
    ],
    ids=["bias", "alibi", "distances", "gate", "sigmoid"],
)  # fmt: skip
def test_gradcheck(s: AttentionSpec) -> None:
    """The blockwise backward as the backward of the dense meaning, against finite differences of that."""
    names = [t.name for t in s.tensors]
    shape = samples.Shape(1, 2, 1, 5, 4)
    inputs = leaves((*samples.qkv(s, shape), *samples.tensors(s, shape).values()))

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Tensor) -> tuple[Tensor, Tensor]:
            out = dense.attention(s, *args[:3], tensors=dict(zip(names, args[3:], strict=True)))
            ctx.save_for_backward(*args, out.o, out.lse)
            return out.o, out.lse

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
            *args, o, lse = ctx.saved_tensors
            tensors = dict(zip(names, args[3:], strict=True))
            found = attention_backward(s, *args[:3], o, lse, *gradients, tensors=tensors)
            return (found.dq, found.dk, found.dv, *(found.captured[n] for n in names))

    def finite(*args: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = Call.apply(*args)
        return o, torch.where(torch.isfinite(lse), lse, 0.0)

    assert gradcheck(finite, inputs, atol=1e-6)


def test_equal_bits_from_run_to_run() -> None:
    s = ZOO["t5"]
    shape = samples.Shape(2, 4, 2, 60, 70)
    q, k, v = samples.qkv(s, shape)
    t = samples.tensors(s, shape)
    o, lse = blockwise.attention(s, q, k, v, tensors=t)
    runs = [flat(tuple(attention_backward(s, q, k, v, o, lse, o, lse, tensors=t))) for _ in range(3)]
    assert all(torch.equal(a, b) for again in runs[1:] for a, b in zip(runs[0], again, strict=True))


def peak_bytes(n: int, score: str) -> int:
    """Most bytes allocated at once by the backward of n rows and keys, beyond what there was before."""
    s = make("causal", score, "per_head")
    q, k, v = qkv(s, 1, n, n, 2, 1, dtype=torch.float32)
    t = tensors_for(s, 1, n, n, 2)
    o, lse = blockwise.attention(s, q, k, v, VALUES, t)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attention_backward(s, q, k, v, o, lse, o, lse, VALUES, t)
    records = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in records if e.name() == "[memory]")
    assert changes
    return max(itertools.accumulate(c for _, c in changes))


@pytest.mark.parametrize("score", ["none", "alibi"])
def test_memory_grows_with_the_length_not_its_square(score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "ROWS", 64)
    monkeypatch.setattr(blockwise, "KEYS", 128)
    monkeypatch.setattr(blockwise, "SCORES", 2 * 64 * 128)
    small, large = (peak_bytes(n, score) for n in (1024, 4096))
    assert large < 4.5 * small
    assert large < 4096 * 4096 * 4 / 8
