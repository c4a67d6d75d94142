"""Attention over listed keys: calls without rows, keys or batch; rows that fill up a block; what its errors name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attngen import AttnError, build
from attngen.passes.serves import why_not
from attngen.syntax import load_spec

pytestmark = pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")
GATED = """  tensor gate: bf16[batch, seqlen_q, heads_q, head_dim_v] grad
  tensor level: f32[batch, seqlen_q, heads_q] grad
  sink     = level[b, q_idx, h]
  epilogue = o * gate[b, q_idx, h, d]
"""


def listed(q: int, kv: int, more: str = "", name: str = "listed") -> str:
    clause = f"  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n"
    return f"attn 1\nattention {name} {{\n  head_dim = 64\n  mask = kv_idx <= q_pos\n{clause}{more}}}\n"


def operands(b: int = 2, sq: int = 9, skv: int = 12, hq: int = 4, hkv: int = 2) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((b, sq, hq, 64), (b, skv, hkv, 64), (b, skv, hkv, 64))
    return [torch.randn(s, generator=g).bfloat16().requires_grad_() for s in shapes]


@pytest.mark.parametrize(("q", "kv"), [(4, 1), (1, 4), (1, 1), (128, 1)])
@pytest.mark.parametrize("empty", ["rows", "keys", "batch", "lists"])
def test_nothing_to_attend_to(q: int, kv: int, empty: str) -> None:
    b, sq, skv = (0 if empty == n else x for n, x in (("batch", 2), ("rows", 9), ("keys", 12)))
    lists = torch.zeros(b, 2, -(-sq // q), 0 if empty == "lists" else 3, dtype=torch.int32)
    qkv = operands(b, sq, skv)
    o, lse = build(listed(q, kv))(*qkv, blocks=lists, return_lse=True)
    assert o.shape == (b, sq, 4, 64) and lse.shape == (b, 4, sq)
    assert (o == 0).all() and (lse == -math.inf).all()
    grads = torch.autograd.grad(o.sum(), qkv)
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, qkv, strict=True))


@pytest.mark.parametrize("sq", [1, 3, 9])
def test_rows_that_fill_up_a_block_read_no_further(sq: int) -> None:
    q, k, v = operands(sq=sq)
    gate, level = torch.ones(2, sq, 4, 64, dtype=torch.bfloat16), torch.zeros(2, sq, 4)
    lists = torch.arange(12).int().expand(1, 1, -(-sq // 4), 12)
    attn = build(listed(4, 1, GATED))
    o = attn(q, k, v, blocks=lists, gate=gate, level=level, check=True)
    whole = build(listed(4, 4, GATED).replace("block_sparse { q = 4, kv = 4, lists = given }", ""))
    assert (o - whole(q, k, v, gate=gate, level=level)).abs().max() < 2e-2


def refused(code: str, *args: Any, **named: Any) -> str:
    with pytest.raises(AttnError) as caught:
        build(listed(4, 1, GATED))(*args, **named)
    assert caught.value.diagnostics[0].code == code, str(caught.value)
    return str(caught.value)


def test_a_caller_reads_of_the_call_that_was_made() -> None:
    q, k, v = operands()
    good: dict[str, Any] = {
        "blocks": torch.zeros(1, 1, 3, 2, dtype=torch.int32),
        "gate": torch.ones(2, 9, 4, 64, dtype=torch.bfloat16),
        "level": torch.zeros(2, 9, 4),
    }
    text = refused("E0607", q, k, v, **{**good, "gate": good["gate"][:, :5]})
    assert "extent 5 along seqlen_q (axis 1), which is 9" in text
    assert "_of_call" not in refused("E0606", q, k, v, **{**good, "level": good["level"].half()})
    assert "`listed`" in refused("E0602", q, k, v, **{**good, "gate": None})
    assert "picked" not in refused("E0601", q, k, v, window=3, **good)
    refused("E0601", q, k, v, picked=3, call_rows=7, **good)
    refused("E0604", q, k, v, **{**good, "gate": [1.0]})
    refused("E0605", q, k, v, **{**good, "blocks": good["blocks"].to("meta")})
    assert "(2, 12, 2, 32)" in refused("E0607", q, k, v[..., :32], **good)
    refused("E0606", q, k.half(), v, **good)


@pytest.mark.parametrize("declared", ["param call_rows: int = 3", "tensor picked: f32[heads_q]"])
def test_names_of_the_kernel_over_listed_keys(declared: str) -> None:
    spec = load_spec(listed(4, 1, f"  {declared}\n"))
    (reason,) = why_not(spec, "sm_90a")
    assert reason.code == "E0402" and declared.split()[1].rstrip(":") in reason.message
    q, k, v = operands()
    extra = {"picked": torch.zeros(4)} if "picked" in declared else {}
    lists = torch.tensor([[[[0, 5, -1], [3, 2, 99], [11, 0, 1]]]]).int()
    o = build(spec)(q, k, v, blocks=lists, **extra)  # the reference takes the lists, too
    assert (o - build(listed(4, 1))(q, k, v, blocks=lists)).abs().max() < 2e-2
