"""Lists of keys through the kernels over gathered K and V: O and LSE of the call, gradients of the gathered tensors."""

from __future__ import annotations

import pytest
import torch
from backward_calls import Call, kernels
from backward_calls import verify as verify_backward
from ptxcheck.compile import compile_spec
from ptxcheck.launch import attngen_call

from attngen.ir.spec import AttentionSpec
from attngen.jit.gathered import gathered
from attngen.passes.selected import SIZES, selected_spec
from attngen.ref import dense
from attngen.ref.compare import assert_close
from attngen.syntax import load_spec

pytestmark = pytest.mark.dsl


def test_largest_scores() -> None:
    """Of the listed keys that a row keeps, by a kernel whose rows are query heads too."""
    head = "attn 1\nattention listed {\n  head_dim = 64\n  output { max_logit = true }\n  mask = kv_idx <= q_pos"
    spec = load_spec(f"{head}\n  block_sparse {{ q = 4, kv = 1, lists = given }}\n}}\n")
    mapped = load_spec(
        f"{head} and seen[b, h_kv, q_idx // 4, kv_idx]\n  tensor seen: bool[batch, heads_kv, n, m]\n}}\n"
    )
    g = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, h, 64, generator=g).bfloat16() for n, h in ((12, 6), (90, 2), (90, 2)))
    lists = torch.randint(-1, 90, (1, 2, 3, 40), generator=g)
    call = gathered(spec, query, key, value, lists, {})
    inner = selected_spec(spec)
    module, _ = compile_spec(inner)
    top = torch.full((3, 2, 12), torch.nan)
    _, lse, report = attngen_call(
        module, 0, call.q.contiguous(), call.k, call.v, params=tuple(call.named[n] for n in SIZES),
        tensors=(call.named["picked"],), further={"max_logit": top},
    )  # fmt: skip
    assert not report.faults
    seen = torch.zeros(1, 2, 3, 91, dtype=torch.bool).scatter_(-1, torch.where(lists < 0, 90, lists), True)[..., :90]
    exact = dense.attention(mapped, query.double(), key.double(), value.double(), {}, {"seen": seen})
    assert (call.lse(top) - exact.max_logit).abs().max() < 2e-3 and (call.lse(lse) - exact.lse).abs().max() < 2e-3


def specs(q: int, kv: int) -> tuple[AttentionSpec, AttentionSpec]:
    """By lists, and by a dense map of the same."""
    head = "attn 1\nattention listed {\n  head_dim = 64\n"
    by_lists = f"{head}  mask = kv_idx <= q_pos\n  block_sparse {{ q = {q}, kv = {kv}, lists = given }}\n}}\n"
    by_map = (
        f"{head}  tensor seen: bool[batch, heads_kv, rows, keys]\n"
        f"  mask = kv_idx <= q_pos and seen[b, h_kv, q_idx // {q}, kv_idx // {kv}]\n}}\n"
    )
    return load_spec(by_lists), load_spec(by_map)


@pytest.mark.parametrize(("q", "kv", "heads"), [(64, 1, 1), (1, 16, 3)], ids=["tokens", "blocks of a row"])
def test_lists(q: int, kv: int, heads: int) -> None:
    """Token lists of 64 rows; blocks of 16 keys of a row, whose query heads fill the tile."""
    spec, mapped = specs(q, kv)
    g = torch.Generator().manual_seed(0)
    sq, skv = (70, 90) if q > 1 else (2, 90)
    query, key, value = (torch.randn(1, n, h, 64, generator=g).bfloat16() for n, h in ((sq, heads), (skv, 1), (skv, 1)))
    rows, count = -(-sq // q), -(-skv // kv)
    lists = torch.randint(-1, count + 1, (1, 1, rows, 80 // kv), generator=g)
    call = gathered(spec, query, key, value, lists, {})
    inner = selected_spec(spec)
    params, picked = {n: call.named[n] for n in SIZES}, call.named["picked"]
    module, _ = compile_spec(inner)
    o, lse, report = attngen_call(
        module, 0, call.q.contiguous(), call.k, call.v, params=tuple(params.values()), tensors=(picked,)
    )
    assert not report.faults
    places = torch.where((lists < 0) | (lists >= count), count, lists)
    seen = torch.zeros(1, 1, rows, count + 1, dtype=torch.bool).scatter_(-1, places, True)[..., :count]
    assert_close(call.o(o), mapped, query, key, value, lse=call.lse(lse), tensors={"seen": seen})
    with torch.no_grad():
        out = dense.attention(inner, call.q, call.k, call.v, params, {"picked": picked})
    do, dlse = torch.randn(out.o.shape, generator=g).bfloat16(), torch.randn(out.lse.shape, generator=g)
    c = Call(
        inner, call.q.contiguous(), call.k, call.v, out.o.bfloat16(), do, out.lse.float(), dlse, params,
        {"picked": picked},
    )  # fmt: skip
    verify_backward(kernels(inner), c)
