"""Fronts that take one qkv, or q and k, met more tensors, or fewer, with Python's TypeError."""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build

PACKED = "attn 1\nattention a {\n  head_dim = 64\n  layout = packed_qkv\n}\n"
VIEW = "attn 1\nattention a {\n  head_dim = 64\n  v = k[0:32]\n}\n"
PLAIN = "attn 1\nattention a {\n  head_dim = 64\n  layout = varlen\n}\n"
Q = torch.zeros(1, 8, 4, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("text", "given", "takes"),
    [(PACKED, 3, "takes one qkv, found 3"), (PACKED, 2, "takes one qkv, found 2"),
     (VIEW, 3, "takes q and k, whose columns are v, found 3"), (VIEW, 1, "whose columns are v, found 1")],
)  # fmt: skip
def test_the_count_is_said(text: str, given: int, takes: str) -> None:
    with pytest.raises(AttnError, match=takes) as fault:
        build(text)(*[Q] * given)
    assert fault.value.code == "E0604"


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_longest_lengths_are_not_taken(name: str) -> None:
    """Other libraries take them; the hint was `cu_seqlens_q`."""
    with pytest.raises(AttnError, match="no length is read on the host") as fault:
        build(PLAIN)(Q[0], Q[0], Q[0], cu_seqlens_q=torch.tensor([0, 8]).int(), **{name: 8})
    assert fault.value.code == "E0601" and "did you mean" not in str(fault.value)
