"""`attngen.merge` and block maps: what torch refused in the middle, or rounded in silence; segments without names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen import AttnError

OUT, LSE = torch.ones(2, 5, 4, 8), torch.zeros(2, 4, 5)
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "lists": ("E0604", ([1], [1], [1], [1]), {}),
    "ints": ("E0606", (OUT.int(), LSE, OUT.int(), LSE), {}),
    "devices": ("E0605", (OUT, LSE, OUT.to("meta"), LSE.to("meta")), {}),
    "text for a dtype": ("E0503", (OUT, LSE, OUT, LSE), {"dtype": "bf16"}),
    "a dtype of ints": ("E0503", (OUT, LSE, OUT, LSE), {"dtype": torch.int32}),
    "rank": ("E0607", (OUT[0], LSE[0], OUT[0], LSE[0]), {}),
    "rank of varlen": ("E0607", (OUT, LSE, OUT, LSE), {"layout": "varlen"}),
    "swapped": ("E0607", (OUT, OUT, LSE, LSE), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    code, args, named = CASES[case]
    with pytest.raises(AttnError) as caught:
        attngen.merge(*args, **named)
    assert caught.value.diagnostics[0].code == code


def test_parts_of_a_ragged_batch() -> None:
    g = torch.Generator().manual_seed(0)
    os, lses = torch.randn(2, 6, 4, 8, generator=g), torch.randn(2, 4, 6, generator=g)
    lses[1, :, 2] = -torch.inf
    o, lse = attngen.merge(os[0], lses[0], os[1], lses[1], layout="varlen")
    want, rows = attngen.merge(os[:1], lses[:1], os[1:], lses[1:])
    assert torch.equal(o, want[0]) and torch.equal(lse, rows[0])
    assert torch.equal(o[2], os[0, 2])


@pytest.mark.parametrize("count", [-3, 2.5, None])
def test_blocks_that_are_no_count(count: Any) -> None:
    with pytest.raises(AttnError, match="`blocks_kv` must be a number of blocks"):
        attngen.block_map(torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 3).int(), count)


def test_segments_as_a_list() -> None:
    attn = attngen.build("attn 1\nattention a {\n  head_dim = 64\n  segment past {\n    mask = true\n  }\n}\n")
    q = torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(AttnError, match="must be a dict, found list"):
        attn(q, q, q, segments=[(q, q)])


def test_shares_of_one_softmax_are_said_of_a_softmax_only() -> None:
    text = "attn 1\nattention a {\n  head_dim = 64\n  normalizer = sigmoid\n  segment past {\n    mask = true\n  }\n}\n"
    assert "O = O_main + O_past" in attngen.explain(text)
    assert "exp(LSE_past - LSE) O_past" in attngen.explain(text.replace("  normalizer = sigmoid\n", ""))


def test_a_block_mask_in_place_of_a_function() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    with pytest.raises(AttnError, match="pass it as block_mask="):
        attngen.from_flex(None, mask, head_dim=64)
