"""What of a spec a benchmark's peers are told: what is recognised, FlexAttention's mods, SDPA's arguments."""

from __future__ import annotations

import pytest
import torch
from bench_cases import case_of, example

from attngen import samples
from attngen.bench import flex
from attngen.bench.peers import PEERS, Unsupported
from attngen.bench.recognize import features
from attngen.ref import dense
from attngen.syntax import load_spec


@pytest.mark.parametrize(
    ("name", "mask", "window", "cap", "sink"),
    [
        ("full", "full", None, None, None),
        ("causal", "causal", None, None, None),
        ("llama3", "causal", None, None, None),
        ("mistral", "window", 4096, None, None),
        ("gemma2", "window", 4096, 50.0, None),
        ("gpt_oss", "window", 128, None, "sinks"),
        ("block_causal", "other", None, None, None),
        ("packing", "other", None, None, None),
        ("modernbert", "other", None, None, None),
        ("off_by_one", "causal", None, None, "other"),
        ("alibi", "causal", None, None, None),
    ],
)
def test_recognition(name, mask, window, cap, sink) -> None:
    spec = example(name)
    f = features(spec, samples.params(spec))
    assert (f.mask, f.window, f.softcap, f.sink) == (mask, window, cap, sink)


def test_top_left_causal_is_not_taken_for_bottom_right() -> None:
    spec = load_spec("attn 1\nattention x {\n  head_dim = 64\n  mask = kv_idx <= q_idx\n}\n")
    assert features(spec, {}).mask == "other"


def test_scale_is_passed_on() -> None:
    spec = example("mla")
    assert features(spec, samples.params(spec)).scale == pytest.approx(1.3688879**2 / 192**0.5)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("causal", {}),
        ("gemma2", {"keys": 20, "cap": 2.0}),
        ("alibi", {}),
        ("packing", {}),
        ("prefix_lm", {}),
        ("t5", {}),
        ("block_causal", {"block": 8}),
        ("longformer", {"half": 5}),
        ("left_padding", {}),
        ("bias", {}),
    ],
)
def test_flex_mods_mean_what_the_spec_means(name, params) -> None:
    """Scores from mask_mod and score_mod, applied element by element, give the dense O."""
    case, arguments = case_of(name, 33, 33, **params)
    mask_mod, score_mod = flex.mods(case)
    b, h, q_idx, kv_idx = torch.meshgrid(
        torch.arange(2), torch.arange(4), torch.arange(33), torch.arange(33), indexing="ij"
    )
    k, v = (x.repeat_interleave(2, 2) for x in (case.k, case.v))
    s = torch.einsum("bqhd,bkhd->bhqk", case.q, k) * case.features.scale
    s = score_mod(s, b, h, q_idx, kv_idx) if score_mod else s
    s = s.masked_fill(~mask_mod(b, h, q_idx, kv_idx), -torch.inf) if mask_mod else s
    o = torch.einsum("bhqk,bkhd->bqhd", torch.nan_to_num(s.softmax(-1)), v)
    exact = dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o
    assert float((o - exact).abs().max()) < 2e-5


def test_flex_runs_them() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    case, arguments = case_of("alibi", 32, 32)
    mask_mod, score_mod = flex.mods(case)
    q, k, v = (x.transpose(1, 2) for x in (case.q, case.k, case.v))

    def both(s, b, h, q_idx, kv_idx):
        return torch.where(mask_mod(b, h, q_idx, kv_idx), score_mod(s, b, h, q_idx, kv_idx), -torch.inf)

    o = flex_attention(q, k, v, score_mod=both, scale=case.features.scale, enable_gqa=True).transpose(1, 2)
    assert float((o - dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o).abs().max()) < 2e-5


def test_every_row_of_the_function_table_has_a_flex_spelling() -> None:
    from attngen.ir.functions import FUNCTIONS

    assert set(flex._SPELLING) == set(FUNCTIONS)


@pytest.mark.parametrize("name", ["fa3", "fa4", "cudnn", "fa2"])
def test_peers_refuse_what_they_have_no_word_for(name) -> None:
    for spec in ("packing", "block_causal", "alibi", "off_by_one"):
        with pytest.raises(Unsupported):
            PEERS[name].prepare(case_of(spec, 16, 16)[0])


def test_sdpa_peers_refuse_causal_with_other_alignment() -> None:
    with pytest.raises(Unsupported, match="top-left"):
        PEERS["cudnn"].prepare(case_of("causal", 16, 32)[0])


def test_sdpa_call_is_the_same_attention() -> None:
    """On CPU torch's math backend stands in for the GPU ones: layout, scale, GQA and mask are passed on rightly."""
    from attngen.bench.peers import _sdpa

    for name in ("full", "causal"):
        case, arguments = case_of(name, 40, 40)
        got = _sdpa("MATH")(case)()
        exact = dense.attention(case.cell.spec, case.q, case.k, case.v, **arguments).o
        assert got.shape == exact.shape and float((got - exact).abs().max()) < 1e-5
