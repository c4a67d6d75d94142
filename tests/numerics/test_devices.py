"""Reference executions create every tensor on the device of q: with another default device nothing may mix."""

from __future__ import annotations

import torch
from cases import qkv, tensors_for
from plans import make_plan
from test_three_way import VALUES, make

from attngen.ref import blockwise, compare, dense, interp


def test_tensors_follow_q() -> None:
    for mask, score, sink in (
        ("window", "alibi", "per_head"),
        ("longformer", "bias", "zero"),
        ("chunk", "softcap", "none"),
    ):
        s = make(mask, score, sink)
        q, k, v = qkv(s, 1, 40, 50, 2, 1, dtype=torch.float32)
        t = tensors_for(s, 1, 40, 50, 2)
        for x in t.values():
            x.requires_grad_(x.is_floating_point())
        with torch.device("meta"):
            assert torch.zeros(1).is_meta
            want = dense.attention(s, q, k, v, VALUES, t)
            o, lse = blockwise.attention(s, q, k, v, VALUES, t)
            tiled, tiled_lse, _ = interp.run(make_plan(s, 64, 16), s, q, k, v, VALUES, t)
            compare.assert_close(o.detach(), s, q, k, v, lse=lse.detach(), params=VALUES, tensors=t)
        for x in (want.o, want.lse, o, lse, tiled, tiled_lse):
            assert x.device == q.device
