"""from_flex against torch's flex_attention itself: eager on the CPU, in float64, on random inputs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

import attngen
from attngen.diag.diagnostic import AttnError
from attngen.importers import Imported
from attngen.ir.spec import BlockSparse
from attngen.ref import interp
from attngen.ref.dense import attention_bhsd
from attngen.search import plan
from attngen.syntax import load_spec

BATCH, HEADS, LENGTH = 2, 4, 37
GENERATOR = torch.Generator().manual_seed(5)


@pytest.fixture(autouse=True)
def plain_eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without this, flex_attention compiles its functions with Dynamo, in eager mode too."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    yield


def randn(*shape: int, **more: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, **more)


def same(
    score: Any = None,
    mask: Any = None,
    *,
    seqlen_q: int = LENGTH,
    seqlen_kv: int = LENGTH,
    heads_kv: int = 2,
    **more: Any,
) -> Imported:
    """Trace, print and parse back, and compare O and LSE with flex_attention."""
    found = attngen.from_flex(score, mask, head_dim=8, **more)
    assert load_spec(found.text) == found.spec
    q = randn(BATCH, HEADS, seqlen_q, 8, dtype=torch.float64)
    k, v = (randn(BATCH, heads_kv, seqlen_kv, 8, dtype=torch.float64) for _ in range(2))
    blocks = None
    if mask is not None:

        def function(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return mask(b, h, q_idx, kv_idx)  # torch takes no bound methods

        blocks = flex.create_block_mask(function, BATCH, HEADS, seqlen_q, seqlen_kv, device="cpu", BLOCK_SIZE=16)
    want, aux = flex.flex_attention(
        q,
        k,
        v,
        score_mod=score,
        block_mask=blocks,
        enable_gqa=True,
        return_aux=flex.AuxRequest(lse=True),
        scale=more.get("scale"),
    )
    got = attention_bhsd(found.spec, q, k, v, tensors=found.tensors)
    torch.testing.assert_close(got.o, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.lse, aux.lse, rtol=1e-6, atol=1e-6)
    return found


WINDOW = 9
DOC = torch.randint(0, 5, (BATCH, LENGTH), generator=GENERATOR).sort(dim=-1).values
BIAS = randn(HEADS, LENGTH, LENGTH)
SLOPES = torch.exp2(-torch.arange(1, HEADS + 1) * 2.0)
PREFIX = torch.tensor([5, 20])


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx < WINDOW


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOC[b, q_idx] == DOC[b, kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < PREFIX[b]


def dilated(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    diff = q_idx - kv_idx
    return ((diff >= 0) & (diff < 20)) & ((diff % 2) == 0)


def blockwise(b: Any, h: Any, q_idx: Any, kv_idx: Any, size: int) -> Any:
    return q_idx // size >= kv_idx // size


def per_head(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(h % 2 == 0, q_idx >= kv_idx, torch.abs(q_idx - kv_idx) <= h + 3)


def bits(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return ((q_idx & 7) == (kv_idx & 7)) | (q_idx >> 3 == kv_idx >> 3) ^ (kv_idx << 1 > 30)


def logical(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    far = torch.logical_not(torch.logical_or(q_idx < kv_idx, kv_idx.eq(3)))
    return torch.logical_and(far, kv_idx.ne(0)) | (~(kv_idx > 2) & b.new_ones((), dtype=torch.bool))


def columns(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 20


class Tree:
    """A callable object that holds its tensor."""

    def __init__(self) -> None:
        self.ancestors = torch.rand(LENGTH, LENGTH, generator=GENERATOR) < 0.3

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.ancestors[q_idx][kv_idx] | (kv_idx == 0)

    def method(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.ancestors[q_idx, :][kv_idx] | (kv_idx == q_idx)


MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "sliding": flex.and_masks(causal, window),
    "packed": flex.and_masks(causal, document),
    "prefix-lm": flex.or_masks(causal, prefix),
    "dilated": dilated,
    "partial": functools.partial(blockwise, size=8),
    "per-head": per_head,
    "bits": bits,
    "logical": logical,
    "columns": columns,
    "object": Tree(),
    "method": Tree().method,
    "everything": flex.noop_mask,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    same(mask=MASKS[name])


@pytest.mark.parametrize("lengths", [(20, 37), (37, 20), (1, 33)])
@pytest.mark.parametrize("name", ["causal", "sliding", "per-head", "dilated"])
def test_masks_count_from_the_first_row(name: str, lengths: tuple[int, int]) -> None:
    same(mask=MASKS[name], seqlen_q=lengths[0], seqlen_kv=lengths[1])


CAP = 3.0
TABLE = randn(2 * LENGTH - 1, HEADS)
HALF = torch.tensor(0.5)
GATE = randn(BATCH, HEADS, LENGTH).cumsum(-1)


def softcap(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return CAP * torch.tanh(score / CAP)


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def alibi_computed(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx) + 2.0**-h + 0.5 ** (h / 2)


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + TABLE[kv_idx - q_idx + (LENGTH - 1), h]


def dense_bias(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    row = BIAS[h]
    return score + row[q_idx, kv_idx] * HALF


def masked_score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def masked_sum(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    hidden = torch.where(DOC[b, q_idx] == DOC[b, kv_idx], 0.0, float("-inf"))
    return (score + hidden).masked_fill(kv_idx % 5 == 4, -torch.inf) / 2.0 + 1


def forgetting(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + GATE[b, h, q_idx] - GATE[b, h, kv_idx]


def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score * (1.0 + 0.1 * torch.log(1.0 + torch.floor((q_idx + 1) / 8)))


def many(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    x = torch.sigmoid(score) + F.softplus(score, beta=2.0) + F.relu(-score) + F.silu(score) + F.logsigmoid(score)
    y = (
        score.clamp(min=-1.0, max=1.0)
        + torch.clamp(score, max=0.3)
        + score.square() * 0.1
        + (score**3) / 50
        - 1 / (2 + score**2)
    )
    z = torch.minimum(score, torch.tensor(0.2)) + torch.max(score, 0 * score) + torch.rsqrt(score.abs() + 1.0)
    w = torch.exp(-score.abs()) + torch.log1p(score.abs()) + torch.log2(score.abs() + 1) + torch.expm1(0.1 * score)
    return x + y + z + w + torch.sign(score) + torch.ceil(score) + torch.trunc(score) + torch.full_like(score, 0.25)


def conversions(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    near = (q_idx - kv_idx).abs() < 4
    bucket = torch.div(q_idx - kv_idx, 3, rounding_mode="trunc") + (kv_idx / 4).to(torch.int32) + 7 // (h + 1)
    return score.to(torch.float32).float() + near * 0.5 + near.int() + bucket.float() / 10 + torch.zeros_like(score)


def rsub(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return 1.5 - score + torch.sub(score, q_idx, alpha=0.01) - (5 - kv_idx) % 3 - 17 % (kv_idx + 1)


SCORES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        softcap, alibi, alibi_computed, relative, dense_bias, masked_score, masked_sum, forgetting, temperature, many,
        conversions, rsub,
    )
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    same(SCORES[name])


@pytest.mark.parametrize("name", ["softcap", "alibi", "masked_sum"])
def test_scores_under_masks(name: str) -> None:
    same(SCORES[name], MASKS["sliding"], scale=0.7)


def test_minus_infinity_becomes_the_mask() -> None:
    found = attngen.from_flex(masked_score, head_dim=64)
    assert found.spec == attngen.from_flex(mask_mod=causal, head_dim=64, name="masked_score").spec
    hidden = attngen.from_flex(lambda s, b, h, q, k: torch.where(q < k, -math.inf, s * 2), columns, head_dim=64)
    assert "mask     = kv_idx < 20 and q_idx >= kv_idx\n" in hidden.text and "score    = s * 2.0\n" in hidden.text


def test_where_of_conditions_is_logic() -> None:
    def text(f: Any) -> str:
        return attngen.from_flex(mask_mod=lambda b, h, q, k: f(q > 2, k > 3), head_dim=8).text

    assert "mask     = q_idx > 2 and kv_idx > 3\n" in text(lambda c, x: torch.where(c, x, torch.tensor(False)))
    assert "mask     = q_idx <= 2 or kv_idx > 3\n" in text(lambda c, x: torch.where(c, x, True))
    assert "mask     = q_idx > 2 or kv_idx > 3\n" in text(lambda c, x: torch.where(c, c.new_ones(()), x))
    assert "mask     = q_idx <= 2 and kv_idx > 3\n" in text(lambda c, x: torch.where(c, False, x))


def test_text() -> None:
    mask = flex.and_masks(causal, window, document)
    found = attngen.from_flex(softcap, mask, head_dim=128, params=["WINDOW", "CAP"], sorted=["DOC"], name="packed")
    assert found.text == (
        "attn 1\n\nattention packed {\n  head_dim = 128\n  layout   = bhsd\n  param  WINDOW: int = 9\n"
        "  param  CAP: float = 3.0\n  tensor DOC: i32[batch, seqlen_kv] sorted\n  score = CAP * tanh(s / CAP)\n"
        "  mask  = q_idx >= kv_idx and q_idx - kv_idx < WINDOW and DOC[b, q_idx] == DOC[b, kv_idx]\n}\n"
    )
    spec, tensors = found
    assert spec is found.spec and set(tensors) == {"DOC"} and found.params == {"WINDOW": 9, "CAP": 3.0}
    assert tensors["DOC"].dtype is torch.int32 and torch.equal(tensors["DOC"].long(), DOC)


def test_a_param_replaces_a_number_everywhere_and_nowhere_else() -> None:
    width = 5

    def local(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx < width) & (kv_idx - q_idx < width)

    mask = flex.or_masks(local, functools.partial(blockwise, size=8))
    found = same(mask=mask, params={"width": {"minimum": 1, "maximum": 99}, "size": {"minimum": 1}})
    assert {p.name: (p.default, p.minimum, p.maximum) for p in found.spec.params} == {
        "width": (5, 1, 99),
        "size": (8, 1, None),
    }
    assert width == 5 and local(0, 0, torch.tensor(4), torch.tensor(0)).item() is True
    q = randn(1, 1, 30, 8, dtype=torch.float64)
    wide = attention_bhsd(found.spec, q, q, q, params={"width": 7, "size": 3}).lse
    width = 7
    again = attngen.from_flex(mask_mod=flex.or_masks(local, functools.partial(blockwise, size=3)), head_dim=8)
    torch.testing.assert_close(wide, attention_bhsd(again.spec, q, q, q).lse)


def test_zero_dimensional_tensors_are_params() -> None:
    offset, cap = torch.tensor(11), torch.tensor(2.5)
    found = same(
        lambda s, b, h, q, k: cap * torch.tanh(s / cap), lambda b, h, q, k: q + offset >= k, seqlen_q=26, seqlen_kv=37
    )
    assert {(p.name, p.type.value, p.default) for p in found.spec.params} == {
        ("offset", "int", 11),
        ("cap", "float", 2.5),
    }


def test_gradients_reach_what_was_captured() -> None:
    bias = randn(HEADS, LENGTH, LENGTH, requires_grad=True)
    weight = torch.tensor(0.3, requires_grad=True)
    frozen = randn(HEADS)

    def learned(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + bias[h, q, k] * weight + frozen[h]

    found = same(learned)
    assert {t.name: t.grad for t in found.spec.tensors} == {"bias": True, "weight": True, "frozen": False}
    q = randn(BATCH, HEADS, LENGTH, 8, dtype=torch.float64)
    up = randn(BATCH, HEADS, LENGTH, 8, dtype=torch.float64)
    found_grads = torch.autograd.grad(
        (attention_bhsd(found.spec, q, q, q, tensors=found.tensors).o * up).sum(), (bias, weight)
    )
    scores = q @ q.mT / math.sqrt(8) + bias * weight + frozen[:, None, None]  # eager flex_attention has no gradients
    wanted = torch.autograd.grad((torch.softmax(scores, -1) @ q * up).sum(), (bias, weight))
    for got, want in zip(found_grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_axes_are_named_where_the_extents_agree() -> None:
    long = torch.zeros(BATCH, 100, dtype=torch.int64)
    table = randn(32, HEADS, dtype=torch.float64)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[(q + k) % 32, h] + long[b, k]

    found = attngen.from_flex(score, document, head_dim=8)
    dims = {t.name: t.dims for t in found.spec.tensors}
    assert dims["table"] == ("table_axis0", "heads_q")
    assert dims["DOC"] == ("batch", "DOC_axis1") and dims["long"] == ("batch", "long_axis1")  # 37 is not 100
    known = attngen.from_flex(score, document, head_dim=8, sizes={"seqlen_kv": LENGTH})
    dims = {t.name: t.dims for t in known.spec.tensors}
    assert dims["DOC"] == ("batch", "seqlen_kv") and dims["long"] == ("batch", "long_axis1")
    assert found.tensors["table"].dtype is torch.float32 and found.tensors["long"].dtype is torch.int32
    same(score, document)


def test_an_index_that_may_be_negative_is_noted() -> None:
    found = attngen.from_flex(lambda s, b, h, q, k: s + TABLE[q - k, h], causal, head_dim=8)
    assert len(found.notes) == 1 and "`q_idx - kv_idx` of `TABLE` may be negative" in found.notes[0]
    for index in (lambda q, k: (q - k) % 7, lambda q, k: (q - k).abs(), lambda q, k: torch.clamp(q - k, 0, 5)):
        assert attngen.from_flex(lambda s, b, h, q, k, i=index: s + TABLE[i(q, k), h], head_dim=8).notes == ()
    ids = attngen.from_flex(lambda s, b, h, q, k: s + TABLE[DOC[b, q], h] + TABLE[DOC[b, k] - 1, h], head_dim=8)
    assert len(ids.notes) == 1 and "`DOC[b, kv_idx] - 1`" in ids.notes[0]
    constant = attngen.from_flex(lambda s, b, h, q, k: s + TABLE[-1, h], head_dim=8)
    assert f"TABLE[{2 * LENGTH - 2}, h]" in constant.text


@pytest.mark.parametrize("block", [16, (16, 32)])
def test_a_block_mask_is_its_function(block: Any) -> None:
    blocks = flex.create_block_mask(MASKS["packed"], BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block)
    found = attngen.from_flex(block_mask=blocks, head_dim=8)
    q, kv = (block, block) if isinstance(block, int) else block
    assert found.spec.block_sparse == BlockSparse(q=q, kv=kv)  # ids of no promise: no interval of keys
    assert found.spec.replace(block_sparse=None) == attngen.from_flex(mask_mod=MASKS["packed"], head_dim=8).spec
    assert load_spec(found.text) == found.spec and "block_sparse" in found.notes[-1]


def test_a_block_mask_that_intervals_say_needs_no_blocks() -> None:
    blocks = flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    found = attngen.from_flex(block_mask=blocks, head_dim=8)
    assert found.spec.block_sparse is None and found.notes == ()


def test_a_walk_by_blocks_keeps_what_the_block_mask_keeps() -> None:
    """The kernel's plans, tile by tile, against FlexAttention."""
    blocks = flex.create_block_mask(MASKS["packed"], BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=128)
    found = attngen.from_flex(block_mask=blocks, head_dim=8)
    plans = plan(found.spec)
    q, k, v = (randn(BATCH, HEADS, LENGTH, 8, dtype=torch.float64) for _ in range(3))
    want = flex.flex_attention(q, k, v, block_mask=blocks).transpose(1, 2)
    for p in plans.plans:
        o, _, _ = interp.run(p, plans.spec, *(x.transpose(1, 2) for x in (q, k, v)), {}, found.tensors)
        torch.testing.assert_close(o, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("mod", [None, causal])
def test_block_lists_that_say_less_than_the_function_are_kept(mod: Any, full: bool) -> None:
    counts = torch.tensor([[[1, 2, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0, 2], [1, 0, 2], [0, 1, 2]]]], dtype=torch.int32)
    more = (
        (
            torch.tensor([[[1, 0, 2]]], dtype=torch.int32),
            torch.tensor([[[[2, 0, 1], [0, 1, 2], [0, 2, 1]]]], dtype=torch.int32),
        )
        if full
        else (None, None)
    )
    blocks = flex.BlockMask.from_kv_blocks(
        counts, indices, *more, BLOCK_SIZE=16, mask_mod=mod, seq_lengths=(LENGTH, LENGTH)
    )
    found = attngen.from_flex(block_mask=blocks, head_dim=8)
    assert load_spec(found.text) == found.spec
    q, k, v = (randn(1, 2, LENGTH, 8, dtype=torch.float64) for _ in range(3))
    kept = torch.zeros(3, 3, dtype=torch.bool)
    whole = torch.zeros(3, 3, dtype=torch.bool)
    for row, columns in enumerate(((1,), (1, 0), ())):
        kept[row, list(columns)] = True
    for row, columns in enumerate(((2,), (), (0, 2)) if full else ()):
        whole[row, list(columns)] = True

    def wide(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(16, 0).repeat_interleave(16, 1)[:LENGTH, :LENGTH]

    inside = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    keep = wide(whole) | (wide(kept) & (inside if mod is None else inside.tril()))
    s = (q @ k.mT / math.sqrt(8)).masked_fill(~keep, -math.inf)
    want = torch.softmax(s, -1).nan_to_num(0.0) @ v
    got = attention_bhsd(found.spec, q, k, v, tensors=found.tensors).o
    torch.testing.assert_close(got, want)


def test_names_that_a_spec_may_not_declare() -> None:
    k, _x = torch.zeros(LENGTH), torch.zeros(LENGTH)
    found = attngen.from_flex(lambda s, b, h, q, kv: s + k[kv] + _x[kv] + torch.ones(LENGTH)[kv], head_dim=8)
    assert set(found.tensors) == {"k_given", "x", "captured"}


def test_modules_and_tensors_made_of_captured_ones() -> None:
    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(randn(HEADS, LENGTH))

        def score(self, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + self.bias[h, k] + (self.bias * 2)[h, q]

    found = same(Biased().score)
    assert {t.name: t.grad for t in found.spec.tensors} == {"bias": True, "bias2": True}


def test_options_of_a_spec() -> None:
    found = attngen.from_flex(
        mask_mod=causal,
        head_dim=192,
        head_dim_v=128,
        scale=0.5,
        dtype="fp16",
        layout="bshd",
        tile_m=128,
        deterministic=True,
    )
    text = "attention causal {\n  head_dim = 192, v = 128\n  dtype    = fp16\n  scale    = 0.5\n"
    assert text in found.text and found.spec.backward.deterministic and found.spec.schedule.tile_m == 128


def test_nothing_but_the_head_dim() -> None:
    assert attngen.from_flex(head_dim=64).text == "attn 1\n\nattention flex {\n  head_dim = 64\n  layout   = bhsd\n}\n"


def test_a_built_spec_runs() -> None:
    spec, tensors = attngen.from_flex(alibi, causal, head_dim=64)
    q, k, v = (randn(1, HEADS, LENGTH, 64).to(torch.bfloat16) for _ in range(3))
    blocks = flex.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    want = flex.flex_attention(q.float(), k.float(), v.float(), score_mod=alibi, block_mask=blocks)
    got = attngen.build(spec)(q, k, v, **tensors)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_a_trace_leaves_nothing_behind() -> None:
    with pytest.raises(AttnError):
        attngen.from_flex(lambda s, b, h, q, k: s + torch.sin(s), head_dim=64)
    assert torch.sin(torch.zeros(())).item() == 0.0
    assert torch.overrides._get_current_function_mode_stack() == []


def test_numpy_numbers_are_numbers() -> None:
    width, factor = np.int64(7), np.float32(0.25)
    found = same(lambda s, b, h, q, k: s * factor, lambda b, h, q, k: q - k < width, params=["width"])
    assert found.params == {"width": 7}


def test_a_large_negative_score_is_noted() -> None:
    (note,) = same(lambda s, b, h, q, k: torch.where(q >= k, s, -1e9)).notes
    assert "large negative score" in note
    assert same(lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf"))).notes == ()


def test_rounding_that_is_left_out_is_noted() -> None:
    found = attngen.from_flex(lambda s, b, h, q, k: s.to(torch.bfloat16) + BIAS.half()[h, q, k], head_dim=8)
    assert len(found.notes) == 1 and "bfloat16" in found.notes[0]
    assert found.spec.tensors[0].dtype.value == "fp16"
