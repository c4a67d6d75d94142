"""Under torch.compile and FakeTensor a fraction given for an int param was cut off; an eager call refused it."""

from __future__ import annotations

import pytest
import torch

from attngen import AttnError, build

SPEC = "attn 1\nattention a {\n  head_dim = 64\n  param keys: int >= 1 = 16\n  mask  = q_pos - kv_idx < keys\n}\n"


def test_a_fraction_is_refused_everywhere() -> None:
    attn = build(SPEC)
    q, k, v = torch.zeros(3, 1, 4, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(AttnError, match="E0603"):
        attn(q, k, v, keys=2.5)
    with pytest.raises(AttnError, match="E0603"):
        attn(q.to("meta"), k.to("meta"), v.to("meta"), keys=2.5)
    compiled = torch.compile(lambda q, k, v: attn(q, k, v, keys=2.5), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"wrong_type|E0603"):
        compiled(q, k, v)
