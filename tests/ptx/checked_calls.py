"""Callables whose launches run in the checker, on CPU tensors: what only the host knows (buffers, saved tensors,
gathers and sums around kernels) meets what only a kernel knows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ptxcheck.compile import compile_backward, compile_module, load_text
from ptxcheck.launch import check

from attngen.jit import launch, variants
from attngen.jit.cache import Entry
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.jit.load import Loaded

#: Places among the arguments of a forward and of a backward of what it writes, and of what a call reads.
_FORWARD, _BACKWARD, _READ = (3, 4), (7, 8, 9, 10), (0, 1, 2)


def in_checker(attn: Attention, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """`attn`, ready on the device of CPU tensors: every launch is executed by the checker, by the plans of its file,
    with NaN in what it is to write.
    """

    def entry(code: Any, written: tuple[int, ...]) -> Any:
        def run(*arguments: Any) -> None:
            read = {arguments[i].data_ptr() for i in _READ}
            for i in written:
                if arguments[i].data_ptr() not in read:  # what is not wanted has a stand-in
                    arguments[i].fill_(math.nan)
            assert not check(code, *arguments).faults

        return run

    def load(source: Any, target: str, cache: Any, *, wanted: Any, progress: Any) -> Loaded:
        module = load_text(source.text, "callable_bwd")
        functions = (entry(compile_backward(module, wanted, i), _BACKWARD) for i in range(len(module.PLANS)))
        return Loaded(tuple(functions), Entry(Path(), Path(), ()), 0.0)

    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    monkeypatch.setattr(variants, "load", load)
    module = load_text(attn.source.text, "callable")
    count = len(module.PLANS)
    attn.launcher.functions = tuple(entry(compile_module(module, i), _FORWARD) for i in range(count))
    attn.launcher.ready[-1] = (DeviceState(-1, 3), 3)
    return attn.alone()
