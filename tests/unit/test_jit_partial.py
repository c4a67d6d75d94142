"""dK and dV of grouped query heads: which heads a launch writes, and what their sum is."""

from __future__ import annotations

import pytest
import torch

from attngen.jit.partial import add_up, buffer_like, heads_of_sums


@pytest.mark.parametrize("heads_kv", [1, 2, 3])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("kv_tiles", [1, 5, 16, 132, 1000])
def test_the_fewest_parts_that_give_every_sm_a_tile(heads_kv: int, group: int, kv_tiles: int) -> None:
    heads = heads_of_sums(kv_tiles, heads_kv * group, heads_kv, 132)
    parts = heads // heads_kv
    assert heads % heads_kv == 0 and group % parts == 0
    fewer = [n for n in range(1, parts) if group % n == 0]
    assert all(kv_tiles * heads_kv * n < 132 for n in fewer)
    assert kv_tiles * heads >= 132 or parts == group


def test_nothing_is_added_up_where_tiles_are_many() -> None:
    assert heads_of_sums(64, 32, 4, 132) == 4 and heads_of_sums(8, 8, 8, 132) == 8
    assert heads_of_sums(8, 32, 4, 132) == 32 and heads_of_sums(16, 32, 4, 132) == 16


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
