"""dK and dV of grouped query heads: which heads a launch writes, and what their sum is."""

from __future__ import annotations

import pytest
import torch

from attngen.jit.partial import HEADS_PER_CTA, add_up, buffer_like, heads_of_sums


@pytest.mark.parametrize("heads_kv", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_a_cta_takes_a_whole_part_of_the_group(heads_kv: int, group: int) -> None:
    heads = heads_of_sums(heads_kv * group, heads_kv)
    assert heads % heads_kv == 0 and (heads_kv * group) % heads == 0
    per_cta = heads_kv * group // heads
    assert per_cta <= HEADS_PER_CTA
    assert per_cta == HEADS_PER_CTA or group % HEADS_PER_CTA or group < HEADS_PER_CTA


def test_nothing_is_added_up_where_a_cta_takes_the_group() -> None:
    assert heads_of_sums(8, 8) == 8 and heads_of_sums(8, 8 // HEADS_PER_CTA) == 8 // HEADS_PER_CTA


@pytest.mark.parametrize("axis", [1, 2])
def test_sums_are_fp32_and_rounded_once(axis: int) -> None:
    shape = [2, 5, 5, 8]
    shape[axis] = 3
    out = torch.empty(shape, dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
    parts = buffer_like(out, 12, axis)
    assert parts.shape[axis] == 12 and parts.dtype is out.dtype
    parts.copy_(torch.randn(parts.shape))
    add_up(parts, out.fill_(float("nan")), axis)
    wanted = parts.double().unflatten(axis, (3, 4)).sum(axis + 1)
    assert (out.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()
    assert (out == wanted.to(torch.bfloat16)).double().mean() > 0.99  # one rounding, but for ties of fp32
    head = sum(parts.select(axis, 8 + i).double() for i in range(4))
    assert torch.allclose(out.select(axis, 2).double(), head, rtol=2**-7, atol=1e-3)
