"""A ragged call on a GPU that is not the current one began anew with arguments that were complete: tables and further
results were asked for twice.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from attngen.emit.module import emit
from attngen.jit import launch
from attngen.jit.cache import KernelCache
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.search import plan
from attngen.syntax import load_spec

SPEC = """attn 1
attention packed {
  head_dim = 64
  layout = varlen
  tensor doc: i32[seqlen_kv] sorted
  mask = kv_idx <= q_pos and doc[max(q_pos, 0)] == doc[kv_idx]
  output { max_logit = true }
}
"""


def test_arguments_are_those_of_a_call_on_the_current_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current, calls = [-1], list[tuple[Any, ...]]()
    monkeypatch.setattr(launch, "_current_device", lambda: current[0])
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)

    @contextlib.contextmanager
    def device(index: int) -> Any:
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    attention = Attention(load_spec(SPEC), emit(plan(load_spec(SPEC))), "sm_90a", KernelCache(tmp_path))
    attention.launcher.functions = (lambda *a: calls.append(a),) * 3
    attention.launcher.ready[-1] = (DeviceState(-1, 132), 132)
    q, k, v = (torch.zeros(8, h, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
    lengths, doc = torch.tensor([0, 3, 8]).int(), torch.zeros(8, dtype=torch.int32)
    for index in (-1, 5):
        current[0] = index
        attention(q, k, v, cu_seqlens_q=lengths, doc=doc)
    here, elsewhere = calls
    assert len(here) == len(elsewhere) and [type(x) for x in here] == [type(x) for x in elsewhere]
    assert current == [5]
