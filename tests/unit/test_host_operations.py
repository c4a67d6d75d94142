"""What a call without gradients asks of torch beside its launches: the memory it gives back, and little else.

Counted, not timed: `bench_host.py` here and `attngen bench --calls` on a GPU tell microseconds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attngen
from attngen.bench.calls import call_of, kinds
from attngen.jit import launch
from attngen.jit.device import DeviceState

#: By kind, launches and the operations: `empty_like` and `empty` make O, and an LSE that another kernel reads, `expand`
#: is a broadcast; lists of keys are gathered, twice, between views.
GATHERS = ["view", "index_select", "view"] * 2
WANTED: dict[str, tuple[int, list[str]]] = {
    "plain": (1, ["empty_like"]),
    "documents": (1, ["empty_like"]),
    "documents, kept": (1, ["empty_like"]),
    "blocks": (1, ["expand", "empty_like"]),
    "blocks, kept": (1, ["expand", "empty_like"]),
    "varlen blocks": (1, ["expand", "empty_like"]),
    "varlen blocks, kept": (1, ["expand", "empty_like"]),
    "row lists, kept": (1, [*GATHERS, "as_strided", "empty", "as_strided"]),
    "segment": (2, ["empty_like", "empty", "empty_like"]),
    "varlen segment": (2, ["empty_like", "empty", "empty_like"]),
    "branches": (2, ["empty_like", "empty_like"]),
    "varlen": (1, ["empty_like"]),
    "one qkv": (1, ["unbind", "empty_like"]),
}


@pytest.mark.parametrize("kind", [k for k in kinds() if k.name in WANTED], ids=lambda k: k.name)
def test_operations(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of its kind, which finds everything that one call can leave to the next."""
    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    attn: Any = attngen.build(kind.spec)
    launches: list[Any] = []
    of_chain = attn.chain.kernels if hasattr(attn, "chain") else ()
    for kernel in (*getattr(attn, "kernels", (attn,)), *of_chain):
        kernel.launcher.functions = (lambda *given: launches.append(given),) * len(kernel.source.meta["plans"])
        kernel.launcher.ready[-1] = (DeviceState(-1, 132), 132)
        kernel.alone()
    call = call_of(kind, attn, "cpu")
    with torch.no_grad():
        call()
        launches.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            call()
    found = [e.name.removeprefix("aten::") for e in seen.events() if e.cpu_parent is None]
    assert (len(launches), found) == WANTED[kind.name]
