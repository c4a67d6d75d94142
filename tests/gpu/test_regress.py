"""One test for each bug that only a GPU showed, named after it."""

from __future__ import annotations

import pytest
from builders import QP, C, K, spec, x
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
