"""What a call without gradients asks of torch beside its launches: the memory it gives back, and little else.

Counted, not timed: `bench_host.py` here and `attngen bench --host` on a GPU tell microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import attngen
from attngen.jit import launch
from attngen.jit.device import DeviceState

BF16, I32 = torch.bfloat16, torch.int32
CAUSAL = "  mask = kv_idx <= q_pos\n"
BLOCKS = CAUSAL + "  block_sparse { q = 64, kv = 64, lists = given }\n"
SEGMENT = CAUSAL + "  segment past { }\n"
Q, K = torch.zeros(1, 8, 4, 64, dtype=BF16), torch.zeros(1, 8, 2, 64, dtype=BF16)
STARTS = torch.tensor([0, 3, 8], dtype=I32)
#: Spec, call, whether by a handle that keeps tables, and the operations: `empty_like` and `empty` make O, and an LSE
#: that another kernel reads, `expand` is a broadcast.
CALLS: dict[str, tuple[str, Callable[..., Any], bool, list[str]]] = {
    "plain": (CAUSAL, lambda attn: attn(Q, K, K), False, ["empty_like"]),
    "documents": (
        "  tensor doc: i32[batch, seqlen_kv] sorted\n  mask = doc[b, q_pos] == doc[b, kv_idx]\n",
        lambda attn, **kept: attn(Q, K, K, doc=torch.zeros(1, 8, dtype=I32), **kept),
        False,
        ["zeros", "empty_like"],
    ),
    "blocks": (BLOCKS, lambda attn, **kept: attn(Q, K, K, blocks=ONE, **kept), False, ["expand", "empty_like"]),
    "blocks, kept": (BLOCKS, lambda attn, **kept: attn(Q, K, K, blocks=ONE, **kept), True, ["expand", "empty_like"]),
    "varlen": (CAUSAL + "  layout = varlen\n", lambda attn: attn(Q[0], K[0], K[0], cu_seqlens_q=STARTS), False,
               ["select"] * 3 + ["empty_like"]),
    "varlen blocks": (
        BLOCKS + "  layout = varlen\n",
        lambda attn: attn(Q[0], K[0], K[0], cu_seqlens_q=STARTS, blocks=ONE),
        False,
        ["select"] * 3 + ["expand", "empty_like"],
    ),
    "segment": (SEGMENT, lambda attn: attn(Q, K, K, segments={"past": (K, K)}), False,
                ["empty_like", "empty", "empty_like"]),
    "branches": (
        CAUSAL + "  branch one { }\n  branch two {\n    weight = -0.5\n  }\n",
        lambda attn: attn((Q, Q), (K, K), K),
        False,
        ["empty_like", "empty_like"],
    ),
    "packed": (CAUSAL + "  layout = packed_qkv\n", lambda attn: attn(torch.zeros(1, 8, 3, 2, 64, dtype=BF16)), False,
               ["zeros", "unbind", "empty_like"]),
}  # fmt: skip
ONE = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("name", CALLS)
def test_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of its kind, which finds everything that one call can leave to the next."""
    body, call, by_handle, wanted = CALLS[name]
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    attn: Any = attngen.build(f"attn 1\nattention counted {{\n  head_dim = 64\n{body}}}\n")
    launches: list[Any] = []
    of_chain = attn.chain.kernels if hasattr(attn, "chain") else ()
    for kernel in (*getattr(attn, "kernels", (attn,)), *of_chain):
        kernel.launcher.functions = (lambda *given: launches.append(given),) * len(kernel.source.meta["plans"])
        kernel.launcher.ready[-1] = (DeviceState(-1, 132), 132)
        kernel.alone()
    kept = {"tables": attn.tables()} if by_handle else {}
    with torch.no_grad():
        call(attn, **kept)
        launches.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            call(attn, **kept)
    found = [e.name.removeprefix("aten::") for e in seen.events() if e.cpu_parent is None]
    assert found == wanted
    assert len(launches) == (2 if of_chain else 1)
