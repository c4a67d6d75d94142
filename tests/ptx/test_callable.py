"""The callable around real kernels: its launches run in the checker, on CPU tensors. What only the host knows (buffers,
saved tensors, permutations of gradients) meets what only the kernel knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ptxcheck.compile import compile_backward, compile_module, load_text
from ptxcheck.launch import check
from test_epilogues import SPECS

import attngen
from attngen import samples
from attngen.ir.types import Layout
from attngen.jit import launch, variants
from attngen.jit.cache import Entry
from attngen.jit.device import DeviceState
from attngen.jit.kernel import Attention
from attngen.jit.load import Loaded
from attngen.ref import dense
from attngen.samples import Shape

pytestmark = [pytest.mark.dsl, pytest.mark.filterwarnings("ignore::attngen.jit.notice.AttngenNotice")]


def in_checker(attn: Attention, monkeypatch: pytest.MonkeyPatch) -> Attention:
    """`attn`, ready on the device of CPU tensors: every launch is executed by the checker, by the plans of its file."""

    def entry(code: Any) -> Any:
        def run(*arguments: Any) -> None:
            assert not check(code, *arguments).faults

        return run

    def load(source: Any, target: str, cache: Any, *, wanted: Any, progress: Any) -> Loaded:
        module = load_text(source.text, "callable_bwd")
        return Loaded((entry(compile_backward(module, wanted)),), Entry(Path(), Path(), ()), 0.0)

    monkeypatch.setattr(launch, "_current_device", lambda: -1)
    monkeypatch.setattr(launch, "_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "_capturing", lambda: False)
    monkeypatch.setattr(variants, "load", load)
    module = load_text(attn.source.text, "callable")
    count = len(module.PLANS)
    attn.launcher.functions = tuple(entry(compile_module(module, i)) for i in range(count))
    attn.launcher.ready[-1] = (DeviceState(-1, 3), 3)
    return attn.alone()


@pytest.mark.parametrize("name", ["gated", "headwise", "weighed"])
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, shape = SPECS[name], Shape(1, 2, 1, 37, 50)
    attn = in_checker(attngen.build(spec), monkeypatch)
    swap = spec.layout is Layout.BHSD
    qkv = [(x.transpose(1, 2).contiguous() if swap else x).requires_grad_() for x in samples.qkv(spec, shape)]
    tensors = {n: x.requires_grad_() for n, x in samples.tensors(spec, shape).items()}
    with torch.no_grad():
        alone = attn(*qkv, **tensors)
    o = attn(*qkv, **tensors)
    assert torch.equal(o, alone) and o.dtype is (torch.float32 if spec.out_dtype else torch.bfloat16)
    leaves = [x.detach().double().requires_grad_() for x in (*qkv, *tensors.values())]
    q, k, v = (x.transpose(1, 2) if swap else x for x in leaves[:3])
    want = dense.attention(spec, q, k, v, None, dict(zip(tensors, leaves[3:], strict=True))).o
    want = want.transpose(1, 2) if swap else want
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(0))
    found = torch.autograd.grad(o, (*qkv, *tensors.values()), do.to(o.dtype))
    exact = torch.autograd.grad(want, leaves, do.double())
    for got, x, e in zip(found, (*qkv, *tensors.values()), exact, strict=True):
        assert got.shape == x.shape and got.dtype is x.dtype
        assert (got - e).abs().max() <= 2e-2 * e.abs().max()
