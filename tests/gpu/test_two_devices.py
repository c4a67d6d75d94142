"""Calls on a device that is not torch's current one, and one callable that serves two devices by turns.

Kernels are loaded, counters and tables are kept, and workspaces are allocated a device at a time: a mistake there is
invisible where there is one GPU only.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.diag.diagnostic import AttnError

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NEEDS TWO GPUS")

CAUSAL = "attn 1\nattention a {\n  head_dim = 64\n  mask = kv_idx <= q_pos\n}\n"
DOCUMENTS = """attn 1
attention a {
  head_dim = 64
  tensor doc: i32[batch, seqlen_kv] sorted
  mask = kv_idx <= q_pos and doc[b, q_pos] == doc[b, kv_idx]
}
"""


def inputs(device: int, seed: int, rows: int = 300) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, rows, 4, 64, generator=g).bfloat16().to(f"cuda:{device}") for _ in range(4)]


def documents(device: int, rows: int = 300) -> torch.Tensor:
    return (torch.arange(rows) // 70).int().expand(2, rows).contiguous().to(f"cuda:{device}")


def gradients(attn: Any, q: Any, k: Any, v: Any, do: Any, **named: Any) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    o = attn(q, k, v, **named)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


@pytest.mark.parametrize("text", [CAUSAL, DOCUMENTS], ids=["causal", "documents"])
def test_the_current_device_does_not_matter(text: str) -> None:
    """The same bits of O wherever the tensors are and whatever device is current; gradients add up in some order."""
    attn = attngen.build(text)
    found = []
    for device in (0, 1, 1, 0):
        named = {"doc": documents(device)} if text is DOCUMENTS else {}
        for current in (0, 1):
            with torch.cuda.device(current):
                found.append([x.cpu() for x in gradients(attn, *inputs(device, 3), **named)])
                assert torch.cuda.current_device() == current
    for o, *grads in found[1:]:
        assert torch.equal(o, found[0][0])
        for grad, first in zip(grads, found[0][1:], strict=True):
            torch.testing.assert_close(grad, first, rtol=2**-7, atol=2**-10)


def test_both_devices_at_once() -> None:
    """Launches on two devices that overlap keep to their own counters and workspaces."""
    attn = attngen.build(CAUSAL)
    calls = {device: inputs(device, 5 + device, 2000) for device in (0, 1)}
    alone = {}
    for device, call in calls.items():
        alone[device] = attn(*call[:3])
        torch.cuda.synchronize(device)
    for _ in range(20):
        both = {device: attn(*call[:3]) for device, call in calls.items()}
        for device, o in both.items():
            assert torch.equal(o, alone[device])


def test_tensors_on_two_devices_are_refused() -> None:
    attn = attngen.build(CAUSAL)
    q, k, v, _ = inputs(0, 1)
    with pytest.raises(AttnError) as caught:
        attn(q, k.to("cuda:1"), v)
    assert caught.value.code == "E0605"


def test_a_graph_on_the_second_device() -> None:
    attn = attngen.build(CAUSAL)
    q, k, v, _ = inputs(1, 9)
    want = attn(q, k, v)
    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = attn(q, k, v)
        o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(o, want)
