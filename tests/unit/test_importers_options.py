"""from_flash, from_sdpa and from_cudnn: each convention against its formula, written out here on positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.importers import Imported
from attngen.importers.cudnn import alibi_slopes
from attngen.ir.expr import tensors_of
from attngen.ir.plan import Rescale
from attngen.passes.mask_form import mask_form
from attngen.ref import ragged
from attngen.ref.dense import attention
from attngen.search import plan
from attngen.syntax import load_spec, print_expr

GENERATOR = torch.Generator().manual_seed(6)
INF = math.inf
BATCH, HEADS = 2, 4
LENGTHS = [(13, 13), (9, 20), (20, 9), (1, 17)]


def randn(*shape: int, **more: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, **more)


def qkv(seqlen_q: int, seqlen_kv: int, batch: int = BATCH) -> tuple[torch.Tensor, ...]:
    """In (B, S, H, D)."""
    shapes = (seqlen_q, HEADS), (seqlen_kv, 2), (seqlen_kv, 2)
    return tuple(randn(batch, n, h, 8, dtype=torch.float64) for n, h in shapes)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, f: Any, sink: Any = None) -> torch.Tensor:
    """softmax(f(scale <q, k>)) v with -inf where a key is not kept; f(s, rows, keys) on grids."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    s = f(scale * q @ k.mT, i, j)
    if sink is not None:
        s = torch.cat([s, sink.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return (torch.softmax(s, -1).nan_to_num(0.0) @ v).transpose(1, 2)


def check(
    found: Imported, inputs: tuple[torch.Tensor, ...], f: Any, *, scale: float = 8**-0.5, sink: Any = None
) -> None:
    assert load_spec(found.text) == found.spec
    got = attention(found.spec, *inputs, tensors=found.tensors).o
    torch.testing.assert_close(got, dense(*inputs, scale, f, sink), rtol=1e-6, atol=1e-7)


def kept(found: Imported, seqlen_q: int, seqlen_kv: int) -> int:
    """Pairs that a head keeps, counted through the weights of a uniform score."""
    q = torch.zeros(1, seqlen_q, 1, 8, dtype=torch.float64)
    k = torch.zeros(1, seqlen_kv, 1, 8, dtype=torch.float64)
    return round(float(attention(found.spec, q, k, k, tensors=found.tensors).lse.exp().sum()))


# -- FlashAttention ------------------------------------------------------------------------------------------------

WINDOWS = [(-1, -1), (None, 0), (3, -1), (-1, 2), (3, 0), (0, 0), (4, 2)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_flash_causal_and_windows(window: tuple[int | None, int], causal: bool, lengths: tuple[int, int]) -> None:
    sq, sk = lengths
    left, right = (INF if x in (None, -1) else x for x in window)
    right = 0 if causal else right

    def keep(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(~((j >= i + sk - sq - left) & (j <= i + sk - sq + right)), -INF)

    check(attngen.from_flash(head_dim=8, causal=causal, window_size=window), qkv(sq, sk), keep)


def test_flash_counts() -> None:
    def flash(**options: Any) -> Imported:
        return attngen.from_flash(head_dim=8, **options)

    assert kept(flash(causal=True), 1000, 1000) == 500500
    assert kept(flash(causal=True), 300, 1000) == 255150
    assert kept(flash(causal=True), 1000, 300) == 45150
    assert kept(flash(causal=True, window_size=(128, 0)), 1000, 1000) == 120744
    assert kept(flash(causal=True, window_size=(127, 0)), 1000, 1000) == 119872
    assert kept(flash(window_size=(64, 64)), 1000, 1000) == 124840


def test_flash_widths_and_caps_are_params() -> None:
    found = attngen.from_flash(head_dim=64, window_size=(7, 3), softcap=30.0)
    assert found.params == {"window_right": 3, "window_left": 7, "cap": 30.0}
    assert [p.minimum for p in found.spec.params] == [0, 0, 1.0]
    other = attngen.from_flash(head_dim=64, window_size=(9, 1), softcap=50.0)
    assert other.spec.mask == found.spec.mask and other.spec.score == found.spec.score


@pytest.mark.parametrize(
    ("softcap", "dtype", "rescale"),
    [(30.0, "bf16", Rescale.BOUNDED), (0.25, "bf16", Rescale.BOUNDED), (51.0, "bf16", Rescale.ON_GROWTH),
     (30.0, "fp16", Rescale.ON_GROWTH)],
)  # fmt: skip
def test_flash_caps_bound_their_scores(softcap: float, dtype: str, rescale: Rescale) -> None:
    """The range that a cap declares is one whose kernel follows no maxima, where there is such a range."""
    spec = attngen.from_flash(head_dim=64, softcap=softcap, dtype=dtype).spec
    (cap,) = spec.params
    assert cap.minimum is None or cap.minimum <= softcap <= cap.maximum
    assert {p.compute.rescale for p in plan(spec).plans} == {rescale}


def test_flash_softcap_then_alibi() -> None:
    slopes = torch.rand(HEADS, generator=GENERATOR)
    found = attngen.from_flash(head_dim=8, softcap=2.0, alibi_slopes=slopes, softmax_scale=0.9)

    def score(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return 2.0 * torch.tanh(s / 2.0) - slopes.double()[None, :, None, None] * (i + 11 - j).abs()

    check(found, qkv(9, 20), score, scale=0.9)


def test_flash_alibi_of_each_batch_element() -> None:
    slopes = torch.rand(BATCH, HEADS, generator=GENERATOR)
    found = attngen.from_flash(head_dim=8, causal=True, alibi_slopes=slopes)

    def score(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (s - slopes.double()[:, :, None, None] * (i + 11 - j).abs()).masked_fill(j > i + 11, -INF)

    check(found, qkv(9, 20), score)


def test_flash_sink() -> None:
    sinks = randn(HEADS, requires_grad=True)
    found = attngen.from_flash(head_dim=8, causal=True, learnable_sink=sinks, deterministic=True)
    assert found.spec.tensor("sinks").grad and found.tensors["sinks"].shape == (HEADS,)
    assert found.spec.backward.deterministic
    check(found, qkv(13, 13), lambda s, i, j: s.masked_fill(j > i, -INF), sink=sinks.detach())


@pytest.mark.parametrize("used", [(True, True), (False, True), (True, False)])
def test_flash_padded_lengths(used: tuple[bool, bool]) -> None:
    lengths_q = torch.tensor([9, 4], dtype=torch.int32) if used[0] else None
    lengths_k = torch.tensor([20, 6], dtype=torch.int32) if used[1] else None
    found = attngen.from_flash(head_dim=8, causal=True, window_size=(3, 0), seqused_q=lengths_q, seqused_k=lengths_k)
    nq = (lengths_q if used[0] else torch.full((2,), 9))[:, None, None, None]
    nk = (lengths_k if used[1] else torch.full((2,), 20))[:, None, None, None]

    def keep(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        p = i + nk - nq
        return s.masked_fill(~((i < nq) & (j < nk) & (j <= p) & (j >= p - 3)), -INF)

    check(found, qkv(9, 20), keep)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_flash_packed_sequences_are_calls_of_their_own(same: bool, causal: bool) -> None:
    q_lengths, k_lengths = [3, 0, 7, 5], [3, 0, 7, 5] if same else [6, 2, 4, 0]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in (q_lengths, k_lengths))
    slopes = torch.rand(4, HEADS, generator=GENERATOR)
    options: dict[str, Any] = {"head_dim": 8, "causal": causal, "window_size": (2, 1)}
    found = attngen.from_flash(**options, alibi_slopes=slopes, cu_seqlens_q=cu_q, cu_seqlens_k=None if same else cu_k)
    assert load_spec(found.text) == found.spec
    q, k, v = qkv(sum(q_lengths), sum(k_lengths), 1)
    got = attention(found.spec, q, k, v, tensors=found.tensors).o
    for n in range(4):
        alone = attngen.from_flash(**options, alibi_slopes=slopes[n])
        rows, keys = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        want = attention(alone.spec, q[:, rows], k[:, keys], v[:, keys], tensors=alone.tensors).o
        torch.testing.assert_close(got[:, rows], want)
    other = attngen.from_flash(**options, alibi_slopes=slopes[:1], cu_seqlens_q=torch.tensor([0, 8]))
    assert other.spec == found.spec  # lengths are values


# -- torch's SDPA --------------------------------------------------------------------------------------------------


def against_sdpa(found: Imported, lengths: tuple[int, int], **options: Any) -> None:
    assert load_spec(found.text) == found.spec
    q, k, v = qkv(*lengths)
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **options)
    got = attention(found.spec, q, k, v, tensors=found.tensors).o
    torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_causal_is_top_left(causal: bool, lengths: tuple[int, int]) -> None:
    against_sdpa(attngen.from_sdpa(head_dim=8, is_causal=causal, scale=0.6), lengths, is_causal=causal, scale=0.6)


SHAPES = {
    (9, 20): 2,
    (1, 20): 1,
    (BATCH, 1, 1, 20): 2,
    (HEADS, 9, 20): 3,
    (BATCH, HEADS, 9, 20): 4,
    (1, HEADS, 9, 1): 2,
    (1, 1): 1,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_sdpa_masks_of_every_shape(shape: tuple[int, ...]) -> None:
    keep = torch.rand(shape, generator=GENERATOR) < 0.7
    found = attngen.from_sdpa(head_dim=8, attn_mask=keep)
    assert len(found.spec.tensors[0].dims) == SHAPES[shape]
    against_sdpa(found, (9, 20), attn_mask=keep)
    bias = randn(*shape, requires_grad=True)
    found = attngen.from_sdpa(head_dim=8, attn_mask=bias)
    assert found.spec.tensor("bias").grad and found.tensors["bias"].requires_grad
    against_sdpa(found, (9, 20), attn_mask=bias.double())


def test_sdpa_bias_of_minus_infinity() -> None:
    bias = torch.where(torch.rand(9, 20, generator=GENERATOR) < 0.5, 0.0, -INF)
    against_sdpa(attngen.from_sdpa(head_dim=8, attn_mask=bias), (9, 20), attn_mask=bias.double())


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_sdpa_causal_objects(make: Any) -> None:
    with torch.no_grad():
        found = attngen.from_sdpa(head_dim=8, attn_mask=make(9, 20))
        assert not found.tensors
        against_sdpa(found, (9, 20), attn_mask=make(9, 20)._materialize())


# -- cuDNN ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("left, right", [(None, None), (None, 0), (1, 0), (4, 0), (4, 2), (None, 3), (2, None)])
@pytest.mark.parametrize("alignment", ["TOP_LEFT", "BOTTOM_RIGHT", None])
def test_cudnn_bands(alignment: str | None, left: int | None, right: int | None, lengths: tuple[int, int]) -> None:
    sq, sk = lengths
    shift = sk - sq if alignment == "BOTTOM_RIGHT" else 0
    found = attngen.from_cudnn(
        head_dim=8, diagonal_alignment=alignment, diagonal_band_left_bound=left, diagonal_band_right_bound=right
    )

    def keep(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        low = INF if left is None else left
        high = INF if right is None else right
        return s.masked_fill(~((j > i + shift - low) & (j <= i + shift + high)), -INF)

    check(found, qkv(sq, sk), keep, scale=1.0)


def test_cudnn_causal_flags_and_the_old_name_of_the_window() -> None:
    def spec(**options: Any) -> Any:
        return attngen.from_cudnn(head_dim=8, **options).spec

    assert spec(use_causal_mask=True) == spec(diagonal_band_right_bound=0)
    lower = spec(use_causal_mask_bottom_right=True)
    assert lower == spec(diagonal_band_right_bound=0, diagonal_alignment="diagonal_alignment.BOTTOM_RIGHT")
    window = spec(use_causal_mask=True, sliding_window_length=128)
    assert window == spec(diagonal_band_left_bound=128, diagonal_band_right_bound=0)
    assert kept(attngen.from_cudnn(head_dim=8, use_causal_mask=True, sliding_window_length=128), 1000, 1000) == 119872
    assert kept(attngen.from_cudnn(head_dim=8, use_causal_mask=True), 300, 1000) == 45150


@pytest.mark.parametrize("bottom_right", [False, True])
def test_cudnn_padding(bottom_right: bool) -> None:
    nq, nk = (torch.tensor(x, dtype=torch.int32).view(2, 1, 1, 1) for x in ([9, 4], [20, 6]))
    found = attngen.from_cudnn(
        head_dim=8,
        use_padding_mask=True,
        seq_len_q=nq,
        seq_len_kv=nk,
        use_causal_mask=not bottom_right,
        use_causal_mask_bottom_right=bottom_right,
    )

    def keep(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return s.masked_fill(~((i < nq) & (j < nk) & (j <= i + (nk - nq if bottom_right else 0))), -INF)

    check(found, qkv(9, 20), keep, scale=1.0)


def test_cudnn_bias_alibi_and_sink() -> None:
    bias, sinks = randn(1, HEADS, 9, 20), randn(1, HEADS, 1, 1)
    found = attngen.from_cudnn(
        head_dim=8,
        attn_scale=0.4,
        bias=bias,
        use_alibi_mask=True,
        heads_q=HEADS,
        use_causal_mask=True,
        sink_token=sinks,
    )
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]).double()[None, :, None, None]

    def score(s: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (s + bias.double() + slopes * (j - i)).masked_fill(j > i, -INF)

    check(found, qkv(9, 20), score, scale=0.4, sink=sinks.view(-1))


def test_slopes_of_a_head_count_that_is_no_power_of_two() -> None:
    twelve = [2.0 ** -(h + 1) for h in range(8)] + [2.0 ** -(h + 0.5) for h in range(4)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(twelve))
    assert alibi_slopes(1).tolist() == [2.0**-8]


# -- what is made of them ------------------------------------------------------------------------------------------

CU = torch.tensor([0, 5, 9])
CLAUSES: list[tuple[Imported, list[tuple[str | None, str | None]]]] = [
    (attngen.from_flash(head_dim=64, causal=True), [(None, "q_pos + 1")]),
    (attngen.from_sdpa(head_dim=64, is_causal=True), [(None, "q_idx + 1")]),
    (
        attngen.from_cudnn(head_dim=64, use_padding_mask=True, seq_len_q=CU, seq_len_kv=CU, use_causal_mask=True),
        [(None, "min(len_kv[b], q_idx + 1)")],
    ),
]


@pytest.mark.parametrize("found, wanted", CLAUSES, ids=["flash", "sdpa", "cudnn"])
def test_masks_are_intervals(found: Imported, wanted: list[tuple[str | None, str | None]]) -> None:
    clauses = mask_form(found.spec).clauses
    shown = [tuple(None if e is None else print_expr(e) for e in (c.lower, c.upper)) for c in clauses]
    assert shown == wanted and all(c.residual is None for c in clauses)


def test_packed_sequences_are_intervals() -> None:
    found = attngen.from_flash(head_dim=64, causal=True, window_size=(5, 0), cu_seqlens_q=CU)
    (clause,) = mask_form(found.spec).clauses
    assert clause.residual is None and clause.lower is not None and clause.upper is not None
    assert tensors_of(clause.lower) | tensors_of(clause.upper) == {"first_key", "end_key", "diagonal"}


def test_built_callables_take_what_the_libraries_take() -> None:
    q, k, v = (torch.randn(2, 30, h, 64, generator=GENERATOR).to(torch.bfloat16) for h in (4, 2, 2))
    wide = [x.transpose(1, 2) for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*(x.float() for x in wide), is_causal=True, enable_gqa=True)
    spec, tensors = attngen.from_flash(head_dim=64, causal=True)
    torch.testing.assert_close(
        attngen.build(spec)(q, k, v, **tensors).float().transpose(1, 2), want, rtol=0.02, atol=0.02
    )
    spec, tensors = attngen.from_sdpa(head_dim=64, is_causal=True)
    torch.testing.assert_close(attngen.build(spec)(*wide, **tensors).float(), want, rtol=0.02, atol=0.02)


# -- faults --------------------------------------------------------------------------------------------------------

INTS = torch.zeros(2, dtype=torch.int32)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (attngen.from_flash, {"dropout_p": 0.1}, "no dropout"),
    (attngen.from_flash, {"window_size": (-3, 0)}, "holds -3"),
    (attngen.from_flash, {"window_size": (1,)}, "has 1 numbers"),
    (attngen.from_flash, {"softcap": -1.0}, "is -1.0"),
    (attngen.from_flash, {"alibi_slopes": torch.zeros(1, 1, 1)}, "shape (1, 1, 1)"),
    (attngen.from_flash, {"cu_seqlens_k": INTS}, "without cu_seqlens_q"),
    (attngen.from_flash, {"cu_seqlens_q": INTS, "seqused_k": INTS}, "beside cu_seqlens"),
    (attngen.from_flash, {"cu_seqlens_q": torch.tensor([0, 3, 2])}, "decreases"),
    (attngen.from_flash, {"cu_seqlens_q": torch.tensor([1, 3])}, "start at 0"),
    (attngen.from_flash, {"cu_seqlens_q": torch.tensor([0.0, 3.0])}, "float32"),
    (attngen.from_flash, {"cu_seqlens_q": INTS, "cu_seqlens_k": torch.tensor([0, 1, 2])}, "has 3 entries"),
    (attngen.from_flash, {"seqused_k": torch.zeros(2, 2, dtype=torch.int32)}, "shape (2, 2)"),
    (attngen.from_flash, {"layout": "varlen", "seqused_k": INTS}, "lengths of the other kind"),
    (attngen.from_flash, {"layout": "varlen"}, "without cu_seqlens_q"),
    (attngen.from_flash, {"layout": "padded", "seqused_k": torch.zeros(2)}, "float32"),
    (attngen.from_sdpa, {"dropout_p": 0.1}, "no dropout"),
    (attngen.from_sdpa, {"is_causal": True, "attn_mask": INTS}, "beside attn_mask"),
    (attngen.from_sdpa, {"attn_mask": INTS}, "is torch.int32"),
    (attngen.from_sdpa, {"attn_mask": torch.zeros(1, 1, 1, 1, 2)}, "has 5 axes"),
    (attngen.from_cudnn, {"dropout": (0.1, 0, 0)}, "no dropout"),
    (attngen.from_cudnn, {"use_causal_mask": True, "use_causal_mask_bottom_right": True}, "beside"),
    (attngen.from_cudnn, {"use_causal_mask": True, "diagonal_alignment": "BOTTOM_RIGHT"}, "contradicts"),
    (attngen.from_cudnn, {"use_causal_mask": True, "diagonal_band_right_bound": 2}, "causal mask"),
    (attngen.from_cudnn, {"diagonal_alignment": "MIDDLE"}, "is MIDDLE"),
    (attngen.from_cudnn, {"sliding_window_length": 4}, "without a causal mask"),
    (attngen.from_cudnn, {"sliding_window_length": 4, "diagonal_band_left_bound": 4}, "beside"),
    (attngen.from_cudnn, {"diagonal_band_left_bound": 0}, "at least 1"),
    (attngen.from_cudnn, {"diagonal_band_right_bound": -1}, "at least 0"),
    (attngen.from_cudnn, {"use_padding_mask": True, "seq_len_q": INTS}, "without seq_len_q and seq_len_kv"),
    (attngen.from_cudnn, {"seq_len_q": INTS}, "without use_padding_mask"),
    (attngen.from_cudnn, {"use_alibi_mask": True}, "without a causal mask"),
    (attngen.from_cudnn, {"use_alibi_mask": True, "use_causal_mask": True}, "number of heads"),
]


@pytest.mark.parametrize("build, options, message", REFUSED, ids=[f"{b.__name__}-{m}" for b, _, m in REFUSED])
def test_refused(build: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AttnError) as caught:
        build(head_dim=64, **options)
    (found,) = caught.value.diagnostics
    assert found.code == "E0706" and message in found.message and found.helps


def test_flash_lengths_by_layout() -> None:
    """The same numbers as by a mask, from a call that takes the lengths."""
    cu_q, cu_k = torch.tensor([0, 3, 3, 9]), torch.tensor([0, 5, 7, 20])
    slopes = torch.rand(3, 2)
    options: dict[str, Any] = {"head_dim": 8, "causal": True, "window_size": (3, 0), "alibi_slopes": slopes}
    spec, tensors = attngen.from_flash(**options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, layout="varlen")
    assert spec.layout == "varlen" and {t.name for t in spec.tensors} == {"slopes"}
    assert tensors["cu_seqlens_q"].dtype == tensors["cu_seqlens_kv"].dtype == torch.int32
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (9, 20, 20))
    lengths = {n: tensors[n] for n in ("cu_seqlens_q", "cu_seqlens_kv")}
    o, _ = ragged.attention(spec, q, k, v, lengths, None, {"slopes": tensors["slopes"]})
    packed, more = attngen.from_flash(**options, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    want = attention(packed, q[None], k[None], v[None], tensors=more)
    assert torch.allclose(o, want.o[0], atol=1e-10)
    used = torch.tensor([2, 5])
    spec, tensors = attngen.from_flash(head_dim=8, causal=True, seqused_k=used, layout="padded")
    assert spec.layout == "padded" and tensors["seqused_kv"].tolist() == [2, 5] and not spec.tensors
