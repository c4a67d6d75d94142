"""One test for each bug that only a GPU showed, named after it."""

from __future__ import annotations

import pytest
from builders import QP, C, K, Q, S, W, f, spec, x
from harness import inputs, verify


@pytest.mark.parametrize("size", [C, x(33)])
@pytest.mark.parametrize("mask", ["floordiv", "mod"])
def test_division_of_negative_positions_truncated_on_the_device(size, mask):
    """`//` of the DSL floors on the host and truncates on the device; rows before the first key have negative q_pos."""
    kept = K // size <= QP // size if mask == "floordiv" else (K % size) <= (QP % size)
    s = spec(kept, d=64)
    verify(s, *inputs(s, 1, 333, 200, 2, 1), size=33)


def test_o_in_the_bytes_of_a_wider_q():
    """head_dim 192/128 with O in Q's buffer: slices of O must lie as far apart as slices of Q."""
    from attngen.ir.spec import ScheduleHints

    s = spec(d=192, dv=128, schedule=ScheduleHints(tile_m=128, tile_n=128))
    verify(s, *inputs(s, 2, 400, 300, 2, 1))


def test_a_window_of_the_largest_int_keeps_every_key():
    """`abs(q_idx - kv_idx) <= 2**31 - 1`: a row's lower limit less a column wrapped: early rows lost keys."""
    s = spec(f("abs", Q - K) <= W, d=64)
    for shape in ((3, 257, 63, 2, 1), (1, 130, 400, 2, 1)):
        verify(s, *inputs(s, *shape), window=2**31 - 1)


def test_the_lowest_float_in_unmasked_tiles():
    """-3.4e38 times log2(e) is -inf; rows whose first tiles hold nothing else were NaN."""
    s = spec(score=f("where", K < 3, S, -3.4e38), d=64)
    verify(s, *inputs(s, 2, 300, 700, 2, 1))


def test_buckets_at_powers_of_two():
    """T5: 2 log2(n / 8) is whole at n = 16, 32, 64; the table is steep so that a wrong bucket shows."""
    import torch
    from harness import EXAMPLES, built

    from attngen.ref.compare import assert_close
    from attngen.syntax import load_spec

    t5 = load_spec(EXAMPLES / "t5.attn")
    for sq, skv in ((200, 77), (190, 45), (300, 300)):
        q, k, v = inputs(t5, 1, sq, skv, 2, 2)
        table = torch.randn(32, 2, device="cuda") * 3
        o, lse = built(t5)(q, k, v, table=table, return_lse=True)
        assert_close(o, t5, q, k, v, lse=lse, tensors={"table": table})
